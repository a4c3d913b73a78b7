"""Bring an index up to date: embed what was added or changed, on any number of processes.

A row of the index, or of a part that a killed run left, is kept if its image is unchanged: same size and time, or else the
same bytes. The main process decides, and writes the index; every process embeds its share and writes parts.
"""

import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.batches.workers import worker_loader
from mm_utils.data.faults import Fault
from mm_utils.data.media.medium import Medium
from mm_utils.data.paths import MEDIA_LIMITS, read_file
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.distributed import RunError
from mm_utils.files import is_about, write_atomic
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.search.index import (
    PARTS,
    SKIPPED,
    STAMPS,
    IndexInfo,
    check_same_model,
    model_fingerprint,
    read_info,
    read_parts,
    read_rows,
    replace_rows,
    write_part,
)
from mm_utils.search.listing import Listing, Reader, Skip, stamps

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 20.0  # of work that a killed run loses at most, and a batch
FLUSH_BYTES = 64 << 20  # of clips and sounds that wait to be written
_ROWS = {"image": 1000, "clip": 50, "sound": 50}  # that are in memory while the index is written anew
_SHOWN = STAMPS.names[:-1]  # all but the hash, which a listing of files does not know
_PASSING = ("permission_denied", "read_error")  # reasons that say nothing of an image that was embedded before


class Embedder(NamedTuple):
    """A model in evaluation mode on its device, how its media are read, media per forward pass, and decoding processes."""

    model: FusionDualEncoderModel
    medium: Medium
    batch_size: int
    workers: int


@dataclass
class Plan:
    """What a run has to do.

    Attributes:
        table: `stamps` of all images of the listing, and then of those of the index that cannot be looked at now.
        known: rows of the index and, after them, of parts.
        indexed: how many of them are of the index.
        parts: names of these parts.
        kept: for each image of the table, the row of `known` that holds it; None if it must be embedded.
        removed: rows of the index whose image is not listed any more.
    """

    table: pa.Table
    known: pa.Table
    indexed: int
    parts: set[str]
    kept: list[int | None]
    removed: int


@dataclass(frozen=True)
class Outcome:
    """What a run did: images embedded, kept, removed, skipped, and those of the index."""

    embedded: int
    kept: int
    removed: int
    skipped: int
    images: int


def update_index(folder: Path, model: str, listing: Listing, embedder: Embedder, accelerator: Accelerator) -> Outcome:
    """Bring an index up to date with a listing; called on all ranks.

    Args:
        folder: the folder of the index, which may not exist yet.
        model: the name of the model.
        listing: the images; the same on all ranks.
        embedder: the model.
        accelerator: its processes embed, each a share.

    Raises:
        RunError: if the index was made with another model, another run writes to it, or no image can be read.
        ValueError: if the folder holds something else.
    """
    held: list[tuple[IndexInfo, Plan]] = []  # on the main process
    with ExitStack() as locked, _explained(folder):

        def begin() -> tuple[IndexInfo, list[int]]:
            read_info(folder)
            locked.enter_context(_lock(folder))
            info = read_info(folder)  # again: another run may have made the index meanwhile
            if info is None:
                name = os.path.abspath(model) if Path(model).is_dir() else model
                fingerprint = model_fingerprint(embedder.model, embedder.medium)
                info = IndexInfo(name, fingerprint, embedder.model.config.projection_dim, embedder.medium.kind)
                info.save(folder)
            check_same_model(info, embedder.model, embedder.medium, model, folder)
            plan = make_plan(folder, listing, info.columns)
            held.append((info, plan))
            todo = [place for place, row in enumerate(plan.kept) if row is None]
            counts = tuple(f"{count:,}" for count in (len(todo), len(plan.kept) - len(todo), plan.removed))
            logger.info("%d %ss: %s to embed, %s unchanged; %s removed", len(plan.kept), info.medium, *counts)
            return info, todo

        info, todo = distributed.on_first(begin)
        mine = todo[accelerator.process_index :: accelerator.num_processes]
        skipped = gather_object(embed_share(folder, info, listing, mine, len(todo), embedder, accelerator))
        return distributed.on_first(lambda: _finish(folder, *held[0], listing, skipped))


