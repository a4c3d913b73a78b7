"""Features of frozen encoders, computed once, and a teacher whose similarities are learnt."""
