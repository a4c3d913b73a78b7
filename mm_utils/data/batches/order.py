"""Which rows form step s: a pure function of (rows, batch sizes, seed, s) alone.

The rows of all epochs form one stream, a fresh permutation per epoch, and every step takes the next batch of it. Where a
batch reaches over the end of an epoch, rows it already holds are moved just behind it, so that no batch holds an image
twice, every batch has exactly its size, and nothing is dropped or repeated: the last, incomplete batch of an epoch is
filled up from the next one.

A rank takes every W-th row of a batch: ranks, workers and restarts see the same global batches.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from mm_utils import distributed
from mm_utils.data.batches.sizes import BatchSizes

ATTEMPTS = 16
"""Rows tried in place of an unreadable one. With a share p of unreadable rows, all of them fail in p^16 cases."""

SHOWN_IN_VALIDATION = "its image is one of validation's"
OF_ANOTHER_SPLIT = "it says that it is of another split"
"""Ends of the reasons for leaving out a row that is intact and is not one of train."""

Draw = tuple[int, int]
"""(row, epoch): the epoch decides caption and augmentation."""


class GlobalOrder:
    """Endless sequence of global batches of the training split's rows; ValueError if there are fewer than a batch needs."""

    def __init__(self, num_rows: int, sizes: BatchSizes, seed: int):
        if num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the training split has {num_rows:,} images; a batch holds "
                f"an image only once. Give at most --global_batch_size {num_rows}."
            )
        self.num_rows = num_rows
        self.sizes = sizes
        self.seed = seed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int, mine: slice = slice(None)) -> list[Draw]:
        """Return the draws of global batch `step`, counted from 0, or a part of them."""
        # of 1,000 rows and batches of 64, step 15 takes the last 40 of epoch 0 and the first 24 of epoch 1
        epoch, low = divmod(self.sizes.before(step), self.num_rows)
        places = np.arange(low, low + self.sizes.at(step))[mine]
        now = places < self.num_rows
        rows = self._epoch(epoch)[places[now]]
        if len(rows) < len(places):
            rows = np.concatenate([rows, self._epoch(epoch + 1)[places[~now] - self.num_rows]])
        return list(zip(rows.tolist(), np.where(now, epoch, epoch + 1).tolist(), strict=True))

    def _make_epoch(self, epoch: int) -> np.ndarray:
        """Return all rows of an epoch in order."""
        # A first batch that reaches into its epoch's tail makes every epoch depend on all before it.
        first = max(0, epoch - 1) if self.num_rows >= 2 * self.sizes.sizes[-1] else 0
        rows = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            before = rows
            rows = self._permutation(later)
            step = self.sizes.step_of(later * self.num_rows)  # of the epoch's first row
            size = self.sizes.at(step)
            # rows of the epoch before, which the batch begins with
            carried = later * self.num_rows - self.sizes.before(step)
            if carried:
                head = rows[:size]
                clash = np.isin(rows[:size], before[-carried:])
                # the batch takes `size - carried` of these: at most `carried` clash, and go behind them
                rows[:size] = np.concatenate([head[~clash], head[clash]])
        return rows

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)


def choose_captions(seed: int, epochs: np.ndarray, image_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Choose one of each image's `counts` captions by a hash of (seed, epoch, image key)."""
    with np.errstate(over="ignore"):
        bits = scramble(_mixed(seed, epochs) ^ image_keys.astype(np.uint64))
    return (bits % counts.astype(np.uint64)).astype(np.int64)


def replacement_rows(seed: int, epoch: int, key: int, count: int) -> list[int]:
    """Return up to `ATTEMPTS` distinct rows of `count` to try in place of an unreadable row.

    A function of (seed, epoch, key), like the order: any rank, at any time, tries the same rows. The unreadable row
    itself may be among them.
    """
    with np.errstate(over="ignore"):
        first = scramble(_mixed(seed, epoch) ^ np.array([key], np.int64).view(np.uint64))
        drawn = scramble(first ^ np.arange(1, ATTEMPTS + 1, dtype=np.uint64)) % np.uint64(count)
    return list(dict.fromkeys(drawn.tolist()))


def _mixed(seed: int, epochs: int | np.ndarray) -> np.ndarray:
    """Hash the seed, then the epoch: hashing their sum would repeat other seeds' epochs."""
    return scramble(scramble(np.array([seed % 2**63], np.uint64)) + np.asarray(epochs, np.uint64))


def scramble(bits: np.ndarray) -> np.ndarray:
    """Hash uint64 values with splitmix64 (Steele et al., OOPSLA 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class RankBatches(Sampler[list[Draw]]):
    """This rank's share of the global batches of steps `start` to `stop`, for a `DataLoader`."""

    def __init__(self, order: GlobalOrder, start: int, stop: int):
        self.order = order
        self.start = start
        self.stop = stop

    def __iter__(self) -> Iterator[list[Draw]]:
        mine = slice(distributed.rank(), None, distributed.world_size())
        return (self.order.batch(step, mine) for step in range(self.start, self.stop))

    def __len__(self) -> int:
        return self.stop - self.start


def evaluation_batches(num_rows: int, batch_size: int) -> list[list[Draw]]:
    """Return this rank's share of all rows, in order; all ranks have equally many batches."""
    mine = distributed.share(num_rows, distributed.rank(), distributed.world_size())
    parts = -(-num_rows // (batch_size * distributed.world_size()))
    batches = []
    for part in range(parts):
        share = distributed.share(len(mine), part, parts)
        batches.append([(mine.start + place, 0) for place in share])
    return batches
