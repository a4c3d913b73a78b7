"""Which row stands in for one that cannot be read: a pure function of (seed, epoch, row), so no matter who reads it, or when."""

import numpy as np

from mm_utils.data.order import scramble

ATTEMPTS = 16
"""A share p of unreadable rows leaves a place empty once in p^-17 rows; where nearly all are unreadable, no search helps."""

SHOWN_IN_VALIDATION = "its image is one of validation's"
"""How the reason ends for a row that may not be shown, though nothing is wrong with it."""


def substitutes(seed: int, epoch: int, key: int, count: int) -> list[int]:
    """Places among `count` rows to try in turn instead of the row that `key` names; none twice, at most `ATTEMPTS`.

    The row itself may be among them.
    """
    with np.errstate(over="ignore"):
        first = scramble(
            scramble(np.array([seed % 2**63 + epoch], np.uint64)) ^ np.array([key], np.int64).view(np.uint64)
        )
        drawn = scramble(first ^ np.arange(1, ATTEMPTS + 1, dtype=np.uint64)) % np.uint64(count)
    return list(dict.fromkeys(drawn.tolist()))
