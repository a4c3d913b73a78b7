"""Which rows form step s: a pure function of (rows, batch sizes, seed, s), and of nothing else.

The rows of all epochs form one stream, a fresh permutation per epoch, and every step takes the next batch of it. Where a
batch reaches over the end of an epoch, rows it already holds are moved just behind it, so that no batch holds an image
twice, every batch has exactly its size, and nothing is dropped or repeated: the last, incomplete batch of an epoch is
filled up from the next one.

Length buckets, on request: inside a window of steps, rows change places so that captions of about one length meet in a
batch, and the batches of the window are shuffled. Every row stays in its window, so in its epoch.

A rank takes every W-th row of a batch: ranks get captions of the same lengths, so none waits for another, and ranks,
workers and restarts see the same global batches.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from torch.utils.data import Sampler

from mm_utils import ranks

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
    ):
        if num_rows < sizes.sizes[-1]:
            raise ValueError(
                f"--global_batch_size is {sizes.sizes[-1]}, and the training split has {num_rows:,} images; a batch holds "
                f"an image only once. Give at most --global_batch_size {num_rows}."
            )
        self.num_rows, self.sizes, self.seed = num_rows, sizes, seed
        self.caption_lengths, self.window = caption_lengths, window
        self._epoch = lru_cache(maxsize=2)(self._make_epoch)
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
        rows = self._epoch(epoch)[low : low + size]
        missing = size - len(rows)
        epochs = np.full(size, epoch)
        if missing:
            rows = np.concatenate([rows, self._epoch(epoch + 1)[:missing]])
            epochs[-missing:] += 1
        return rows, epochs

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
        """The rows of an epoch in order. Only its first batch looks at the epoch before, and only at that one's tail."""
        independent = self.num_rows >= 2 * self.sizes.sizes[-1]  # else a first batch may reach into its epoch's tail
        first = max(epoch - 1, 0) if independent else 0
        rows = self._permutation(first)
        for later in range(first + 1, epoch + 1):
            rows = self._follow(rows, later)
        return rows

    def _permutation(self, epoch: int) -> np.ndarray:
        return np.random.default_rng([self.seed, epoch]).permutation(self.num_rows)

    def _follow(self, before: np.ndarray, epoch: int) -> np.ndarray:
        rows = self._permutation(epoch)
        crossing = self.sizes.step_of(epoch * self.num_rows)
        carried = epoch * self.num_rows - self.sizes.before(crossing)  # rows of `before` in the batch that crosses
        if not carried:
            return rows
        size = self.sizes.at(crossing)
        head = rows[:size]
        clash = np.isin(head, before[-carried:])
        return np.concatenate([head[~clash], head[clash], rows[size:]])


def choose_captions(seed: int, epochs: np.ndarray, image_keys: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Which of its `counts` captions each image shows in its epoch: a hash of (seed, epoch, image key)."""
    with np.errstate(over="ignore"):
        bits = _mix(_mix(np.uint64(seed % 2**63) + epochs.astype(np.uint64)) ^ image_keys.astype(np.uint64))
    return (bits % counts.astype(np.uint64)).astype(np.int64)


def _mix(bits: np.ndarray) -> np.ndarray:
    """Scramble uint64 values: splitmix64 (Steele et al., OOPSLA 2014)."""
    bits = bits + np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


class RankBatches(Sampler[list[Draw]]):
    """This rank's share of the global batches of steps `start` to `stop`."""

    def __init__(self, order: GlobalOrder, start: int, stop: int):
        self.order, self.start, self.stop = order, start, stop

    def __iter__(self) -> Iterator[list[Draw]]:
        for step in range(self.start, self.stop):
            yield self.order.batch(step)[ranks.rank() :: ranks.world_size()]

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
