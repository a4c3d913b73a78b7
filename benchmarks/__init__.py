"""Measure Tandem and what it is compared with. For developers; users need none of it."""
