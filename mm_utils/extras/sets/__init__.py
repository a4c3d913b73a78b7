"""Embedded sets of media that last: drawn clips, made sounds, captions of what comes when."""

import os
from pathlib import Path

NAMES = ("clips", "sounds")


def is_embedded(dataset_name: str | os.PathLike[str] | None) -> bool:
    """Return whether --dataset_name means an embedded set; a file or folder goes before."""
    return dataset_name in NAMES and not Path(dataset_name).exists()
