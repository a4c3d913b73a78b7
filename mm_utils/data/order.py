"""Which rows form step s: a pure function of (number of rows, batch size, seed, s), and of nothing else.

The rows of all epochs form one stream, a fresh permutation per epoch, and step s takes the s-th `batch_size` of them.
Where a batch reaches over the end of an epoch, rows it already holds are moved just behind it, so that no batch holds an
image twice, every batch has exactly `batch_size` rows, and nothing is dropped or repeated: the last, incomplete batch of
an epoch is filled up from the next one.

A rank's share of a batch is a contiguous slice, so ranks, workers and restarts see the same global batches.
"""

from collections.abc import Iterator
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from mm_utils import ranks

Draw = tuple[int, int]
"""(row, epoch): the epoch decides caption and augmentation."""


class GlobalOrder:
    """The endless sequence of global batches.

    Raises:
        ValueError: if there are fewer rows than a batch needs.
    """

    def __init__(self, num_rows: int, batch_size: int, seed: int):
        if batch_size < 2:
            raise ValueError(f"--global_batch_size is {batch_size}; a contrastive batch needs at least 2 pairs.")
        if num_rows < batch_size:
            raise ValueError(
                f"--global_batch_size is {batch_size}, and the training split has {num_rows:,} images; a batch holds an "
                f"image only once. Give at most --global_batch_size {num_rows}."
            )
        self.num_rows, self.batch_size, self.seed = num_rows, batch_size, seed
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)

    def batch(self, step: int) -> list[Draw]:
        """The draws of global batch `step`, counted from 0."""
        first = step * self.batch_size
        epoch, low = divmod(first, self.num_rows)
        draws = [(int(row), epoch) for row in self._epoch(epoch)[low : low + self.batch_size]]
        missing = self.batch_size - len(draws)
        return draws + [(int(row), epoch + 1) for row in self._epoch(epoch + 1)[:missing]] if missing else draws

    def _make_epoch(self, epoch: int) -> np.ndarray:
        """The rows of an epoch in order. Only its first batch looks at the epoch before, and only at that one's tail."""
        independent = self.num_rows >= 2 * self.batch_size  # else a first batch may reach into its own epoch's tail
        first = max(epoch - 1, 0) if independent else 0
        rows = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            rows = self._follow(rows, later)
        return rows

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def _follow(self, before: np.ndarray, epoch: int) -> np.ndarray:
        rows = self._permutation(epoch)
        carried = epoch * self.num_rows % self.batch_size  # rows of `before` in the batch that crosses into this epoch
        if not carried:
            return rows
        head = rows[: self.batch_size]
        clash = np.isin(head, before[-carried:])
        return np.concatenate([head[~clash], head[clash], rows[self.batch_size :]])


class RankBatches(Sampler[list[Draw]]):
    """This rank's share of the global batches of steps `start` to `stop`."""

    def __init__(self, order: GlobalOrder, start: int, stop: int):
        self.order, self.start, self.stop = order, start, stop

    def __iter__(self) -> Iterator[list[Draw]]:
        mine = ranks.share(self.order.batch_size, ranks.rank(), ranks.world_size())
        for step in range(self.start, self.stop):
            yield self.order.batch(step)[mine.start : mine.stop]

    def __len__(self) -> int:
        return self.stop - self.start


class EvaluationBatches(Sampler[list[Draw]]):
    """This rank's share of all rows once, in order, about `batch_size` at a time, in as many batches on every rank."""

    def __init__(self, num_rows: int, batch_size: int):
        mine = ranks.share(num_rows, ranks.rank(), ranks.world_size())
        parts = -(-num_rows // (batch_size * ranks.world_size()))
        self.batches = [
            [(mine.start + place, 0) for place in ranks.share(len(mine), part, parts)] for part in range(parts)
        ]

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)
