"""What captions say: words of directions, codes of languages."""
