"""Bring an index up to date: embed what was added or changed, on any number of processes.

A row of the index, or of a part that a killed run left, is kept if its image has the same time and size, or else the same stored
bytes; its captions are embedded anew where they or the text tower have changed. The main process decides, and writes the index; every process embeds its share and writes parts.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from torch import Tensor
from torch.nn.functional import normalize
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.data.batches.workers import worker_loader
from mm_utils.data.media.medium import Medium
from mm_utils.distributed import RunError
from mm_utils.files import folder_lock
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.processor import load_processor_of
from mm_utils.search.index import (
    KEY,
    IndexInfo,
    check_folder,
    check_same_model,
    model_fingerprint,
    read_index,
    read_parts,
    text_fingerprint,
    write_index,
    write_part,
)
from mm_utils.search.listing import Listing, Reader, Skip

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 20.0  # of work that a killed run loses at most, and a batch
FLUSH_BYTES = 64 << 20  # of clips and sounds that wait to be written
_ROWS = {"image": 1000, "clip": 50, "sound": 50}  # that are in memory while the index is written anew
_TOLD = ["path", "captions"]  # which the listing tells anew


class Embedder(NamedTuple):
    """A model in evaluation mode on its device, how its media are read, media per forward pass, and decoding processes."""

    model: FusionDualEncoderModel
    medium: Medium
    batch_size: int
    workers: int


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

    Raises:
        RunError: if the index was made with another model, another run writes to it, or no image can be read.
        ValueError: if the folder holds something else.
    """
    plans: list[_Plan] = []  # on the main process
    embedder.model.processor = embedder.model.processor or load_processor_of(model)
    with ExitStack() as locked:

        def begin() -> tuple[IndexInfo, list[int]]:
            check_folder(folder)
            folder.mkdir(parents=True, exist_ok=True)
            if locked.enter_context(folder_lock(folder)) is False:
                raise RunError(f"--index_dir is {folder}; another run writes to it. Wait for its end, or end it.")
            name = os.path.abspath(model) if Path(model).is_dir() else model
            old, texts = read_index(folder), text_fingerprint(embedder.model)
            if old is None:
                fingerprint = model_fingerprint(embedder.model, embedder.medium)
                width = embedder.model.config.projection_dim
                old = IndexInfo(name, fingerprint, texts, width, embedder.medium.kind), None
            info, rows = old
            check_same_model(info, embedder.model, embedder.medium, name, folder)
            plans.append(_Plan(folder, replace(info, texts=texts), rows, listing, info.texts != texts))
            info = plans[0].info
            return info, plans[0].todo

        info, todo = distributed.on_first(begin)
        mine = todo[accelerator.process_index :: accelerator.num_processes]
        skipped = gather_object(embed_share(folder, info, listing, mine, len(todo), embedder, accelerator))
        return distributed.on_first(lambda: plans[0].finish(skipped, embedder, accelerator))


