"""What captions say: directions, codes of languages, captions with a few words altered."""
