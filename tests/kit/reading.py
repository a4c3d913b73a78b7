"""Read a source as tests do: its records and its bad rows."""

import json
import pickle
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mm_utils.data.paths import Limits
from mm_utils.data.rows.detect import read_source
from mm_utils.data.rows.records import BadRow, Record
from mm_utils.data.rows.source import PathArguments, Source
from tests.data.prepare.fault_layouts import add_member

SAFE = PathArguments()
Member = tuple[str, bytes]
NAMES = ["a.jpg", "b.jpg", "c.jpg"]


def read(path: Path | str, safety: PathArguments = SAFE, **fields: Any) -> tuple[list[Record], list[BadRow]]:
    items = list(read_source(Source(str(path), **fields), safety))
    return [item for item in items if isinstance(item, Record)], [item for item in items if isinstance(item, BadRow)]


def reasons(bad: list[BadRow]) -> list[tuple[str, str]]:
    return [(row.where, row.fault.reason) for row in bad]


def content(record: Record) -> bytes:
    return pickle.loads(pickle.dumps(record)).image.read(Limits())


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def write_tar(path: Path, members: Sequence[Member], kind: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            add_member(archive, name, content)
    return str(path)
