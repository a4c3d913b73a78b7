"""Plots, reports, model card, experiment trackers, the Hub."""
