"""What a record of a shard is as a row of the one schema (`mm_utils.data.sources`), and why some records make none."""

import hashlib
from pathlib import Path
from typing import Any

import datasets
from datasets import Features, Image, Value

from mm_utils.data.raw.columns import Columns, captions_of, is_null
from mm_utils.data.raw.faults import Fault
from mm_utils.data.stream.formats import Record


def features_of(columns: Columns) -> Features:
    """Of the rows that `make_row` gives."""
    features = {"id": Value("string"), "image": Image(decode=False), "captions": datasets.Sequence(Value("string"))}
    if columns.language is not None:
        features["languages"] = datasets.Sequence(Value("string"))
    return Features(features)


def needed_columns(columns: Columns) -> list[str]:
    """Names of those there are."""
    named = (columns.image, columns.caption, columns.id, columns.language)
    return [name for name in named if name is not None]


def make_row(record: Record, columns: Columns, features: Features, where: str) -> dict[str, Any] | str:
    """A row in the schema of `features`, or why there is none."""
    if isinstance(record, str):
        return record
    image = record.get(str(columns.image))
    if not isinstance(image, dict):
        image = {"bytes": image, "path": None}
    content = image.get("bytes")
    if not isinstance(content, bytes) or not content:
        return f"{where}: the image is not in the shard"
    try:
        texts, languages = captions_of(record, columns)
    except Fault as fault:
        return f"{where}: {fault}"
    usable: dict[str, str] = {}
    for text, language in zip(texts, languages or [""] * len(texts), strict=True):
        if isinstance(text, str) and not is_null(text) and _is_unicode(text + language):
            usable.setdefault(text, language)
    if not usable:
        return f"{where}: the caption is empty"
    given = record.get(columns.id) if columns.id is not None else _digest(content)
    if is_null(given) or not _is_unicode(str(given)):
        return f"{where}: the id is empty or no text"
    row = {
        "id": str(given),
        "image": {"bytes": content, "path": image.get("path")},  # raw pixels have their size there
        "captions": list(usable),
        "languages": list(usable.values()),
    }
    return {name: row[name] for name in features}


def _is_unicode(text: str) -> bool:
    """A lone surrogate, as a broken "\\ud83d" in JSON gives, is a string in Python but cannot be stored as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def name_by_id(row: dict[str, Any]) -> str:
    """The same for rows of one id."""
    return f"id {row['id']}"


def name_by_bytes(row: dict[str, Any]) -> str:
    """The same for rows whose images have the same bytes."""
    image = row["image"]
    return f"bytes {_digest(image['bytes'] or Path(image['path']).read_bytes())}"
