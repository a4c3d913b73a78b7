"""Advice for the flags of other trainers: transformers, sentence-transformers, open_clip, and the launcher."""
