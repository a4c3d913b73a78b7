"""Checkpoints: atomic folders, captured state, background writer."""
