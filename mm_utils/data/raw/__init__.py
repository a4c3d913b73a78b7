"""Raw sources of pairs: every format, row by row, with a place and a reason for what cannot be read."""
