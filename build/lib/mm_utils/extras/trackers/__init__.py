"""Experiment trackers that can neither stop nor slow a run."""
