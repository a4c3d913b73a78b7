"""Read a source as tests do: its records and its bad rows."""

import io
import json
import pickle
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mm_utils.data.rows.detect import read_rows
from mm_utils.data.rows.records import BadRow, Record
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.model.reading import MOST_BYTES
from tests.kit.fault_images import grey

SAFE = PathArguments()
Member = tuple[str, bytes]


def read(path: Path | str, safety: PathArguments = SAFE, **fields: Any) -> tuple[list[Record], list[BadRow]]:
    items = list(read_rows(Source(str(path), **fields), safety))
    return [item for item in items if isinstance(item, Record)], [item for item in items if isinstance(item, BadRow)]


def reasons(bad: list[BadRow]) -> list[tuple[str, str]]:
    return [(row.where, row.fault.reason) for row in bad]


def content(record: Record) -> bytes:
    return pickle.loads(pickle.dumps(record)).image.read(MOST_BYTES)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def lines(*rows: Any) -> str:
    return "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)


def add_member(archive: tarfile.TarFile, name: str, content: bytes = b"", **fields: Any) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(content)
    for key, value in fields.items():
        setattr(member, key, value)
    archive.addfile(member, io.BytesIO(content))


def write_tar(path: Path, members: Sequence[Member], kind: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            add_member(archive, name, content)
    return str(path)


Build = Callable[[Path], None]


def put(*names: str) -> Build:
    """Write files of these names: pictures, captions, tables and archives of one row each."""

    def build(root: Path) -> None:
        for at, name in enumerate(names):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".parquet"):
                pq.write_table(pa.table({"image": [grey(at)], "caption": ["a"], "id": [name]}), path)
            elif name.endswith(".tar"):
                write_tar(path, [("a.png", grey(at)), ("a.txt", b"a")])
            else:
                path.write_bytes(b"a caption" if name.lower().endswith(".txt") else grey(at))

    return build
