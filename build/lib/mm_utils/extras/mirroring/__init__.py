"""Which images must not be mirrored: words of direction and writing in 29 languages."""
