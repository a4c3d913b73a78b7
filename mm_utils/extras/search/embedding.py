"""Embed a process's share of images, clips or sounds, and write it as parts of an index."""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from accelerate import Accelerator
from torch.nn.functional import normalize
from torch.utils.data import DataLoader
from tqdm.auto import tqdm

from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.workers import worker_options
from mm_utils.distributed import RunError
from mm_utils.extras.search.index import schema, write_part
from mm_utils.extras.search.listing import Listing, Skip
from mm_utils.extras.search.reading import Reader
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

FLUSH_SECONDS = 20.0  # of work that a killed run loses at most, and a batch
FLUSH_BYTES = 64 << 20  # of clips and sounds that wait to be written


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and how its media are read.

    Attributes:
        model: in evaluation mode.
        fingerprint: `mm_utils.extras.search.index.model_fingerprint` of the model.
        loaders: those of the model's media.
        batch_size: media per process and forward pass.
        workers: processes that decode, per process.
        states: shapes of the taps to keep for the fusion head, from `tap_shapes`; None to keep none.
    """

    model: FusionDualEncoderModel
    fingerprint: str
    loaders: Loaders
    batch_size: int
    workers: int
    states: list[list[int]] | None = None

    @property
    def width(self) -> int:
        """Numbers of an embedding."""
        return self.model.config.projection_dim

    @property
    def columns(self) -> pa.Schema:
        """The columns of an index of these embeddings."""
        return schema(self.width, self.states, self.loaders.medium.kind)

    @property
    def state_bytes(self) -> int:
        """Bytes of an image's states."""
        return 2 * sum(map(math.prod, self.states or ()))


@torch.no_grad()
def tap_shapes(model: FusionDualEncoderModel, loaders: Loaders) -> list[list[int]]:
    """Return the shapes of what the fusion head reads of a medium.

    Raises:
        ValueError: if the model has no head.
    """
    if model.fusion is None:
        raise ValueError("--keep_fusion_states is given; the model has no fusion head. Drop the flag.")
    _, taps = model.vision_features(loaders.blank(1).to(model.device))
    return [list(tap.shape[1:]) for tap in taps]


def as_input(examples: Sequence[torch.Tensor], loaders: Loaders) -> torch.Tensor:
    """Return a model's input on its device, for media as evaluations cut them."""
    [batch] = loaders.on_device([{"pixel_values": torch.stack(list(examples))}])
    return batch["pixel_values"]


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
    reader = Reader(listing, mine, embedder.loaders)
    workers = min(embedder.workers, -(-len(mine) // embedder.batch_size))
    loader = DataLoader(reader, embedder.batch_size, collate_fn=list, **worker_options(workers))
    skipped: list[Skip] = []
    held: list[dict[str, Any]] = []
    flushed = time.monotonic()
    with tqdm(
        total=total,
        desc="Embedding",
        unit=f" {embedder.loaders.medium.kind}s",
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
    """Return the rows of read images, with their embeddings."""
    if not examples:
        return []
    pixels_b = as_input([each.pop("square") for each in examples], embedder.loaders)
    with accelerator.autocast():
        pooled, taps = embedder.model.vision_features(pixels_b, with_taps=embedder.states is not None)
        embeds_bE, _ = embedder.model.project_image(pooled, ())
    columns = {"embedding": normalize(embeds_bE.float(), dim=-1).half().cpu()}
    if taps:
        columns["states"] = torch.cat([tap.flatten(1) for tap in taps], 1).half().cpu()
    if not all(values.isfinite().all() for values in columns.values()):
        raise RunError(
            "The model gives embeddings that are not finite in float16. Try another checkpoint, or leave --mixed_precision or "
            "--keep_fusion_states out."
        )
    return [{**each, **{name: values[at] for name, values in columns.items()}} for at, each in enumerate(examples)]


def _kept_bytes(row: dict[str, Any]) -> int:
    return len(row.get("content", b""))
