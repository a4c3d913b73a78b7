"""Joint training of image and text encoders: data, model, losses, the loop."""
