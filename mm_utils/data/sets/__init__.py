"""The embedded sets besides the scenes: `--dataset_name clips` or `sounds`."""

from mm_utils.data.sets.events import load_clips
from mm_utils.data.sets.tones import load_sounds

SETS = {"clips": load_clips, "sounds": load_sounds}
"""By the name of a set, what returns its splits."""
