"""Find captions that a trained model takes for those of other images: hard negatives."""
