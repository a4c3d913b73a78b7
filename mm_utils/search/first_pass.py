"""Find a query's best images: exactly, or those of a coarse first pass exactly.

A first pass is a FAISS index. It returns `RESCORE` times as many images as are wanted. These are scored from the stored
embeddings, which are memory-mapped, so scores are always those of exact search; only an image that the first pass has missed is
missing. A FAISS index lies beside the rows that it was made of, and its name has their fingerprint.

Shape letters: N images of the index, Q queries, E embedding width.
"""

import hashlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Sequence
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
_VALUES = re.compile(r"=\s*(-?\d+\.?\d*)")  # of the settings behind a factory string
Hits = list[tuple[int, float]]
"""Rows and cosines, best first."""
Find = Callable[[Tensor, int], list[Hits]]
"""Maps unit queries, fp32 `[Q, E]`, and a number from 1 on to that many images for each."""


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
    if factory is not None:
        first_pass = open_faiss(factory, folder, rows, vectors)

        def find_some(query_QE: Tensor, count: int) -> list[Hits]:
            found = first_pass(query_QE, min(RESCORE * count, MOST_RESCORED + count, len(vectors)))
            hits: list[Hits] = []
            for query_E, candidates in zip(query_QE, found, strict=True):
                score_n = vectors.take(candidates).float() @ query_E if len(candidates) else torch.empty(0)
                places = best(score_n, count)
                hits.append(list(zip(candidates[places].tolist(), score_n[places].tolist(), strict=True)))
            return hits

        return find_some
    embeds_NE = torch.from_numpy(np.concatenate(vectors.blocks))  # in memory: 2 x E bytes an image

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


def _highest(blocks: Iterable[Tensor], query_QE: Tensor, count: int) -> list[Hits]:
    """Return the best rows of all blocks `[n, E]`, by products in fp32."""
    # Memory that is taken and freed for every block costs more than the product: the system clears its pages.
    scratch_nE, parts = torch.empty(0, query_QE.shape[1]), [torch.empty(len(query_QE), 0)]
    for block in blocks:
        if len(block) > len(scratch_nE):
            scratch_nE = torch.empty(block.shape)
        part_nE = scratch_nE[: len(block)].copy_(block)
        parts.append(query_QE @ part_nE.T if len(query_QE) > 1 else torch.mv(part_nE, query_QE[0])[None])
    score_QN = torch.cat(parts, 1)
    places = [best(score_N, count) for score_N in score_QN]
    return [
        list(zip(rows, score_N[rows].tolist(), strict=True)) for rows, score_N in zip(places, score_QN, strict=True)
    ]


def best(score_N: Tensor, top_k: int) -> list[int]:
    """Return the places of the highest scores, best first; of equal ones, the first comes first."""
    if not 0 < top_k < len(score_N):
        return score_N.sort(descending=True, stable=True).indices[: max(0, top_k)].tolist()
    least = score_N.topk(top_k).values[-1]
    rows = (score_N >= least).nonzero().flatten()
    return rows[score_N[rows].sort(descending=True, stable=True).indices[:top_k]].tolist()


def open_faiss(
    text: str, folder: Path, rows: datasets.Dataset, vectors: StoredVectors
) -> Callable[[Tensor, int], list[np.ndarray]]:
    """Return a first pass by a FAISS index, made and saved if these rows have none: unit queries and a number to sorted rows.

    Args:
        text: a string of FAISS's index factory; after a semicolon, settings of its `ParameterSpace`, such as
            `IVF1024,PQ32;nprobe=64`. These need no new index.
        folder, rows, vectors: the index.

    Raises:
        RunError: if FAISS is not installed.
        ValueError: if FAISS does not know the string, or the images are too few for it.
    """
    try:
        import faiss
    except ImportError as error:
        raise RunError(
            f"--index_factory is {text}; FAISS is not installed. pip install faiss-cpu, or drop the flag."
        ) from error
    factory, _, settings = text.partition(";")
    name = hashlib.blake2b(factory.encode(), digest_size=8).hexdigest()
    file = folder / f"{FAISS}{fingerprint_of(rows)}-{name}.index"
    index: Any = _read(file, len(vectors)) if file.is_file() else None
    is_new = index is None

    def candidates(query_QE: Tensor, count: int) -> list[np.ndarray]:
        found = index.search(query_QE.numpy(), count)[1]
        return [np.unique(rows[rows >= 0]) for rows in found]

    try:
        if is_new:
            index = _build(vectors, factory)
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
        temporary = file.with_name(f"{file.name}.{os.getpid()}.tmp")
        try:
            faiss.write_index(index, str(temporary))
            temporary.replace(file)
        except (OSError, RuntimeError) as error:
            temporary.unlink(missing_ok=True)
            logger.warning("%s cannot be written (%s); the next start makes it again", file, one_line(error))
    return candidates


def _read(file: Path, count: int) -> Any:
    """Return a FAISS index of so many rows; None if the file holds another or is damaged."""
    import faiss

    try:
        index = faiss.read_index(str(file))
        return index if index.ntotal == count else None
    except RuntimeError as error:
        logger.warning("%s is damaged (%s); it is made anew", file, one_line(error))
        return None


def _build(vectors: StoredVectors, factory: str) -> Any:
    """Return a FAISS index of inner products, trained on rows drawn at random."""
    import faiss

    logger.info("Making a FAISS index %s of %s images, once; larger ones take minutes", factory, f"{len(vectors):,}")
    index: Any = faiss.index_factory(vectors.width, factory, faiss.METRIC_INNER_PRODUCT)
    lists = faiss.try_extract_index_ivf(index)
    if not index.is_trained:
        count = max(_LEAST_TRAINING, _TRAINING * (lists.nlist if lists is not None else 0))
        chosen = np.random.default_rng(0).permutation(len(vectors))[:count]
        index.train(vectors.take(np.sort(chosen)).float().numpy())
    for block in vectors.blocks:
        index.add(block.astype(np.float32))
    return index
