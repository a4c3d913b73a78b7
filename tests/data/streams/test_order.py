"""The order of a stream, against a plain reference that walks through all rows, and its guarantees as properties."""

import pickle
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.streams.order import InterleavedOrder, Reader, Slot, deal, interleave

SHARDS = st.lists(st.integers(1, 30), min_size=1, max_size=12)
SEEDS = st.integers(0, 2**31)


@st.composite
def orders(draw: st.DrawFn) -> InterleavedOrder:
    rows = draw(SHARDS.filter(lambda rows: sum(rows) >= 2))
    small = draw(st.integers(2, min(9, sum(rows))))
    large = draw(st.integers(small, min(17, sum(rows))))
    sizes = BatchSizes((0, draw(st.integers(1, 9))), (small, large))
    return InterleavedOrder(rows, sizes, draw(SEEDS), draw(st.integers(1, len(rows))), draw(st.integers(1, 12)))


def epoch_of(order: InterleavedOrder, epoch: int) -> list[Slot]:
    """All slots of an epoch, from whole steps."""
    first = order.sizes.step_of(epoch * order.num_rows)
    last = order.sizes.step_of((epoch + 1) * order.num_rows - 1)
    slots = [slot for step in range(first, last + 1) for slot in order.batch(step)]
    return [slot for slot in slots if slot.epoch == epoch]


@given(st.lists(st.integers(1, 40), min_size=1, max_size=20), st.data())
def test_interleaving_any_part_equals_sorting_all_rows(rows: list[int], data: st.DataObject) -> None:
    low = data.draw(st.integers(0, sum(rows)))
    high = data.draw(st.integers(low, sum(rows)))
    everything = sorted(
        ((turn + 0.5) / count, group, turn) for group, count in enumerate(rows) for turn in range(count)
    )
    found = interleave(np.array(rows), low, high)
    assert [(group, turn) for _, group, turn in everything[low:high]] == list(
        zip(*map(np.ndarray.tolist, found), strict=True)
    )


def test_a_stream_of_many_billion_rows_is_found_at_once() -> None:
    order = InterleavedOrder([10**8 + shard for shard in range(64)], BatchSizes((0,), (4096,)), 0, 64, 256)
    step = order.num_rows // 4096 - 2
    assert len({(slot.shard, slot.row) for slot in order.batch(step)}) == 4096
    assert len({slot.group for slot in order.batch(step)}) == 64


@given(orders())
def test_every_row_is_drawn_once_an_epoch_and_every_batch_is_full(order: InterleavedOrder) -> None:
    expected = {(shard, row) for shard, count in enumerate(order.rows.tolist()) for row in range(count)}
    for epoch in range(2):
        slots = epoch_of(order, epoch)
        assert Counter((slot.shard, slot.row) for slot in slots) == Counter(expected)
        assert [slot.position for slot in slots] == list(range(epoch * order.num_rows, (epoch + 1) * order.num_rows))
    assert all(len(order.batch(step)) == order.sizes.at(step) for step in range(12))


@given(orders(), st.integers(0, 20), st.data())
def test_readers_share_a_step_without_gap_or_overlap(order: InterleavedOrder, step: int, data: st.DataObject) -> None:
    world_size, workers = data.draw(st.integers(1, order.groups)), data.draw(st.integers(1, 3))
    readers = [Reader(rank, world_size, worker, workers) for rank in range(world_size) for worker in range(workers)]
    parts = [order.batch(step, reader) for reader in readers]
    assert sorted(slot for part in parts for slot in part) == order.batch(step)


@given(orders(), st.data())
def test_within_an_epoch_a_shard_has_one_reader(order: InterleavedOrder, data: st.DataObject) -> None:
    world_size = data.draw(st.integers(1, order.groups))
    owner: dict[tuple[int, int], int] = {}
    for step in range(order.sizes.step_of(order.num_rows) + 1):
        for rank in range(world_size):
            for slot in order.batch(step, Reader(rank, world_size)):
                assert owner.setdefault((slot.epoch, slot.shard), rank) == rank


