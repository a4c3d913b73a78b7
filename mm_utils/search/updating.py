"""Bring an index up to date: embed what was added or changed, on any number of processes.

A row of the index, or of a part that a killed run left, is kept if its image is unchanged: same size and time, or else the
same bytes. The main process decides, and writes the index; every process embeds its share and writes parts.
"""

import logging
import math
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from filelock import FileLock, Timeout
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.batches.workers import worker_options
from mm_utils.data.faults import Fault
from mm_utils.data.media.medium import Medium
from mm_utils.data.paths import MEDIA_LIMITS, read_file
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.distributed import RunError
from mm_utils.files import is_about
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.search.index import (
    STAMPS,
    IndexInfo,
    check_same_model,
    model_fingerprint,
    read_info,
    read_parts,
    read_rows,
    remove_parts,
    replace_rows,
    schema,
    stored_files,
    write_part,
    write_skipped,
)
from mm_utils.search.listing import Listing, Reader, Skip, stamps

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 20.0  # of work that a killed run loses at most, and a batch
FLUSH_BYTES = 64 << 20  # of clips and sounds that wait to be written
KEPT_BYTES = (
    64 << 20
)  # of a file of rows from which on an update leaves it as it is; smaller ones are written anew with what is new
_ROWS = {"image": 1000, "clip": 50, "sound": 50}  # that are in memory while the index is written anew
_PASSING = ("permission_denied", "read_error")  # reasons that say nothing of an image that was embedded before
_SHOWN = [name for name in STAMPS.names if name != "content_hash"]


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and how its media are read.

    Attributes:
        model: in evaluation mode.
        medium: how its media are read.
        batch_size: media per process and forward pass.
        workers: processes that decode, per process.
        states: shapes of the taps to keep for the fusion head, from `tap_shapes`; None to keep none.
    """

    model: FusionDualEncoderModel
    medium: Medium
    batch_size: int
    workers: int
    states: list[list[int]] | None = None

    @cached_property
    def fingerprint(self) -> str:
        """Digits of the weights and of how media are read."""
        return model_fingerprint(self.model, self.medium)

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self.model.config.projection_dim

    @property
    def columns(self) -> pa.Schema:
        """The columns of an index of these embeddings."""
        return schema(self.width, self.states, self.medium.kind)

    @property
    def state_bytes(self) -> int:
        """Bytes of an image's states."""
        return 2 * sum(map(math.prod, self.states or ()))


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

    @property
    def todo(self) -> list[int]:
        """Places in the listing of images that must be embedded."""
        return [place for place, row in enumerate(self.kept) if row is None]


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

        def begin() -> list[int]:
            locked.enter_context(_lock(folder))
            info = start_index(folder, model, embedder)
            plan = make_plan(folder, listing, info.columns)
            held.append((info, plan))
            logger.info("%s", describe(plan, info.medium))
            return plan.todo

        todo = distributed.on_first(begin)
        mine = todo[accelerator.process_index :: accelerator.num_processes]
        skipped = embed_share(folder, listing, mine, len(todo), embedder, accelerator)
        skipped = gather_object(skipped)
        return distributed.on_first(lambda: _finish(folder, *held[0], listing, skipped))


def start_index(folder: Path, model: str, embedder: Embedder) -> IndexInfo:
    """Return what `index.json` says, written now if the index is new.

    Raises:
        RunError: if the index was made with another model, or without the states that are asked for.
    """
    info = read_info(folder)
    if info is None:
        name = os.path.abspath(model) if Path(model).is_dir() else model
        info = IndexInfo(
            *(name, embedder.fingerprint, embedder.medium.key["image_size"], embedder.width),
            states=embedder.states,
            medium=embedder.medium.kind,
        )
        info.save(folder)
    check_same_index(info, model, folder, embedder)
    return info


