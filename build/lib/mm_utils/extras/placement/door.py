"""What placement adds to the core, see `mm_utils.doors`."""

CALLBACKS = {"placement": "mm_utils.extras.placement.flags.Placement"}
