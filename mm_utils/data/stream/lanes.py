"""Which rows form step s where rows can only be read one after the other: the order of a stream.

Shards are files, or runs of rows in a file. Each epoch deals them at random to a fixed number of lanes, so that lanes hold
about as many rows. A lane reads its shards in turn, each in blocks of consecutive rows, and shuffles inside the block.
The rows of all lanes are then interleaved in proportion to the lanes' lengths: every lane gives its rows evenly over the
whole epoch, all lanes end together, and a batch holds rows of as many places of the source as there are lanes.

What is guaranteed:
  - The batch of step s is a pure function of (rows of the shards, batch sizes, seed, lanes, block size, s). Ranks, workers
    and restarts change nothing, and any step is found without walking through those before it.
  - Every row is drawn exactly once an epoch, and every batch has exactly its size.
What is weaker than in `mm_utils.data.order`:
  - The order is no uniform permutation. Rows of one block meet in neighbouring steps; two rows of a shard that are more than
    a block apart never change their order. Shards that were sorted when they were written stay so to that extent.
  - A batch that reaches over the end of an epoch may hold an image twice. The loss takes neither for a negative of the other.
  - There are no length buckets.

A reader, one of the workers of one of the ranks, reads whole lanes. Which ones is chosen per epoch so that readers have about
the same to read. Until the end of an epoch no two readers open the same shard.

Shape letters: L lanes, B rows of a step.
"""

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from mm_utils.data.order import BatchSizes


class Slot(NamedTuple):
    """One row of a step: the `row`-th of its shard, which is the `place`-th of the shuffled `block` that holds it.

    `position` counts all rows of the stream from 0; `lane` is who reads it, in `epoch`.
    """

    position: int
    epoch: int
    lane: int
    shard: int
    block: int
    place: int
    row: int


