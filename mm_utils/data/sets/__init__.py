"""The embedded sets besides the scenes: `--dataset_name clips` or `sounds`."""
