"""The size of the batch of every step."""

from bisect import bisect_right
from dataclasses import dataclass
from itertools import pairwise


@dataclass(frozen=True)
class BatchSizes:
    """Global batch size as a function of the step: `sizes[k]` from step `starts[k]` on.

    Raises:
        ValueError: if the schedule does not begin at step 0, if its steps do not rise, or if a size shrinks or is below 2.
    """

    starts: tuple[int, ...]
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        if self.starts[0] != 0:
            raise ValueError(f"--batch_size_schedule begins at step {self.starts[0]}. Say what holds from step 0 on.")
        for earlier, later in pairwise(self.starts):
            if later <= earlier:
                raise ValueError(
                    f"--batch_size_schedule goes back from step {earlier} to step {later}. Give rising steps."
                )
        for before, after in pairwise(self.sizes):
            if after < before:
                raise ValueError(
                    f"--batch_size_schedule goes back from {before} to {after} pairs; batches grow as training needs less "
                    "noise. Give rising sizes."
                )
        if self.sizes[0] < 2:
            raise ValueError(f"--global_batch_size is {self.sizes[0]}; a contrastive batch needs at least 2 pairs.")

    @classmethod
    def parse(cls, text: str) -> "BatchSizes":
        """Parse `step:size` pairs such as `0:256,2000:512`; ValueError if the text has another form."""
        try:
            phases = [tuple(map(int, phase.split(":"))) for phase in text.split(",")]
            starts, sizes = zip(*phases, strict=True)
        except ValueError:
            raise ValueError(
                f"--batch_size_schedule is {text!r}; write step:size, step:size, e.g. 0:256,2000:512."
            ) from None
        return cls(starts, sizes)

    def at_most(self, rows: int) -> "BatchSizes":
        """Return batches of all rows in place of one size that is larger."""
        return BatchSizes((0,), (rows,)) if len(self.sizes) == 1 and 2 <= rows < self.sizes[0] else self

    def at(self, step: int) -> int:
        """Return the number of pairs in step `step`."""
        return self.sizes[self._phase(step)]

    def before(self, step: int) -> int:
        """Return the number of pairs in all steps before `step`."""
        phase = self._phase(step)
        # before step 3000 of 0:256,2000:512 are 2000 x 256 + 1000 x 512 pairs
        spans = zip(self.sizes, pairwise(self.starts[: phase + 1]), strict=False)
        whole = sum(size * (stop - start) for size, (start, stop) in spans)
        return whole + self.sizes[phase] * (step - self.starts[phase])

    def step_of(self, pair: int) -> int:
        """Return the step that takes the `pair`-th pair of the stream, counted from 0."""
        phase = bisect_right([self.before(start) for start in self.starts], pair) - 1
        return self.starts[phase] + (pair - self.before(self.starts[phase])) // self.sizes[phase]

    def _phase(self, step: int) -> int:
        return bisect_right(self.starts, step) - 1
