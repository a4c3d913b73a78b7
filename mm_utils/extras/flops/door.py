"""What counting FLOPs adds to a run, see `mm_utils.doors`."""

CALLBACKS = {"flops": "mm_utils.extras.flops.counts.FlopRates"}
