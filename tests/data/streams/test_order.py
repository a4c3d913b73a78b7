"""The order of a stream, against a plain reference that lists all rows of an epoch."""

import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.streams.order import InterleavedOrder


@st.composite
def orders(draw: st.DrawFn) -> InterleavedOrder:
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda rows: sum(rows) >= 2))
    small = draw(st.integers(2, min(9, sum(rows))))
    large = draw(st.integers(small, min(17, sum(rows))))
    sizes = BatchSizes((0, draw(st.integers(1, 9))), (small, large))
    return InterleavedOrder(
        rows, sizes, draw(st.integers(0, 2**31)), draw(st.integers(1, len(rows))), draw(st.integers(1, 12))
    )


def plain_epoch(order: InterleavedOrder, epoch: int) -> list[tuple[int, int]]:
    """Shard and row of all draws: the groups filled one shard after the other, then sorted by where their rows stand."""
    groups: list[list[tuple[int, int]]] = [[] for _ in range(order.groups)]
    for shard in np.random.default_rng([order.seed, epoch]).permutation(len(order.rows)).tolist():
        least, rows = min(groups, key=len), list(range(order.rows[shard]))
        for block, first in enumerate(range(0, len(rows), order.block_size)):
            inside = rows[first : first + order.block_size]
            shuffled = np.random.default_rng([order.seed, epoch, shard, block]).permutation(len(inside))
            least += [(shard, inside[place]) for place in shuffled]
    placed = [
        ((turn + 0.5) / len(rows), group, row) for group, rows in enumerate(groups) for turn, row in enumerate(rows)
    ]
    return [row for _, _, row in sorted(placed)]


@given(orders(), st.integers(0, 20))
def test_any_step_is_that_part_of_the_epochs_one_after_the_other(order: InterleavedOrder, step: int) -> None:
    first, size = order.sizes.before(step), order.sizes.at(step)
    epochs = range(first // order.num_rows, (first + size) // order.num_rows + 1)
    listed = [(epoch, *row) for epoch in epochs for row in plain_epoch(order, epoch)]
    begin = first - epochs[0] * order.num_rows
    slots = pickle.loads(pickle.dumps(order)).batch(step)
    assert [(slot.epoch, slot.shard, slot.row) for slot in slots] == listed[begin : begin + size]
    assert [slot.position for slot in slots] == list(range(first, first + size))


@given(orders(), st.data())
def test_parts_share_a_step_and_within_an_epoch_a_shard_is_read_by_one(
    order: InterleavedOrder, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, order.groups + 3))
    owner: dict[tuple[int, int], int] = {}
    for step in range(order.sizes.step_of(order.num_rows) + 1):
        read = [order.batch(step, part, parts) for part in range(parts)]
        assert sorted(slot for slots in read for slot in slots) == order.batch(step)
        for part, slots in enumerate(read):
            assert all(owner.setdefault((slot.epoch, slot.shard), part) == part for slot in slots)


def test_a_stream_of_many_billion_rows_is_found_at_once() -> None:
    order = InterleavedOrder([10**8 + shard for shard in range(64)], BatchSizes((0,), (4096,)), 0, 64, 256)
    slots = order.batch(order.num_rows // 4096 - 2)
    assert len({(slot.shard, slot.row) for slot in slots}) == 4096
    assert len({slot.group for slot in slots}) == 64


def test_too_few_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="--global_batch_size is 8, and the stream has 5 rows"):
        InterleavedOrder([3, 2], BatchSizes((0,), (8,)), 0, 1, 4)
