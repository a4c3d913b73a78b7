"""Features of frozen encoders, computed once."""
