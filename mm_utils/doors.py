"""The doors of the extras: what each adds to the core, found by name and imported where it is used.

A folder of `mm_utils/extras` has a light `door.py`: constants alone, dictionaries from a name to `module.attribute`, such as
`TERMS = {"regions": "mm_utils.extras.grounding.terms.RegionPointing"}`. The core asks for all entries of a kind and does not
know the folders, so that one can be deleted.
"""

import importlib
import os
import sys
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


def entry(kind: str, name: str, asked: str) -> Any:
    """Import an entry of a kind by its name.

    Raises:
        ValueError: begun by `asked`, if no extra has it.
    """
    path = entries(kind).get(name)
    if path is None:
        raise ValueError(
            f"{asked}; no folder of {EXTRAS} has {name} among its {kind}. Restore the folder, or drop the flag."
        )
    return load(path)


def load_own(path: str, flag: str, base: type | None = None) -> Any:
    """Import what is given as module.name, from the current folder, an installed package or `__main__`.

    Args:
        path: what was given.
        flag: the flag that it was given by.
        base: the class that it must be a subclass of; default: it must be a function, or callable as one.

    Raises:
        ValueError: if there is no such thing.
    """
    module, _, name = path.rpartition(".")
    sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{flag} has {path}; {error}. Put {module.partition('.')[0]}.py in the current folder, with {name} in it."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if base is None:
        if isinstance(found, type) or not callable(found):
            raise ValueError(f"{flag} has {path}; that is not a function. Name one.")
    elif not (isinstance(found, type) and issubclass(found, base)):
        raise ValueError(
            f"{flag} has {path}; that is not a subclass of {base.__module__}.{base.__name__}. Make it one."
        )
    return found


@cache
def _doors() -> tuple[ModuleType, ...]:
    found = sorted(path.parent.name for path in EXTRAS.glob("*/door.py"))
    return tuple(importlib.import_module(f"mm_utils.extras.{name}.door") for name in found)
