"""A script's `--help` in a second, without the large libraries that a run loads."""
