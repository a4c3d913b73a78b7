"""The order of the global batches: complete, distinct, a function of the step, the same for any number of processes."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_utils import ranks
from mm_utils.data.order import Draw, EvaluationBatches, GlobalOrder, RankBatches


def on_rank(patch: pytest.MonkeyPatch, rank: int, world: int) -> None:
    patch.setattr(ranks, "rank", lambda: rank)
    patch.setattr(ranks, "world_size", lambda: world)


sizes = st.integers(2, 24).flatmap(lambda batch: st.tuples(st.integers(batch, 4 * batch + 3), st.just(batch)))


@given(sizes, st.integers(0, 2**32))
@settings(max_examples=60)
def test_stream_is_one_permutation_after_another(size: tuple[int, int], seed: int) -> None:
    num_rows, batch_size = size
    order = GlobalOrder(num_rows, batch_size, seed)
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
    straight = GlobalOrder(*size, seed)
    sequence = [straight.batch(step) for step in range(61)]
    jumping = GlobalOrder(*size, seed)
    for step in steps:
        assert jumping.batch(step) == sequence[step]
        assert GlobalOrder(*size, seed).batch(step) == sequence[step]


def test_a_far_step_is_found_at_once() -> None:
    order = GlobalOrder(1000, 64, 0)
    assert len({row for row, _ in order.batch(10_000_000)}) == 64


def test_seed_and_epoch_decide() -> None:
    first = [row for row, _ in GlobalOrder(64, 32, 0).batch(0)]
    assert first != [row for row, _ in GlobalOrder(64, 32, 1).batch(0)]
    assert first != [row for row, _ in GlobalOrder(64, 32, 0).batch(2)]
    assert first != sorted(first)


def test_every_pair_of_rows_meets_in_a_batch() -> None:
    """Neighbours of one epoch are not neighbours of the next: negatives change."""
    order = GlobalOrder(16, 4, 0)
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
    crossing = Counter(row for seed in range(3000) for row, epoch in GlobalOrder(5, 3, seed).batch(1) if epoch == 1)
    assert sum(crossing.values()) == 3000
    assert max(crossing.values()) < 720  # 600 in expectation, with a standard deviation of 22


@pytest.mark.parametrize("world", range(1, 6))
@pytest.mark.parametrize(("num_rows", "batch_size"), [(37, 8), (10, 3), (64, 64)])
def test_ranks_share_out_every_batch(num_rows: int, batch_size: int, world: int) -> None:
    order, start, stop = GlobalOrder(num_rows, batch_size, 7), 3, 20
    shares: list[list[list[Draw]]] = []
    for rank in range(world):
        with pytest.MonkeyPatch.context() as patch:
            on_rank(patch, rank, world)
            batches = RankBatches(order, start, stop)
            shares.append(list(batches))
            assert len(batches) == len(shares[-1]) == stop - start
    for step, parts in zip(range(start, stop), zip(*shares, strict=True), strict=True):
        assert [draw for part in parts for draw in part] == order.batch(step)
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
        GlobalOrder(100, 1, 0)
    with pytest.raises(
        ValueError, match=r"--global_batch_size is 128, .* has 5 images; .* at most --global_batch_size 5"
    ):
        GlobalOrder(5, 128, 0)
