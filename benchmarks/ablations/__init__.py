"""Variants of a training run: their grids, their runs in turn, the table."""
