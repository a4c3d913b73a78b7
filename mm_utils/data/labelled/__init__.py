"""Labelled rows: images, clips or sounds, texts, or both, each with a class."""
