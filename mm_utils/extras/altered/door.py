"""What altered captions add to the core, see `mm_utils.doors`."""

_CAPTIONS = "mm_utils.extras.altered.captions"
PROBES = {"altered": f"{_CAPTIONS}.altered_captions"}
"""What returns the `Probe`s of some rows."""
PROBES_IN_TRAINING = dict.fromkeys(("clip", "sound"), f"{_CAPTIONS}.event_probes")
"""By medium, what returns those that every evaluation of a run has."""
TERMS = {"altered": "mm_utils.extras.altered.term.Altered"}
