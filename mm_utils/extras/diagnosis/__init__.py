"""Warnings of a run that does not learn: what is found, the likely reason, the remedy."""
