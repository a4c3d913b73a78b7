"""The order of the global batches: complete, distinct, a function of the step, the same for any number of processes."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_utils import distributed
from mm_utils.data.batches.order import (
    ATTEMPTS,
    GlobalOrder,
    choose_captions,
    evaluation_batches,
    replacement_rows,
)
from mm_utils.data.batches.sizes import BatchSizes


def in_order(num_rows: int, batch_size: int, seed: int) -> GlobalOrder:
    """An order whose batches have one size."""
    return GlobalOrder(num_rows, BatchSizes((0,), (batch_size,)), seed)


def on_rank(patch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    patch.setattr(distributed, "rank", lambda: rank)
    patch.setattr(distributed, "world_size", lambda: world)


def test_seeds_share_no_epoch() -> None:
    """Seed 7 has no epoch of seed 8: neither the order, the captions nor the replacement rows."""
    ones = np.ones(3000, np.int64)
    keys = np.random.default_rng(3).integers(0, 2**63 - 1, 3000)
    orders = {seed: GlobalOrder(3000, BatchSizes((0,), (1500,)), seed) for seed in (7, 8, 9)}
    drawn = []
    for seed, epoch in [(7, 1), (8, 0), (7, 2), (9, 0)]:
        rows = [row for step in (0, 1) for row, _ in orders[seed].batch(2 * epoch + step)]
        drawn.append((np.array(rows), choose_captions(seed, epoch * ones, keys, np.full(3000, 5))))
    for first, (order, captions) in enumerate(drawn):
        for other_order, other_captions in drawn[:first]:
            assert (order == other_order).mean() < 0.01
            assert abs((captions == other_captions).mean() - 0.2) < 0.05
    assert replacement_rows(7, 1, 5, 1000) != replacement_rows(8, 0, 5, 1000)


def test_rows_moved_over_an_epoch_stay_uniform() -> None:
    """The repair at the end of an epoch must not favour any row for the batch that crosses it."""
    crossing = Counter(row for seed in range(3000) for row, epoch in in_order(5, 3, seed).batch(1) if epoch == 1)
    assert sum(crossing.values()) == 3000
    assert max(crossing.values()) < 720  # 600 in expectation, with a standard deviation of 22


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6))
def test_evaluation_covers_every_row_once(num_rows: int, batch_size: int, world: int) -> None:
    shares = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            on_rank(patch, rank, world)
            batches = evaluation_batches(num_rows, batch_size)
            shares.append(list(batches))
            assert len(batches) == len(shares[-1]) == len(shares[0])
    assert [draw for share in shares for batch in share for draw in batch] == [(row, 0) for row in range(num_rows)]
    assert all(len(batch) <= batch_size for share in shares for batch in share)


# -- schedules ----------------------------------------------------------------------------------------------------------
schedules = st.tuples(
    st.integers(2, 24), st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=0, max_size=3)
).map(
    lambda first_and_growth: BatchSizes(
        tuple(np.cumsum([0, *(steps for steps, _ in first_and_growth[1])]).tolist()),
        tuple(np.cumsum([first_and_growth[0], *(more for _, more in first_and_growth[1])]).tolist()),
    )
)


@given(schedules, st.integers(0, 70), st.integers(0, 2**32))
def test_every_epoch_is_a_permutation_with_any_batch_sizes(sizes: BatchSizes, more: int, seed: int) -> None:
    num_rows = sizes.sizes[-1] + more
    order = GlobalOrder(num_rows, sizes, seed)
    steps = sizes.step_of(8 * num_rows) + 1
    batches = [order.batch(step) for step in range(steps)]
    assert [len(batch) for batch in batches] == [sizes.at(step) for step in range(steps)]
    assert all(len({row for row, _ in batch}) == len(batch) for batch in batches)
    stream = [draw for batch in batches for draw in batch]
    for epoch in range(8):
        assert sorted(stream[epoch * num_rows :][:num_rows]) == [(row, epoch) for row in range(num_rows)]
    assert all(type(value) is int for draw in stream for value in draw)
    for step in {0, steps // 2, steps - 1}:  # a function of the step alone
        assert GlobalOrder(num_rows, sizes, seed).batch(step) == batches[step]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:8,20:16,10:32", "goes back from step 20 to step 10"),
        ("0:8,20:4", "goes back from 8 to 4 pairs"),
        ("5:8", "begins at step 5"),
        ("0:128", "is 128, .* has 5 images; .* at most --global_batch_size 5"),
        *((text, "write step:size") for text in ("8", "0:8,", "0:x")),
    ],
)
def test_invalid_sizes_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GlobalOrder(5, BatchSizes.parse(text), 0)


def test_replacement_rows_are_spread_and_distinct() -> None:
    tried = Counter()  # type: Counter[int]
    for epoch in range(200):
        found = replacement_rows(3, epoch, -(2**62), 50)
        assert len(found) == len(set(found)) <= ATTEMPTS
        assert found == replacement_rows(3, epoch, -(2**62), 50)
        tried.update(found)
    assert set(tried) == set(range(50))
    assert max(tried.values()) < 2 * min(tried.values())
    assert replacement_rows(0, 0, 0, 1) == [0]
