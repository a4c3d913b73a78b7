"""Answer queries from an index: by cosine, for a text also by the captions, then re-ranked where the model gains by it.

For a text, the fusion head reorders the first `rerank_top_k` images if `config.rerank_weights` of the model has a weight above 0,
which training sets only where it helped on the validation split. The head reads the image, from its file, or from its thumbnail if the
file has changed, is gone, or was never there; a clip or a sound from the index. Near copies of a hit are folded into it.

Shape letters: N images of the index, n that are scored, E embedding width.
"""

import copy
import datetime
import logging
import os
import random
import re
import string
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.data.batches.tokens import unread
from mm_utils.data.faults import Fault
from mm_utils.data.images import open_image
from mm_utils.data.media.medium import read_by
from mm_utils.data.media.pictures import moving_picture
from mm_utils.data.paths import read_file
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, groups, near_pairs
from mm_utils.files import changed_ns
from mm_utils.model.build import open_model
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.reading import MOST_BYTES, UnreadableError, center_square, open_picture
from mm_utils.search.index import check_same_model, fingerprints, open_index
from mm_utils.search.listing import jpeg, stock_file
from mm_utils.text import printable

logger = logging.getLogger(__name__)

_LARGE = 1600  # pixels of the longer side of an image that is looked at
_FEW = 30  # images with captions, or without; mean and deviation of fewer say little
_HANDICAP = 0.15  # of images with captions among others, in standard deviations; see `fused`
LEAST_LEVEL = 1000  # images from which `Searcher.level` is kept and said; fewer are looked through, and the line errs where a model knows little
# '-people' in 'a beach -people', but neither 'state-of-the-art' nor '-5'
_OFF = re.compile(r"(?:^|\s)-(?=[^\W\d_])(\S+)")  # a word that is taken off
_OFF_WEIGHT = 0.5  # of 343 pairs of words in Flickr8k, 0.25 keeps more of what is taken off, and 1 loses more of what is asked for
_SAME = 0.999  # cosine of an image with itself, embedded and rounded elsewhere
_KEPT = 1 << 28  # numbers of an index, up to which they are held in fp32, in 1 GiB


@dataclass(frozen=True)
class Hit:
    """An image that was found.

    Attributes:
        row, id, split, path, day, captions: as the index has them.
        rank: its place in the answer, from 1.
        score: what orders the hits: the cosine of the query with the image or, for a text, with the image and its captions (`fused`);
            1 more for an image whose id or captions have the text, if that is a code.
        cosine: that of the query and the image alone.
        fits: for a text, whether the score is above what texts without meaning reach; None where that is not known.
        reranked: score with what the fusion head adds, by which the first hits are ordered; None if the head has not seen it.
        copies: ids of images of lower rank that show the same picture.
    """

    row: int
    rank: int
    score: float
    cosine: float
    fits: bool | None
    reranked: float | None
    id: str
    split: str
    path: str
    day: str
    captions: list[str]
    copies: list[str]


