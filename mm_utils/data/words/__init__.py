"""What captions say: directions, languages, and captions with a few words altered."""
