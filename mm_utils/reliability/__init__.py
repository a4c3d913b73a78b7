"""Failure detection, hang detection, signals, skipped samples."""
