"""Which rows have captions that look alike, so that they can meet in a batch and be each other's hard negatives.

Found once per data set and without a model, from the words that two rows have in common, rare words counting most: a weighted
Jaccard similarity (weights: inverse document frequency), estimated by min-wise hashing (Broder, 1997; with weights, a race of
exponential clocks). Rows that agree in many hashes are grouped first.
"""

import numpy as np
import pyarrow as pa

from mm_utils.data.order import scramble

# How many hashes must agree. Half of the pairs with 96 % of their weight in common agree in 16.
ROUNDS = (16, 12, 8, 6, 4, 3, 2)
TRIES = 4  # of each number of hashes


def arrange(input_ids: pa.ChunkedArray, size: int, seed: int = 0) -> np.ndarray:
    """All rows, int64, in an order in which each block of `size` consecutive ones holds look-alikes, as far as there are any.

    Args:
        input_ids: the tokens of all captions of every row, a list of lists.
        size: rows of a block. The last rows, fewer than a block, are in none.
        seed: of the hashes.
    """
    tokens, starts = _flat(input_ids)
    weights = _rarity(tokens, starts)
    free = np.arange(len(starts) - 1)
    blocks: list[np.ndarray] = []
    clocks = _Clocks(tokens, starts, weights, seed)
    for hashes in ROUNDS:
        for _ in range(TRIES):
            if len(free) < size:
                break
            found, free = _grouped(free, clocks.signature(hashes)[free], size)
            blocks.append(found)
    return np.concatenate([*blocks, free])


class _Clocks:
    """Every token has a clock that rings after -log(uniform) / weight; a row's hash is the token that rings first."""

    def __init__(self, tokens: np.ndarray, starts: np.ndarray, weights: np.ndarray, seed: int):
        self.tokens, self.starts, self.weights = tokens, starts, weights
        self.rng = np.random.default_rng(seed)

    def signature(self, hashes: int) -> np.ndarray:
        """uint64 `[rows]`, equal where the same token rings first in all of so many races."""
        total = np.zeros(len(self.starts) - 1, np.uint64)
        for _ in range(hashes):
            rings = self.rng.exponential(size=len(self.weights)) / self.weights
            order = np.empty(len(rings), np.int64)
            order[rings.argsort(kind="stable")] = np.arange(len(rings))
            first = np.minimum.reduceat(np.append(order[self.tokens], len(rings)), self.starts[:-1])
            with np.errstate(over="ignore"):
                total = scramble(total + first.astype(np.uint64))
        return total


def _flat(input_ids: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of all rows one after the other, and where each row's begin and the last one's end."""
    rows = input_ids.combine_chunks() if isinstance(input_ids, pa.ChunkedArray) else input_ids
    captions = rows.flatten()
    tokens = captions.flatten().to_numpy(zero_copy_only=False)
    caption_ends = np.append(0, np.cumsum(np.diff(captions.offsets.to_numpy())))
    row_ends = np.append(0, np.cumsum(np.diff(rows.offsets.to_numpy())))
    return tokens, caption_ends[row_ends]


def _rarity(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Weight of every token by number: log of rows over those that hold it; those that all hold hardly count."""
    row_of = np.repeat(np.arange(len(starts) - 1), np.diff(starts))
    held = np.unique(row_of * (tokens.max(initial=0) + 1) + tokens) % (tokens.max(initial=0) + 1)
    counts = np.bincount(held.astype(np.int64), minlength=int(tokens.max(initial=0)) + 1)
    return np.maximum(np.log(max(1, len(starts) - 1) / np.maximum(counts, 1)), 1e-6)


def _grouped(rows: np.ndarray, signature: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks of `size` rows of one signature, one after the other, and the rows that are in none, in order."""
    order = np.argsort(signature, kind="stable")
    by_signature = signature[order]
    begins = np.flatnonzero(np.append(True, by_signature[1:] != by_signature[:-1]))
    lengths = np.diff(np.append(begins, len(order)))
    place_in_run = np.arange(len(order)) - np.repeat(begins, lengths)
    taken = place_in_run < np.repeat(lengths // size * size, lengths)
    return rows[order[taken]], np.sort(rows[order[~taken]])
