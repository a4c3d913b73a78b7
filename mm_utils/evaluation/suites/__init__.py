"""Doors to others' evaluation suites, imported only where they are installed."""
