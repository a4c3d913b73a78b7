"""What altered captions add to the core, see `mm_utils.doors`."""

_CAPTIONS = "mm_utils.extras.altered.captions"
PROBES = {"altered": f"{_CAPTIONS}.altered_captions"}
PROBES_IN_TRAINING = {"event_order": f"{_CAPTIONS}.event_probes"}
"""What returns the `Probe`s of some rows."""
TERMS = {"altered": "mm_utils.extras.altered.term.Altered"}