def check_same_index(info: IndexInfo, model: str, folder: Path, embedder: Embedder) -> None:
    """Raise RunError unless this model made the index, with states if it has them."""
    check_same_model(info, embedder.model, embedder.medium, model, folder)
    if info.states != embedder.states:
        raise RunError(
            f"--keep_fusion_states is given; the index {folder} was made without. Embed into a new --index_dir, or delete this "
            "one first."
        )


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
            is_unseen = bool(out_of_reach) and not out_of_reach.isdisjoint([old["id"], *_folders_of(old["id"])])
            unseen += [row] if is_unseen else []
            removed += not is_unseen
    if unseen:
        table = pa.concat_tables([table, known.select(table.column_names).take(pa.array(unseen))])
    return Plan(table, known, len(indexed), set(parts), [*kept, *unseen], removed)


def _folders_of(name: str) -> list[str]:
    return [folder.as_posix() for folder in PurePosixPath(name).parents]


def describe(plan: Plan, medium: str) -> str:
    """Return what a run has to do, in a line."""
    todo = len(plan.todo)
    return f"{len(plan.kept):,} {medium}s: {todo:,} to embed, {len(plan.kept) - todo:,} unchanged; {plan.removed:,} removed"


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
    place_of = np.full(len(known), -1)
    place_of[[row for _, row in wanted]] = [place for place, _ in wanted]
    kept, is_anew = _kept_files(folder, plan, place_of)
    if is_anew.any() or (place_of[: plan.indexed] < 0).any():
        anew = [(place, row) for place, row in wanted if is_anew[row]]
        replace_rows(folder, _merged(plan, known, anew, _ROWS[info.medium]), info.columns, kept)
    write_skipped(folder, lines)
    replace(info, images=len(wanted), skipped=len(lines)).save(folder)
    remove_parts(folder)
    todo = len(plan.todo)
    return Outcome(todo - len(skipped), len(plan.kept) - todo, plan.removed, len(lines), len(wanted))


def _kept_files(folder: Path, plan: Plan, place_of: np.ndarray) -> tuple[list[str], np.ndarray]:
    """Return the files of the index that stay, and a mask of the known rows that are written anew.

    A file stays if all its rows are listed and as they were; a small one only if nothing is written at all.
    """
    same, begin = [], 0
    for path, count in stored_files(folder):
        places = place_of[begin : begin + count]
        shown = plan.known.select(_SHOWN).slice(begin, count)
        if (places >= 0).all() and shown.equals(plan.table.select(_SHOWN).take(pa.array(places))):
            same.append((path, range(begin, begin + count)))
        begin += count
    if sum(len(rows) for _, rows in same) < np.count_nonzero(place_of >= 0):
        same = [(path, rows) for path, rows in same if path.stat().st_size >= KEPT_BYTES]
    anew = place_of >= 0
    for _, rows in same:
        anew[rows.start : rows.stop] = False
    return [path.name for path, _ in same], anew


def _merged(plan: Plan, known: pa.Table, wanted: list[tuple[int, int]], count: int) -> Iterator[pa.Table]:
    """Yield the new index's rows in blocks; kept ones with the listing's paths and captions."""
    rows_of_known = datasets.Dataset(known).with_format("arrow")
    for low in tqdm(range(0, len(wanted), count), desc="Writing", leave=False, delay=2):
        places, rows = zip(*wanted[low : low + count], strict=True)
        table = rows_of_known[list(rows)]
        is_new = pa.array([row >= len(plan.known) for row in rows])
        listed = plan.table.take(pa.array(places))
        for name in _SHOWN:
            column = pc.if_else(is_new, table[name], listed[name])
            table = table.set_column(table.column_names.index(name), name, column)
        yield table


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Let no other run write to the index."""
    read_info(folder)
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


def try_out(folder: Path, model: str, listing: Listing, embedder: Embedder, accelerator: Accelerator) -> None:
    """Log what `update_index` would do, its time and the index's size; write nothing."""
    info = read_info(folder)
    if info is not None:
        check_same_index(info, model, folder, embedder)
    plan = make_plan(folder, listing, embedder.columns if info is None else info.columns)
    begin = time.monotonic()
    sample = plan.todo[: 2 * embedder.batch_size]
    skipped = embed_share(None, listing, sample, len(sample), embedder, accelerator)
    seconds = (time.monotonic() - begin) / max(1, len(sample)) * len(plan.todo) / accelerator.num_processes
    kept = f" What the head reads takes {embedder.state_bytes / 1e3:,.1f} kB an image." if embedder.states else ""
    logger.info(
        "Nothing was written. %s. %d of the first %d cannot be read; all would take about %.0f s.%s",
        describe(plan, embedder.medium.kind), len(skipped), len(sample), seconds, kept,
    )  # fmt: skip