def make_plan(folder: Path, listing: Listing, columns: pa.Schema) -> Plan:
    """Compare a listing with the index and with what killed runs have left."""
    table = stamps(listing)
    rows = read_rows(folder, columns)
    indexed = columns.empty_table() if rows is None else rows.data.table.cast(columns)
    parts = read_parts(folder, columns)
    known = pa.concat_tables([indexed, *parts.values()])
    place_of = {name: place for place, name in enumerate(listing.ids)}
    kept: list[int | None] = [None] * len(listing.ids)
    out_of_reach = {each["id"] for each in listing.skipped if each["reason"] in _PASSING}
    unseen: list[int] = []
    listed, removed = table.drop(["captions"]).to_pylist(), 0
    for row, old in enumerate(known.select(["id", "size", "mtime_ns", "content_hash"]).to_pylist()):
        place = place_of.get(old["id"])
        if place is not None and _unchanged(old, listed[place]):
            kept[place] = row
        if place is None and row < len(indexed):
            around = [folder.as_posix() for folder in PurePosixPath(old["id"]).parents]
            is_unseen = not out_of_reach.isdisjoint([old["id"], *around])
            unseen += [row] if is_unseen else []
            removed += not is_unseen
    if unseen:
        table = pa.concat_tables([table, known.select(table.column_names).take(pa.array(unseen))])
    return Plan(table, known, len(indexed), set(parts), [*kept, *unseen], removed)


def _unchanged(old: dict[str, Any], new: dict[str, Any]) -> bool:
    """Return whether the image is still that of the row `old`; a file of another date is read."""
    if new["content_hash"]:
        return old["content_hash"] == new["content_hash"]
    if old["size"] != new["size"]:
        return False
    if old["mtime_ns"] == new["mtime_ns"]:
        return True
    try:
        return stored_hash(read_file(new["path"], MEDIA_LIMITS)) == old["content_hash"]
    except Fault as fault:
        return fault.reason in _PASSING


def _finish(folder: Path, info: IndexInfo, plan: Plan, listing: Listing, skipped: list[Skip]) -> Outcome:
    """Write the index anew from what was known and what the parts hold now."""
    new = read_parts(folder, info.columns, without=plan.parts)
    known = pa.concat_tables([plan.known, *new.values()])
    row_of = {name: len(plan.known) + row for row, name in enumerate(known["id"].slice(len(plan.known)).to_pylist())}
    ids = plan.table["id"].to_pylist()
    chosen = [row_of.get(name) if row is None else row for name, row in zip(ids, plan.kept, strict=True)]
    order = sorted(range(len(ids)), key=ids.__getitem__) if len(ids) > len(listing.ids) else range(len(ids))
    wanted = [(place, row) for place in order if (row := chosen[place]) is not None]
    lines = [*listing.skipped, *sorted(skipped, key=lambda line: line["id"])]
    if not wanted:
        raise RunError(
            f"No {info.medium} can be read; the first reasons are: {'; '.join(each['detail'] for each in lines[:3])}"
        )
    places = pa.array([place for place, _ in wanted])
    is_new = [row for _, row in wanted] != list(range(plan.indexed))
    if is_new or not known.slice(0, plan.indexed).select(_SHOWN).equals(plan.table.select(_SHOWN).take(places)):
        replace_rows(folder, _merged(plan, known, wanted, _ROWS[info.medium]), info.columns)
    write_atomic(folder / SKIPPED, "".join(json.dumps(line) + "\n" for line in lines))
    replace(info, images=len(wanted), skipped=len(lines)).save(folder)
    shutil.rmtree(folder / PARTS, ignore_errors=True)
    todo = plan.kept.count(None)
    return Outcome(todo - len(skipped), len(plan.kept) - todo, plan.removed, len(lines), len(wanted))


