"""Metrics of a trained model: retrieval, re-ranking, zero-shot, pointing, classification."""
