"""Features that are computed once, before the first step, and read in training."""