class _Plan:
    """What a run has to do; on the main process.

    Attributes:
        todo: places of the listing that have to be embedded.
        other_texts: whether another text tower has embedded the captions of the rows that are there.
    """

    def __init__(
        self, folder: Path, info: IndexInfo, rows: datasets.Dataset | None, listing: Listing, other_texts: bool
    ):
        self.folder, self.info, self.listing, self.other_texts = folder, info, listing, other_texts
        self.old = info.columns.empty_table() if rows is None else rows.data.table
        self.parts = read_parts(folder, info)
        known = pa.concat_tables([self.old, *self.parts.values()])
        self.before = len(known)
        row_of = {tuple(key.values()): row for row, key in enumerate(known.select(KEY).to_pylist())}
        media = list(listing.stamps())
        self.listed = [(each["path"], each["captions"]) for each in media]
        keys = [(name, each["mtime_ns"], each["stamp"]) for name, each in zip(listing.ids, media, strict=True)]
        self.rows = [row_of.get(key) for key in keys]
        self.todo = [place for place, row in enumerate(self.rows) if row is None]
        self.removed = len({*self.old["id"].to_pylist()} - {*listing.ids})
        counts = tuple(f"{count:,}" for count in (len(self.todo), len(self.rows) - len(self.todo), self.removed))
        logger.info("%d %ss: %s to embed, %s unchanged; %s removed", len(self.rows), info.medium, *counts)

    def finish(self, skipped: list[Skip], embedder: Embedder, accelerator: Accelerator) -> Outcome:
        """Write the index anew from what was known and what the parts hold now."""
        parts = self.parts | read_parts(self.folder, self.info)  # those that were known come first
        known = pa.concat_tables([self.old, *parts.values()])
        new = {name: self.before + row for row, name in enumerate(known["id"][self.before :].to_pylist())}
        places = [new.get(name) if row is None else row for name, row in zip(self.listing.ids, self.rows, strict=True)]
        chosen = [(row, listed) for row, listed in zip(places, self.listed, strict=True) if row is not None]
        lines = [*self.listing.skipped, *sorted(skipped, key=lambda line: line["id"])]
        if not chosen:
            reasons = "; ".join(line["detail"] for line in lines[:3])
            raise RunError(f"No {self.info.medium} can be read; the first reasons are: {reasons}")
        # A folder may have moved, and a caption been added.
        old = [(row, (each["path"], each["captions"])) for row, each in enumerate(self.old.select(_TOLD).to_pylist())]
        is_old = chosen == old and not self.other_texts
        blocks = None if is_old else self._blocks(known, chosen, embedder, accelerator)
        write_index(self.folder, self.info, blocks, lines)
        kept = len(self.rows) - len(self.todo)
        return Outcome(len(self.todo) - len(skipped), kept, self.removed, len(lines), len(chosen))

    def _blocks(
        self,
        known: pa.Table,
        chosen: list[tuple[int, tuple[str, list[str]]]],
        embedder: Embedder,
        accelerator: Accelerator,
    ) -> Iterator[pa.Table]:
        rows, count = datasets.Dataset(known).with_format("arrow"), _ROWS[self.info.medium]
        for low in tqdm(range(0, len(chosen), count), desc="Writing", leave=False, delay=2):
            places, listed = zip(*chosen[low : low + count], strict=True)
            table = rows[list(places)]
            texts = [captions for _, captions in listed]
            was = table["captions"].to_pylist()
            changed = [at for at, now in enumerate(texts) if now != was[at] or self.other_texts]
            column, order = table["caption_embedding"], np.arange(len(table))
            order[changed] = len(table) + np.arange(len(changed))
            new = embed_captions([texts[at] for at in changed], embedder, accelerator)
            column = pa.chunked_array([*column.chunks, pa.array(new, column.type)]).take(pa.array(order))
            table = table.set_column(table.column_names.index("caption_embedding"), "caption_embedding", column)
            for name, values in zip(_TOLD, zip(*listed, strict=True), strict=True):
                at = table.column_names.index(name)
                table = table.set_column(at, name, pa.array(values, self.info.columns.field(name).type))
            yield table


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
    is_quiet = not (accelerator.is_main_process and total)
    with tqdm(total=total, desc="Embedding", unit=f" {info.medium}s", disable=is_quiet) as bar:
        for number, batch in enumerate(loader, 1):
            skipped += [each for each in batch if "reason" in each]
            held += embed_batch([each for each in batch if "square" in each], embedder, accelerator)
            bar.update(min(len(batch) * accelerator.num_processes, total - bar.n))
            waiting = sum(len(row.get("content", b"")) for row in held)
            is_time = time.monotonic() - flushed > FLUSH_SECONDS or waiting > FLUSH_BYTES
            if held and (is_time or number == len(loader)):
                write_part(folder, held, info)
                held, flushed = [], time.monotonic()
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
        embeds_bE, _ = embedder.model.encode_image(pixels_b, with_keys_values=False)
    units = normalize(embeds_bE.float(), dim=-1).split(list(map(len, parts)))
    texts = embed_captions([each["captions"] for each in examples], embedder, accelerator)
    vectors = zip(examples, _rounded_means(units), texts, strict=True)
    return [{**each, "embedding": image, "caption_embedding": text} for each, image, text in vectors]


@torch.no_grad()
def embed_captions(captions: list[list[str]], embedder: Embedder, accelerator: Accelerator) -> list[np.ndarray | None]:
    """Return the unit vector of each row's captions, float16 `[E]`; None of no captions."""
    texts, size, model = [text for each in captions for text in each], embedder.batch_size, embedder.model
    parts = list[Tensor]()
    for low in range(0, len(texts), size):
        with accelerator.autocast():
            parts.append(model.encode_text(*model.text_inputs(texts[low : low + size]), with_states=False)[0])
    if not parts:
        return [None] * len(captions)
    units = normalize(torch.cat(parts).float(), dim=-1).split([len(each) for each in captions if each])
    means = iter(_rounded_means(units).numpy())
    return [next(means) if each else None for each in captions]


def _rounded_means(units: Sequence[Tensor]) -> Tensor:
    """Return the unit vectors of the means of unit vectors `[n, E]`, in float16."""
    rounded = torch.stack([normalize(each.mean(0), dim=0) for each in units]).half().cpu()
    if not rounded.isfinite().all():
        raise RunError(
            "The model's embeddings are not finite in float16. Try another checkpoint, or leave --mixed_precision out."
        )
    return rounded
