"""What warnings add to a run, see `mm_utils.doors`."""

CALLBACKS = {"diagnosis": "mm_utils.extras.diagnosis.warnings.CollapseWarning"}
