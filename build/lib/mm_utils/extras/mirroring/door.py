"""What mirroring adds to the core, see `mm_utils.doors`."""

KEEPS_SIDES = {"words": "mm_utils.extras.mirroring.words.has_direction"}
"""What tells of a row that its image must not be mirrored."""
