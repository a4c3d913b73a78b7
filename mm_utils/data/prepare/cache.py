"""Prepare raw sources once, into the datasets cache, for training from raw files."""

import hashlib
import json
import logging
import os
import shutil
from collections import defaultdict
from pathlib import Path

import datasets
import PIL
from datasets import DatasetDict
from filelock import FileLock
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.faults import REASONS
from mm_utils.data.prepare.dedup_and_split import ReconcileArguments, Reconciled, reconcile
from mm_utils.data.prepare.ingest import FIRST_CHUNK, IN_PLACE
from mm_utils.data.prepare.medium_cache import RAW_CHECKS, stamp_of
from mm_utils.data.prepare.on_disk import open_prepared, write_findings, write_pairs
from mm_utils.data.prepare.pipeline import Ingested, IngestPlan, flush, ingest_sources
from mm_utils.data.rows.detect import read_source
from mm_utils.data.rows.records import Record
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.text import redact

logger = logging.getLogger(__name__)

_VERSION = 2  # part of the cache's key; raise it with every change of the rows that are written
_RECONCILE = ReconcileArguments(validation_fraction=0.0, on_leakage="keep")
_NAMED = 3  # places that a warning names


def load_or_prepare(sources: list[Source], paths: PathArguments, num_proc: int | None) -> DatasetDict:
    """Load the rows of raw sources from the datasets cache; check all of them the first time.

    Files stay where they are and are named by their paths; embedded images are stored as they came, clips and sounds in
    the form of prepared ones. Rows of equal images
    become one. Bad rows and leaks between splits are logged every time. The cache's key is a hash of all rows, of the
    size and date of every file that holds images, and of the settings. A process that finds another one at work waits.

    Raises:
        ValueError: if a source cannot be read, more than half of its rows are bad, an id names two images, or the cache
            cannot be written.
    """
    key, count = _key(sources, paths)
    folder = Path(datasets.config.HF_DATASETS_CACHE, "tandem_pairs", key)
    workers = min(num_proc or distributed.available_cores(), count // FIRST_CHUNK + 1)
    names = ", ".join(source.name for source in sources)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            pairs = _open(folder)
            if pairs is None:
                logger.info(
                    "%s: all %s rows and their images are checked, once; the result is kept in %s",
                    names,
                    f"{count:,}",
                    folder,
                )
                _prepare(folder, sources, paths, workers)
                pairs = open_prepared(str(folder), names, allow_outside=True)
    except OSError as error:
        raise ValueError(
            f"{error.filename or folder} cannot be written: {error.strerror}. Free some space, or set HF_DATASETS_CACHE "
            "to another folder; the next start resumes where this stopped."
        ) from error
    if distributed.rank() == 0:
        for message in json.loads((folder / "report.json").read_text(encoding="utf-8"))["warnings"]:
            logger.warning("%s", message)
    return pairs


def _key(sources: list[Source], paths: PathArguments) -> tuple[str, int]:
    """Hash everything that the result depends on; count the rows."""
    settings = (_VERSION, PIL.__version__, RAW_CHECKS, _RECONCILE, IN_PLACE, sources, paths)
    digest = hashlib.blake2b(repr(settings).encode("utf-8", "backslashreplace"), digest_size=16)
    stamps: dict[str, str] = {}
    count = 0
    for source in sources:
        for item in tqdm(
            read_source(source, paths),
            desc=f"Reading {redact(source.name)}",
            unit=" rows",
            leave=False,
            disable=distributed.rank() > 0,
        ):
            stamp = stamp_of(item.image, stamps) if isinstance(item, Record) else ""
            time = f"{item.timing}{IN_PLACE.timed}" if isinstance(item, Record) and item.timing else ""
            digest.update(f"{item!r}{stamp}{time}\n".encode("utf-8", "backslashreplace"))
            count += 1
    return digest.hexdigest(), count


def _open(folder: Path) -> DatasetDict | None:
    if not folder.is_dir():
        return None
    try:
        return open_prepared(str(folder), str(folder), allow_outside=True)
    except ValueError as error:
        logger.warning("%s. The rows are prepared anew; check the disk.", error)
        shutil.rmtree(folder)
        return None


def _prepare(folder: Path, sources: list[Source], paths: PathArguments, workers: int) -> None:
    work = folder.with_name(f"{folder.name}.partial")
    work.mkdir(exist_ok=True)
    result = work / "result"
    shutil.rmtree(result, ignore_errors=True)
    try:
        ingested = ingest_sources(
            sources, paths, IngestPlan(RAW_CHECKS, IN_PLACE, workers, max_bad_fraction=0.5), work
        )
        found = reconcile(ingested.parts, _RECONCILE, {}, work / "leaks.jsonl", own_ids=True)
        if found.faults:  # images that share an id, as nothing else is set aside here
            fault = found.faults[0]
            raise ValueError(f"{fault['source']}, {fault['where']}: {fault['detail']}. {REASONS[fault['reason']]}")
        write_pairs(found, ingested.parts, result)
    except ValueError:
        shutil.rmtree(work)  # data that are mended have another key
        raise
    write_findings(result, {"warnings": _warnings(ingested, found, folder)}, ingested.faults)
    flush(result)
    os.replace(result, folder)
    shutil.rmtree(work)


def _warnings(ingested: Ingested, found: Reconciled, folder: Path) -> list[str]:
    """Describe the faults of each source by reason, the merged rows and the leaks."""
    by_reason = defaultdict(list)
    for fault in ingested.faults:
        by_reason[fault["source"], fault["reason"]].append(fault)
    messages = []
    for (source, reason), faults in by_reason.items():
        rows = ingested.sources[source].rows
        places = ", ".join(fault["where"] for fault in faults[:_NAMED]) + (" ..." if len(faults) > _NAMED else "")
        messages.append(
            f"{source}: {reason}, {len(faults):,} times in {rows:,} rows ({places}), such as: {faults[0]['detail']}. "
            f"{REASONS[reason]} {folder / 'quarantine.jsonl'} lists all."
        )
    merged = found.duplicates["merged_rows"]
    if merged:
        logger.info("%s rows merged into an earlier row of the same image", f"{merged:,}")
    if found.leaks:
        messages.append(
            f"{found.leaks}; what is measured there is no measure of unseen images. prepare_data lists all."
        )
    return messages
