"""What streams add to the core, see `mm_utils.doors`."""

CALLBACKS = {"streaming": "mm_utils.extras.streams.callbacks.Streaming"}