def _merged(plan: Plan, known: pa.Table, wanted: list[tuple[int, int]], count: int) -> Iterator[pa.Table]:
    """Yield the new index's rows in blocks; kept ones with the listing's paths and captions."""
    rows_of_known = datasets.Dataset(known).with_format("arrow")
    for low in tqdm(range(0, len(wanted), count), desc="Writing", leave=False, delay=2):
        places, rows = zip(*wanted[low : low + count], strict=True)
        table = rows_of_known[list(rows)]
        is_new = pa.array([row >= len(plan.known) for row in rows])
        listed = plan.table.take(pa.array(places))
        for at, name in enumerate(_SHOWN):
            table = table.set_column(at, name, pc.if_else(is_new, table[name], listed[name]))
        yield table


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let no other run write to the index."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(
            f"--index_dir is {folder}; it cannot be made: {error.strerror}. Give another folder."
        ) from error
    try:
        with FileLock(folder / ".lock", timeout=0):
            yield
    except Timeout as error:
        raise RunError(f"--index_dir is {folder}; another run writes to it. Wait for its end, or end it.") from error


@contextmanager
def _explained(folder: Path) -> Iterator[None]:
    """Turn an error of a disk that is full or read-only into one that says what to do."""
    try:
        yield
    except OSError as error:
        if not is_about(error, folder):
            raise
        raise RunError(
            f"--index_dir is {folder}; it cannot be written: {error.strerror or error}. Free some space, and run the command again: "
            "what has been embedded is kept."
        ) from error


def embed_share(
    folder: Path,
    info: IndexInfo,
    listing: Listing,
    mine: Sequence[int],
    total: int,
    embedder: Embedder,
    accelerator: Accelerator,
) -> list[Skip]:
    """Embed this rank's media, write them as parts; return those that cannot be read.

    Raises:
        RunError: if an embedding is not finite.
    """
    reader = Reader(listing, mine, embedder.medium)
    workers = min(embedder.workers, -(-len(mine) // embedder.batch_size))
    loader = worker_loader(reader, workers, batch_size=embedder.batch_size, collate_fn=list)
    skipped: list[Skip] = []
    held: list[dict[str, Any]] = []
    flushed = time.monotonic()
    with tqdm(
        total=total, desc="Embedding", unit=f" {info.medium}s", disable=not (accelerator.is_main_process and total)
    ) as bar:
        for batch in loader:
            skipped += [each for each in batch if "reason" in each]
            held += embed_batch([each for each in batch if "square" in each], embedder, accelerator)
            bar.update(min(len(batch) * accelerator.num_processes, total - bar.n))
            waiting = sum(len(row.get("content", b"")) for row in held)
            if held and (time.monotonic() - flushed > FLUSH_SECONDS or waiting > FLUSH_BYTES):
                write_part(folder, held, info.columns)
                held, flushed = [], time.monotonic()
    if held:
        write_part(folder, held, info.columns)
    return skipped


@torch.no_grad()
def embed_batch(examples: list[dict[str, Any]], embedder: Embedder, accelerator: Accelerator) -> list[dict[str, Any]]:
    """Return the rows of read images, with their embeddings; a clip among them has the mean of those of its frames."""
    if not examples:
        return []
    shown = [each.pop("square") for each in examples]
    parts = [each if each.dim() > len(embedder.medium.shape) else each[None] for each in shown]
    pixels_b = embedder.medium.features(torch.cat(parts).to(embedder.model.device))
    with accelerator.autocast():
        pooled, _ = embedder.model.vision_features(pixels_b, with_taps=False)
        embeds_bE, _ = embedder.model.project_image(pooled, ())
    units = normalize(embeds_bE.float(), dim=-1).split(list(map(len, parts)))
    means = [part[0] if len(part) == 1 else normalize(part.mean(0), dim=0) for part in units]
    rounded = torch.stack(means).half().cpu()
    if not rounded.isfinite().all():
        raise RunError(
            "The model's embeddings are not finite in float16. Try another checkpoint, or leave --mixed_precision out."
        )
    return [{**each, "embedding": embedding} for each, embedding in zip(examples, rounded, strict=True)]
