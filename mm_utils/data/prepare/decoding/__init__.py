"""Sounds and clips of any file, decoded within limits, on the file's own clock."""
