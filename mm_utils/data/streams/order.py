"""The order of a stream: the rows of step s where rows can only be read one after the other.

Each epoch deals the shards at random to a fixed number of groups of about as many rows. A group reads its shards one after the
other, in blocks of consecutive rows that are shuffled inside the block, and yields its rows evenly over the epoch.

The batch of step s is a pure function of (rows of the shards, batch sizes, seed, groups, block size, s), found without walking
through the steps before it. Every row is drawn once an epoch, and every batch has exactly its size. Weaker than in
`mm_utils.data.batches.order`: two rows of a shard that are more than a block apart never change their order, and a batch that
reaches over the end of an epoch may hold an image twice. A reader, one of the workers of one of the ranks, reads whole groups,
dealt per epoch so that readers have about the same to read. Shape letters: G groups, B rows of a step.
"""

import heapq
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mm_utils.data.batches.order import BatchSizes


class Slot(NamedTuple):
    """One row of a step: a shard's `row`-th, in its `block`. `position` counts all rows of the stream from 0."""

    position: int
    epoch: int
    group: int
    shard: int
    block: int
    row: int


class Reader(NamedTuple):
    """Worker `worker` of `workers` of rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1


class InterleavedOrder:
    """The endless sequence of global batches of a stream whose shards have so many `rows`, none 0.

    Raises:
        ValueError: if there are fewer rows than a batch needs.
    """

    def __init__(self, rows: Sequence[int] | np.ndarray, sizes: BatchSizes, seed: int, groups: int, block_size: int):
        self.rows, self.sizes, self.seed = np.asarray(rows, dtype=np.int64), sizes, seed
        self.groups, self.block_size, self.num_rows = groups, block_size, int(self.rows.sum())
        if self.num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the stream has {self.num_rows:,} rows; a batch holds a row "
                f"only once. Give at most --global_batch_size {self.num_rows}."
            )
        self._epoch = lru_cache(maxsize=2)(self._deal_epoch)
        self._owners = lru_cache(maxsize=4)(self._find_owners)
        self._block = lru_cache(maxsize=4 * groups)(self._shuffle_block)

    def __reduce__(self) -> tuple[type, tuple]:
        """Leave the caches here when the order is sent to workers."""
        return InterleavedOrder, (self.rows, self.sizes, self.seed, self.groups, self.block_size)

    def batch(self, step: int, reader: Reader | None = None) -> list[Slot]:
        """Return the rows of `step`, from 0, in the stream's order: all, or those of `reader`.

        Raises:
            ValueError: if there are fewer groups than ranks, so that some would have nothing to read.
        """
        first, stop = self.sizes.before(step), self.sizes.before(step) + self.sizes.at(step)
        slots: list[Slot] = []
        while first < stop:
            epoch, low = divmod(first, self.num_rows)
            high = min(low + stop - first, self.num_rows)
            shards, before, rows_G = self._epoch(epoch)
            group_B, turn_B = interleave(rows_G, low, high)
            mine_B = np.ones(high - low, bool) if reader is None else self._owners(epoch, reader)[group_B]
            positions = (np.flatnonzero(mine_B) + first).tolist()
            for position, group, turn in zip(
                positions, group_B[mine_B].tolist(), turn_B[mine_B].tolist(), strict=True
            ):
                at = int(np.searchsorted(before[group], turn, side="right")) - 1
                shard = int(shards[group][at])
                block, place = divmod(turn - int(before[group][at]), self.block_size)
                row = int(self._block(epoch, shard, block)[place])
                slots.append(Slot(position, epoch, group, shard, block, row))
            first += high - low
        return slots

    def span_of(self, shard: int, block: int) -> tuple[int, int]:
        """Return the first row of a block, and that behind its last one."""
        first = block * self.block_size
        return first, min(first + self.block_size, int(self.rows[shard]))

    def _shuffle_block(self, epoch: int, shard: int, block: int) -> np.ndarray:
        first, last = self.span_of(shard, block)
        return first + np.random.default_rng([self.seed, epoch, shard, block]).permutation(last - first)

    def _deal_epoch(self, epoch: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
        """Return each group's shards in an epoch, in order, the rows before each, and the group's rows `[G]`."""
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        group_of = deal(self.rows[shuffled], self.groups)
        shards = [shuffled[group_of == group] for group in range(self.groups)]
        before = [np.cumsum(self.rows[mine]) - self.rows[mine] for mine in shards]
        return shards, before, np.array([self.rows[mine].sum() for mine in shards])

    def _find_owners(self, epoch: int, reader: Reader) -> np.ndarray:
        """Return a mask `[G]` of the groups that `reader` reads."""
        if reader.world_size > self.groups:
            raise ValueError(
                f"the stream has {self.groups} groups of shards, and {reader.world_size} processes train; each reads groups of "
                "its own. Write more shards, or start fewer processes."
            )
        rows_G = self._epoch(epoch)[2]
        largest = np.argsort(-rows_G, kind="stable")
        of_rank = largest[deal(rows_G[largest], reader.world_size) == reader.rank]
        mine = of_rank[deal(rows_G[of_rank], reader.workers) == reader.worker]
        return np.isin(np.arange(self.groups), mine)


def interleave(rows_G: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return group and row of positions `low` to `high`, each group spread evenly.

    Row k of a group of n rows stands at (k + 1/2) / n, and positions count the rows from left to right, groups in turn where
    they stand together. So the row at position p of N stands within G / 2 rows of p / N, and only rows near it are looked at.
    """
    groups, total = len(rows_G), int(rows_G.sum())
    first_G = np.maximum(0, rows_G * (low - groups) // total - 1)
    stop_G = np.minimum(rows_G, rows_G * (high + groups) // total + 2)
    group = np.repeat(np.arange(groups), stop_G - first_G)
    starts_G = np.cumsum(stop_G - first_G) - (stop_G - first_G)
    turn = np.arange(len(group)) - starts_G[group] + first_G[group]
    near = np.lexsort((group, (turn + 0.5) / rows_G[group]))
    chosen = near[low - int(first_G.sum()) : high - int(first_G.sum())]
    return group[chosen], turn[chosen]


def deal(rows: np.ndarray, parts: int) -> np.ndarray:
    """Assign each item, in turn, to the part with the fewest rows so far; return the part of each."""
    heap = [(0, part) for part in range(parts)]
    owner = np.empty(len(rows), dtype=np.int64)
    for item, count in enumerate(rows.tolist()):
        held, part = heap[0]
        owner[item] = part
        heapq.heapreplace(heap, (held + count, part))
    return owner
