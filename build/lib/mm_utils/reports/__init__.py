"""Plots, pictures of media, and the model card."""
