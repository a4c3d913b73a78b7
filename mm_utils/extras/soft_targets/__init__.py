"""Soft targets: terms that learn the similarities of averaged weights, or of a teacher."""
