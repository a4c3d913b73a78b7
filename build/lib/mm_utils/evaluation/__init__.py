"""Metrics of a trained model: retrieval, re-ranking, probes of captions."""
