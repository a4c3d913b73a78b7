"""Phrases that point into boxes of an image or at moments of a clip or sound."""
