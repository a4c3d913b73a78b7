"""The order of a stream: the rows of step s where rows can only be read one after the other.

Each epoch deals the shards at random to a fixed number of groups of about as many rows. A group reads its shards one after the
other, in blocks of consecutive rows that are shuffled inside the block, and yields its rows evenly over the epoch.

The batch of step s is a pure function of (rows of the shards, batch sizes, seed, groups, block size, s), found without walking
through the steps before it. Every row is drawn once an epoch, and every batch has exactly its size. Weaker than in
`mm_utils.data.batches.order`: two rows of a shard that are more than a block apart never change their order, and a batch that
reaches over the end of an epoch may hold an image twice. Shape letters: G groups, B rows of a step.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mm_utils.data.batches.sizes import BatchSizes


class Slot(NamedTuple):
    """One row of a step: a shard's `row`-th, in its block `first` to `last`. `position` counts all rows of the stream from 0."""

    position: int
    epoch: int
    group: int
    shard: int
    first: int
    last: int
    row: int


class InterleavedOrder:
    """The endless sequence of global batches of a stream whose shards have so many `rows`, none 0, together a batch at least."""

    def __init__(self, rows: Sequence[int] | np.ndarray, sizes: BatchSizes, seed: int, groups: int, block_size: int):
        self.rows = np.asarray(rows, dtype=np.int64)
        self.sizes = sizes
        self.seed = seed
        self.groups = groups
        self.block_size = block_size
        self.num_rows = int(self.rows.sum())
        if self.num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the stream has {self.num_rows:,} rows; a batch holds a row "
                f"only once. Give at most --global_batch_size {self.num_rows}."
            )
        self._epoch = lru_cache(maxsize=2)(self._deal_epoch)
        self._block = lru_cache(maxsize=4 * groups)(self._shuffle_block)

    def __reduce__(self) -> tuple[type, tuple]:
        """Leave the caches here when the order is sent to workers."""
        return InterleavedOrder, (self.rows, self.sizes, self.seed, self.groups, self.block_size)

    def batch(self, step: int, part: int = 0, parts: int = 1) -> list[Slot]:
        """Return the rows of `step`, from 0, in the stream's order; of several parts, one reads every `parts`-th group."""
        begin = self.sizes.before(step)
        stop = self.sizes.before(step) + self.sizes.at(step)
        slots: list[Slot] = []
        while begin < stop:
            epoch, low = divmod(begin, self.num_rows)
            high = min(low + stop - begin, self.num_rows)
            shards, before, rows_G = self._epoch(epoch)
            group_B, turn_B = interleave(rows_G, low, high)
            for place in np.flatnonzero(group_B % parts == part).tolist():
                group = int(group_B[place])
                turn = int(turn_B[place])
                at = int(np.searchsorted(before[group], turn, side="right")) - 1
                shard = int(shards[group][at])
                turn_of_shard = turn - int(before[group][at])
                # turn 700 lies in the block of rows 512 to 768, if blocks have 256
                first = turn_of_shard // self.block_size * self.block_size
                last = min(first + self.block_size, int(self.rows[shard]))
                row = first + int(self._block(epoch, shard, first, last)[turn_of_shard - first])
                slots.append(Slot(begin + place, epoch, group, shard, first, last, row))
            begin += high - low
        return slots

    def _shuffle_block(self, epoch: int, shard: int, first: int, last: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch, shard, first // self.block_size]).permutation(last - first)

    def _deal_epoch(self, epoch: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return each group's shards in an epoch, in order, the rows before each, and the group's rows `[G]`."""
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        group_of = np.empty_like(shuffled)
        heap = [(0, group) for group in range(self.groups)]
        for at, rows in enumerate(self.rows[shuffled].tolist()):  # to the group with the fewest rows so far
            held, group_of[at] = heap[0]
            heapq.heapreplace(heap, (held + rows, heap[0][1]))
        shards = [shuffled[group_of == group] for group in range(self.groups)]
        # shards of 5, 3 and 4 rows begin at 0, 5 and 8
        before = [np.cumsum(self.rows[mine]) - self.rows[mine] for mine in shards]
        return shards, before, np.array([self.rows[mine].sum() for mine in shards])


def interleave(rows_G: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return group and row of positions `low` to `high`, each group spread evenly.

    Row k of a group of n rows stands at (k + 1/2) / n, and positions count the rows from left to right, groups in turn where
    they stand together. So the row at position p of N stands within G / 2 rows of p / N, and only rows near it are looked at.
    """
    groups = len(rows_G)
    total = int(rows_G.sum())
    first_G = np.maximum(0, rows_G * (low - groups) // total - 1)
    stop_G = np.minimum(rows_G, rows_G * (high + groups) // total + 2)
    group = np.repeat(np.arange(groups), stop_G - first_G)
    starts_G = np.cumsum(stop_G - first_G) - (stop_G - first_G)
    turn = np.arange(len(group)) - starts_G[group] + first_G[group]
    # by place, then by group: the last key counts first
    near = np.lexsort((group, (turn + 0.5) / rows_G[group]))
    # all rows that were not looked at before these, `first_G` of each group, stand before `low`
    chosen = near[low - int(first_G.sum()) : high - int(first_G.sum())]
    return group[chosen], turn[chosen]
