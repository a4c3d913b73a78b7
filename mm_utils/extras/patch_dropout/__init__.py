"""Part of an image's patches in training, which takes less time (FLIP, arXiv 2212.00794)."""
