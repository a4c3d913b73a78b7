"""What the dry run adds to the core, see `mm_utils.doors`."""

CALLBACKS = {"dry_run": "mm_utils.extras.dry_run.callbacks.DryRun"}
