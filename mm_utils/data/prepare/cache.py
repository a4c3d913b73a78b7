"""Prepare raw rows once, into the datasets cache, for training from raw files."""

import logging
import math
import shutil
from collections import defaultdict
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pyarrow as pa
from datasets import Dataset, DatasetDict
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.cores import available_cores
from mm_utils.data.faults import REASONS
from mm_utils.data.media import FEATURES
from mm_utils.data.prepare.arguments import PILLOW_PIXELS, CheckArguments, ReconcileArguments
from mm_utils.data.prepare.dedup_and_split import SAME_FROM_TRAIN, reconcile
from mm_utils.data.prepare.ingest import (
    FIRST_CHUNK,
    IN_PLACE,
    PART_SCHEMA,
    IngestPlan,
    ingest_sources,
    key_of_rows,
    read_part,
    rows_of,
)
from mm_utils.data.prepare.on_disk import open_prepared, write_findings, write_pairs
from mm_utils.data.rows.records import Record, Records
from mm_utils.data.rows.source import Source
from mm_utils.files import flush, read_json
from mm_utils.stored import open_rows, stored
from mm_utils.text import redact

logger = logging.getLogger(__name__)

RAW_CHECKS = CheckArguments(max_image_pixels=PILLOW_PIXELS, min_image_side=1, max_aspect_ratio=math.inf)
_LABELLED = ("image", "seconds", "file_hash", "stored_hash", "captions", "answers", "split")  # columns
_NAMED = 3  # places that a warning names


def load_or_prepare(sources: list[Source], trains: bool = False) -> DatasetDict:
    """Load the rows of raw sources from the datasets cache; check all of them the first time.

    Files stay where they are; embedded images are stored as they came, clips and sounds in the form of prepared ones. Bad rows
    and leaks between splits are logged every time. For a run that `trains`, the rows of train whose very image is in
    another split too are left out.

    Raises:
        ValueError: if a source cannot be read, more than half of its rows are bad, an id names two images, or the cache
            cannot be written.
    """
    folder, _ = _checked(sources, SAME_FROM_TRAIN if trains else "keep")
    return open_prepared(str(folder), ", ".join(source.name for source in sources), allow_outside=True)


def load_labelled_rows(sources: list[Source]) -> tuple[Dataset, tuple[str, ...]]:
    """Load the rows of labelled sources as `load_or_prepare` does, all of them, in order.

    Returns:
        The rows: `image`, `content_id` (a hash of it), `captions` (a text, or none), `answers`, and the split, if the source says
        it; of clips and sounds also `seconds`, and the `file_hash` that parts of a file have in common. And the names of all
        classes in order, if the source has them.
    """
    (folder, classes) = _checked(sources, "keep")
    medium = sources[0].medium
    found = open_rows(folder).cast_column("image", FEATURES[medium]).rename_column("stored_hash", "content_id")
    return found.remove_columns(["seconds", "file_hash"]) if medium == "image" else found, classes


def _checked(sources: list[Source], on_leakage: str) -> tuple[Path, tuple[str, ...]]:
    """Return the folder of what is made of the rows of the sources, once, and the names of all classes; log its warnings."""
    classes: dict[tuple[str, ...], None] = {}

    def rows() -> Records:
        for row in chain.from_iterable(map(rows_of, sources)):
            if isinstance(row, Record):
                classes[row.classes] = None
            yield row

    names = ", ".join(source.name for source in sources)
    labelled = sources[0].labelled
    title = f"Reading {redact(names)}"
    hidden = distributed.rank() > 0
    given = tqdm(rows(), desc=title, unit=" rows", leave=False, disable=hidden)
    storage = replace(IN_PLACE, captioned=not labelled)
    rules = ReconcileArguments(validation_fraction=0.0, on_leakage=on_leakage)
    key, count = key_of_rows(given, sources, RAW_CHECKS, storage, rules)

    def make(folder: Path) -> None:
        logger.info(
            "%s: all %s rows and their images are checked, once; the result is kept in %s",
            names, f"{count:,}", folder.parent,
        )  # fmt: skip
        workers = min(available_cores(), count // FIRST_CHUNK + 1)
        plan = IngestPlan(RAW_CHECKS, storage, workers, max_bad_fraction=0.5)
        _prepare(folder, folder.parent / key, sources, plan, rules)

    folder = stored("labels" if labelled else "pairs", key, make)
    if distributed.rank() == 0:
        for message in read_json(folder / "report.json")["warnings"]:
            logger.warning("%s", message)
    return folder, next(iter(classes), ())


def _prepare(
    folder: Path,
    final: Path,
    sources: list[Source],
    plan: IngestPlan,
    rules: ReconcileArguments,
) -> None:
    """Write the result, whose folder will be named `final`, into `folder`."""
    ingested = ingest_sources(sources, plan, folder)
    by_reason = defaultdict(list)
    for fault in ingested.faults:
        by_reason[fault["source"], fault["reason"]].append(fault)
    warnings = []
    for (source, reason), faults in by_reason.items():
        rows = ingested.rows[source]
        places = ", ".join(fault["where"] for fault in faults[:_NAMED]) + (" ..." if len(faults) > _NAMED else "")
        warnings.append(
            f"{source}: {reason}, {len(faults):,} times in {rows:,} rows ({places}), such as: {faults[0]['detail']}. "
            f"{REASONS[reason]} {final / 'quarantine.jsonl'} lists all."
        )
    if plan.storage.captioned:
        found = reconcile(ingested.parts, rules, folder / "leaks.jsonl", own_ids=True)
        clash = next((fault for fault in found.faults if fault["reason"] != "leaked"), None)
        if clash:  # images that share an id, as nothing else is set aside here
            raise ValueError(f"{clash['source']}, {clash['where']}: {clash['detail']}. {REASONS[clash['reason']]}")
        if merged := found.duplicates["merged_rows"]:
            logger.info("%s rows merged into an earlier row of the same image", f"{merged:,}")
        if other_files := found.duplicates["merged_files"]:
            warnings.append(other_files)
        if found.leaks:
            what = "what is measured there is no measure of unseen images"
            if count := found.leakage["dropped"].get("train"):
                what = f"the {count:,} rows of train that are the very same are left out"
            warnings.append(f"{found.leaks}; {what}. prepare_data lists all.")
        write_pairs(found, ingested.parts, folder)
    else:
        schema = pa.schema([PART_SCHEMA.field(name) for name in _LABELLED])
        with pa.ipc.new_stream(str(folder / "rows.arrow"), schema) as writer:
            for part in ingested.parts:
                writer.write_table(read_part(part, _LABELLED))
    shutil.rmtree(folder / "parts")
    write_findings(folder, {"warnings": warnings}, ingested.faults)
    flush(folder)
