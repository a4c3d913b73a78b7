"""Answer queries from an index: by cosine, then re-ranked where the model gains by it.

Scores are products in fp32 of the query and the stored embeddings: of all of them, or of those that a first pass has found
(`mm_utils.search.first_pass`). For a text, the fusion head then reorders the first `rerank_top_k` images if
`config.rerank_weights` of the model has a weight above 0, which training sets only where it helped on the validation split.
The head reads the image, from its file, or from its thumbnail if the file has changed, is gone, or was never there; a clip
or a sound from the index.

Shape letters: E embedding width, K images of an answer, or those that are re-ranked.
"""

import copy
import io
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow.compute
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.data.images import open_image
from mm_utils.data.media.medium import read_by
from mm_utils.files import changed_ns
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.model.reading import UnreadableError, center_square, open_picture, read_sound
from mm_utils.search.first_pass import StoredVectors, among, open_find
from mm_utils.search.index import STAMPS, check_same_model, open_index
from mm_utils.search.narrowed import Filter, copies

_LARGE = 1600  # pixels of the longer side of an image that is looked at
_RANDOM_TEXTS, _RANDOM_TOKENS, _FLOOR = 100, 4, 0.5


@dataclass(frozen=True)
class Hit:
    """An image that was found.

    Attributes:
        row: its row in the index.
        rank: its place in the answer, from 1.
        score: cosine of the query and the image.
        reranked: cosine + what the fusion head adds, divided by the logit scale; None if the head has not seen it.
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
    """Search an index with the model that made it.

    Queries of several threads take turns.

    Args:
        index_dir: the folder that scripts/embed.py wrote.
        model: the folder or Hub id of the model, if it has moved since.
        rerank_top_k: images of an answer that the fusion head reorders; 0 turns it off.
        device: where the model runs; default: a GPU if there is one.
        index_factory: the first pass: a string of FAISS's index factory; default: exact search.

    Raises:
        ValueError: if there is no index, no model, or FAISS cannot make the first pass.
        RunError: if the model's weights have changed since the index was made, or FAISS is needed and missing.
    """

    def __init__(
        self,
        index_dir: str | Path,
        model: str | None = None,
        rerank_top_k: int = 10,
        device: str | None = None,
        index_factory: str | None = None,
    ):
        self.info, rows = open_index(Path(index_dir))
        self._lock, self._vectors = threading.Lock(), StoredVectors(rows)
        self._find = self._find_everywhere = open_find(index_factory, Path(index_dir), rows)
        # Without the vectors: a row of them would become thousands of Python numbers.
        self._rows = rows.select_columns([*STAMPS.names, "thumbnail"])
        self._texts = rows.select_columns(["id", "path", "captions"])
        self._contents = None if self.info.medium == "image" else rows.select_columns(["content"])
        self.searched = len(rows)
        name = model or self.info.model
        processor = load_processor_of(name)
        self._tokenizer = processor.tokenizer
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._medium: Any = read_by(processor)
        self._model = load_model(name, fusion_layers=0).eval()
        self._model.processor = processor
        check_same_model(self.info, self._model, self._medium, name, Path(index_dir))
        self._model.to(self._device)
        weights = self._model.config.rerank_weights or {}
        helps = self._model.fusion is not None and any(weights.values())
        self.rerank_top_k = rerank_top_k if helps else 0

    def within(self, given: Filter) -> "Searcher":
        """Return a searcher that finds the rows of a filter alone, `searched` of them, exactly; this one without a filter.

        Rows keep their numbers, and the floor is that of the whole index.
        """
        if not given:
            return self
        new, mask_N = copy.copy(self), given.mask(self._rows)
        new._find, new.searched = among(self._vectors, mask_N), int(mask_N.sum())
        return new

    def copies(self, given: Filter) -> list[list[dict[str, Any]]]:
        """Return groups of images that show the same picture, of those that a filter lets through: row, id and path."""
        rows = given.mask(self._rows).nonzero()[0].tolist()
        return [
            [{"row": rows[at], **self._texts[rows[at]]} for at in group] for group in copies(self._rows.select(rows))
        ]

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def reranks(self) -> bool:
        """Whether answers to texts are re-ranked by the fusion head."""
        return self.rerank_top_k > 0

    def search_text(self, text: str, top_k: int = 10, rerank: bool = True) -> list[Hit]:
        """Return the images that a text describes best; without `rerank`, by the towers alone.

        Raises:
            ValueError: if it is not a text.
        """
        with self._lock, torch.no_grad():
            ids, mask = self._model.text_inputs([text])
            query_1E, states = self._model.encode_text(ids, mask)
            found = self._best(query_1E[0], max(top_k, self.rerank_top_k))
            reranked: dict[int, float] = {}
            if rerank and self.reranks and found:
                first = found[: self.rerank_top_k]
                reranked = self._head(first, states, mask, ids)
                found[: self.rerank_top_k] = sorted(first, key=lambda hit: -reranked[hit[0]])
        return self._hits(found[:top_k], reranked)

    @cached_property
    def floor(self) -> float:
        """The cosine that a text's hits have to exceed: half of 100 random sequences of four tokens find nothing above it."""
        draw, size = torch.Generator().manual_seed(0), len(self._tokenizer)
        drawn = torch.randint(size, (_RANDOM_TEXTS, _RANDOM_TOKENS), generator=draw).tolist()
        texts = [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in drawn]
        with self._lock, torch.no_grad():
            query_QE, _ = self._model.encode_text(*self._model.text_inputs(texts), with_states=False)
            parts = normalize(query_QE.float().cpu(), dim=1).split(10)  # 40 MB of scores for a million images
            found = [hits for part in parts for hits in self._find_everywhere(part, 1)]
        return float(torch.tensor([hits[0][1] for hits in found]).quantile(_FLOOR))

    def search_image(self, image: Image.Image, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to a picture, best first."""
        return self._search(center_square(open_picture(image), self._medium.image_size), top_k)

    def search_file(self, file: str | bytes, top_k: int = 10) -> list[Hit]:
        """Return what is most similar to a file, by path or bytes: an image, or a WAV; best first.

        Raises:
            UnreadableError: if it cannot be read, or the index holds clips.
        """
        return self._search(read_query(file, self._medium), top_k)

    def similar(self, row: int, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to an image of the index, without itself.

        Raises:
            IndexError: if the index has no such row.
        """
        self._check(row)
        found = self._best(self._vectors.take([row])[0], top_k + 1)
        return self._hits([hit for hit in found if hit[0] != row][:top_k])

    def row_of(self, name: str, row: int) -> int:
        """Return the row of an id, which was `row` when it was last seen; raise IndexError if the index has no such id."""
        if not 0 <= row < len(self) or self._texts[row]["id"] != name:
            row = pyarrow.compute.index(self._texts.data.column("id"), name).as_py()
        if row < 0:
            raise IndexError(f"the {self.info.medium} is no longer in the index. Search again")
        return row

    def some(self, count: int) -> list[dict[str, Any]]:
        """Return row, id, path and captions of images that are spread over the index."""
        rows = range(0, len(self), max(1, len(self) // count))[:count]
        return [{"row": row, **self._texts[row]} for row in rows]

    def large(self, row: int) -> bytes:
        """Return a JPEG of an image of the index, of its file if that is unchanged; raise IndexError without such a row."""
        self._check(row)
        image, stream = self._image(row, _LARGE), io.BytesIO()
        image.thumbnail((_LARGE, _LARGE))
        image.save(stream, "JPEG", quality=88)
        return stream.getvalue()

    def thumbnail(self, row: int) -> bytes:
        """Return the JPEG of an image of the index; raise IndexError if there is no such row."""
        self._check(row)
        return self._rows[row]["thumbnail"]

    def content(self, row: int) -> bytes:
        """Return the file of an index's clip or sound; raise IndexError if there is no such row."""
        self._check(row)
        if self._contents is None:
            raise IndexError("an index of images has thumbnails alone")
        return self._contents[row]["content"]

    def _search(self, example: Tensor, top_k: int) -> list[Hit]:
        with self._lock, torch.no_grad():
            query_1E = self._model.encode_image(self._input([example]), with_keys_values=False)[0]
            return self._hits(self._best(query_1E[0], top_k))

    def _input(self, examples: Sequence[Tensor]) -> Tensor:
        return self._medium.features(torch.stack(list(examples)).to(self._device))

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}; the index has {len(self)} {self.info.medium}s")

    def _best(self, query_E: Tensor, count: int) -> list[tuple[int, float]]:
        """Return rows and cosines of the best images for a query, best first."""
        return self._find(normalize(query_E.float().cpu(), dim=0)[None], count)[0]

    def _head(self, hits: list[tuple[int, float]], states: Tensor, mask: Tensor, ids: Tensor) -> dict[int, float]:
        """Return the scores of images after re-ranking, by row."""
        _, taps = self._model.vision_features(self._input([self._example(row) for row, _ in hits]))
        assert self._model.fusion is not None
        keys_values = self._model.fusion.encode_vision(taps)
        added_K = self._model.head_scores(keys_values, states, mask, ids).tolist()
        scale = self._model.logit_scale.float().exp().item()
        return {row: cosine + added / scale for (row, cosine), added in zip(hits, added_K, strict=True)}

    def _example(self, row: int) -> Tensor:
        """Return what evaluations take of an index's clip, sound or (by `_image`) image."""
        if self._medium.lasts:
            return self._medium.read({"bytes": self.content(row), "path": None})[0]
        return center_square(self._image(row, self._medium.image_size), self._medium.image_size)

    def _image(self, row: int, side: int) -> Image.Image:
        """Return an image of the index, of about `side` pixels or more: its file if it is unchanged, else its thumbnail."""
        known = self._rows[row]
        try:
            status = os.stat(known["path"])
            if (status.st_size, changed_ns(status)) == (known["size"], known["mtime_ns"]):
                return open_image({"bytes": None, "path": known["path"]}, side)
        except (OSError, UnreadableError):
            pass
        try:
            return open_image({"bytes": known["thumbnail"], "path": None}, side)
        except UnreadableError as error:
            raise UnreadableError(
                f"The thumbnail of {known['id']} is damaged. Delete the index, and run scripts/embed.py again."
            ) from error

    def _hits(self, hits: list[tuple[int, float]], reranked: Mapping[int, float] | None = None) -> list[Hit]:
        found = self._texts[[row for row, _ in hits]] if hits else {"id": [], "path": [], "captions": []}
        columns = zip(hits, found["id"], found["path"], found["captions"], strict=True)
        return [
            Hit(row, rank, cosine, (reranked or {}).get(row), name, path, captions)
            for rank, ((row, cosine), name, path, captions) in enumerate(columns, 1)
        ]


def read_query(file: str | bytes, medium: Any) -> Tensor:
    """Return what evaluations take of a searched file, path or bytes: an image, or a WAV.

    Raises:
        UnreadableError: if it cannot be read, or the model is for clips.
    """
    if medium.kind == "clip":
        raise UnreadableError("clips are found by texts and by clips of the index; write what the clip shows")
    value = {"bytes": None, "path": file} if isinstance(file, str) else {"bytes": file, "path": None}
    if medium.kind == "sound":
        from mm_utils.data.faults import Fault
        from mm_utils.data.media.riff import write_wav
        from mm_utils.data.paths import Limits, read_file

        name = file if isinstance(file, str) else "the file"
        try:
            content = read_file(file, Limits()) if isinstance(file, str) else file
            rate = medium.log_mel.rate
            stored = write_wav(read_sound(content, rate, codecs=False), rate)  # strangers' files meet no codec
        except (Fault, UnreadableError) as error:
            raise UnreadableError(f"{name}: {error.detail if isinstance(error, Fault) else error}") from error
        return medium.read({"bytes": stored, "path": None})[0]
    return medium.read(value)[0]
