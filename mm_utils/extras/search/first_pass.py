"""Find a query's best images: exactly, or those of a coarse first pass exactly.

A first pass reads codes of the embeddings that are kept in memory (`mm_utils.extras.measured.embedding_codes`), or a FAISS index. It returns
many times as many images as are wanted (`RESCORE`). These are scored from the stored embeddings, which are memory-mapped, so scores
are always those of exact search; only an image that the first pass has missed is missing.

A FAISS index lies beside the rows that it was made of, and its name has their fingerprint: after an update another file is
looked for, and made.

Queries are answered together: the embeddings are read once for all of them, in blocks that stay in a core's cache.

Shape letters: N images of the index, Q queries, E embedding width.
"""

import hashlib
import logging
import math
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.data.batches.column_cache import fingerprint_of
from mm_utils.distributed import RunError
from mm_utils.extras.measured.embedding_codes import hamming, quantize_int8, to_bits
from mm_utils.extras.search.index import FAISS
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

BLOCK = 1 << 20  # numbers of a product that are turned into fp32 at a time; 4 MB stay in a core's cache
RESCORE = {"int8": 10, "binary": 100, "faiss": 50}  # candidates of a first pass for each image that is wanted
MOST_RESCORED = 10_000  # candidates beyond the images that are wanted
AUTO = "auto"
FEW = 300_000  # images, below which exact search takes less time than embedding the query
TEXT_NOISE = 1.4  # length of a text's own part beside the part that it shares with its image: cosine 0.58
LISTS_READ = 16  # one of n lists of an inverted file is read, if the factory string does not say nprobe
_TRAINING = 64  # images for each list of an inverted file that FAISS is trained on, and at least
_LEAST_TRAINING = 65_536  # of these, as many as a product quantiser takes
_SCORES = 1 << 23  # that are kept at a time
_FIRST = 16  # scores for each wanted image that say what is low; the best of 8 million take 130 ms
_TIMED = 8  # queries of which the fastest counts
_TUNED = 64  # queries that measure a recall
_RECALL = re.compile(r"recall=(\d*\.?\d+)")
_VALUES = re.compile(r"=\s*(-?\d+\.?\d*)")  # of the settings behind a factory string
Block = tuple[Tensor, Tensor | None]
"""Rows `[n, E]` of any type, and what the numbers of a query are multiplied with, `[E]`."""
Hits = list[tuple[int, float]]
"""Rows and cosines, best first."""
Find = Callable[[Tensor, int], list[Hits]]
"""Maps unit queries, fp32 `[Q, E]`, and a number to that many images for each."""
FirstPass = Callable[[Tensor, int], Iterable[np.ndarray]]
"""Maps unit queries, fp32 `[Q, E]`, and a number to the rows of about that many images for each, in any order."""


