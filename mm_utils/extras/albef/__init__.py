"""Terms of ALBEF (arXiv 2107.07651): matching with hard negatives, masked words."""
