"""Score images with a query: all of them, or those that a coarse first pass of FAISS finds.

Scores are always products in fp32 with the stored embeddings, which are memory-mapped; an image may only be missing that the first
pass has missed.

Shape letters: N images of the index, E embedding width.
"""

import hashlib
import logging
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor

from mm_utils.distributed import RunError
from mm_utils.search.index import FAISS
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

RESCORE = 50  # candidates of a first pass for each image that is wanted
MOST_RESCORED = 10_000  # candidates beyond the images that are wanted
LISTS_READ = 16  # one of n lists of an inverted file is read, if the factory string does not say nprobe
_TRAINING = 64  # images for each list of an inverted file that FAISS is trained on, and at least
_LEAST_TRAINING = 65_536  # of these, as many as a product quantiser takes
Hits = list[tuple[int, float]]
"""Rows and cosines, best first."""


class StoredVectors:
    """The column `embedding` of an index, float16 `[N, E]`, read from the memory-mapped file."""

    def __init__(self, rows: datasets.Dataset):
        chunks = [chunk for chunk in rows.data.column("embedding").chunks if len(chunk)]
        arrays = [chunk.flatten().to_numpy(zero_copy_only=True).reshape(len(chunk), -1) for chunk in chunks]
        with warnings.catch_warnings():  # torch would rather write to them
            warnings.simplefilter("ignore")
            self.blocks = [torch.from_numpy(array) for array in arrays]
        self._ends = np.cumsum([len(block) for block in self.blocks])

    def __len__(self) -> int:
        return int(self._ends[-1])

    @property
    def width(self) -> int:
        """Numbers of a row."""
        return self.blocks[0].shape[1]

    def take(self, rows: Sequence[int] | np.ndarray) -> Tensor:
        """Return rows in fp32, `[n, E]`."""
        blocks = np.searchsorted(self._ends, rows, side="right").tolist()
        places = (np.asarray(rows) - self._ends[blocks]).tolist()  # from the end of the block
        found = [self.blocks[block][place] for block, place in zip(blocks, places, strict=True)]
        return torch.stack(found).float() if found else torch.empty(0, self.width)

    def cosines(self, query: Tensor) -> Tensor:
        """Return the products of all rows with a unit query `[E]`; a block of the file stays in a core's cache."""
        return torch.cat([block.float() @ query for block in self.blocks])


def best(rows: np.ndarray, score_n: Tensor, count: int) -> Hits:
    """Return the rows of the highest scores, best first; of equal ones, the first comes first."""
    if 0 < count < len(score_n):
        kept = (score_n >= score_n.topk(count).values[-1]).nonzero().flatten()
        rows, score_n = rows[kept.numpy()], score_n[kept]
    order = score_n.sort(descending=True, stable=True).indices[:count]
    return list(zip(rows[order.numpy()].tolist(), score_n[order].tolist(), strict=True))


def open_faiss(text: str, folder: Path, name: str, vectors: StoredVectors) -> Callable[[Tensor, int], Hits]:
    """Return a search by a FAISS index, made and saved if the rows of that name have none: a unit query `[E]` and a number to hits.

    `text` is a string of FAISS's index factory; after a semicolon, settings of its `ParameterSpace`, such as `IVF1024,PQ32;nprobe=64`.

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
    file = folder / f"{FAISS}{hashlib.blake2b(f'{name} {factory}'.encode(), digest_size=12).hexdigest()}.index"
    try:
        if file.is_file():
            index: Any = faiss.read_index(str(file))
        else:
            logger.info("Making a FAISS index %s of %s images, once; larger ones take minutes", factory, len(vectors))
            index = faiss.index_factory(vectors.width, factory, faiss.METRIC_INNER_PRODUCT)
        lists = faiss.try_extract_index_ivf(index)
        if not index.is_trained:
            count = max(_LEAST_TRAINING, _TRAINING * (lists.nlist if lists is not None else 0))
            drawn = np.random.default_rng(0).permutation(len(vectors))[:count]
            index.train(vectors.take(np.sort(drawn)).numpy())
        if not file.is_file():
            for block in vectors.blocks:
                index.add(block.float().numpy())
            temporary = file.with_name(f".{file.name}.{os.getpid()}.tmp")
            faiss.write_index(index, str(temporary))
            temporary.replace(file)
        if lists is not None:
            lists.nprobe = -(-lists.nlist // LISTS_READ)
        if settings:
            faiss.ParameterSpace().set_index_parameters(index, settings)  # type: ignore[arg-type]
    except (RuntimeError, OSError) as error:
        raise ValueError(
            f"--index_factory is {text}; FAISS cannot search {len(vectors):,} images so ({one_line(error)}). Give a string of its "
            f"index factory with fewer lists, such as IVF64,Flat, with nprobe for IVF or efSearch for HNSW behind a semicolon; "
            f"delete {file} if it is damaged."
        ) from error

    def find(query_E: Tensor, count: int) -> Hits:
        wanted = min(RESCORE * count, MOST_RESCORED + count, len(vectors))
        rows = np.unique(index.search(query_E[None].numpy(), wanted)[1])
        rows = rows[rows >= 0]
        return best(rows, vectors.take(rows) @ query_E, count)

    return find