# -- embedding ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def tap_shapes(model: FusionDualEncoderModel, medium: Medium) -> list[list[int]]:
    """Return the shapes of what the fusion head reads of a medium.

    Raises:
        ValueError: if the model has no head.
    """
    if model.fusion is None:
        raise ValueError("--keep_fusion_states is given; the model has no fusion head. Drop the flag.")
    _, taps = model.vision_features(medium.features(medium.blank(1).to(model.device)))
    return [list(tap.shape[1:]) for tap in taps]


def embed_share(
    folder: Path | None,
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
    loader = DataLoader(reader, embedder.batch_size, collate_fn=list, **worker_options(workers))
    skipped: list[Skip] = []
    held: list[dict[str, Any]] = []
    flushed = time.monotonic()
    with tqdm(
        total=total,
        desc="Embedding",
        unit=f" {embedder.medium.kind}s",
        disable=not (accelerator.is_main_process and total),
    ) as bar:
        for batch in loader:
            skipped += [each for each in batch if "reason" in each]
            held += embed_batch([each for each in batch if "square" in each], embedder, accelerator)
            bar.update(min(len(batch) * accelerator.num_processes, total - bar.n))
            is_due = time.monotonic() - flushed > FLUSH_SECONDS or sum(map(_kept_bytes, held)) > FLUSH_BYTES
            if folder is not None and held and is_due:
                write_part(folder, held, embedder.columns)
                held, flushed = [], time.monotonic()
    if folder is not None and held:
        write_part(folder, held, embedder.columns)
    return skipped


@torch.no_grad()
def embed_batch(examples: list[dict[str, Any]], embedder: Embedder, accelerator: Accelerator) -> list[dict[str, Any]]:
    """Return the rows of read images, with their embeddings; a clip among them has the mean of those of its frames."""
    if not examples:
        return []
    shown = [each.pop("square") for each in examples]
    parts = [each if each.dim() > len(embedder.medium.shape) else each[None] for each in shown]
    counts, squares = list(map(len, parts)), torch.cat(parts)
    pixels_b = embedder.medium.features(squares.to(embedder.model.device))
    with accelerator.autocast():
        pooled, taps = embedder.model.vision_features(pixels_b, with_taps=embedder.states is not None)
        embeds_bE, _ = embedder.model.project_image(pooled, ())
    units = normalize(embeds_bE.float(), dim=-1).split(counts)
    means = [part[0] if len(part) == 1 else normalize(part.mean(0), dim=0) for part in units]
    columns = {"embedding": torch.stack(means).half().cpu()}
    if taps:
        middle = [sum(counts[:at]) + count // 2 for at, count in enumerate(counts)]
        columns["states"] = torch.cat([tap.flatten(1) for tap in taps], 1)[middle].half().cpu()
    if not all(values.isfinite().all() for values in columns.values()):
        raise RunError(
            "The model's embeddings are not finite in float16. Try another checkpoint, or leave --mixed_precision or "
            "--keep_fusion_states out."
        )
    return [{**each, **{name: values[at] for name, values in columns.items()}} for at, each in enumerate(examples)]


def _kept_bytes(row: dict[str, Any]) -> int:
    return len(row.get("content", b""))
