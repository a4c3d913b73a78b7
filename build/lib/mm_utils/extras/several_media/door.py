"""What several media add to a run, see `mm_utils.doors`."""

CALLBACKS = {"several_media": "mm_utils.extras.several_media.callbacks.SeveralMedia"}
