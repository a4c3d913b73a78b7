"""What the sigmoid loss adds to the core, see `mm_utils.doors`."""

TERMS = {"sigmoid": "mm_utils.extras.sigmoid.term.PairwiseSigmoid"}
