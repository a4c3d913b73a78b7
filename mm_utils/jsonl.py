"""Files of a run that grow by a JSON object a line, each with the step that it is of."""

import json
import logging
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

_failed: set[Path] = set()


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add lines. A disk that does not take them costs the lines and not the run; it is told once a file."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        if path not in _failed:
            _failed.add(path)
            logger.error("%s cannot be written: %s. Training goes on without it; make room", path, error.strerror)


def truncate_rows(path: Path, step: int) -> None:
    """Drop the lines of later steps, which a resumed run is about to write again, and torn ones."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    kept = path.with_name(f".{path.name}.kept")
    kept.write_text("".join(line + "\n" for line in lines if _step_of(line) <= step), encoding="utf-8")
    kept.replace(path)


def _step_of(line: str) -> float:
    """Infinite if it is no row."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf
