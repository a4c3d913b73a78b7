"""Answer queries from an index: exact search by cosine, then re-ranking of the first hits where the model gains by it.

Scores are products in fp32 of the query and every embedding, in blocks: nothing is approximated. For a text, the fusion head
then reorders the first `rerank_top_k` images if `config.rerank_weights` of the model has a weight above 0, which training sets
only where it helped on the validation split. The head reads an image from its file, or from its thumbnail if the file
has changed, is gone, or was never there.

Shape letters: N images of the index, E embedding width, K re-ranked images.
"""

import os
import threading
from dataclasses import dataclass
from pathlib import Path

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mm_utils.data.images import UnreadableImageError, open_image
from mm_utils.data.loading.augment import center_square
from mm_utils.data.loading.loaders import image_geometry
from mm_utils.data.loading.tokens import encode_captions, pad_captions
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.search.embedding import normalised
from mm_utils.search.index import check_same_model, model_fingerprint, open_index

BLOCK = (
    1 << 20
)  # numbers of a product that are turned into fp32 at a time; 4 MB stay in a core's cache, ten times faster
_MOST_TOKENS = 64  # of a query, as of a caption in training


@dataclass(frozen=True)
class Hit:
    """An image that was found.

    Attributes:
        row: its row in the index.
        rank: its place in the answer, from 1.
        score: cosine of the query and the image.
        reranked: scaled cosine + what the fusion head adds; None if the head has not seen it.
        id, path, captions: as the index has them.
    """

    row: int
    rank: int
    score: float
    reranked: float | None
    id: str
    path: str
    captions: list[str]


