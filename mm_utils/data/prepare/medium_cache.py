"""Keep labelled rows' clips and sounds in the datasets cache, as prepared sets do."""

import hashlib
import math
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, Features, Value
from filelock import FileLock

from mm_utils import distributed
from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.media import FEATURES
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.checks import PILLOW_PIXELS, CheckArguments
from mm_utils.data.prepare.ingest import FIRST_CHUNK, IN_PLACE, Worker
from mm_utils.data.rows.records import (
    ArrowImage,
    BytesImage,
    FileImage,
    FramesImage,
    ImageRef,
    MemberImage,
    ParquetImage,
    Record,
    RecordBuilder,
)
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.tables import time_of

_VERSION = 1  # part of the cache's key; raise it with every change of the rows that are written
RAW_CHECKS = CheckArguments(max_image_pixels=PILLOW_PIXELS, min_image_side=1, max_aspect_ratio=math.inf)
TIMES = ("start", "end", "times")
_STORED = Features(
    {
        "image": {"bytes": Value("binary"), "path": Value("string")},
        "seconds": Value("float64"),
        "file_hash": Value("string"),
        "fault": Value("string"),
    }
)


def media_records(values: Mapping[str, Sequence[Any]], kind: str, jail: Jail, faults: dict[int, str]) -> list[Record]:
    """Return the clips or sounds of the column `image`, and their parts by the columns `TIMES`.

    `faults` gets by row the reason why one is none.
    """
    builder = RecordBuilder(Source(".", medium=kind), PathArguments(), ".")
    nothing = [None] * len(values["image"])
    found: list[Record] = []
    for row, columns in enumerate(zip(values["image"], *(values.get(name, nothing) for name in TIMES), strict=True)):
        value, start, end, times = columns
        try:
            image = builder.image(value, jail, times)
        except Fault as fault:
            faults[row], image = fault.detail, (BytesImage("", None), None)
        found.append(builder.record("", image, [], cut=(time_of(start), time_of(end))))
    return found


def store_media(records: Sequence[Record], num_proc: int | None) -> tuple[Dataset, dict[int, str]]:
    """Store clips or sounds once, in the datasets cache, in the form of prepared ones.

    Returns:
        Their column `image`, with `seconds`, and the `file_hash` that parts of one file have in common; and by row the reason
        why one cannot be used, whose bytes are null.
    """
    kind, stamps = records[0].medium, dict[str, str]()
    settings = (_VERSION, RAW_CHECKS, IN_PLACE, IN_PLACE.timed, find_spec("av") is None)
    digest = hashlib.blake2b(repr(settings).encode(), digest_size=16)
    for record in records:
        row = f"{record!r}{stamp_of(record.image, stamps)}{record.timing}\n"
        digest.update(row.encode("utf-8", "backslashreplace"))
    name = digest.hexdigest()
    folder = Path(datasets.config.HF_DATASETS_CACHE, "tandem_media")
    folder.mkdir(parents=True, exist_ok=True)
    workers = min(num_proc or distributed.available_cores(), len(records) // FIRST_CHUNK + 1)
    with FileLock(folder / f"{name}.lock"):
        stored = Dataset.from_dict({"row": range(len(records))}).map(
            _stored,
            fn_kwargs={"records": records},
            remove_columns=["row"],
            features=_STORED,
            num_proc=workers if workers > 1 else None,
            cache_file_name=str(folder / f"{name}.arrow"),
            new_fingerprint=name,
            desc=f"Storing {kind}s",
        )
    faults = {row: fault for row, fault in enumerate(stored["fault"][:]) if fault}
    return stored.remove_columns("fault").cast_column("image", FEATURES[kind]), faults


def _stored(row: dict[str, int], records: Sequence[Record]) -> dict[str, Any]:
    try:
        found = Worker(RAW_CHECKS, IN_PLACE, "").image(records[row["row"]], measured=False, notes=Counter())
    except Fault as fault:
        why = f"{fault.detail}. {REASONS[fault.reason]}".rstrip(".")
        return {"image": {"bytes": None, "path": None}, "seconds": 0.0, "file_hash": "", "fault": why}
    return {**{name: found[name] for name in ("image", "seconds", "file_hash")}, "fault": None}


def stamp_of(image: ImageRef, known: dict[str, str]) -> str:
    """Return the size and date of the file that holds an image; `known` keeps archives'."""
    if isinstance(image, FileImage):
        return _size_and_date(image.name)
    if isinstance(image, FramesImage):
        return " ".join(stamp_of(frame, known) for frame in image.frames)
    if isinstance(image, (MemberImage, ArrowImage, ParquetImage)):
        if image.path not in known:
            known[image.path] = _size_and_date(image.path)
        return known[image.path]
    return ""  # the reference is all there is


def _size_and_date(path: str) -> str:
    status = os.stat(path)
    return f"{status.st_size} {status.st_mtime_ns}"
