"""A teacher of sentence-transformers that embeds images and texts: `--teacher_name_or_path st:FOLDER`.

This is how today's large vision-language embedders come. It reads whole images by its own processor, and captions as they are;
as it has no temperature, its soft targets have the student's.
"""

import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from PIL import Image
from torch import Tensor, nn

from mm_utils.data.batches.column_cache import column_digest, image_digest
from mm_utils.data.batches.tokens import fingerprint
from mm_utils.data.images import UnreadableImageError, open_image
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.frozen.feature_cache import Block, Source
from mm_utils.text import one_line

PREFIX = "st:"
_SETTINGS = (".json", ".txt", ".model", ".jinja")  # files of a folder that decide what it embeds, besides weights


class Embedder(nn.Module):
    """A SentenceTransformer of a folder.

    Raises:
        ValueError: if the package or the folder is missing, it needs code or pickles of others, or embeds no images.
    """

    def __init__(self, name: str):
        super().__init__()
        folder, what = Path(name.removeprefix(PREFIX)), f"--teacher_name_or_path is {name}"
        if not folder.is_dir():
            raise ValueError(f"{what}; there is no such folder. Give one of a SentenceTransformer.")
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ValueError(
                f"{what}; it needs sentence-transformers, which is not installed. Run pip install sentence-transformers."
            ) from error
        try:
            self.model: Any = SentenceTransformer(
                str(folder),
                device="cpu",
                trust_remote_code=False,
                model_kwargs={"use_safetensors": True, "dtype": "float32"},
            )
            self.width = self.encode([Image.new("RGB", (64, 64))]).shape[1]
            same = self.encode(["a"]).shape[1] == self.width
        except Exception as error:  # of any kind: its modules are of many classes
            raise ValueError(
                f"{what}; it cannot embed an image and a text: {one_line(error)}. Choose a model that embeds both."
            ) from error
        if not same:
            raise ValueError(f"{what}; its embeddings of images and texts differ in width. Choose another model.")
        digest = hashlib.blake2b(digest_size=16)
        for path in sorted(each for each in folder.rglob("*") if each.suffix in _SETTINGS and each.is_file()):
            digest.update(f"{path.relative_to(folder)} ".encode() + path.read_bytes())
        settings = {"settings": digest.hexdigest()}
        self.config = SimpleNamespace(to_dict=lambda: settings)

    @torch.no_grad()
    def encode(self, items: Sequence[Any], batch_size: int = 32) -> Tensor:
        """Return unit embeddings `[n, E]` of images or texts."""
        found = self.model.encode(
            list(items),
            batch_size=batch_size,
            convert_to_tensor=True,
            normalize_embeddings=True,
            show_progress_bar=False,
        )
        return found.float()


class SentenceTeacher(Source):
    """The teacher, run on every image and on all its captions."""

    name, flag = "teacher", "--teacher_name_or_path"

    def __init__(self, rows: datasets.Dataset, data: TrainingData, embedder: Embedder, accelerator: Accelerator):
        super().__init__(rows, data.loaders, data.eval_batch_size, embedder, accelerator)  # type: ignore[arg-type]
        self.embedder = embedder

    @property
    def tower(self) -> nn.Module:
        """Return the teacher."""
        return self.embedder

    def depends_on(self) -> tuple:
        """Return what is embedded."""
        return image_digest(self.rows), column_digest(self.rows, "captions"), fingerprint(self.rows)

    def blocks(self) -> Iterator[Block]:
        """Yield the embeddings of this rank's rows."""
        for draws in self.batches:
            rows = [self.rows[row] for row, _ in draws]
            counts = [len(row["captions"]) for row in rows]
            image_nE, text_tE = (torch.zeros(size, self.embedder.width) for size in (len(rows), sum(counts)))
            images = {place: found for place, row in enumerate(rows) if (found := _open(row["image"])) is not None}
            if images:
                image_nE[list(images)] = self.embedder.encode(list(images.values()), self.batch_size).cpu()
                text_tE = self.embedder.encode(
                    [text for row in rows for text in row["captions"]], self.batch_size
                ).cpu()
            yield {"teacher_image": (image_nE,), "teacher_text": (text_tE, counts)}, {}


def _open(value: dict[str, Any]) -> Image.Image | None:
    """Return a stored image; None for one that cannot be decoded, which is never shown."""
    try:
        return open_image(value)
    except UnreadableImageError:
        return None