class StoredVectors:
    """Rows of an index's column, float16 `[N, E]`, read from the memory-mapped files."""

    def __init__(self, rows: datasets.Dataset, column: str = "embedding"):
        chunks = [chunk for chunk in rows.data.column(column).chunks if len(chunk)]
        self.blocks = [chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1) for chunk in chunks]
        self._ends = np.cumsum([len(block) for block in self.blocks])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.blocks[0].shape[1]

    def head(self, count: int) -> list[Block]:
        """Return the first `count` rows or a few more, copied."""
        stop = int(np.searchsorted(self._ends, count)) + 1
        return [(torch.from_numpy(block.copy()), None) for block in self.blocks[:stop]]

    def take(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return rows, at least one, float16 `[n, E]`."""
        block = np.searchsorted(self._ends, rows, side="right")
        place = np.asarray(rows) - self._ends[block]  # from the end of the block
        found = [self.blocks[one][at] for one, at in zip(block.tolist(), place.tolist(), strict=True)]
        return torch.from_numpy(np.stack(found))


def open_find(kind: str | None, folder: Path, rows: datasets.Dataset) -> Find:
    """Return the search that `--index_factory` asks for.

    Args:
        kind: None for exact search; `int8`, `binary`, `auto`, or what `open_faiss` takes.
        folder: the folder of the index.
        rows: its rows.

    Raises:
        RunError: if FAISS is needed and not installed.
        ValueError: if FAISS does not know the string, the images are too few for it, or exact search is faster.
    """
    vectors = StoredVectors(rows)
    is_free = kind is not None and kind.partition(";")[0] == AUTO
    chosen = choose(kind, vectors) if kind is not None and is_free else kind
    if chosen is None:
        return exact(vectors)
    if chosen in CODES:
        find = rescored(vectors, CODES[chosen](vectors), RESCORE[chosen])
    else:
        find = rescored(vectors, open_faiss(chosen, folder, rows, vectors), RESCORE["faiss"])
    reason = slower(find, vectors)
    if reason and is_free:
        logger.info("%s: %s; exact search is taken", chosen, reason)
        return exact(vectors)
    if reason:
        raise ValueError(f"--index_factory is {kind}; {reason}. Drop the flag, or give auto.")
    return find


def exact(vectors: StoredVectors) -> Find:
    """Return a search that scores every image from memory: 2 x E bytes an image."""
    embeds_NE = torch.from_numpy(np.concatenate(vectors.blocks))

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        return _highest([(block, None) for block in embeds_NE.split(max(1, BLOCK // vectors.width))], query_QE, count)

    return find


def among(vectors: StoredVectors, mask_N: np.ndarray) -> Find:
    """Return an exact search of the rows of a mask, which are read from the stored embeddings for every query."""
    rows_n, begins = np.flatnonzero(mask_N), np.cumsum([0, *map(len, vectors.blocks)])

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        parts = zip(vectors.blocks, begins, strict=False)
        chosen: Any = ((torch.from_numpy(part[mask_N[at : at + len(part)]]), None) for part, at in parts)
        return [[(int(rows_n[row]), score) for row, score in hits] for hits in _highest(chosen, query_QE, count)]

    return find


def rescored(vectors: StoredVectors, first_pass: FirstPass, candidates: int) -> Find:
    """Return a search that scores what a first pass finds, `candidates` for each wanted image."""

    def score(query_E: Tensor, rows: np.ndarray, count: int) -> Hits:
        if not len(rows):
            return []
        rows = np.sort(rows)
        score_n = vectors.take(rows).float() @ query_E
        places = best(score_n, count)
        return list(zip(rows[places].tolist(), score_n[places].tolist(), strict=True))

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        if count < 1:
            return [[] for _ in query_QE]
        found = first_pass(query_QE, min(candidates * count, MOST_RESCORED + count, len(vectors)))
        return [score(query_E, rows, count) for query_E, rows in zip(query_QE, found, strict=True)]

    return find


def int8(vectors: StoredVectors) -> FirstPass:
    """Return a first pass over codes of E bytes an image."""
    coded = map(quantize_int8, _joined(vectors))
    codes: list[Block] = [(torch.from_numpy(codes), torch.from_numpy(scale)) for codes, scale in coded]

    def candidates(query_QE: Tensor, count: int) -> Iterator[np.ndarray]:
        for hits in _highest(codes, query_QE, count):
            yield np.array([row for row, _ in hits], dtype=np.int64)

    return candidates


def binary(vectors: StoredVectors) -> FirstPass:
    """Return a first pass over signs: E / 8 bytes an image."""
    bits = np.concatenate([to_bits(block) for block in vectors.blocks])

    def candidates(query_QE: Tensor, count: int) -> Iterator[np.ndarray]:
        for query_E in query_QE:
            [distance_N] = hamming(to_bits(query_E.numpy()[None]), bits)
            yield distance_N.argpartition(count - 1)[:count]

    return candidates


CODES = {"int8": int8, "binary": binary}


def best(score_N: Tensor, top_k: int) -> list[int]:
    """Return the places of the highest scores, best first; of equal ones, the first comes first."""
    if not 0 < top_k < len(score_N):
        return score_N.sort(descending=True, stable=True).indices[: max(0, top_k)].tolist()
    least = score_N.topk(top_k).values[-1]
    rows = (score_N >= least).nonzero().flatten()
    return rows[score_N[rows].sort(descending=True, stable=True).indices[:top_k]].tolist()


# -- what pays ---------------------------------------------------------------------------------------------------------


def choose(asked: str, vectors: StoredVectors) -> str | None:
    """Return the first pass for `auto`, by rows and free memory: exact search while it is faster than the encoder.

    Beyond, FAISS's inverted file with a byte for each number reads as few lists as the recall needs (`auto;recall=0.9`, default
    0.95); without FAISS, int8 halves the memory.
    """
    count, free, size = len(vectors), psutil.virtual_memory().available, 2 * len(vectors) * vectors.width
    chosen, settings = None, asked.partition(";")[2] or "recall=0.95"
    wanted = _RECALL.fullmatch(settings)  # of few images, too, which may become many
    if wanted is None or not 0 < float(wanted[1]) <= 1:
        raise ValueError(f"--index_factory is {asked}; auto takes a recall above 0 and up to 1. Give auto;recall=0.9.")
    if count >= FEW or size > free:
        lists = 2 ** round(math.log2(2 * math.sqrt(count)))
        chosen = "int8" if find_spec("faiss") is None else f"IVF{lists},SQ8;{settings}"
    logger.info(
        "--index_factory %s: %s for %s images; exact search takes %.1f GiB, and %.1f GiB of memory are free",
        asked, chosen or "exact search", f"{count:,}", size / 2**30, free / 2**30,
    )  # fmt: skip
    return chosen


def drawn_queries(vectors: StoredVectors, count: int) -> Tensor:
    """Return unit queries [count, E] whose cosine with an image of the index is about 0.6, as that of a text is."""
    drawn = np.random.default_rng(0).integers(0, len(vectors), (2, count))
    image_QE, other_QE = (vectors.take(rows).float() for rows in drawn)
    return normalize(image_QE + TEXT_NOISE * (other_QE - other_QE.mean(0)), dim=1)


def slower(find: Find, vectors: StoredVectors) -> str:
    """Return by how much exact search of many images is faster than `find`; "" if it is not, or lacks the memory."""
    count, free, size = len(vectors), psutil.virtual_memory().available, 2 * len(vectors) * vectors.width
    if count < FEW or size > free:
        return ""
    some, query_QE = vectors.head(FEW), drawn_queries(vectors, _TIMED)
    share = sum(len(block) for block, _ in some) / count
    exactly = _fastest(lambda query_QE: _highest(some, query_QE, 10), query_QE) / share
    passed = _fastest(lambda query_QE: find(query_QE, 10), query_QE)
    figures = f"a query of {count:,} images takes {1e3 * passed:.1f} ms so, and about {1e3 * exactly:.1f} ms exactly"
    logger.info("%s", figures)
    return f"{figures} with {size / 2**30:.1f} of {free / 2**30:.1f} GiB of free memory" if passed >= exactly else ""


def _fastest(search: Callable[[Tensor], Any], query_QE: Tensor) -> float:
    """Return the seconds of the fastest of single queries."""
    seconds = []
    for query_1E in query_QE.split(1):
        begin = time.perf_counter()
        search(query_1E)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


# -- FAISS --------------------------------------------------------------------------------------------------------------


def open_faiss(text: str, folder: Path, rows: datasets.Dataset, vectors: StoredVectors) -> FirstPass:
    """Return a first pass by a FAISS index, made and saved if these rows have none.

    Args:
        text: a string of FAISS's index factory; after a semicolon, settings of its `ParameterSpace`, such as
            `IVF1024,PQ32;nprobe=64`, or the recall@10 for which it reads as few lists as possible, such as
            `IVF1024,PQ32;recall=0.9`. These need no new index.
        folder, rows, vectors: the index.

    Raises:
        RunError: if FAISS is not installed.
        ValueError: if FAISS does not know the string, or the images are too few for it.
    """
    if find_spec("faiss") is None:
        raise RunError(
            f"--index_factory is {text}; FAISS is not installed. pip install faiss-cpu, or give int8 or binary."
        )
    import faiss

    factory, _, settings = text.partition(";")
    wanted = _RECALL.fullmatch(settings)
    file, searched = faiss_file(folder, rows, factory), rows.select_columns(["embedding"])

    def candidates(query_QE: Tensor, count: int) -> list[np.ndarray]:
        found = searched.search_batch("embedding", query_QE.numpy(), count).total_indices
        return [np.unique(rows[rows >= 0]) for rows in found]

    try:
        is_new = not _load(searched, file)
        if is_new:
            _build(searched, vectors, factory)
        index: Any = searched.get_index("embedding").faiss_index
        lists = faiss.try_extract_index_ivf(index)
        if lists is not None:
            lists.nprobe = -(-lists.nlist // LISTS_READ)
        if wanted is not None:
            _read_enough_lists(lists, rescored(vectors, candidates, RESCORE["faiss"]), vectors, float(wanted[1]))
        elif settings:
            if any(float(value) < 1 for value in _VALUES.findall(settings)):
                raise RuntimeError("a setting below 1 reads nothing")
            faiss.ParameterSpace().set_index_parameters(index, settings)  # type: ignore[arg-type]
        candidates(torch.zeros(1, vectors.width), 1)
    except RuntimeError as error:
        raise ValueError(
            f"--index_factory is {text}; FAISS cannot search {len(vectors):,} images so ({one_line(error)}). Give int8, binary, "
            "or a string of its index factory with fewer lists, such as IVF64,Flat, and behind a semicolon nprobe for IVF or "
            "efSearch for HNSW."
        ) from error
    if is_new:
        _save(searched, file)
    return candidates


def _read_enough_lists(lists: Any, find: Find, vectors: StoredVectors, recall: float) -> None:
    """Set nprobe of an inverted file to the least power of two with which `find` has this recall@10."""
    if lists is None or not 0 < recall <= 1:
        raise RuntimeError("a recall above 0 and up to 1 is for an inverted file (IVF)")
    query_QE = drawn_queries(vectors, _TUNED)
    copied = ((torch.from_numpy(block), None) for block in _joined(vectors))
    expected = [{row for row, _ in hits} for hits in _highest(copied, query_QE, 10)]
    lists.nprobe = 1
    while True:
        hits = find(query_QE, 10)
        same = [len(right & dict(one).keys()) / len(right) for right, one in zip(expected, hits, strict=True)]
        found = sum(same) / len(same)
        if found >= recall or lists.nprobe >= lists.nlist:
            break
        lists.nprobe = min(2 * lists.nprobe, lists.nlist)
    logger.info(
        "nprobe=%d of %d lists: recall@10 is %.3f of %d drawn queries", lists.nprobe, lists.nlist, found, _TUNED
    )


def faiss_file(folder: Path, rows: datasets.Dataset, factory: str) -> Path:
    """Return the file of the FAISS index that was made of these rows, and of no others."""
    name = hashlib.blake2b(factory.encode(), digest_size=8).hexdigest()
    return folder / f"{FAISS}{fingerprint_of(rows)}-{name}.index"


def _load(rows: datasets.Dataset, file: Path) -> bool:
    """Read a FAISS index, and return whether it is one of these rows."""
    if not file.is_file():
        return False
    try:
        rows.load_faiss_index("embedding", str(file))
    except RuntimeError as error:
        logger.warning("%s is damaged (%s); it is made anew", file, one_line(error))
        return False
    return rows.get_index("embedding").faiss_index.ntotal == len(rows)


def _build(rows: datasets.Dataset, vectors: StoredVectors, factory: str) -> None:
    """Make a FAISS index of inner products, trained on rows drawn at random."""
    import faiss

    index: Any = faiss.index_factory(vectors.width, factory, faiss.METRIC_INNER_PRODUCT)
    lists = faiss.try_extract_index_ivf(index)
    count = max(_LEAST_TRAINING, _TRAINING * (lists.nlist if lists is not None else 0))
    chosen = np.random.default_rng(0).permutation(len(vectors))[:count]
    logger.info("Making a FAISS index %s of %s images, once; larger ones take minutes", factory, f"{len(vectors):,}")
    if not index.is_trained:
        index.train(vectors.take(np.sort(chosen)).float().numpy())
    rows.add_faiss_index("embedding", custom_index=index)


def _save(rows: datasets.Dataset, file: Path) -> None:
    """Keep a FAISS index for the next start, if the folder can be written."""
    temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
    try:
        rows.save_faiss_index("embedding", str(temporary))
        temporary.replace(file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        logger.warning("%s cannot be written (%s); the next start makes it again", file, error.strerror)


def _highest(blocks: Iterable[Block], query_QE: Tensor, count: int) -> list[Hits]:
    """Return the best rows of all blocks, by products in fp32.

    As many blocks are scored as `_SCORES` allows. Of these, what is below the best so far is left out at once.
    """
    if count < 1 or not len(query_QE):
        return [[] for _ in query_QE]
    # Memory that is taken and freed for every block costs more than the product: the system clears its pages.
    scratch_nE, score_Qn = torch.empty(0, query_QE.shape[1]), torch.empty(len(query_QE), _SCORES // len(query_QE))
    kept = [(torch.empty(0), torch.empty(0, dtype=torch.int64)) for _ in query_QE]
    begin = filled = 0

    def sift() -> None:
        for at, score_n in enumerate(score_Qn[:, :filled]):
            scores, rows = kept[at]
            if len(scores) == count:  # of equal scores, the first stays
                found = (score_n > scores[-1]).nonzero().flatten()
            else:
                found = torch.tensor(best(score_n, count))
            if len(found):
                scores, rows = torch.cat([scores, score_n[found]]), torch.cat([rows, found + begin])
                places = best(scores, count)
                kept[at] = scores[places], rows[places]

    for block, scale_E in blocks:
        size = len(block)
        is_first = begin == 0 and filled >= _FIRST * count
        if is_first or filled + size > score_Qn.shape[1]:
            sift()
            begin, filled = begin + filled, 0
            score_Qn = score_Qn if size <= score_Qn.shape[1] else torch.empty(len(query_QE), size)
        scratch_nE = scratch_nE if size <= len(scratch_nE) else torch.empty(size, query_QE.shape[1])
        part_nE, scaled_QE = scratch_nE[:size].copy_(block), query_QE if scale_E is None else query_QE * scale_E
        if len(query_QE) == 1:
            torch.mv(part_nE, scaled_QE[0], out=score_Qn[0, filled : filled + size])
        else:
            score_Qn[:, filled : filled + size] = scaled_QE @ part_nE.T
        filled += size
    sift()
    return [list(zip(rows.tolist(), scores.tolist(), strict=True)) for scores, rows in kept]


def _joined(vectors: StoredVectors) -> Iterator[np.ndarray]:
    """Yield the embeddings in blocks of at most `BLOCK` numbers, for small stored ones."""
    held: list[np.ndarray] = []
    for block in vectors.blocks:
        if held and sum(map(len, held)) + len(block) > BLOCK // vectors.width:
            yield np.concatenate(held)
            held = []
        held.append(block)
    yield np.concatenate(held)
