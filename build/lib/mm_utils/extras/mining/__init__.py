"""Hard negatives: captions that a trained model takes for those of other images, and similar ones in one batch."""
