"""Prepare raw rows once, into the datasets cache, for training from raw files."""

import heapq
import json
import logging
import math
import shutil
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, Features, Value
from datasets.arrow_writer import ArrowWriter
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.media import FEATURES
from mm_utils.data.paths import Jail
from mm_utils.data.prepare.checks import PILLOW_PIXELS, CheckArguments
from mm_utils.data.prepare.dedup_and_split import ReconcileArguments, Reconciled, reconcile
from mm_utils.data.prepare.ingest import FIRST_CHUNK, IN_PLACE, key_of_rows, read_part
from mm_utils.data.prepare.on_disk import open_prepared, write_findings, write_pairs
from mm_utils.data.prepare.pipeline import Ingested, IngestPlan, flush, ingest_rows, ingest_sources, rows_of
from mm_utils.data.rows.records import BytesImage, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.tables import time_of
from mm_utils.stored import open_rows, stored
from mm_utils.text import redact

logger = logging.getLogger(__name__)

_RAW_CHECKS = CheckArguments(max_image_pixels=PILLOW_PIXELS, min_image_side=1, max_aspect_ratio=math.inf)
_RECONCILE = ReconcileArguments(validation_fraction=0.0, on_leakage="keep")
_NAMED = 3  # places that a warning names
TIMES = ("start", "end", "times")
_STORED = Features(
    {
        "image": {"bytes": Value("binary"), "path": Value("string")},
        "seconds": Value("float64"),
        "file_hash": Value("string"),
        "fault": Value("string"),
    }
)


def load_or_prepare(sources: list[Source], paths: PathArguments, num_proc: int | None) -> DatasetDict:
    """Load the rows of raw sources from the datasets cache; check all of them the first time.

    Files stay where they are and are named by their paths; embedded images are stored as they came, clips and sounds in
    the form of prepared ones. Rows of equal images become one. Bad rows and leaks between splits are logged every time.

    Raises:
        ValueError: if a source cannot be read, more than half of its rows are bad, an id names two images, or the cache
            cannot be written.
    """
    names = ", ".join(source.name for source in sources)
    title, hidden = f"Reading {redact(names)}", distributed.rank() > 0
    given = tqdm(
        (row for source in sources for row in rows_of(source, paths)),
        desc=title, unit=" rows", leave=False, disable=hidden,
    )  # fmt: skip
    key, count = key_of_rows(given, sources, paths, _RAW_CHECKS, IN_PLACE, _RECONCILE)

    def make(folder: Path) -> None:
        logger.info(
            "%s: all %s rows and their images are checked, once; the result is kept in %s",
            names, f"{count:,}", folder.parent,
        )  # fmt: skip
        with _unfinished(folder.parent / f"{key}.partial") as work:
            _prepare(folder, work, sources, paths, _workers(num_proc, count))

    folder = stored("pairs", key, make)
    if distributed.rank() == 0:
        for message in json.loads((folder / "report.json").read_text(encoding="utf-8"))["warnings"]:
            logger.warning("%s", message)
    return open_prepared(str(folder), names, allow_outside=True)


def _workers(num_proc: int | None, count: int) -> int:
    return min(num_proc or distributed.available_cores(), count // FIRST_CHUNK + 1)


@contextmanager
def _unfinished(work: Path) -> Iterator[Path]:
    """Yield the folder in which an interrupted start left its chunks; remove it at the end.

    Where the rows are refused it goes, too: data that are mended have another key.
    """
    work.mkdir(exist_ok=True)
    try:
        yield work
    except ValueError:
        shutil.rmtree(work)
        raise
    shutil.rmtree(work)


def _prepare(folder: Path, work: Path, sources: list[Source], paths: PathArguments, workers: int) -> None:
    plan = IngestPlan(_RAW_CHECKS, IN_PLACE, workers, max_bad_fraction=0.5)
    ingested = ingest_sources(sources, paths, plan, work)
    found = reconcile(ingested.parts, _RECONCILE, {}, work / "leaks.jsonl", own_ids=True)
    if found.faults:  # images that share an id, as nothing else is set aside here
        fault = found.faults[0]
        raise ValueError(f"{fault['source']}, {fault['where']}: {fault['detail']}. {REASONS[fault['reason']]}")
    write_pairs(found, ingested.parts, folder)
    write_findings(folder, {"warnings": _warnings(ingested, found, work.with_suffix(""))}, ingested.faults)
    flush(folder)


def _warnings(ingested: Ingested, found: Reconciled, place: Path) -> list[str]:
    """Describe the faults of each source by reason, the merged rows and the leaks; `place` is the result's."""
    by_reason = defaultdict(list)
    for fault in ingested.faults:
        by_reason[fault["source"], fault["reason"]].append(fault)
    messages = []
    for (source, reason), faults in by_reason.items():
        rows = ingested.sources[source].rows
        places = ", ".join(fault["where"] for fault in faults[:_NAMED]) + (" ..." if len(faults) > _NAMED else "")
        messages.append(
            f"{source}: {reason}, {len(faults):,} times in {rows:,} rows ({places}), such as: {faults[0]['detail']}. "
            f"{REASONS[reason]} {place / 'quarantine.jsonl'} lists all."
        )
    merged = found.duplicates["merged_rows"]
    if merged:
        logger.info("%s rows merged into an earlier row of the same image", f"{merged:,}")
    if found.leaks:
        messages.append(
            f"{found.leaks}; what is measured there is no measure of unseen images. prepare_data lists all."
        )
    return messages


# -- labelled clips and sounds -----------------------------------------------------------------------------------------


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
    kind, storage = records[0].medium, replace(IN_PLACE, captioned=False)
    key, count = key_of_rows(records, _RAW_CHECKS, storage)
    plan = IngestPlan(_RAW_CHECKS, storage, _workers(num_proc, count), max_bad_fraction=1.0)
    numbered = (replace(record, where=str(row), captions=[]) for row, record in enumerate(records))

    def make(folder: Path) -> None:
        with _unfinished(folder.parent / f"{key}.partial") as work:
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
