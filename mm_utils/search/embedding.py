"""Read images in data workers, and embed a process's share of them."""

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import torch
from accelerate import Accelerator
from PIL import Image
from torch.nn.functional import normalize
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm

from mm_utils.data.faults import Fault
from mm_utils.data.images import MOST_PIXELS, UnreadableImageError, encode, open_image, pixels, raw_size, shrink
from mm_utils.data.loading.augment import center_square
from mm_utils.data.loading.workers import worker_options
from mm_utils.data.paths import Limits, read_file
from mm_utils.data.prepare.checks import CheckArguments, check_image
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.distributed import RunError
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.search.index import schema, write_part
from mm_utils.search.listing import Listing, Skip, skip

THUMBNAIL = 256  # pixels of the shorter side, or the model's image size if that is more
QUALITY = 85  # of the JPEG of a thumbnail: about 25 kB
FLUSH_SECONDS = 20.0  # of work that a killed run loses at most, and a batch


@dataclass(frozen=True)
class Embedder:
    """A model on its device, and how its images are read.

    Attributes:
        model: in evaluation mode.
        fingerprint: `mm_utils.search.index.model_fingerprint` of the model.
        geometry: side, mean and std of the squares, as `mm_utils.data.loading.loaders.image_geometry` returns them.
        batch_size: images per process and forward pass.
        workers: processes that decode, per process.
        states: shapes of the taps to keep for the fusion head, from `tap_shapes`; None to keep none.
    """

    model: FusionDualEncoderModel
    fingerprint: str
    geometry: tuple[int, list[float], list[float]]
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
        return schema(self.width, self.states)

    @property
    def state_bytes(self) -> int:
        """Bytes of an image's states."""
        return 2 * sum(map(math.prod, self.states or ()))


@torch.no_grad()
def tap_shapes(model: FusionDualEncoderModel, side: int) -> list[list[int]]:
    """Return the shapes of what the fusion head reads of an image of this side.

    Raises:
        ValueError: if the model has no head.
    """
    if model.fusion is None:
        raise ValueError("--keep_fusion_states is given; the model has no fusion head. Drop the flag.")
    _, taps = model.vision_features(torch.zeros(1, 3, side, side, device=model.device))
    return [list(tap.shape[1:]) for tap in taps]


def normalised(
    squares: torch.Tensor, geometry: tuple[int, list[float], list[float]], device: torch.device
) -> torch.Tensor:
    """Return a model's input `[b, 3, S, S]` on its device, for uint8 squares."""
    mean, std = (torch.tensor(values, device=device).view(3, 1, 1) * 255 for values in geometry[1:])
    return squares.to(device).float().sub_(mean).div_(std)


def embed_share(
    folder: Path | None,
    listing: Listing,
    mine: Sequence[int],
    total: int,
    embedder: Embedder,
    accelerator: Accelerator,
) -> list[Skip]:
    """Embed this rank's images and write them as parts, none without a folder; return those that cannot be read.

    Raises:
        RunError: if an embedding is not finite.
    """
    reader = Reader(listing, mine, embedder.geometry[0])
    workers = min(embedder.workers, -(-len(mine) // embedder.batch_size))
    loader = DataLoader(reader, embedder.batch_size, collate_fn=list, **worker_options(workers))
    skipped: list[Skip] = []
    held: list[dict[str, Any]] = []
    flushed = time.monotonic()
    with tqdm(
        total=total, desc="Embedding", unit=" images", disable=not (accelerator.is_main_process and total)
    ) as bar:
        for batch in loader:
            skipped += [each for each in batch if "reason" in each]
            held += embed_batch([each for each in batch if "square" in each], embedder, accelerator)
            bar.update(min(len(batch) * accelerator.num_processes, total - bar.n))
            if folder is not None and held and time.monotonic() - flushed > FLUSH_SECONDS:
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
    squares = torch.stack([each.pop("square") for each in examples])
    pixels_b = normalised(squares, embedder.geometry, embedder.model.device)
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


class Reader(Dataset):
    """Images of a listing, read, checked and cut in data workers."""

    def __init__(self, listing: Listing, places: Sequence[int], side: int):
        self.listing, self.places, self.side = listing, places, side
        self.limits, self.checks = Limits(), CheckArguments()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row without its embedding, with the `square` to embed; or a line of `skipped.jsonl`."""
        place = self.places[number]
        name, row = self.listing.ids[place], self.listing.rows[place]
        try:
            return {"id": name, "captions": row["captions"], **self._read(row["image"])}
        except Fault as fault:
            return dict(skip(name, fault))

    def _read(self, image: dict[str, Any]) -> dict[str, Any]:
        path, content = image["path"] or "", image["bytes"]
        own = {"path": "", "size": len(content or b""), "mtime_ns": 0}
        if not content:
            try:
                status = os.stat(path)
                own = {"path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            except OSError:
                pass  # `read_file` says what is wrong
            content = read_file(path, self.limits)
            image = {"bytes": content, "path": path}
        square, thumbnail = self._show(image)
        return {**own, "content_hash": stored_hash(content), "square": square, "thumbnail": thumbnail}

    def _show(self, image: dict[str, Any]) -> tuple[torch.Tensor, bytes]:
        """Return the square, as evaluations cut it, and the thumbnail."""
        side = max(THUMBNAIL, self.side)
        try:
            if raw_size(image) is None:
                checked = check_image(image["bytes"], self.checks, image["path"] or "", self.side, MOST_PIXELS)
                shown, shorter = checked.image, min(checked.width, checked.height)
            else:
                shown = Image.fromarray(pixels(image))
                shorter = min(shown.size)
            square = center_square(shown, self.side)
            if min(shown.size) < min(side, shorter):  # decoded at a reduced scale
                shown = open_image(image, side)
        except UnreadableImageError as error:
            raise Fault("image_unreadable", str(error)) from error
        return square, encode(shrink(shown, side), "jpeg", QUALITY)
