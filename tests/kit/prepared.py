"""What a prepared data set says of itself, and whether it is what was written."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from datasets import load_from_disk
from PIL import Image

from mm_utils.data.prepare.on_disk import content_id

CLOSE = 12  # levels of 255; pictures of two numbers differ by 50 and more


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def quarantine_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(text) for text in (folder / "quarantine.jsonl").read_text().splitlines()]


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
