"""Which medium a step has, where a run trains on several: a pure function of the step.

Every medium has steps of its own, counted from 0, with its own order of rows over them
(`mm_utils.data.batches.order.GlobalOrder`), its own epochs and its own place in a schedule of batch sizes. So the batches of a step
depend on data, shares, seed and step alone, as with one medium.
"""

import math
from fractions import Fraction

from mm_utils.data.batches.order import BatchSizes

MOST_SHARES = 10_000  # steps of a period, which is held as a table


class Turns:
    """The media of all steps, which repeat after a period of one step for each share.

    Within a period, turns are as even as can be: after any number of steps, no medium is further than 1 - 1/(2n - 2) steps from
    its share of them, n being the number of media (Tijdeman, "The chairman assignment problem", Discrete Mathematics 32, 1980).

    Args:
        shares: shares of the steps, whole numbers from 1 on, of two media or more; 6 and 2 are as 3 and 1.

    Raises:
        ValueError: if a share is below 1, or together they are too many.
    """

    def __init__(self, shares: dict[str, int]):
        if min(shares.values()) < 1 or sum(shares.values()) > MOST_SHARES:
            shown = ",".join(map(str, shares.values()))
            raise ValueError(
                f"--media_share is {shown}; give whole numbers from 1 on, together at most {MOST_SHARES:,}, e.g. 3,1."
            )
        common = math.gcd(*shares.values())
        self.shares = {medium: share // common for medium, share in shares.items()}
        self.period = sum(self.shares.values())
        self._media: list[str] = []
        self._before = {medium: [0] for medium in shares}  # its steps before each step of a period
        for _ in range(self.period):
            self._media.append(self._next())
            for medium, counts in self._before.items():
                counts.append(counts[-1] + (medium == self._media[-1]))

    def _next(self) -> str:
        """Return the next step's medium: of those far behind, the one whose time runs out first."""
        slack = 1 - Fraction(1, 2 * len(self.shares) - 2)
        due = {}
        for medium, share in self.shares.items():
            behind = Fraction(share * (len(self._media) + 1), self.period) - self._before[medium][-1]
            if behind >= 1 - slack:
                due[medium] = (slack - behind) * self.period / share
        return min(due, key=due.__getitem__)

    def medium(self, step: int) -> str:
        """Return the medium of step `step`, counted from 0."""
        return self._media[step % self.period]

    def before(self, medium: str, step: int) -> int:
        """Return how many steps before `step` have this medium."""
        periods, place = divmod(step, self.period)
        return periods * self.shares[medium] + self._before[medium][place]

    def batch_sizes(self, medium: str, sizes: BatchSizes) -> BatchSizes:
        """Return the batch sizes of the run as a function of this medium's own steps."""
        of_own = {self.before(medium, start): size for start, size in zip(sizes.starts, sizes.sizes, strict=True)}
        return BatchSizes(tuple(of_own), tuple(of_own.values()))

    def __str__(self) -> str:
        return ", ".join(f"{share} {medium}" for medium, share in self.shares.items())
