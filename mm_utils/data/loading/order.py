"""Which rows form step s: a pure function of (rows, batch sizes, seed, s), and of nothing else.

The rows of all epochs form one stream, a fresh permutation per epoch, and every step takes the next batch of it. Where a
batch reaches over the end of an epoch, rows it already holds are moved just behind it, so that no batch holds an image
twice, every batch has exactly its size, and nothing is dropped or repeated: the last, incomplete batch of an epoch is
filled up from the next one.

Length buckets, on request: inside a window of steps, rows change places so that captions of about one length meet in a
batch, and the batches of the window are shuffled. Every row stays in its window, so in its epoch.

A rank takes every W-th row of a batch: ranks get captions of the same lengths, so none waits for another, and ranks,
workers and restarts see the same global batches.

Beyond `_LISTED` rows no permutation is held. Rows are then computed from their places, 0.2 ms for a batch of 1,024,
so that memory does not grow with the data set: 100 million rows would be 800 MB and 10 s an epoch on every rank.
"""

import math
from bisect import bisect_right
from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from mm_utils import ranks

_LISTED = 2**16
"""Up to so many rows an epoch is shuffled as a list, half a megabyte; beyond, row by row."""

Draw = tuple[int, int]
"""(row, epoch): the epoch decides caption and augmentation."""

