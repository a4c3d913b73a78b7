"""Preparing pairs, and reading them into batches."""
