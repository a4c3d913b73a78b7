"""Metrics of a trained model: retrieval and re-ranking."""
