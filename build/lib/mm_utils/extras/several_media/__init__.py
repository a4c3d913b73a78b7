"""One run on images, sounds and clips together, with a tower for each and one text tower."""
