"""The sigmoid loss (SigLIP, arXiv 2303.15343): each pair is judged alone."""
