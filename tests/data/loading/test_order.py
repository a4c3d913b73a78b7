"""The order of the global batches: complete, distinct, a function of the step, the same for any number of processes."""

import tracemalloc
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_utils import ranks
from mm_utils.data import order as order_module
from mm_utils.data.order import (
    BatchSizes,
    Draw,
    EvaluationBatches,
    GlobalOrder,
    RankBatches,
    choose_captions,
    permute,
)


def in_order(num_rows: int, batch_size: int, seed: int) -> GlobalOrder:
    """Without schedule or buckets."""
    return GlobalOrder(num_rows, BatchSizes((0,), (batch_size,)), seed)


def on_rank(patch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    patch.setattr(ranks, "rank", lambda: rank)
    patch.setattr(ranks, "world_size", lambda: world)


@pytest.fixture(params=[0, 2**16], ids=["computed", "listed"], scope="module", autouse=True)
def both_ways(request: pytest.FixtureRequest) -> Iterator[None]:
    """Epochs are shuffled as lists or computed row by row; whatever is true of an order is true of both."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "_LISTED", request.param)
        yield


sizes = st.integers(2, 24).flatmap(lambda batch: st.tuples(st.integers(batch, 4 * batch + 3), st.just(batch)))


@given(sizes, st.integers(0, 2**32))
@settings(max_examples=60)
def test_stream_is_one_permutation_after_another(size: tuple[int, int], seed: int) -> None:
    num_rows, batch_size = size
    order = in_order(num_rows, batch_size, seed)
    steps = 8 * num_rows // batch_size + 1
    batches = [order.batch(step) for step in range(steps)]
    for batch in batches:
        assert len(batch) == batch_size
        assert len({row for row, _ in batch}) == batch_size
    stream = [draw for batch in batches for draw in batch]
    for epoch in range(8):
        begin = epoch * num_rows
        assert sorted(stream[begin : begin + num_rows]) == [(row, epoch) for row in range(num_rows)]
    assert all(type(value) is int for draw in stream for value in draw)


@given(sizes, st.integers(0, 2**32), st.lists(st.integers(0, 60), min_size=1, max_size=6))
@settings(max_examples=30)
def test_batch_is_a_function_of_the_step(size: tuple[int, int], seed: int, steps: list[int]) -> None:
    straight = in_order(*size, seed)
    sequence = [straight.batch(step) for step in range(61)]
    jumping = in_order(*size, seed)
    for step in steps:
        assert jumping.batch(step) == sequence[step]
        assert in_order(*size, seed).batch(step) == sequence[step]


def test_a_far_step_is_found_at_once() -> None:
    order = in_order(1000, 64, 0)
    assert len({row for row, _ in order.batch(10_000_000)}) == 64


def test_seed_and_epoch_decide() -> None:
    first = [row for row, _ in in_order(64, 32, 0).batch(0)]
    assert first != [row for row, _ in in_order(64, 32, 1).batch(0)]
    assert first != [row for row, _ in in_order(64, 32, 0).batch(2)]
    assert first != sorted(first)


def test_every_pair_of_rows_meets_in_a_batch() -> None:
    """Neighbours of one epoch are not neighbours of the next: negatives change."""
    order = in_order(16, 4, 0)
    met = {
        frozenset((row, other))
        for step in range(400)
        for row, _ in order.batch(step)
        for other, _ in order.batch(step)
        if row < other
    }
    assert len(met) == 16 * 15 // 2


def test_rows_moved_over_an_epoch_stay_uniform() -> None:
    """The repair at the end of an epoch must not favour any row for the batch that crosses it."""
    crossing = Counter(row for seed in range(3000) for row, epoch in in_order(5, 3, seed).batch(1) if epoch == 1)
    assert sum(crossing.values()) == 3000
    assert max(crossing.values()) < 720  # 600 in expectation, with a standard deviation of 22


@pytest.mark.parametrize("world", range(1, 6))
@pytest.mark.parametrize(("num_rows", "batch_size"), [(37, 8), (10, 3), (64, 64)])
def test_ranks_share_out_every_batch(num_rows: int, batch_size: int, world: int) -> None:
    order, start, stop = in_order(num_rows, batch_size, 7), 3, 20
    shares: list[list[list[Draw]]] = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            on_rank(patch, rank, world)
            batches = RankBatches(order, start, stop)
            shares.append(list(batches))
            assert len(batches) == len(shares[-1]) == stop - start
    for step, parts in zip(range(start, stop), zip(*shares, strict=True), strict=True):
        turns = [draw for turn in zip_longest(*parts) for draw in turn if draw is not None]
        assert turns == order.batch(step)
        assert max(map(len, parts)) - min(map(len, parts)) <= 1


@given(st.integers(0, 60), st.integers(1, 20), st.integers(1, 6))
@settings(max_examples=80)
def test_evaluation_covers_every_row_once(num_rows: int, batch_size: int, world: int) -> None:
    shares = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            on_rank(patch, rank, world)
            batches = EvaluationBatches(num_rows, batch_size)
            shares.append(list(batches))
            assert len(batches) == len(shares[-1]) == len(shares[0])
    assert [draw for share in shares for batch in share for draw in batch] == [(row, 0) for row in range(num_rows)]
    assert all(len(batch) <= batch_size for share in shares for batch in share)


def test_errors_name_the_flag() -> None:
    with pytest.raises(ValueError, match="--global_batch_size is 1;"):
        in_order(100, 1, 0)
    with pytest.raises(
        ValueError, match=r"--global_batch_size is 128, .* has 5 images; .* at most --global_batch_size 5"
    ):
        in_order(5, 128, 0)


# -- permutations -------------------------------------------------------------------------------------------------------


@given(st.integers(2, 5000), st.integers(0, 2**32), st.integers(0, 1000))
@settings(max_examples=60)
def test_permutations_hold_every_row_once(count: int, seed: int, epoch: int) -> None:
    rows = permute(np.arange(count), count, seed, epoch)
    assert sorted(rows.tolist()) == list(range(count))
    some = np.random.default_rng(seed).integers(0, count, 20)
    assert permute(some, count, seed, epoch).tolist() == rows[some].tolist()


def test_permutations_look_random() -> None:
    """Place and row, and rows of neighbouring places, of neighbouring epochs and seeds, are independent."""
    count, cells = 100_003, 10
    one, next_epoch, other_seed = (permute(np.arange(count), count, *key) for key in ((1, 5), (1, 6), (2, 5)))
    beside = [np.arange(count), np.roll(one, 1), np.roll(one, 317), next_epoch, other_seed]  # 317 x 316 is the grid
    for other in beside:
        table, _, _ = np.histogram2d(one, other, cells)
        expected = count / cells**2
        assert 40 < ((table - expected) ** 2 / expected).sum() < 140  # chi square of 81 degrees of freedom: 81 +- 13
    assert 0.328 < np.abs(one - np.arange(count)).mean() / count < 0.339  # a third
    assert (one == np.arange(count)).sum() < 8  # 1 in expectation


def test_every_order_of_four_rows_occurs() -> None:
    found = Counter(tuple(permute(np.arange(4), 4, seed, 0)) for seed in range(4800))
    assert len(found) == 24
    assert min(found.values()) > 140  # 200 in expectation, with a standard deviation of 14
    assert max(found.values()) < 260


def test_memory_does_not_grow_with_the_rows() -> None:
    order = in_order(10**11, 256, 0)
    tracemalloc.start()
    drawn = [draw for step in (0, 5, 10**11 // 256, 10**9) for draw in order.batch(step)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1_000_000
    assert len(set(drawn)) == 4 * 256
    assert max(row for row, _ in drawn) > 9 * 10**10


# -- schedules ----------------------------------------------------------------------------------------------------------

schedules = st.lists(st.tuples(st.integers(1, 9), st.integers(0, 7)), min_size=0, max_size=3).map(
    lambda growth: BatchSizes(
        tuple(np.cumsum([0, *(steps for steps, _ in growth)]).tolist()),
        tuple(np.cumsum([2, *(more for _, more in growth)]).tolist()),
    )
)


@given(schedules, st.integers(0, 80))
def test_batch_sizes_count(sizes: BatchSizes, step: int) -> None:
    each = [sizes.at(earlier) for earlier in range(step + 1)]
    assert sizes.before(step) == sum(each[:-1])
    first = sum(each[:-1])
    assert sizes.step_of(first) == sizes.step_of(first + each[-1] - 1) == step


@given(schedules, st.integers(0, 30), st.integers(0, 2**32), st.integers(1, 5))
@settings(max_examples=60)
def test_a_schedule_cuts_the_same_epochs(sizes: BatchSizes, more: int, seed: int, window: int) -> None:
    """Whatever the batch sizes and buckets, every epoch is a permutation, and no batch holds a row twice."""
    num_rows = sizes.sizes[-1] + more
    lengths = np.random.default_rng(seed).integers(3, 60, num_rows)
    bucketed = GlobalOrder(num_rows, sizes, seed, lambda rows, epochs: lengths[rows] + epochs % 3, window)
    plain = GlobalOrder(num_rows, sizes, seed)
    steps = sizes.step_of(5 * num_rows) + 1
    for order in (plain, bucketed):
        batches = [order.batch(step) for step in range(steps)]
        assert [len(batch) for batch in batches] == [sizes.at(step) for step in range(steps)]
        assert all(len({row for row, _ in batch}) == len(batch) for batch in batches)
        drawn = Counter(draw for batch in batches for draw in batch)
        assert all(drawn[row, epoch] == 1 for epoch in range(5) for row in range(num_rows))
        assert max(drawn.values()) == 1
    again = GlobalOrder(num_rows, sizes, seed, bucketed.caption_lengths, window)
    assert again.batch(steps - 1) == batches[-1]


def test_a_phase_begins_where_the_one_before_ends() -> None:
    """Growing the batch takes no row twice: the stream goes on."""
    steady = in_order(1000, 4, 3)
    grown = GlobalOrder(1000, BatchSizes.parse("0:4,10:8"), 3)
    assert [grown.batch(step) for step in range(10)] == [steady.batch(step) for step in range(10)]
    assert grown.batch(10) == steady.batch(10) + steady.batch(11)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0:8,0:16", "goes back from step 0 to step 0"),
        ("0:8,20:16,10:32", "goes back from step 20 to step 10"),
        ("0:8,20:4", "goes back from 8 to 4 pairs"),
        ("5:8", "begins at step 5"),
        ("0:1,5:8", "--global_batch_size is 1;"),
        *((text, "write step:size") for text in ("", "8", "0:8;10:16", "0:8,", "0:8:9", "0:x")),
    ],
)
def test_schedules_that_make_no_sense(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        BatchSizes.parse(text)


# -- buckets ------------------------------------------------------------------------------------------------------------


def test_buckets_save_padding_and_stay_in_their_window() -> None:
    lengths = np.minimum(64, np.random.default_rng(0).lognormal(3, 0.6, 4096).astype(int) + 3)
    sizes = BatchSizes((0,), (64,))
    plain = GlobalOrder(4096, sizes, 5)
    bucketed = GlobalOrder(4096, sizes, 5, lambda rows, epochs: lengths[rows], 16)

    def padding(order: GlobalOrder) -> float:
        shown = [[lengths[row] for row, _ in order.batch(step)] for step in range(64)]
        return sum(len(batch) * max(batch) for batch in shown) / sum(map(sum, shown))

    assert padding(plain) > 2
    assert padding(bucketed) < 1.1
    for window in range(4):
        steps = range(16 * window, 16 * window + 16)
        rows = [sorted(draw for step in steps for draw in order.batch(step)) for order in (plain, bucketed)]
        assert rows[0] == rows[1]
    longest = [max(lengths[row] for row, _ in bucketed.batch(step)) for step in range(16)]
    assert longest != sorted(longest)


# -- captions -----------------------------------------------------------------------------------------------------------


def test_captions_are_chosen_evenly_and_apart() -> None:
    keys, counts = np.random.default_rng(0).integers(0, 2**63, 3000), np.full(3000, 5)
    chosen = [choose_captions(7, np.full(3000, epoch), keys, counts) for epoch in range(4)]
    for one in chosen:
        assert np.bincount(one).min() > 500  # 600 in expectation, with a standard deviation of 22
    assert 0.15 < (chosen[0] == chosen[1]).mean() < 0.25
    assert 0.15 < (chosen[0] == choose_captions(8, np.zeros(3000, int), keys, counts)).mean() < 0.25
    assert set(choose_captions(7, np.zeros(50, int), keys[:50], np.ones(50, int))) == {0}
