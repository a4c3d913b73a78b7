"""What captions say: words of directions, codes of languages, and captions with a few words altered."""
