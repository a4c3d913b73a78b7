"""Embedded data sets of media that last: drawn clips and made sounds, with captions that say what comes after what."""

import os
from pathlib import Path

NAMES = ("clips", "sounds")


def is_embedded(dataset_name: str | os.PathLike[str] | None) -> bool:
    """Return whether --dataset_name means an embedded set; a file or folder of that name goes before."""
    return dataset_name in NAMES and not Path(dataset_name).exists()
