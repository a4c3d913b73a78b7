"""Joint training of image and text encoders: data, model, losses, the loop."""

__version__ = "0.2.0"
