"""What altered captions add to the core, see `mm_utils.doors`."""

TERMS = {"altered": "mm_utils.extras.altered.term.Altered"}