class Searcher:
    """Search an index with the model that made it.

    Queries of several threads take turns.

    Args:
        index_dir: the folder that scripts/embed.py wrote.
        model: the folder or Hub id of the model, if it has moved since; or the model itself.
        rerank_top_k: images of an answer that the fusion head reorders; 0 turns it off.
        device: where the model runs; default: a GPU if there is one.
        read_captions: whether for texts the embeddings of the captions count beside those of the images.

    Raises:
        ValueError: if there is no index or no model.
        RunError: if the model has changed since the index was made.
    """

    def __init__(
        self,
        index_dir: str | Path,
        model: str | FusionDualEncoderModel | None = None,
        rerank_top_k: int = 10,
        device: str | None = None,
        read_captions: bool = True,
    ):
        folder = Path(index_dir)
        self.info, self._rows = open_index(folder)
        self._texts = self._rows.select_columns(["id", "split", "path", "day", "captions"])
        self._lock = threading.Lock()
        self._mask_N = np.ones(len(self._rows), dtype=bool)
        self.undated = 0  # images without a day, which a filter of days leaves out
        self._embeddings = self._vectors("embedding")
        self._has_captions_N = torch.tensor(self._rows.data.column("caption_embedding").is_valid().to_numpy())
        self._reads_captions = read_captions and bool(self._has_captions_N.any())
        name = model if isinstance(model, str) else self.info.model
        self._model = model if isinstance(model, FusionDualEncoderModel) else open_model(name)[0]
        processor = self._model.processor
        self._device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
        self._medium: Any = read_by(processor)
        self._tokenizer = processor.tokenizer
        fingerprint, texts = fingerprints(self._model, self._medium)
        check_same_model(self.info, fingerprint, name, folder)
        is_said = self.info.texts == texts and read_captions and len(self._rows) >= LEAST_LEVEL
        self._level = self.info.level if is_said else None
        if self._reads_captions and self.info.texts != texts:
            self._reads_captions = False
            logger.warning(
                "The captions in %s were embedded with another text side, and are not read. Run scripts/embed.py with this model.",
                folder,
            )
        if self._reads_captions:
            self._caption_embeddings = self._vectors("caption_embedding")
            self._agree_N = self._agreement()
        self._model.to(self._device)  # type: ignore[arg-type]
        weights = self._model.config.rerank_weights or {}
        helps = self._model.fusion is not None and any(weights.values())
        self.rerank_top_k = rerank_top_k if helps else 0

    def __len__(self) -> int:
        return len(self._rows)

    def within(self, folder: str = "", since: str = "", until: str = "") -> "Searcher":
        """Return a searcher that finds some rows alone, `searched` of them; rows keep their numbers.

        Args:
            folder: those whose id lies below it, such as `2024/italy`; an id is the path in the folder that was embedded.
            since, until: those of the days from then to then, both included: a day (2024-05-31), a month (2024-05) or a year.
                Those without a day are left out, `undated` of them.

        Raises:
            ValueError: for a folder that there is not, a date of another form, or days of an index without any.
        """
        ids = self._rows.data.column("id")
        # "" for no folder, which all ids begin with
        fits = pc.starts_with(ids, f"{folder.strip('/')}/".lstrip("/")).to_numpy()
        if not fits.any():
            folders = sorted({name.rpartition("/")[0] for name in ids.to_pylist()} - {""})
            shown = f"folders such as {', '.join(map(printable, folders[:5]))}" if folders else "no folders"
            raise ValueError(f"--folder is {folder}; the index has {shown}. Give one that it has, or none.")
        for name, text in (("since", since), ("until", until)):
            try:
                # '2024-05' -> '2024-05-01-01' -> '2024-05-01', and '2024' -> '2024-01-01'
                datetime.date.fromisoformat(f"{text or '2024'}-01-01"[: max(10, len(text))])
            except ValueError as error:
                raise ValueError(
                    f"--{name} is {text}; {error}. Give a day such as 2024-05-31, a month or a year."
                ) from error
        new = copy.copy(self)
        if since or until:
            days = self._rows.data.column("day")
            until = until or "9999"
            has_day = pc.not_equal(days, "").to_numpy()
            if not has_day.any():
                raise ValueError(
                    f"--since and --until ask for days; no {self.info.medium} of the index has one. A camera writes it into a "
                    "photograph's EXIF, which --images reads and prepared sets do not keep. Leave both out."
                )
            new.undated = int((fits & ~has_day).sum())
            # ISO dates compare as texts: '2024-05-01' >= '2024-05', and '2024-05-31'[:7] <= '2024-05'
            fits &= has_day & pc.greater_equal(days, since).to_numpy()
            fits &= pc.less_equal(pc.utf8_slice_codeunits(days, 0, len(until)), until).to_numpy()
        new._mask_N = fits
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
        """Return the images that a text describes best; without `rerank`, by towers and captions alone.

        Words with a hyphen before them are taken off: half of their embedding is subtracted, and the head reorders nothing.

        Raises:
            ValueError: if it is blank, or has such words alone.
        """
        text = text if isinstance(text, str) else ""
        off = " ".join(_OFF.findall(text))
        text = " ".join(_OFF.sub(" ", text).split())
        if not text:
            problem = f"only says what to leave out, {off}" if off else "is blank"
            raise ValueError(f"The text {problem}; nothing can be searched for by it. Write what the image shows.")
        with self._lock, torch.no_grad():
            for said in unread(self._tokenizer, [text], self._model.most_tokens(self._tokenizer), "The text"):
                logger.warning("%s", said)
            ids, mask = self._model.text_inputs([text])
            query_1E, states = self._model.encode_text(ids, mask)
            if off:
                off_1E, _ = self._model.encode_text(*self._model.text_inputs([off]))
                query_1E = normalize(query_1E) - _OFF_WEIGHT * normalize(off_1E)
            scored = self._score(query_1E[0], self._reads_captions)
            scored = scored._replace(by_n=scored.by_n + self._with_code(text)[scored.rows])
            places, copies = self._folded(scored, max(top_k, self.rerank_top_k))
            first = places[: self.rerank_top_k] if rerank and self.reranks and not off else []
            added = dict(zip(first, self._head(scored.rows[first], states, mask, ids) if first else [], strict=True))
        first.sort(key=lambda at: -(scored.by_n[at] + scored.slope_n[at] * added[at]).item())
        level = None if off else self._level
        return self._hits(scored, [*first, *places[len(first) :]][:top_k], copies, added, level)

    @torch.no_grad()
    def level(self) -> float:
        """Return a score that the best hits of 99 of 100 texts do not reach, each three words of random letters, the same ones every time."""
        draw = random.Random(0)
        words = ["".join(draw.choices(string.ascii_lowercase, k=5)) for _ in range(300)]
        texts = [" ".join(words[at : at + 3]) for at in range(0, len(words), 3)]
        queries_tE, _ = self._model.encode_text(*self._model.text_inputs(texts))
        best = [self._score(query_E, self._reads_captions).by_n.max() for query_E in queries_tE]
        return torch.stack(best).quantile(0.99).item()

    def search_image(self, image: Image.Image, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to a picture, best first."""
        example = center_square(open_picture(image), self._medium.image_size)
        with self._lock, torch.no_grad():
            scored = self._score(self._embedded(example))
            return self._hits(scored, *self._folded(scored, top_k))

    def search_file(self, file: str | bytes, top_k: int = 10) -> list[Hit]:
        """Return what is most similar to a file, without itself; see `look_up`."""
        return self.look_up(file, top_k)[1]

    def look_up(self, file: str | bytes, top_k: int = 10) -> tuple[list[Hit], list[Hit]]:
        """Return the hit that is a file itself, if it is in the index, and what is most similar to it without that.

        The file is an image or a sound, by its path, or the bytes of an image or a WAV. It is in the index if its path is, or its embedding up to rounding.

        Raises:
            UnreadableError: if it cannot be read.
        """
        example = read_query(file, self._medium)
        # -1 where no row has the path
        own = pc.index(self._rows.data.column("path"), os.path.abspath(file)).as_py() if isinstance(file, str) else -1
        with self._lock, torch.no_grad():
            scored = self._score(self._embedded(example))
            same = np.flatnonzero(scored.rows == own).tolist()
            same = same or [at for at in best(scored.cosine_n, 1) if scored.cosine_n[at] > _SAME]
            without = int(scored.rows[same[0]]) if same else -1
            return self._hits(scored, same, {}), self._hits(scored, *self._folded(scored, top_k, without))

    def similar(self, row: int, top_k: int = 10) -> list[Hit]:
        """Return the images that are most similar to an image of the index, without itself; IndexError without such a row."""
        scored = self._score(torch.tensor(self.stored(row, "embedding")))
        return self._hits(scored, *self._folded(scored, top_k, row))

    def browse(self, count: int) -> list[Hit]:
        """Return images at equal distances over the index, for a page that has no query yet."""
        count = min(count, len(self))
        rows = (place * len(self) // count for place in range(count))
        return [
            Hit(row, rank, 0.0, 0.0, None, None, **self._texts[row], copies=[]) for rank, row in enumerate(rows, 1)
        ]

    def copies(self) -> list[list[dict[str, Any]]]:
        """Return groups of images that show the same picture: row, id and path."""
        rows = np.flatnonzero(self._mask_N)
        found = dict[int, list[dict[str, Any]]]()
        for at, group in enumerate(groups(len(rows), near_pairs(self._prints(rows.tolist())))):
            found.setdefault(group, []).append({"row": int(rows[at]), **self._texts[int(rows[at])]})
        return [group for group in found.values() if len(group) > 1]

    def large(self, row: int) -> bytes:
        """Return a JPEG of an image of the index, of its file if that is unchanged, or a clip as a moving WebP; raise IndexError without such a row."""
        if self.info.medium == "clip":
            return moving_picture(self.stored(row, "content"))
        image = self._image(row, _LARGE)
        image.thumbnail((_LARGE, _LARGE))
        return jpeg(image)

    def stored(self, row: int, column: str) -> Any:
        """Return a column of a row, such as its `thumbnail` or `content`; raise IndexError if there is none."""
        if not 0 <= row < len(self) or column not in self._rows.column_names:
            raise IndexError(f"there is no {column} of row {row}; the index has {len(self)} {self.info.medium}s")
        return self._rows.data.column(column)[row].as_py()

    def _embedded(self, example: Tensor) -> Tensor:
        return self._model.encode_image(self._input([example]), with_keys_values=False)[0][0]

    def _input(self, examples: Sequence[Tensor]) -> Tensor:
        return self._medium.features(torch.stack(list(examples)).to(self._device))

    def _vectors(self, name: str) -> list[Tensor]:
        """Return a column of embeddings, without nulls; of a large index, where it has none, this is the memory-mapped file."""
        with warnings.catch_warnings():  # torch would rather write to it
            warnings.simplefilter("ignore")
            chunks = [chunk.flatten().to_numpy(zero_copy_only=True) for chunk in self._rows.data.column(name).chunks]
            blocks = [torch.from_numpy(chunk.reshape(-1, self.info.width)) for chunk in chunks]
        is_small = len(self) * self.info.width <= _KEPT
        return [block.float() for block in blocks] if is_small else blocks

    def _agreement(self) -> Tensor:
        """Return the cosine of each image with its captions, 0 without any."""
        masks = self._has_captions_N.split(list(map(len, self._embeddings)))
        blocks = zip(self._embeddings, masks, self._caption_embeddings, strict=True)
        agree = [(images[has].float() * captions.float()).sum(1) for images, has, captions in blocks]
        return torch.zeros(len(self)).masked_scatter(self._has_captions_N, torch.cat(agree))

    def _cosines(self, blocks: list[Tensor], query_E: Tensor) -> Tensor:
        """Return the products of stored unit vectors and a query; a block of the file stays in a core's cache."""
        query_E = normalize(query_E.float().cpu(), dim=0)
        return torch.cat([block.float() @ query_E for block in blocks])

    def _score(self, query_E: Tensor, reads_captions: bool = False) -> "_Scored":
        """Return the scores of all rows that the filter lets through."""
        cosine_N = self._cosines(self._embeddings, query_E)
        by_N = cosine_N
        slope_N = torch.ones(len(self))
        if reads_captions:
            captions_N = torch.full((len(self),), -torch.inf)
            captions_N[self._has_captions_N] = self._cosines(self._caption_embeddings, query_E)
            by_N, slope_N = fused(cosine_N, captions_N, self._agree_N)
        rows = np.flatnonzero(self._mask_N)
        return _Scored(rows, cosine_N[rows], by_N[rows], slope_N[rows])

    def _with_code(self, text: str) -> Tensor:
        """Return 1 for rows whose id or captions have the text as a word, if it is one word with a digit, such as SKU-10001; else 0."""
        has_N = np.zeros(len(self), np.float32)
        if not any(map(str.isdigit, text)) or " " in text:
            return torch.from_numpy(has_N)
        pattern = rf"(?i)(^|\W){re.escape(text)}($|\W)"
        has_N[pc.match_substring_regex(self._rows.data.column("id"), pattern).to_numpy()] = 1
        captions = self._rows.data.column("captions").combine_chunks()
        found = pc.match_substring_regex(pc.list_flatten(captions), pattern)
        has_N[pc.list_parent_indices(captions).filter(found).to_numpy()] = 1
        return torch.from_numpy(has_N)

    def _folded(self, scored: "_Scored", count: int, without: int = -1) -> tuple[list[int], dict[int, list[int]]]:
        """Return the places of the best images, best first, without a row; and the rows of their copies by place."""
        wide = 2 * count + 1  # as many copies as hits, and the row itself
        while True:
            found = best(scored.by_n, wide)
            places = [at for at in found if scored.rows[at] != without]
            pairs = near_pairs(self._prints(scored.rows[places].tolist())) if places else np.empty((0, 2), int)
            # Copies of copies are one picture, as in `copies()`.
            group_of = groups(len(places), pairs).tolist()
            folded = [place for at, place in enumerate(places) if group_of[at] == at]
            # enough, or no row is left to look at
            if len(folded) >= count or len(found) < wide:
                copies: dict[int, list[int]] = {}
                for place, first in zip(places, group_of, strict=True):
                    if place != places[first]:
                        copies.setdefault(places[first], []).append(int(scored.rows[place]))
                return folded[:count], copies
            wide *= 2

    def _prints(self, rows: list[int]) -> np.ndarray:
        column = self._rows.data.column("print")
        return np.frombuffer(b"".join(column[row].as_py() for row in rows), FINGERPRINT)

    def _head(self, rows: np.ndarray, states: Tensor, mask: Tensor, ids: Tensor) -> list[float]:
        """Return what the fusion head adds to the cosines of images."""
        _, taps = self._model.vision_features(self._input([self._example(row) for row in rows.tolist()]))
        assert self._model.fusion is not None
        added = self._model.head_scores(self._model.fusion.encode_vision(taps), states, mask, ids)
        return (added / self._model.logit_scale.float().exp()).tolist()

    def _example(self, row: int) -> Tensor:
        """Return what evaluations take of an index's clip, sound or image."""
        if self._medium.lasts:
            return self._medium.read({"bytes": self.stored(row, "content"), "path": None})[0]
        return center_square(self._image(row, self._medium.image_size), self._medium.image_size)

    def _image(self, row: int, side: int) -> Image.Image:
        """Return an image of the index, of about `side` pixels or more: its file if it is unchanged, else its thumbnail."""
        path = self.stored(row, "path")
        thumbnail = self.stored(row, "thumbnail")
        try:
            status = os.stat(path)
            if (str(status.st_size), changed_ns(status)) == (self.stored(row, "stamp"), self.stored(row, "mtime_ns")):
                return open_image({"bytes": None, "path": path}, side)
        except (OSError, UnreadableError):
            pass
        try:
            return open_image({"bytes": thumbnail, "path": None}, side)
        except UnreadableError as error:
            raise UnreadableError(
                f"The thumbnail of {self.stored(row, 'id')} is damaged. Delete the index, and run scripts/embed.py again."
            ) from error

    def _hits(
        self,
        scored: "_Scored",
        places: list[int],
        copies: dict[int, list[int]],
        added: dict[int, float] | None = None,
        level: float | None = None,
    ) -> list[Hit]:
        found = []
        added = added or {}
        for rank, at in enumerate(places, 1):
            row = int(scored.rows[at])
            score = scored.by_n[at].item()
            cosine = scored.cosine_n[at].item()
            names = [self._texts[each]["id"] for each in copies.get(at, ())]
            reranked = score + scored.slope_n[at].item() * added[at] if at in added else None
            fits = None if level is None else score > level
            found.append(Hit(row, rank, score, cosine, fits, reranked, **self._texts[row], copies=names))
        return found


class _Scored(NamedTuple):
    """Rows of the index and their scores `[n]`."""

    rows: np.ndarray
    cosine_n: Tensor
    by_n: Tensor  # by which they are ordered
    slope_n: Tensor  # of `by_n` over `cosine_n`


def fused(cosine_n: Tensor, captions_n: Tensor, agree_n: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scores of images for a text, and how much of them a unit of their cosine is.

    Of an image with captions this is the cosine of the text with image + 2 x captions, both unit vectors. Where there are images without,
    the scores of those with captions are brought to the mean and the deviation of these, less `_HANDICAP` deviations: else they stand in
    front of all others. `benchmarks.captions` has the figures.

    Args:
        cosine_n, captions_n: cosines of the text with images and with their captions, -inf without.
        agree_n: cosines of images with their captions.
    """
    has_n = captions_n > -torch.inf
    slope_n = torch.where(has_n, (5 + 4 * agree_n).rsqrt(), 1.0)  # |i + 2 c|^2 = 1 + 4 i.c + 4
    score_n = torch.where(has_n, (cosine_n + 2 * captions_n) * slope_n, cosine_n)
    own_n = score_n[has_n]
    other_n = score_n[~has_n]
    if min(len(own_n), len(other_n)) >= _FEW:
        deviation = other_n.std(correction=0)
        ratio = deviation / own_n.std(correction=0).clamp(min=1e-6)
        score_n[has_n] = other_n.mean() - _HANDICAP * deviation + (own_n - own_n.mean()) * ratio
        slope_n[has_n] *= ratio
    return score_n, slope_n


def best(by_n: Tensor, count: int) -> list[int]:
    """Return the places of the highest scores, best first; of equal ones, the first comes first."""
    kept = torch.arange(len(by_n))
    if 0 < count < len(by_n):
        # `topk` takes any of the equal scores at its end
        kept = (by_n >= by_n.topk(count).values[-1]).nonzero().flatten()
    return kept[by_n[kept].sort(descending=True, stable=True).indices[:count]].tolist()


def read_query(file: str | bytes, medium: Any) -> Tensor:
    """Return what evaluations take of a searched image or sound, a path, or bytes that may be of an image or a WAV; UnreadableError if it cannot be read."""
    if medium.kind == "clip":
        raise UnreadableError("clips are found by texts and by clips of the index; write what the clip shows")
    if medium.kind == "image":
        path, content = (file, None) if isinstance(file, str) else (None, file)
        return medium.read({"bytes": content, "path": path})[0]
    try:
        content = read_file(file, MOST_BYTES) if isinstance(file, str) else file
        stored = stock_file(content, medium, codecs=isinstance(file, str))  # strangers' files meet no codec
    except (Fault, UnreadableError) as error:
        name = file if isinstance(file, str) else "the file"
        raise UnreadableError(f"{name}: {error.detail if isinstance(error, Fault) else error}") from error
    return medium.read({"bytes": stored, "path": None})[0]
