"""Read a source as tests do: its records and its bad rows; and what a prepared set says of itself."""

import hashlib
import io
import json
import pickle
import tarfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from datasets import load_from_disk
from PIL import Image

from mm_utils.data.arguments import PathArguments
from mm_utils.data.prepare.on_disk import content_id
from mm_utils.data.rows.detect import read_rows
from mm_utils.data.rows.records import BadRow, Record
from mm_utils.data.rows.source import Source
from mm_utils.model.reading import MOST_BYTES
from tests.kit.fault_images import grey
from tests.kit.jsonl import read_lines

SAFE = PathArguments()
Member = tuple[str, bytes]


def read(path: Path | str, safety: PathArguments = SAFE, **fields: Any) -> tuple[list[Record], list[BadRow]]:
    items = list(read_rows(Source(str(path), paths=safety, **fields)))
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

    def build(root):
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


CLOSE = 12  # levels of 255; pictures of two numbers differ by 50 and more


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def quarantine_of(folder: Path) -> list[dict[str, str]]:
    return read_lines(folder / "quarantine.jsonl")


def intact_rows(folder: Path | str) -> int:
    """The number of rows, each of which has the content id of its medium and captions."""
    rows = [row for split in load_from_disk(str(folder)).values() for row in split]
    for row in rows:
        medium = next(row[name] for name in ("image", "video", "audio") if name in row)
        stored = hashlib.blake2b(medium["bytes"], digest_size=16).hexdigest()
        assert content_id(stored, row["captions"]) == row["content_id"], row["id"]
    return len(rows)


def digests(folder: Path | str) -> dict[str, str]:
    """The digest of every shard."""
    shards = sorted(Path(folder).rglob("*.arrow"))
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in shards}


def pixels_apart(image: Image.Image, other: Image.Image) -> float:
    """Mean difference in levels of 255."""
    return float(np.abs(np.asarray(image, np.float32) - np.asarray(other, np.float32)).mean())
