"""Rows with similar captions in groups, as each other's hard negatives in a batch.

Groups are found once per data set and without a model, from the words that two rows share, rare words counting most: a
weighted Jaccard similarity (weights: inverse document frequency), estimated by min-wise hashing (Broder, 1997; with weights,
a race of exponential clocks). Rows that agree in many hashes are grouped first.
"""

import numpy as np
import pyarrow as pa

from mm_utils.data.batches.order import scramble

# Numbers of hashes that must agree, in turn. Of pairs that share 96 % of their weight, half agree in 16.
ROUNDS = (16, 12, 8, 6, 4, 3, 2)
TRIES = 4  # per number of hashes


def group_similar(input_ids: pa.ChunkedArray, size: int, seed: int = 0) -> np.ndarray:
    """Arrange all rows so that blocks of `size` rows have similar captions, as far as possible.

    Args:
        input_ids: the tokens of all captions of every row, a list of lists.
        size: rows per block. The last rows, too few for a block, are in none.
        seed: seed of the hashes.

    Returns:
        row numbers, int64 `[rows]`.
    """
    tokens, starts = _flatten(input_ids)
    weights = _rarity(tokens, starts)
    rng = np.random.default_rng(seed)
    free = np.arange(len(starts) - 1)
    blocks: list[np.ndarray] = []
    for hashes in ROUNDS:
        for _ in range(TRIES):
            if len(free) < size:
                break
            found, free = _blocks(free, _signature(tokens, starts, weights, hashes, rng)[free], size)
            blocks.append(found)
    return np.concatenate([*blocks, free])


def _signature(
    tokens: np.ndarray, starts: np.ndarray, weights: np.ndarray, hashes: int, rng: np.random.Generator
) -> np.ndarray:
    """Return a uint64 per row, equal where the same token wins in all of `hashes` races.

    In a race, the clock of each token rings after -log(uniform) / weight, and the row's token that rings first wins.
    """
    total = np.zeros(len(starts) - 1, np.uint64)
    for _ in range(hashes):
        times = rng.exponential(size=len(weights)) / weights
        rank = np.empty(len(times), np.int64)
        rank[times.argsort(kind="stable")] = np.arange(len(times))
        first = np.minimum.reduceat(np.append(rank[tokens], len(times)), starts[:-1])
        with np.errstate(over="ignore"):
            total = scramble(total + first.astype(np.uint64))
    return total


def _flatten(input_ids: pa.ChunkedArray) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of all rows in one array, and where each row starts, and the end."""
    rows = input_ids.combine_chunks() if isinstance(input_ids, pa.ChunkedArray) else input_ids
    captions = rows.flatten()
    tokens = captions.flatten().to_numpy(zero_copy_only=False)
    caption_ends = np.append(0, np.cumsum(np.diff(captions.offsets.to_numpy())))
    row_ends = np.append(0, np.cumsum(np.diff(rows.offsets.to_numpy())))
    return tokens, caption_ends[row_ends]


def _rarity(tokens: np.ndarray, starts: np.ndarray) -> np.ndarray:
    """Return the weight of every token id, log(rows / rows that have it), at least 1e-6."""
    num_rows, num_tokens = len(starts) - 1, int(tokens.max(initial=0)) + 1
    row_of = np.repeat(np.arange(num_rows), np.diff(starts))
    distinct = np.unique(row_of * num_tokens + tokens) % num_tokens
    counts = np.bincount(distinct.astype(np.int64), minlength=num_tokens)
    return np.maximum(np.log(max(1, num_rows) / np.maximum(counts, 1)), 1e-6)


def _blocks(rows: np.ndarray, signature: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Return blocks of `size` rows of one signature, concatenated, and the other rows in order."""
    order = np.argsort(signature, kind="stable")
    by_signature = signature[order]
    begins = np.flatnonzero(np.append(True, by_signature[1:] != by_signature[:-1]))
    lengths = np.diff(np.append(begins, len(order)))
    place_in_run = np.arange(len(order)) - np.repeat(begins, lengths)
    taken = place_in_run < np.repeat(lengths // size * size, lengths)
    return rows[order[taken]], np.sort(rows[order[~taken]])