CaptionLengths = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""(rows, epochs) -> tokens of the caption that each row shows in its epoch."""


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size as a function of the step: `sizes[k]` from step `starts[k]` on.

    Raises:
        ValueError: if it does not begin at step 0, goes back, shrinks, or holds a batch of less than 2.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.starts[0] != 0:
            raise ValueError(f"--batch_size_schedule begins at step {self.starts[0]}. Say what holds from step 0 on.")
        for earlier, later in zip(self.starts, self.starts[1:], strict=False):
            if later <= earlier:
                raise ValueError(
                    f"--batch_size_schedule goes back from step {earlier} to step {later}. Give rising steps."
                )
        for before, after in zip(self.sizes, self.sizes[1:], strict=False):
            if after < before:
                raise ValueError(
                    f"--batch_size_schedule goes back from {before} to {after} pairs; batches grow as training needs less "
                    "noise. Give rising sizes."
                )
        if self.sizes[0] < 2:
            raise ValueError(f"--global_batch_size is {self.sizes[0]}; a contrastive batch needs at least 2 pairs.")

    @classmethod
    def parse(cls, text: str) -> "BatchSizes":
        """Of `0:256,2000:512`: step and size, twice.

        Raises:
            ValueError: if that is not what it looks like.
        """
        try:
            phases = [tuple(map(int, phase.split(":"))) for phase in text.split(",")]
            starts, sizes = zip(*phases, strict=True)
        except ValueError:
            raise ValueError(
                f"--batch_size_schedule is {text!r}; write step:size, step:size, e.g. 0:256,2000:512."
            ) from None
        return cls(starts, sizes)

    def at(self, step: int) -> int:
        """Pairs of step `step`."""
        return self.sizes[self._phase(step)]

    def before(self, step: int) -> int:
        """Pairs of all steps before `step`."""
        phase = self._phase(step)
        whole = sum(
            size * (stop - start)
            for size, start, stop in zip(
                self.sizes[:phase], self.starts[:phase], self.starts[1 : phase + 1], strict=True
            )
        )
        return whole + self.sizes[phase] * (step - self.starts[phase])

    def step_of(self, pair: int) -> int:
        """The step that takes the `pair`-th pair of the stream, counted from 0."""
        phase = bisect_right([self.before(start) for start in self.starts], pair) - 1
        return self.starts[phase] + (pair - self.before(self.starts[phase])) // self.sizes[phase]

    def phase_of(self, step: int) -> tuple[int, int | None]:
        """First step with the size of `step`, and the first with another one (None: there is none)."""
        phase = self._phase(step)
        return self.starts[phase], self.starts[phase + 1] if phase + 1 < len(self.starts) else None

    def _phase(self, step: int) -> int:
        return bisect_right(self.starts, step) - 1


class GlobalOrder:
    """The endless sequence of global batches.

    Args:
        num_rows: images of the training split.
        sizes: pairs per step.
        seed: decides the permutations.
        caption_lengths: with it, captions of about one length form a batch,
        window: inside windows of this many steps.
        arrangement: all rows in a fixed order, in which blocks of consecutive ones belong together, that are shuffled as one,
        block: of so many rows (`mm_utils.data.neighbours`).

    Raises:
        ValueError: if there are fewer rows than a batch needs.
    """

    def __init__(
        self,
        num_rows: int,
        sizes: BatchSizes,
        seed: int,
        caption_lengths: CaptionLengths | None = None,
        window: int = 1,
        arrangement: np.ndarray | None = None,
        block: int = 1,
    ):
        if num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the training split has {num_rows:,} images; a batch holds "
                f"an image only once. Give at most --global_batch_size {num_rows}."
            )
        self.num_rows, self.sizes, self.seed = num_rows, sizes, seed
        self.caption_lengths, self.window = caption_lengths, window
        self.arrangement, self.block = arrangement, block if arrangement is not None else 1
        # A first batch that reaches into its epoch's tail makes every epoch depend on all before it.
        self._apart = num_rows >= 2 * sizes.sizes[-1]
        self._permutation = lru_cache(maxsize=3)(self._make_permutation)
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
        self._head = lru_cache(maxsize=2)(self._make_head)
        self._sorted = lru_cache(maxsize=2)(self._make_window)

    def batch(self, step: int) -> list[Draw]:
        """The draws of global batch `step`, counted from 0."""
        first, stop = (
            self._window_of(step) if self.caption_lengths is not None and self.window > 1 else (step, step + 1)
        )
        rows, epochs = self._in_turn(step) if stop - first == 1 else self._sorted(first, stop)[step - first]
        return list(zip(rows.tolist(), epochs.tolist(), strict=True))

    def _in_turn(self, step: int) -> tuple[np.ndarray, np.ndarray]:
        """Rows and epochs of a step as the stream has them."""
        size = self.sizes.at(step)
        epoch, low = divmod(self.sizes.before(step), self.num_rows)
        missing = max(0, low + size - self.num_rows)
        rows = self._places(epoch, low, low + size - missing)
        epochs = np.full(size, epoch)
        if missing:
            rows = np.concatenate([rows, self._places(epoch + 1, 0, missing)])
            epochs[-missing:] += 1
        return rows, epochs

    def _places(self, epoch: int, low: int, high: int) -> np.ndarray:
        """The rows at places `low` to `high` of an epoch."""
        if not self._apart:
            return self._epoch(epoch)[low:high]
        head = self._head(epoch)
        first = min(max(low, len(head)), high)
        return np.concatenate([head[low:high], self._shuffled(epoch, first, high)])

    def _window_of(self, step: int) -> tuple[int, int]:
        """First and last + 1 step of the window of `step`: of one batch size, and inside one epoch.

        A batch that reaches over the end of an epoch is a window of its own.
        """
        epoch = self.sizes.before(step) // self.num_rows
        first = self.sizes.step_of(epoch * self.num_rows)
        if self.sizes.before(first) < epoch * self.num_rows:
            first += 1
        after = self.sizes.step_of((epoch + 1) * self.num_rows)  # it takes the next epoch's first pair
        if step >= after:
            return step, step + 1
        start, stop = self.sizes.phase_of(step)
        first = max(first, start)
        first += (step - first) // self.window * self.window
        return first, min(first + self.window, after, *([stop] if stop is not None else []))

    def _make_window(self, first: int, stop: int) -> list[tuple[np.ndarray, np.ndarray]]:
        assert self.caption_lengths is not None
        parts = [self._in_turn(step) for step in range(first, stop)]
        rows, epochs = (np.concatenate(column) for column in zip(*parts, strict=True))
        by_length = np.argsort(self.caption_lengths(rows, epochs), kind="stable").reshape(stop - first, -1)
        places = np.random.default_rng([self.seed, first, stop]).permutation(stop - first)
        return [(rows[by_length[place]], epochs[by_length[place]]) for place in places]

    def _make_epoch(self, epoch: int) -> np.ndarray:
        """All rows of an epoch in order, where that takes all epochs before."""
        rows = self._shuffled(0, 0, self.num_rows)
        for later in range(1, epoch + 1):
            before, rows = rows, self._shuffled(later, 0, self.num_rows)
            size, carried = self._crossing(later)
            if carried:
                rows[:size] = _moved_behind(rows[:size], before[-carried:])
        return rows

    def _make_head(self, epoch: int) -> np.ndarray:
        """The first rows of an epoch, as far as they differ from its shuffle, which is no further than a batch."""
        size, carried = self._crossing(epoch)
        if not carried:
            return np.empty(0, np.int64)
        tail = self._shuffled(epoch - 1, self.num_rows - carried, self.num_rows)
        return _moved_behind(self._shuffled(epoch, 0, size), tail)

    def _crossing(self, epoch: int) -> tuple[int, int]:
        """Size of the batch that takes the first row of an epoch, and how many rows of the epoch before are in it."""
        step = self.sizes.step_of(epoch * self.num_rows)
        return self.sizes.at(step), epoch * self.num_rows - self.sizes.before(step)

    def _shuffled(self, epoch: int, low: int, high: int) -> np.ndarray:
        """A new array: the rows at these places of an epoch's shuffle. Rows that are in no block come last."""
        if self.arrangement is None:
            return self._shuffled_blocks(epoch, np.arange(low, high))
        places = np.arange(low, high)
        inside = places < self.num_rows // self.block * self.block
        block, offset = np.divmod(places[inside], self.block)
        places[inside] = self._shuffled_blocks(epoch, block) * self.block + offset
        return self.arrangement[places]

    def _shuffled_blocks(self, epoch: int, places: np.ndarray) -> np.ndarray:
        if self.num_rows <= _LISTED:
            return self._permutation(epoch)[places]
        return permute(places, self.num_rows // self.block, self.seed, epoch)

    def _make_permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows // self.block)


def _moved_behind(head: np.ndarray, carried: np.ndarray) -> np.ndarray:
    """The rows of `head`, those that `carried` holds last."""
    clash = np.isin(head, carried)
    return np.concatenate([head[~clash], head[clash]])


def permute(places: np.ndarray, count: int, seed: int, epoch: int) -> np.ndarray:
    """Where a pseudo-random permutation of `count` rows, given by (seed, epoch), puts these places; int64.

    A generalised Feistel network on a grid of at least `count` cells. What falls on a cell beyond `count` goes through it
    again until it does not: Black and Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA 2002.
    """
    across = math.isqrt(count - 1) + 1
    down = -(-count // across)
    with np.errstate(over="ignore"):
        keys = scramble(
            scramble(np.array([seed % 2**63 + epoch], np.uint64)) ^ np.arange(1, _ROUNDS + 1, dtype=np.uint64)
        )
        rows = _feistel(places.astype(np.uint64), across, down, keys)
        while (outside := rows >= count).any():
            rows[outside] = _feistel(rows[outside], across, down, keys)
    return rows.astype(np.int64)


_ROUNDS = 8


def _feistel(values: np.ndarray, across: int, down: int, keys: np.ndarray) -> np.ndarray:
    """A permutation of 0 ... `across * down` - 1: the two coordinates of a cell shift each other in turn."""
    right, left = np.divmod(values, np.uint64(across))
    for place, key in enumerate(keys):
        modulus = np.uint64(down if place % 2 else across)
        left, right = right, (left + scramble(right ^ key) % modulus) % modulus
    return right * np.uint64(across) + left


def choose_captions(seed: int, epochs: np.ndarray, image_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which of its `counts` captions each image shows in its epoch: a hash of (seed, epoch, image key)."""
    with np.errstate(over="ignore"):
        bits = scramble(scramble(np.uint64(seed % 2**63) + epochs.astype(np.uint64)) ^ image_keys.astype(np.uint64))
    return (bits % counts.astype(np.uint64)).astype(np.int64)


def scramble(bits: np.ndarray) -> np.ndarray:
    """Scramble uint64 values: splitmix64 (Steele et al., OOPSLA 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class RankBatches(Sampler[list[Draw]]):
    """This rank's share of the global batches of steps `start` to `stop`."""

    def __init__(self, order: GlobalOrder, start: int, stop: int):
        self.order, self.start, self.stop = order, start, stop

    @property
    def largest(self) -> int:
        """Rows of the largest batch."""
        return -(-self.order.sizes.at(max(self.start, self.stop - 1)) // ranks.world_size())

    def __iter__(self) -> Iterator[list[Draw]]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, number: int) -> list[Draw]:
        return self.order.batch(self.start + number)[ranks.rank() :: ranks.world_size()]

    def __len__(self) -> int:
        return self.stop - self.start

    def after(self, number: int) -> "RankBatches":
        """Those from the `number`-th on."""
        return RankBatches(self.order, self.start + number, self.stop)

    def name(self, number: int) -> str:
        """What the `number`-th is called."""
        return f"step {self.start + number + 1}"


class EvaluationBatches(Sampler[list[Draw]]):
    """This rank's share of all rows once, in order, about `batch_size` at a time, in as many batches on every rank."""

    def __init__(self, num_rows: int, batch_size: int):
        mine = ranks.share(num_rows, ranks.rank(), ranks.world_size())
        parts = -(-num_rows // (batch_size * ranks.world_size()))
        self.batches = [
            [(mine.start + place, 0) for place in ranks.share(len(mine), part, parts)] for part in range(parts)
        ]
        self.largest = max(map(len, self.batches), default=0)

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.batches)

    def __getitem__(self, number: int) -> list[Draw]:
        return self.batches[number]

    def __len__(self) -> int:
        return len(self.batches)

    def after(self, number: int) -> "EvaluationBatches":
        """Those from the `number`-th on."""
        rest = copy(self)
        rest.batches = self.batches[number:]
        return rest

    def name(self, number: int) -> str:
        """What the `number`-th is called."""
        return f"batch {number + 1} of {len(self)} of an evaluation"
