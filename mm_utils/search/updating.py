"""Bring an index up to date: embed what was added or changed, on any number of processes.

A row of the index, or of a part that a killed run left, is kept if its image has the same time and size, or else the same stored
bytes, and its captions are the same, embedded by the same text tower. The main process decides, and writes the index; every process
embeds its share and writes parts.
"""

import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
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
from mm_utils.evaluation.embeddings import check_embeddings
from mm_utils.files import folder_lock, writable_folder
from mm_utils.model.encoding import embed_texts
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.search.index import (
    KEY,
    IndexInfo,
    check_folder,
    check_same_model,
    fingerprints,
    has_index,
    is_older,
    open_index,
    read_parts,
    write_index,
    write_info,
    write_part,
)
from mm_utils.search.listing import Listing, Reader, Skip
from mm_utils.search.searcher import LEAST_LEVEL, Searcher

logger = logging.getLogger(__name__)

FLUSH_SECONDS = 10.0  # of work that a killed run loses at most, and a batch
_ROWS = {"image": 1000, "clip": 50, "sound": 50}  # that are in memory while the index is written anew


class Embedder(NamedTuple):
    """A model with its processor, in evaluation mode on its device, how its media are read, media per forward pass, and decoding processes."""

    model: FusionDualEncoderModel
    medium: Medium
    batch_size: int
    workers: int


def update_index(
    folder: Path, model: str, listing: Listing, embedder: Embedder, accelerator: Accelerator
) -> dict[str, int]:
    """Bring an index up to date with a listing; called on all ranks.

    Returns:
        The images that were embedded, kept, removed and skipped, and those of the index (`images`).

    Raises:
        RunError: if the index was made with another model, another run writes to it, or no image can be read.
        ValueError: if the folder holds something else.
    """
    plans: list[_Plan] = []  # on the main process
    with ExitStack() as locked:

        def begin() -> tuple[IndexInfo, list[int]]:
            check_folder(folder)
            writable_folder(str(folder), "--index_dir")
            if locked.enter_context(folder_lock(folder)) is False:
                raise RunError(f"--index_dir is {folder}; another run writes to it. Wait for its end, or end it.")
            name = os.path.abspath(model) if Path(model).is_dir() else model
            fingerprint, texts = fingerprints(embedder.model, embedder.medium)
            info = IndexInfo(name, fingerprint, texts, embedder.model.config.projection_dim, embedder.medium.kind)
            before = info
            old = info.columns.empty_table()
            if is_older(folder):
                logger.info("%s was written by an earlier version; all is embedded anew", folder)
            elif has_index(folder):
                before, rows = open_index(folder)
                check_same_model(before, fingerprint, name, folder)
                old = rows.data.table
            same_texts = before.texts == texts
            before = replace(before, texts=texts, level=before.level if same_texts else None)
            plans.append(_Plan(folder, before, old, listing, same_texts))
            info = plans[0].info
            return info, plans[0].todo

        info, todo = distributed.on_first(begin)
        mine = todo[accelerator.process_index :: accelerator.num_processes]
        skipped = gather_object(embed_share(folder, info, listing, mine, len(todo), embedder, accelerator))

        def end() -> dict[str, int]:
            counts = plans[0].finish(skipped)
            info, rows = open_index(folder)
            if info.level is None and len(rows) >= LEAST_LEVEL:
                write_info(folder, replace(info, level=Searcher(folder, embedder.model).level()))
            return counts

        return distributed.on_first(end)


