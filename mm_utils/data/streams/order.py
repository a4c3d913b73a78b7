"""The order of a stream: the rows of step s where rows can only be read one after the other.

Shards are files, or runs of rows in a file. Each epoch assigns them at random to a fixed number of groups, so that groups
hold about as many rows. Of each group, one shard after the other is read, each in blocks of consecutive rows, which are
shuffled inside the block. The rows of all groups are then interleaved in proportion to the groups' sizes: every group yields
its rows evenly over the whole epoch, all groups end together, and a batch holds rows of as many places of the source as
there are groups.

What is guaranteed:
  - The batch of step s is a pure function of (rows of the shards, batch sizes, seed, groups, block size, s). Ranks, workers
    and restarts change nothing, and any step is found without walking through those before it.
  - Every row is drawn exactly once an epoch, and every batch has exactly its size.
What is weaker than in `mm_utils.data.batches.order`:
  - The order is not a uniform permutation. Rows of one block meet in neighbouring steps; two rows of a shard that are more than
    a block apart never change their order. Shards that were sorted when they were written stay so to that extent.
  - A batch that reaches over the end of an epoch may hold an image twice. The loss takes neither for a negative of the other.

A reader, one of the workers of one of the ranks, reads whole groups. Its groups are chosen per epoch so that readers have
about the same to read. Until the end of an epoch no two readers open the same shard.

Shape letters: G groups, B rows of a step.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mm_utils.data.batches.order import BatchSizes


class Slot(NamedTuple):
    """One row of a step: a shard's `row`-th, `place`-th of its shuffled `block`.

    `position` counts all rows of the stream from 0; `group` is the shard's group in `epoch`.
    """

    position: int
    epoch: int
    group: int
    shard: int
    block: int
    place: int
    row: int


class Reader(NamedTuple):
    """Worker `worker` of `workers` of rank `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True)
class _Epoch:
    """Each group's shards in an epoch, in order, the rows before each, and the group's rows."""

    shards: list[np.ndarray]
    before: list[np.ndarray]
    rows_G: np.ndarray


class InterleavedOrder:
    """The endless sequence of global batches of a stream.

    Args:
        rows: the number of rows of each shard, none 0.
        sizes: the global batch size as a function of the step.
        seed: decides the group of each shard, and the order inside blocks.
        groups: number of interleaved shard groups.
        block_size: rows that are shuffled among themselves.

    Raises:
        ValueError: if there are fewer rows than a batch needs, or fewer shards than groups.
    """

    def __init__(self, rows: Sequence[int] | np.ndarray, sizes: BatchSizes, seed: int, groups: int, block_size: int):
        self.rows, self.sizes, self.seed = np.asarray(rows, dtype=np.int64), sizes, seed
        self.groups, self.block_size, self.num_rows = groups, block_size, int(self.rows.sum())
        if not 1 <= groups <= len(rows):
            raise ValueError(
                f"--set stream_interleave is {groups}; every group has shards of its own, and there are {len(rows)}. Give at "
                "most that many, or write more shards."
            )
        if self.num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the stream has {self.num_rows:,} rows; a batch holds a row "
                f"only once. Give at most --global_batch_size {self.num_rows}."
            )
        self._epoch = lru_cache(maxsize=2)(self._deal_epoch)
        self._owners = lru_cache(maxsize=4)(self._find_owners)
        self._block = lru_cache(maxsize=4 * groups)(self._make_block)

    def __reduce__(self) -> tuple[type, tuple]:
        """Leave the caches here when the order is sent to workers."""
        return InterleavedOrder, (self.rows, self.sizes, self.seed, self.groups, self.block_size)

    def batch(self, step: int, reader: Reader | None = None) -> list[Slot]:
        """Return the rows of `step`, from 0, in the stream's order: all, or those of `reader`.

        Raises:
            ValueError: if there are fewer groups than ranks, so that some would have nothing to read.
        """
        first, size = self.sizes.before(step), self.sizes.at(step)
        slots: list[Slot] = []
        while size:
            epoch, low = divmod(first, self.num_rows)
            high = min(low + size, self.num_rows)
            slots += self._slots(epoch, low, high, reader)
            first, size = first + high - low, size - (high - low)
        return slots

    def _slots(self, epoch: int, low: int, high: int, reader: Reader | None) -> list[Slot]:
        dealt = self._epoch(epoch)
        group_B, turn_B = interleave(dealt.rows_G, low, high)
        position_B = np.arange(low, high) + epoch * self.num_rows
        if reader is not None:
            mine_B = self._owners(epoch, reader)[group_B]
            group_B, turn_B, position_B = group_B[mine_B], turn_B[mine_B], position_B[mine_B]
        return [
            self._slot(dealt, epoch, *where)
            for where in zip(position_B.tolist(), group_B.tolist(), turn_B.tolist(), strict=True)
        ]

    def _slot(self, dealt: _Epoch, epoch: int, position: int, group: int, turn: int) -> Slot:
        before = dealt.before[group]
        at = int(np.searchsorted(before, turn, side="right")) - 1
        shard = int(dealt.shards[group][at])
        block, place = divmod(turn - int(before[at]), self.block_size)
        row = int(self.block_rows(epoch, shard, block)[place])
        return Slot(position, epoch, group, shard, block, place, row)

    def block_rows(self, epoch: int, shard: int, block: int) -> np.ndarray:
        """Return the rows of a block of `shard` in the order of `epoch`; `Slot.place` counts here."""
        return self._block(epoch, shard, block)

    def _make_block(self, epoch: int, shard: int, block: int) -> np.ndarray:
        size = min(self.block_size, int(self.rows[shard]) - block * self.block_size)
        return block * self.block_size + np.random.default_rng([self.seed, epoch, shard, block]).permutation(size)

    def _deal_epoch(self, epoch: int) -> _Epoch:
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        group_of = deal(self.rows[shuffled], self.groups)
        shards = [shuffled[group_of == group] for group in range(self.groups)]
        before = [np.cumsum(self.rows[mine]) - self.rows[mine] for mine in shards]
        return _Epoch(shards, before, np.array([self.rows[mine].sum() for mine in shards]))

    def _find_owners(self, epoch: int, reader: Reader) -> np.ndarray:
        """Return a mask `[G]` of the groups that `reader` reads."""
        if reader.world_size > self.groups:
            raise ValueError(
                f"--set stream_interleave is {self.groups}, and {reader.world_size} processes train; each reads groups of its "
                "own. Write more shards, or start fewer processes."
            )
        rows_G = self._epoch(epoch).rows_G
        largest = np.argsort(-rows_G, kind="stable")
        of_rank = largest[deal(rows_G[largest], reader.world_size) == reader.rank]
        mine = of_rank[deal(rows_G[of_rank], reader.workers) == reader.worker]
        return np.isin(np.arange(self.groups), mine)


def interleave(rows_G: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Return group and row of positions `low` to `high`, each group spread evenly.

    Row k of a group of n rows stands at (k + 1/2) / n, and positions count the rows from left to right, groups in turn
    where they stand together. As many rows of a group as belong to a share t of the whole lie left of t, give or take one
    half. So the row at position p of N stands within G / 2 rows of p / N, and only rows near it need be looked at.
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