class Searcher:
    """Search an index with the model that made it; queries of several threads take turns.

    Args:
        index_dir: the folder that scripts/embed.py wrote.
        model: the folder or Hub id of the model, if it has moved since.
        rerank_top_k: images of an answer that the fusion head reorders; 0 turns it off.
        device: where the model runs; default: a GPU if there is one.

    Raises:
        ValueError: if there is no index, or no model.
        RunError: if the model's weights have changed since the index was made.
    """

    def __init__(
        self, index_dir: str | Path, model: str | None = None, rerank_top_k: int = 10, device: str | None = None
    ):
        self.info, rows = open_index(Path(index_dir))
        self._rows, self._lock = rows, threading.Lock()
        self._texts = rows.select_columns(
            [name for name in rows.column_names if name not in ("embedding", "thumbnail")]
        )
        self._embeds_NE = _embeddings(rows, self.info.width)
        name = model or self.info.model
        processor = load_processor_of(name)
        self._tokenizer, self._geometry = processor.tokenizer, image_geometry(processor)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._model = load_model(name, fusion_layers=0).eval()
        check_same_model(self.info, model_fingerprint(self._model, self._geometry), name, Path(index_dir))
        self._model.to(self._device)
        positions = getattr(self._model.config.text_config, "max_position_embeddings", None) or _MOST_TOKENS
        self._most_tokens = min(_MOST_TOKENS, positions, self._tokenizer.model_max_length)
        weights = self._model.config.rerank_weights or {}
        helps = self._model.fusion is not None and any(weights.values())
        self.rerank_top_k = rerank_top_k if helps else 0

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def reranks(self) -> bool:
        """Whether answers to texts are re-ranked by the fusion head."""
        return self.rerank_top_k > 0

    def search_text(self, text: str, top_k: int = 10, rerank: bool = True) -> list[Hit]:
        """Return the images that a text describes best, best first; without `rerank`, by the two towers alone."""
        ids, mask = pad_captions(self._encode(text), self._tokenizer.pad_token_id)
        ids, mask = ids.to(self._device), mask.to(self._device)
        with self._lock, torch.no_grad():
            query_1E, states = self._model.encode_text(ids, mask)
            score_N = self._scores(query_1E[0])
            order = _best(score_N, max(top_k, self.rerank_top_k))
            reranked: dict[int, float] = {}
            if rerank and self.reranks:
                first = order[: self.rerank_top_k]
                reranked = dict(zip(first, self._head(first, score_N, states, mask, ids), strict=True))
                order = [*sorted(first, key=lambda row: -reranked[row]), *order[self.rerank_top_k :]]
        return self._hits(order[:top_k], score_N, reranked)

    def search_image(self, image: Image.Image, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to an RGB image, best first."""
        with self._lock, torch.no_grad():
            query_1E, _ = self._model.encode_image(self._pixels([image]), with_keys_values=False)
            score_N = self._scores(query_1E[0])
        return self._hits(_best(score_N, top_k), score_N, {})

    def similar(self, row: int, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to an image of the index, without itself.

        Raises:
            IndexError: if the index has no such row.
        """
        self._check(row)
        score_N = self._scores(self._embeds_NE[row].float())
        return self._hits([other for other in _best(score_N, top_k + 1) if other != row][:top_k], score_N, {})

    def thumbnail(self, row: int) -> bytes:
        """Return the JPEG of an image of the index; raise IndexError if there is no such row."""
        self._check(row)
        return self._rows[row]["thumbnail"]

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}; the index has {len(self)} images")

    def _encode(self, text: str) -> list[list[int]]:
        return encode_captions(self._tokenizer, [text], None, self._most_tokens)

    def _scores(self, query_E: Tensor) -> Tensor:
        """Return the cosine of the query and every image, fp32 `[N]` on the CPU."""
        query_E = torch.nn.functional.normalize(query_E.float().cpu(), dim=0)
        return torch.cat([block.float() @ query_E for block in self._embeds_NE.split(max(1, BLOCK // len(query_E)))])

    def _head(self, rows: list[int], score_N: Tensor, states: Tensor, mask: Tensor, ids: Tensor) -> list[float]:
        """Return the scores `[K]` of images after re-ranking."""
        count = len(rows)
        images = [self._image(row) for row in rows]
        _, keys_values = self._model.encode_image(self._pixels(images))
        assert keys_values is not None
        added = self._model.head_scores(
            keys_values, states.expand(count, -1, -1), mask.expand(count, -1), ids.expand(count, -1)
        )
        scale = self._model.logit_scale.float().exp().item()
        return (scale * score_N[rows] + added.float().cpu()).tolist()

    def _image(self, row: int) -> Image.Image:
        """Return an image of the index: its file if it is unchanged, else its thumbnail."""
        known = self._rows[row]
        try:
            status = os.stat(known["path"])
            if (status.st_size, status.st_mtime_ns) == (known["size"], known["mtime_ns"]):
                return open_image({"bytes": None, "path": known["path"]}, self._geometry[0])
        except (OSError, UnreadableImageError):
            pass
        return open_image({"bytes": known["thumbnail"], "path": None}, self._geometry[0])

    def _pixels(self, images: list[Image.Image]) -> Tensor:
        """Return the model's input `[B, 3, S, S]`."""
        squares = torch.stack([center_square(image, self._geometry[0]) for image in images])
        return normalised(squares, self._geometry, self._device)

    def _hits(self, rows: list[int], score_N: Tensor, reranked: dict[int, float]) -> list[Hit]:
        found = self._texts[rows] if rows else {"id": [], "path": [], "captions": []}
        columns = zip(rows, found["id"], found["path"], found["captions"], strict=True)
        return [
            Hit(row, rank, score_N[row].item(), reranked.get(row), name, path, captions)
            for rank, (row, name, path, captions) in enumerate(columns, 1)
        ]


def _best(score_N: Tensor, top_k: int) -> list[int]:
    """Return the rows of the highest scores, best first; of equal ones, the first comes first."""
    if not 0 < top_k < len(score_N):
        return score_N.sort(descending=True, stable=True).indices[: max(0, top_k)].tolist()
    least = score_N.topk(top_k).values[-1]
    rows = (score_N >= least).nonzero().flatten()
    return rows[score_N[rows].sort(descending=True, stable=True).indices[:top_k]].tolist()


def _embeddings(rows: datasets.Dataset, width: int) -> Tensor:
    """Copy all embeddings into memory, float16 `[N, E]`: 2 x E bytes an image."""
    chunks = rows.data.column("embedding").chunks
    parts = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in chunks]
    return torch.from_numpy(np.concatenate(parts).reshape(-1, width))