class _Plan:
    """What a run has to do, on the main process; `todo` are the places of the listing that have to be embedded."""

    def __init__(self, folder: Path, info: IndexInfo, old: pa.Table, listing: Listing, same_texts: bool):
        self.folder = folder
        self.info = info
        self.old = old
        self.listing = listing
        self.parts = read_parts(folder, info)
        known = pa.concat_tables([old, *self.parts.values()])
        row_of = {
            repr(list(key.values())): row  # a text, as lists have no hash
            for row, key in enumerate(known.select(KEY).to_pylist())
            # captions of the old rows may be embedded by another text tower; those of parts never are
            if row >= len(old) or same_texts or not key["captions"]
        }
        self.places: list[tuple[str, str]] = []
        self.rows: list[int | None] = []
        for medium in listing.stamps():
            self.places.append((medium["path"], medium["split"]))
            self.rows.append(row_of.get(repr([medium[name] for name in KEY])))
        self.todo = [place for place, row in enumerate(self.rows) if row is None]
        self.removed = len({*old["id"].to_pylist()} - {*listing.ids})
        logger.info(
            "%s %ss: %s to embed, %s unchanged; %s removed",
            f"{len(self.rows):,}",
            info.medium,
            f"{len(self.todo):,}",
            f"{len(self.rows) - len(self.todo):,}",
            f"{self.removed:,}",
        )

    def finish(self, skipped: list[Skip]) -> dict[str, int]:
        """Write the index anew from what was known and what the parts hold now."""
        new = [table for name, table in read_parts(self.folder, self.info).items() if name not in self.parts]
        known = pa.concat_tables([self.old, *self.parts.values(), *new])
        first = len(known) - sum(map(len, new))
        row_of = {name: first + row for row, name in enumerate(known["id"][first:].to_pylist())}
        chosen = []
        for name, row, place in zip(self.listing.ids, self.rows, self.places, strict=True):
            row = row_of.get(name) if row is None else row
            if row is not None:
                chosen.append((row, place))
        lines = [*self.listing.skipped, *sorted(skipped, key=lambda line: line["id"])]
        if not chosen:
            reasons = "; ".join(line["detail"] for line in lines[:3])
            raise RunError(f"No {self.info.medium} can be read; the first reasons are: {reasons}")
        before = enumerate(zip(self.old["path"].to_pylist(), self.old["split"].to_pylist(), strict=True))
        # the same rows in the same order, paths and splits: the file stays
        is_old = self.info.rows and chosen == list(before)
        write_index(self.folder, self.info, None if is_old else self._blocks(known, chosen), lines)
        counts = {"embedded": len(self.todo) - len(skipped), "kept": len(self.rows) - len(self.todo)}
        return counts | {"removed": self.removed, "skipped": len(lines), "images": len(chosen)}

    def _blocks(self, known: pa.Table, chosen: list[tuple[int, tuple[str, str]]]) -> Iterator[pa.Table]:
        """Yield the chosen rows with their present paths and splits, as a folder may have moved, and a pair."""
        rows = datasets.Dataset(known).with_format("arrow")
        count = _ROWS[self.info.medium]
        for low in tqdm(range(0, len(chosen), count), desc="Writing", leave=False, delay=2):
            block = chosen[low : low + count]
            table = rows[[row for row, _ in block]]
            paths = pa.array([path for _, (path, _) in block], pa.string())
            splits = pa.array([split for _, (_, split) in block], pa.string())
            yield table.drop(["path", "split"]).append_column("path", paths).append_column("split", splits)


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
    skipped: list[Skip] = []
    held: list[dict[str, Any]] = []
    flushed = time.monotonic()
    for examples, others in read_share(listing, mine, total, embedder, accelerator, "Embedding"):
        skipped += others
        held += embed_batch(examples, embedder, accelerator)
        if held and time.monotonic() - flushed > FLUSH_SECONDS:
            write_part(folder, held, info)
            held = []
            flushed = time.monotonic()
    if held:
        write_part(folder, held, info)
    return skipped


def read_share(
    listing: Listing, mine: Sequence[int], total: int, embedder: Embedder, accelerator: Accelerator, title: str
) -> Iterator[tuple[list[dict[str, Any]], list[Skip]]]:
    """Yield this rank's media in batches, those that could be read and the lines of the others; the main process shows a bar."""
    reader = Reader(listing, mine, embedder.medium)
    size = embedder.batch_size
    loader = worker_loader(reader, min(embedder.workers, -(-len(mine) // size)), batch_size=size, collate_fn=list)
    is_quiet = not (accelerator.is_main_process and total)
    with tqdm(total=total, desc=title, unit=f" {embedder.medium.kind}s", disable=is_quiet) as bar:
        for batch in loader:
            yield [each for each in batch if "square" in each], [each for each in batch if "reason" in each]
            # the other ranks embed about as many meanwhile
            bar.update(min(len(batch) * accelerator.num_processes, total - bar.n))


@torch.no_grad()
def embed_batch(examples: list[dict[str, Any]], embedder: Embedder, accelerator: Accelerator) -> list[dict[str, Any]]:
    """Return the rows of read media, with unit vectors: of the medium, and of the mean of its captions."""
    if not examples:
        return []
    model = embedder.model
    size = embedder.batch_size
    squares = torch.stack([each.pop("square") for each in examples])
    texts = [text for each in examples for text in each["captions"]]
    with accelerator.autocast():
        pixels_b = embedder.medium.features(squares.to(model.device))
        images_bE, _ = model.encode_image(pixels_b, with_keys_values=False)
        text_inputs = (model.text_inputs(texts[low : low + size]) for low in range(0, len(texts), size))
        texts_tE = [embed_texts(model, *inputs) for inputs in text_inputs]
    images = _means(images_bE, [1] * len(examples))
    captions = _means(torch.cat([images_bE[:0], *texts_tE]), [len(each["captions"]) for each in examples])
    vectors = zip(examples, images, captions, strict=True)
    return [{**each, "embedding": image, "caption_embedding": caption} for each, image, caption in vectors]


def _means(embeds: Tensor, counts: list[int]) -> list[np.ndarray | None]:
    """Return the unit vectors of the means of unit vectors, in float16; None of no vector."""
    units = normalize(embeds.float(), dim=-1).split(counts)
    # zeros where no item has a vector, as `torch.stack` refuses an empty list
    means = torch.stack([normalize(each.mean(0), dim=0) for each in units if len(each)] or [embeds[:0].sum(0)])
    rounded = means.half().cpu()
    if any(counts):
        check_embeddings("media or texts", rounded.float())
    vectors = iter(rounded.numpy())
    return [next(vectors) if count else None for count in counts]
