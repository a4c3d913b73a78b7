"""What packing adds to the core, see `mm_utils.doors`."""

TEXT_ENCODERS = {"packed": "mm_utils.extras.packing.packing.pack_captions"}
