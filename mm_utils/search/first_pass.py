"""Find a query's best images: exactly, or those of a coarse first pass exactly.

A first pass is a FAISS index. It returns many times as many images as are wanted (`RESCORE`). These are scored from the stored embeddings, which are memory-mapped, so scores
are always those of exact search; only an image that the first pass has missed is missing.

A FAISS index lies beside the rows that it was made of, and its name has their fingerprint: after an update another file is
looked for, and made.

Queries are answered together: the embeddings are read once for all of them, in blocks that stay in a core's cache.

Shape letters: N images of the index, Q queries, E embedding width.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from mm_utils.data.batches.column_cache import fingerprint_of
from mm_utils.distributed import RunError
from mm_utils.search.index import FAISS
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

BLOCK = 1 << 20  # numbers of a product that are turned into fp32 at a time; 4 MB stay in a core's cache
RESCORE = 50  # candidates of a first pass for each image that is wanted
MOST_RESCORED = 10_000  # candidates beyond the images that are wanted
LISTS_READ = 16  # one of n lists of an inverted file is read, if the factory string does not say nprobe
_TRAINING = 64  # images for each list of an inverted file that FAISS is trained on, and at least
_LEAST_TRAINING = 65_536  # of these, as many as a product quantiser takes
_SCORES = 1 << 23  # that are kept at a time
_FIRST = 16  # scores for each wanted image that say what is low; the best of 8 million take 130 ms
_VALUES = re.compile(r"=\s*(-?\d+\.?\d*)")  # of the settings behind a factory string
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

    def take(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return rows, at least one, float16 `[n, E]`."""
        block = np.searchsorted(self._ends, rows, side="right")
        place = np.asarray(rows) - self._ends[block]  # from the end of the block
        found = [self.blocks[one][at] for one, at in zip(block.tolist(), place.tolist(), strict=True)]
        return torch.from_numpy(np.stack(found))


def open_find(factory: str | None, folder: Path, rows: datasets.Dataset) -> Find:
    """Return the search that `--index_factory` asks for.

    Args:
        factory: None for exact search, or what `open_faiss` takes.
        folder: the folder of the index.
        rows: its rows.

    Raises:
        RunError: if FAISS is needed and not installed.
        ValueError: if FAISS does not know the string, or the images are too few for it.
    """
    vectors = StoredVectors(rows)
    if factory is None:
        return exact(vectors)
    return rescored(vectors, open_faiss(factory, folder, rows, vectors))


def exact(vectors: StoredVectors) -> Find:
    """Return a search that scores every image from memory: 2 x E bytes an image."""
    embeds_NE = torch.from_numpy(np.concatenate(vectors.blocks))

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        return _highest(embeds_NE.split(max(1, BLOCK // vectors.width)), query_QE, count)

    return find


def among(vectors: StoredVectors, mask_N: np.ndarray) -> Find:
    """Return an exact search of the rows of a mask, which are read from the stored embeddings for every query."""
    rows_n, begins = np.flatnonzero(mask_N), np.cumsum([0, *map(len, vectors.blocks)])

    def find(query_QE: Tensor, count: int) -> list[Hits]:
        parts = zip(vectors.blocks, begins, strict=False)
        chosen = (torch.from_numpy(part[mask_N[at : at + len(part)]]) for part, at in parts)
        return [[(int(rows_n[row]), score) for row, score in hits] for hits in _highest(chosen, query_QE, count)]

    return find


def rescored(vectors: StoredVectors, first_pass: FirstPass) -> Find:
    """Return a search that scores what a first pass finds, `RESCORE` images for each wanted one."""

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
        found = first_pass(query_QE, min(RESCORE * count, MOST_RESCORED + count, len(vectors)))
        return [score(query_E, rows, count) for query_E, rows in zip(query_QE, found, strict=True)]

    return find


def best(score_N: Tensor, top_k: int) -> list[int]:
    """Return the places of the highest scores, best first; of equal ones, the first comes first."""
    if not 0 < top_k < len(score_N):
        return score_N.sort(descending=True, stable=True).indices[: max(0, top_k)].tolist()
    least = score_N.topk(top_k).values[-1]
    rows = (score_N >= least).nonzero().flatten()
    return rows[score_N[rows].sort(descending=True, stable=True).indices[:top_k]].tolist()


# -- FAISS --------------------------------------------------------------------------------------------------------------


def open_faiss(text: str, folder: Path, rows: datasets.Dataset, vectors: StoredVectors) -> FirstPass:
    """Return a first pass by a FAISS index, made and saved if these rows have none.

    Args:
        text: a string of FAISS's index factory; after a semicolon, settings of its `ParameterSpace`, such as
            `IVF1024,PQ32;nprobe=64`. These need no new index.
        folder, rows, vectors: the index.

    Raises:
        RunError: if FAISS is not installed.
        ValueError: if FAISS does not know the string, or the images are too few for it.
    """
    if find_spec("faiss") is None:
        raise RunError(f"--index_factory is {text}; FAISS is not installed. pip install faiss-cpu, or drop the flag.")
    import faiss

    factory, _, settings = text.partition(";")
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
        if settings:
            if any(float(value) < 1 for value in _VALUES.findall(settings)):
                raise RuntimeError("a setting below 1 reads nothing")
            faiss.ParameterSpace().set_index_parameters(index, settings)  # type: ignore[arg-type]
        candidates(torch.zeros(1, vectors.width), 1)
    except RuntimeError as error:
        raise ValueError(
            f"--index_factory is {text}; FAISS cannot search {len(vectors):,} images so ({one_line(error)}). Give a string of its "
            "index factory with fewer lists, such as IVF64,Flat, and behind a semicolon nprobe for IVF or efSearch for HNSW."
        ) from error
    if is_new:
        _save(searched, file)
    return candidates


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


def _highest(blocks: Iterable[Tensor], query_QE: Tensor, count: int) -> list[Hits]:
    """Return the best rows of all blocks `[n, E]`, by products in fp32.

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

    for block in blocks:
        size = len(block)
        is_first = begin == 0 and filled >= _FIRST * count
        if is_first or filled + size > score_Qn.shape[1]:
            sift()
            begin, filled = begin + filled, 0
            score_Qn = score_Qn if size <= score_Qn.shape[1] else torch.empty(len(query_QE), size)
        scratch_nE = scratch_nE if size <= len(scratch_nE) else torch.empty(size, query_QE.shape[1])
        part_nE = scratch_nE[:size].copy_(block)
        if len(query_QE) == 1:
            torch.mv(part_nE, query_QE[0], out=score_Qn[0, filled : filled + size])
        else:
            score_Qn[:, filled : filled + size] = query_QE @ part_nE.T
        filled += size
    sift()
    return [list(zip(rows.tolist(), scores.tolist(), strict=True)) for scores, rows in kept]
