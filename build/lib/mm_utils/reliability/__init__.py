"""Failure detection, hang detection, signals, rendezvous, skipped samples."""
