"""Doors to the evaluation suites of others, which are imported only where they are installed."""