@given(orders(), st.integers(0, 40))
def test_a_step_needs_nothing_of_the_steps_before(order: InterleavedOrder, step: int) -> None:
    walked = InterleavedOrder(order.rows.tolist(), order.sizes, order.seed, order.groups, order.block_size)
    for earlier in range(step):
        walked.batch(earlier)
    fresh = InterleavedOrder(order.rows.tolist(), order.sizes, order.seed, order.groups, order.block_size)
    assert walked.batch(step) == fresh.batch(step) == pickle.loads(pickle.dumps(walked)).batch(step)


@given(orders())
def test_a_group_reads_shard_after_shard_and_block_after_block(order: InterleavedOrder) -> None:
    blocks: dict[int, list[tuple[int, int]]] = {}
    for slot in epoch_of(order, 0):
        seen = blocks.setdefault(slot.group, [])
        if (slot.shard, slot.block) not in seen[-1:]:
            assert (slot.shard, slot.block) not in seen, "a group goes back to a block it has left"
            assert slot.block == (seen[-1][1] + 1 if seen and seen[-1][0] == slot.shard else 0)
            seen.append((slot.shard, slot.block))
        assert slot.row == order.block_rows(slot.epoch, slot.shard, slot.block)[slot.place]
        assert slot.row // order.block_size == slot.block


def test_rows_change_their_order_inside_a_block_and_shards_change_their_group_between_epochs() -> None:
    order = InterleavedOrder([500] * 16, BatchSizes((0,), (64,)), 3, 4, 100)
    first, second = epoch_of(order, 0), epoch_of(order, 1)
    for slots in (first, second):
        of_shard = [slot.row for slot in slots if slot.shard == 5]
        assert of_shard != sorted(of_shard)
        assert all(abs(row - place) < 100 for place, row in enumerate(of_shard))
    assert [slot.row for slot in first if slot.shard == 5] != [slot.row for slot in second if slot.shard == 5]
    groups = [{slot.shard: slot.group for slot in slots} for slots in (first, second)]
    assert groups[0] != groups[1]
    assert epoch_of(InterleavedOrder([500] * 16, BatchSizes((0,), (64,)), 4, 4, 100), 0) != first


def test_all_groups_last_until_the_end_of_the_epoch() -> None:
    order = InterleavedOrder([1000, 300, 20, 700, 450, 90], BatchSizes((0,), (64,)), 1, 3, 50)
    slots = epoch_of(order, 0)
    per_group = Counter(slot.group for slot in slots)
    for low in range(0, len(slots) - 64, 64):
        counts = Counter(slot.group for slot in slots[low : low + 64])
        assert all(abs(counts[group] - 64 * per_group[group] / len(slots)) <= 1 for group in per_group)


@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 8))
def test_dealing_differs_by_at_most_the_largest_item(rows: list[int], parts: int) -> None:
    owner = deal(np.array(rows), parts)
    held = [sum(count for count, part in zip(rows, owner, strict=True) if part == number) for number in range(parts)]
    assert max(held) - min(held) <= max(rows)


@pytest.mark.parametrize(
    ("rows", "groups", "message"),
    [
        ([9, 9], 3, "--set stream_interleave is 3; every group has shards of its own, and there are 2"),
        ([3, 2], 1, "--global_batch_size is 8, and the stream has 5 rows"),
    ],
)
def test_too_few_rows_or_shards_are_refused(rows: list[int], groups: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        InterleavedOrder(rows, BatchSizes((0,), (8,)), 0, groups, 4)


def test_more_processes_than_groups_are_refused() -> None:
    order = InterleavedOrder([9, 9], BatchSizes((0,), (8,)), 0, 2, 4)
    with pytest.raises(ValueError, match="--set stream_interleave is 2, and 3 processes train"):
        order.batch(0, Reader(0, 3))
