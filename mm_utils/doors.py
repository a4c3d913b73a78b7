"""The doors of the extras: what each adds to the core, found by name and imported where it is used.

A folder of `mm_utils/extras` has a light `door.py`: constants alone, dictionaries from a name to `module.attribute`, such as
`TERMS = {"regions": "mm_utils.extras.grounding.terms.RegionPointing"}`. The core asks for all entries of a kind and does not
know the folders, so that one can be deleted.
"""

import importlib
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

EXTRAS = Path(__file__).parent / "extras"


def entries(kind: str) -> dict[str, Any]:
    """Return the entries of a kind, such as `TERMS`, of all extras."""
    return {name: value for door in _doors() for name, value in getattr(door, kind, {}).items()}


def load(path: str) -> Any:
    """Import the attribute that is named `module.attribute`."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@cache
def _doors() -> tuple[ModuleType, ...]:
    found = sorted(path.parent.name for path in EXTRAS.glob("*/door.py"))
    return tuple(importlib.import_module(f"mm_utils.extras.{name}.door") for name in found)
