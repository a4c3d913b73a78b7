"""Little padding without choosing who is whose negative: a batch's captions go through the text tower in groups of a length.

Padding a batch to its longest caption computes two to five times the tokens there are. Filling batches with captions of one
length avoids that, and changes what is learnt: the negatives of a pair are then those that look like it in length, and so
in language and style (`--length_bucket_window`; figures in docs/log.md). A text tower, though, reads every caption by
itself. So the batch stays as it was drawn, and its captions, sorted by length, are embedded group by group.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

PASS_TOKENS = {"cpu": 32, "cuda": 1024}
"""What one more pass through a tower costs, in tokens: time to start its kernels, or until they fill the device."""


def length_groups(lengths: Sequence[int], device_type: str) -> list[range]:
    """Cut rows, longest caption first, into groups padded to their own longest: the fewest tokens, passes counted in.

    Rows that are not sorted stay together. There is at least one group, if an empty one.
    """
    if not lengths or any(longer < shorter for longer, shorter in pairwise(lengths)):
        return [range(len(lengths))]
    values, first = np.unique(-np.asarray(lengths), return_index=True)
    starts = np.append(first, len(lengths))
    # cheapest[k]: of all rows from the k-th distinct length on; end[k]: where their first group ends
    cheapest, end = np.zeros(len(starts)), np.zeros(len(values), dtype=int)
    for k in range(len(values) - 1, -1, -1):
        costs = -values[k] * (starts[k + 1 :] - starts[k]) + cheapest[k + 1 :]
        end[k] = k + 1 + costs.argmin()
        cheapest[k] = costs.min() + PASS_TOKENS.get(device_type, PASS_TOKENS["cuda"])
    groups, k = [], 0
    while k < len(values):
        groups.append(range(int(starts[k]), int(starts[end[k]])))
        k = end[k]
    return groups


def padded_tokens(lengths: Sequence[int], groups: Sequence[range]) -> int:
    """Tokens that are computed for `groups` of captions of these lengths."""
    return sum(len(group) * max(lengths[group.start : group.stop], default=0) for group in groups)
