"""Captions with words or events in another order: the term, and how often a model tells them apart."""
