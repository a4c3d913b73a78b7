"""What trackers add to a run, see `mm_utils.doors`."""

CALLBACKS = {"trackers": "mm_utils.extras.trackers.tracking.Tracking"}