class Reader(NamedTuple):
    """Who reads: `worker` of `workers` of `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1


@dataclass(frozen=True)
class _Epoch:
    """How an epoch deals its shards: those of each lane in turn, the rows before each of them, and the rows of each lane."""

    shards: list[np.ndarray]
    before: list[np.ndarray]
    rows_L: np.ndarray


class LaneOrder:
    """The endless sequence of global batches of a stream.

    Args:
        rows: how many there are in each shard, none 0.
        sizes: pairs per step.
        seed: decides who gets which shard, and how blocks are shuffled.
        lanes: how many shards are read side by side.
        block_size: rows that are shuffled among themselves.

    Raises:
        ValueError: if there are fewer rows than a batch needs, or fewer shards than lanes.
    """

    def __init__(self, rows: Sequence[int] | np.ndarray, sizes: BatchSizes, seed: int, lanes: int, block_size: int):
        self.rows, self.sizes, self.seed = np.asarray(rows, dtype=np.int64), sizes, seed
        self.lanes, self.block_size, self.num_rows = lanes, block_size, int(self.rows.sum())
        if not 1 <= lanes <= len(rows):
            raise ValueError(
                f"--stream_lanes is {lanes}; every lane reads a shard of its own, and there are {len(rows)}. Give at most "
                "that many, or write more shards."
            )
        if self.num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the stream has {self.num_rows:,} rows; a batch holds a row "
                f"only once. Give at most --global_batch_size {self.num_rows}."
            )
        self._epoch = lru_cache(maxsize=2)(self._deal_epoch)
        self._owners = lru_cache(maxsize=4)(self._find_owners)
        self._block = lru_cache(maxsize=4 * lanes)(self._make_block)

    def __reduce__(self) -> tuple[type, tuple]:
        """Workers get what the order is made of; what has been worked out stays here."""
        return LaneOrder, (self.rows, self.sizes, self.seed, self.lanes, self.block_size)

    def batch(self, step: int, reader: Reader | None = None) -> list[Slot]:
        """The rows of `step`, counted from 0, in the order of the stream: all, or those that `reader` reads.

        Raises:
            ValueError: if there are fewer lanes than ranks, so that some would have nothing to read.
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
        lane_B, turn_B = interleave(dealt.rows_L, low, high)
        position_B = np.arange(low, high) + epoch * self.num_rows
        if reader is not None:
            mine_B = self._owners(epoch, reader)[lane_B]
            lane_B, turn_B, position_B = lane_B[mine_B], turn_B[mine_B], position_B[mine_B]
        return [
            self._slot(dealt, epoch, *where)
            for where in zip(position_B.tolist(), lane_B.tolist(), turn_B.tolist(), strict=True)
        ]

    def _slot(self, dealt: _Epoch, epoch: int, position: int, lane: int, turn: int) -> Slot:
        before = dealt.before[lane]
        at = int(np.searchsorted(before, turn, side="right")) - 1
        shard = int(dealt.shards[lane][at])
        block, place = divmod(turn - int(before[at]), self.block_size)
        row = int(self.block_rows(epoch, shard, block)[place])
        return Slot(position, epoch, lane, shard, block, place, row)

    def block_rows(self, epoch: int, shard: int, block: int) -> np.ndarray:
        """Rows of a block of `shard`, in the order in which `epoch` draws them; `Slot.place` counts here."""
        return self._block(epoch, shard, block)

    def _make_block(self, epoch: int, shard: int, block: int) -> np.ndarray:
        size = min(self.block_size, int(self.rows[shard]) - block * self.block_size)
        return block * self.block_size + np.random.default_rng([self.seed, epoch, shard, block]).permutation(size)

    def _deal_epoch(self, epoch: int) -> _Epoch:
        shuffled = np.random.default_rng([self.seed, epoch]).permutation(len(self.rows))
        lane_of = deal(self.rows[shuffled], self.lanes)
        shards = [shuffled[lane_of == lane] for lane in range(self.lanes)]
        before = [np.cumsum(self.rows[mine]) - self.rows[mine] for mine in shards]
        return _Epoch(shards, before, np.array([self.rows[mine].sum() for mine in shards]))

    def _find_owners(self, epoch: int, reader: Reader) -> np.ndarray:
        """Whether `reader` reads the lane: bool `[L]`."""
        if reader.world_size > self.lanes:
            raise ValueError(
                f"--stream_lanes is {self.lanes}, and {reader.world_size} processes train; each reads lanes of its own. Write "
                "more shards, or start fewer processes."
            )
        rows_L = self._epoch(epoch).rows_L
        largest = np.argsort(-rows_L, kind="stable")
        of_rank = largest[deal(rows_L[largest], reader.world_size) == reader.rank]
        mine = of_rank[deal(rows_L[of_rank], reader.workers) == reader.worker]
        return np.isin(np.arange(self.lanes), mine)


def interleave(rows_L: np.ndarray, low: int, high: int) -> tuple[np.ndarray, np.ndarray]:
    """Lane, and row of the lane, at positions `low` to `high` of all lanes' rows, each lane spread evenly over the whole.

    Row k of a lane of n rows stands at (k + 1/2) / n, and positions count the rows from left to right, lanes in turn where
    they stand together. As many rows of a lane as belong to a share t of the whole lie left of t, give or take one half.
    So the row at position p of N stands within L / 2 rows of p / N, and only rows near it need be looked at.
    """
    lanes, total = len(rows_L), int(rows_L.sum())
    first_L = np.maximum(0, rows_L * (low - lanes) // total - 1)
    stop_L = np.minimum(rows_L, rows_L * (high + lanes) // total + 2)
    lane = np.repeat(np.arange(lanes), stop_L - first_L)
    starts_L = np.cumsum(stop_L - first_L) - (stop_L - first_L)
    turn = np.arange(len(lane)) - starts_L[lane] + first_L[lane]
    near = np.lexsort((lane, (turn + 0.5) / rows_L[lane]))
    chosen = near[low - int(first_L.sum()) : high - int(first_L.sum())]
    return lane[chosen], turn[chosen]


def deal(rows: np.ndarray, parts: int) -> np.ndarray:
    """Give each item, in turn, to the part with the fewest rows so far: the part of each."""
    heap = [(0, part) for part in range(parts)]
    owner = np.empty(len(rows), dtype=np.int64)
    for item, count in enumerate(rows.tolist()):
        held, part = heap[0]
        owner[item] = part
        heapq.heapreplace(heap, (held + count, part))
    return owner
