"""Store labelled clips and sounds once, in the datasets cache, in the form of prepared ones."""

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from datasets import Dataset, Features, Value
from datasets.arrow_writer import ArrowWriter

from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.media import FEATURES
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.cache import RAW_CHECKS, unfinished, workers_for
from mm_utils.data.prepare.ingest import IN_PLACE, key_of_rows, read_part
from mm_utils.data.prepare.pipeline import IngestPlan, ingest_rows
from mm_utils.data.rows.records import BytesImage, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.tables import time_of
from mm_utils.stored import open_rows, stored

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
    """Store clips or sounds, or find them stored.

    Returns:
        Their column `image`, with `seconds`, and the `file_hash` that parts of one file have in common; and by row the reason
        why one cannot be used, whose bytes are null.
    """
    kind, storage = records[0].medium, replace(IN_PLACE, captioned=False)
    key, count = key_of_rows(records, RAW_CHECKS, storage)
    plan = IngestPlan(RAW_CHECKS, storage, workers_for(num_proc, count), max_bad_fraction=1.0)
    numbered = (replace(record, where=str(row), captions=[]) for row, record in enumerate(records))

    def make(folder: Path) -> None:
        with unfinished(folder.parent / f"{key}.partial") as work:
            writer = ArrowWriter(path=str(folder / "media.arrow"), features=_STORED)
            for row in _stored_rows(ingest_rows(numbered, plan, work, f"Storing {kind}s")):
                writer.write(row)
            writer.finalize()

    found = open_rows(stored("media", key, make))
    faults = {row: fault for row, fault in enumerate(found["fault"][:]) if fault}
    return found.remove_columns("fault").cast_column("image", FEATURES[kind]), faults


def _stored_rows(chunks: Iterator[tuple[Path, Any]]) -> Iterator[dict[str, Any]]:
    """Yield what is stored of every record, those with a fault in their places."""
    nothing = {"image": {"bytes": None, "path": None}, "seconds": 0.0, "file_hash": ""}
    for part, result in chunks:
        batches = read_part(part, ["where", "image", "seconds", "file_hash"]).to_batches()
        good = ((int(row.pop("where")), {**row, "fault": None}) for batch in batches for row in batch.to_pylist())
        why = {int(fault["where"]): f"{fault['detail']}. {REASONS[fault['reason']]}" for fault in result.faults}
        bad = ((row, {**nothing, "fault": reason.rstrip(".")}) for row, reason in why.items())
        yield from (row for _, row in heapq.merge(good, bad, key=itemgetter(0)))
