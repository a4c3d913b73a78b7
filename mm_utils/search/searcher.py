"""Answer queries from an index: by cosine, then re-ranked where the model gains by it.

For a text, the fusion head reorders the first `rerank_top_k` images if `config.rerank_weights` of the model has a weight above 0,
which training sets only where it helped on the validation split. The head reads the image, from its file, or from its thumbnail if the
file has changed, is gone, or was never there; a clip or a sound from the index. Near copies of a hit are folded into it.

Shape letters: N images of the index, E embedding width, K images of an answer, or those that are re-ranked.
"""

import copy
import datetime
import io
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.data.faults import Fault
from mm_utils.data.images import open_image
from mm_utils.data.media.medium import read_by
from mm_utils.data.paths import read_file
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, groups, near_pairs
from mm_utils.files import changed_ns
from mm_utils.model.build import load_model
from mm_utils.model.processor import load_processor_of
from mm_utils.model.reading import MOST_BYTES, UnreadableError, center_square, open_picture
from mm_utils.search.first_pass import Hits, StoredVectors, best, open_faiss
from mm_utils.search.index import check_same_model, open_index
from mm_utils.search.listing import stock_file

_LARGE = 1600  # pixels of the longer side of an image that is looked at


@dataclass(frozen=True)
class Hit:
    """An image that was found.

    Attributes:
        row, id, path, captions: as the index has them.
        rank: its place in the answer, from 1.
        score: cosine of the query and the image.
        reranked: cosine + what the fusion head adds, divided by the logit scale; None if the head has not seen it.
        copies: ids of images of lower rank that show the same picture.
    """

    row: int
    rank: int
    score: float
    reranked: float | None
    id: str
    path: str
    captions: list[str]
    copies: list[str]


@dataclass(frozen=True)
class Filter:
    """Which rows of an index are searched.

    Attributes:
        folder: those whose id lies below it, such as `2024/italy`; an id is the path in the folder that was embedded.
        since, until: those whose file was last changed from then to then, both included, in local time: a day
            (2024-05-31), a month (2024-05) or a year. A row without a file has no date.
    """

    folder: str = ""
    since: str = ""
    until: str = ""

    def __str__(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in vars(self).items() if value)

    def mask(self, rows: datasets.Dataset) -> np.ndarray:
        """Return which rows fit, bool `[N]`; raise ValueError for a date of another form."""
        fits = pc.starts_with(rows.data.column("id"), f"{self.folder.strip('/')}/".lstrip("/"))
        if self.since or self.until:
            first = _span("since", self.since or "1970")[0]
            last = _span("until", self.until or "2200")[1]
            changed = rows.data.column("mtime_ns")
            fits = pc.and_(fits, pc.and_(pc.greater_equal(changed, max(1, first)), pc.less(changed, last)))
        return fits.to_numpy()


