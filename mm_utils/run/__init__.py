"""Start and finish a run: output folder, checks, dry run, final reports."""
