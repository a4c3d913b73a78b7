"""Projections in closed form before the first step, and weights between start and end after the last."""
