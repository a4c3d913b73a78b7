"""Embedded sets of media that last: drawn clips, made sounds, captions of what comes when."""
