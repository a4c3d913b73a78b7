"""Check a data set once: find faults, duplicates and leaks, and write prepared rows."""