def _span(name: str, text: str) -> tuple[int, int]:
    """Return when a day, month or year begins and ends, in nanoseconds."""
    try:
        begin = datetime.datetime.strptime(f"{text}-01-01"[: max(10, len(text))], "%Y-%m-%d")
        end = begin + datetime.timedelta(days={4: 366, 7: 31}.get(len(text), 1))
        end = end.replace(day=end.day if len(text) == 10 else 1, month=1 if len(text) == 4 else end.month)
        # 64 bits hold the year 2242
        first, last = (min(max(0, int(each.timestamp())), 2**33) * 10**9 for each in (begin, end))
        return first, last
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"--{name} is {text}; {error}. Give a day such as 2024-05-31, a month or a year.") from error


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
        RunError: if the model has changed since the index was made, or FAISS is needed and missing.
    """

    def __init__(
        self,
        index_dir: str | Path,
        model: str | None = None,
        rerank_top_k: int = 10,
        device: str | None = None,
        index_factory: str | None = None,
    ):
        folder = Path(index_dir)
        self.info, self._rows = open_index(folder)
        self._texts = self._rows.select_columns(["id", "path", "captions"])
        self._lock, self._vectors = threading.Lock(), StoredVectors(self._rows)
        self._first_pass: Callable[[Tensor, int], Hits] | None = None
        if index_factory is not None:
            self._first_pass = open_faiss(index_factory, folder, self.info.rows, self._vectors)
        self._mask_N = np.ones(len(self._rows), dtype=bool)
        name = model or self.info.model
        processor: Any = load_processor_of(name)
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._medium: Any = read_by(processor)
        self._model = load_model(name, fusion_layers=0).eval()
        self._model.processor = processor
        check_same_model(self.info, self._model, self._medium, name, folder)
        self._model.to(self._device)
        weights = self._model.config.rerank_weights or {}
        helps = self._model.fusion is not None and any(weights.values())
        self.rerank_top_k = rerank_top_k if helps else 0

    def __len__(self) -> int:
        return len(self._rows)

    def within(self, part: Filter) -> "Searcher":
        """Return a searcher that finds the rows of a filter alone, `searched` of them, exactly; rows keep their numbers."""
        new = copy.copy(self)
        new._mask_N = part.mask(self._rows)
        new._first_pass = None if str(part) else self._first_pass
        return new

    @property
    def searched(self) -> int:
        """Images that the filter lets through."""
        return int(self._mask_N.sum())

    @property
    def reranks(self) -> bool:
        """Whether answers to texts are re-ranked by the fusion head."""
        return self.rerank_top_k > 0

    def search_text(self, text: str, top_k: int = 10, rerank: bool = True) -> list[Hit]:
        """Return the images that a text describes best; without `rerank`, by the towers alone."""
        with self._lock, torch.no_grad():
            ids, mask = self._model.text_inputs([text])
            query_1E, states = self._model.encode_text(ids, mask)
            hits, copies = self._best(query_1E[0], max(top_k, self.rerank_top_k))
            head = self._head(hits[: self.rerank_top_k], states, mask, ids) if rerank and self.reranks and hits else {}
        hits = sorted(hits[: len(head)], key=lambda hit: -head[hit[0]]) + hits[len(head) :]
        return self._hits(hits[:top_k], copies, head)

    def search_image(self, image: Image.Image, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to a picture, best first."""
        return self._search(center_square(open_picture(image), self._medium.image_size), top_k)

    def search_file(self, file: str | bytes, top_k: int = 10) -> list[Hit]:
        """Return what is most similar to a file, by path or bytes: an image, or a WAV; UnreadableError if it cannot be read."""
        return self._search(read_query(file, self._medium), top_k)

    def similar(self, row: int, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to an image of the index, without itself; IndexError without such a row."""
        self._check(row)
        return self._hits(*self._best(self._vectors.take([row])[0], top_k, row))

    def copies(self) -> list[list[dict[str, Any]]]:
        """Return groups of images that show the same picture: row, id and path."""
        rows, found = np.flatnonzero(self._mask_N), dict[int, list[dict[str, Any]]]()
        for at, group in enumerate(groups(len(rows), near_pairs(self._prints(rows.tolist())))):
            found.setdefault(group, []).append({"row": int(rows[at]), **self._texts[int(rows[at])]})
        return [group for group in found.values() if len(group) > 1]

    def row_of(self, name: str, row: int) -> int:
        """Return the row of an id, which was `row` when it was last seen; raise IndexError if the index has no such id."""
        if not 0 <= row < len(self) or self._texts[row]["id"] != name:
            row = pc.index(self._texts.data.column("id"), name).as_py()
        if row < 0:
            raise IndexError(f"the {self.info.medium} is no longer in the index. Search again")
        return row

    def some(self, count: int) -> list[dict[str, Any]]:
        """Return row, id, path and captions of images that are spread over the index."""
        rows = range(0, len(self), max(1, len(self) // count))[:count]
        return [{"row": row, **self._texts[row]} for row in rows]

    def large(self, row: int) -> bytes:
        """Return a JPEG of an image of the index, of its file if that is unchanged; raise IndexError without such a row."""
        image, stream = self._image(row, _LARGE), io.BytesIO()
        image.thumbnail((_LARGE, _LARGE))
        image.save(stream, "JPEG", quality=88)
        return stream.getvalue()

    def stored(self, row: int, column: str) -> bytes:
        """Return the `thumbnail` or the `content` of a row; raise IndexError if there is none."""
        self._check(row)
        if column not in self._rows.column_names:
            raise IndexError(f"an index of {self.info.medium}s has no {column}")
        return self._rows.select_columns([column])[row][column]

    def _check(self, row: int) -> None:
        if not 0 <= row < len(self):
            raise IndexError(f"there is no row {row}; the index has {len(self)} {self.info.medium}s")

    def _search(self, example: Tensor, top_k: int) -> list[Hit]:
        with self._lock, torch.no_grad():
            query_1E = self._model.encode_image(self._input([example]), with_keys_values=False)[0]
            return self._hits(*self._best(query_1E[0], top_k))

    def _input(self, examples: Sequence[Tensor]) -> Tensor:
        return self._medium.features(torch.stack(list(examples)).to(self._device))

    def _best(self, query_E: Tensor, count: int, without: int = -1) -> tuple[Hits, dict[int, list[int]]]:
        """Return the best images for a query, best first, without a row; and the rows of their copies by row."""
        query_E, wide = normalize(query_E.float().cpu(), dim=0), 2 * count + 1
        while True:
            if self._first_pass is not None:
                found = self._first_pass(query_E, wide)
            else:
                rows = np.flatnonzero(self._mask_N)
                found = best(rows, self._vectors.cosines(query_E)[rows], wide)
            hits = [hit for hit in found if hit[0] != without]
            pairs = near_pairs(self._prints([row for row, _ in hits])) if hits else np.empty((0, 2), int)
            # A copy goes to the first hit that it is near to; so longer answers begin as shorter ones do.
            copy_of: dict[int, int] = {}
            for first, second in pairs.tolist():
                if first not in copy_of:
                    copy_of.setdefault(second, first)
            folded = [hit for at, hit in enumerate(hits) if at not in copy_of]
            if len(folded) >= count or len(found) < wide:
                copies: dict[int, list[int]] = {}
                for second, first in copy_of.items():
                    copies.setdefault(hits[first][0], []).append(hits[second][0])
                return folded[:count], copies
            wide *= 2

    def _prints(self, rows: list[int]) -> np.ndarray:
        prints = self._rows.select_columns(["print"])[rows]["print"]
        return np.frombuffer(b"".join(prints), FINGERPRINT)

    def _head(self, hits: Hits, states: Tensor, mask: Tensor, ids: Tensor) -> dict[int, float]:
        """Return the scores of images after re-ranking, by row."""
        _, taps = self._model.vision_features(self._input([self._example(row) for row, _ in hits]))
        assert self._model.fusion is not None
        keys_values = self._model.fusion.encode_vision(taps)
        added_K = self._model.head_scores(keys_values, states, mask, ids).tolist()
        scale = self._model.logit_scale.float().exp().item()
        return {row: cosine + added / scale for (row, cosine), added in zip(hits, added_K, strict=True)}

    def _example(self, row: int) -> Tensor:
        """Return what evaluations take of an index's clip, sound or image."""
        if self._medium.lasts:
            return self._medium.read({"bytes": self.stored(row, "content"), "path": None})[0]
        return center_square(self._image(row, self._medium.image_size), self._medium.image_size)

    def _image(self, row: int, side: int) -> Image.Image:
        """Return an image of the index, of about `side` pixels or more: its file if it is unchanged, else its thumbnail."""
        self._check(row)
        known = self._rows.select_columns(["id", "path", "mtime_ns", "stamp", "thumbnail"])[row]
        try:
            status = os.stat(known["path"])
            if (str(status.st_size), changed_ns(status)) == (known["stamp"], known["mtime_ns"]):
                return open_image({"bytes": None, "path": known["path"]}, side)
        except (OSError, UnreadableError):
            pass
        try:
            return open_image({"bytes": known["thumbnail"], "path": None}, side)
        except UnreadableError as error:
            raise UnreadableError(
                f"The thumbnail of {known['id']} is damaged. Delete the index, and run scripts/embed.py again."
            ) from error

    def _hits(self, hits: Hits, copies: dict[int, list[int]], head: dict[int, float] | None = None) -> list[Hit]:
        head, found = head or {}, []
        for rank, (row, score) in enumerate(hits, 1):
            names = [self._texts[each]["id"] for each in copies.get(row, ())]
            found.append(Hit(row, rank, score, head.get(row), **self._texts[row], copies=names))
        return found


def read_query(file: str | bytes, medium: Any) -> Tensor:
    """Return what evaluations take of a searched file, path or bytes: an image, or a WAV; UnreadableError if it cannot be read."""
    if medium.kind == "clip":
        raise UnreadableError("clips are found by texts and by clips of the index; write what the clip shows")
    if medium.kind == "image":
        return medium.read({"bytes": None, "path": file} if isinstance(file, str) else {"bytes": file, "path": None})[
            0
        ]
    try:
        content = read_file(file, MOST_BYTES) if isinstance(file, str) else file
        stored = stock_file(content, medium, codecs=False)  # strangers' files meet no codec
    except (Fault, UnreadableError) as error:
        name = file if isinstance(file, str) else "the file"
        raise UnreadableError(f"{name}: {error.detail if isinstance(error, Fault) else error}") from error
    return medium.read({"bytes": stored, "path": None})[0]
