"""Rows with similar captions are put side by side, and stay so in every epoch."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.extras.mining.similar_captions import group_similar


def table(rows: list[list[list[int]]]) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(rows, pa.list_(pa.list_(pa.int32())))])


def random_rows(count: int, seed: int = 0) -> list[list[list[int]]]:
    rng = np.random.default_rng(seed)
    return [
        [rng.integers(10, 500, rng.integers(3, 9)).tolist() for _ in range(rng.integers(1, 4))] for _ in range(count)
    ]


@given(
    st.lists(st.lists(st.lists(st.integers(0, 9), max_size=4), min_size=1, max_size=3), max_size=30), st.integers(2, 5)
)
@settings(max_examples=60)
def test_an_arrangement_has_every_row_once(rows: list[list[list[int]]], size: int) -> None:
    assert sorted(group_similar(table(rows), size).tolist()) == list(range(len(rows)))


@pytest.mark.parametrize("size", [2, 3])
def test_rows_of_the_same_words_are_found_among_many(size: int) -> None:
    """In any order of the words, however far apart the rows are."""
    rows = random_rows(300)
    rng = np.random.default_rng(1)
    groups = [
        [place, *(len(rows) + copy for copy in range((size - 1) * place, (size - 1) * (place + 1)))]
        for place in range(40)
    ]
    rows += [
        [rng.permutation(caption).tolist() for caption in rows[group[0]]] for group in groups for _ in range(size - 1)
    ]
    found = group_similar(table(rows), size)
    blocks = {frozenset(found[low : low + size].tolist()) for low in range(0, len(found) // size * size, size)}
    assert all(frozenset(group) in blocks for group in groups)


def test_rare_words_count_more_than_common_ones() -> None:
    """Rows 2k and 2k + 1 share two rare words, rows of one parity five common ones."""
    rows = [[[1000 + row // 2, 2000 + row // 2, *range(5 * (row % 2), 5 * (row % 2) + 5)]] for row in range(80)]
    found = group_similar(table(rows), 2).reshape(-1, 2)
    assert (found // 2 == found[:, :1] // 2).all(1).mean() >= 0.8


def test_the_same_captions_give_the_same_arrangement() -> None:
    rows = random_rows(200)
    assert np.array_equal(group_similar(table(rows), 2), group_similar(table(rows), 2))
    chunks = pa.chunked_array([table(rows[:70]).combine_chunks(), table(rows[70:]).combine_chunks()])
    assert np.array_equal(group_similar(chunks, 2), group_similar(table(rows), 2))


@pytest.mark.parametrize(("num_rows", "block"), [(64, 2), (67, 2), (64, 4), (67, 4), (2**16 + 3, 4)])
def test_blocks_stay_together_and_nothing_is_lost(num_rows: int, block: int) -> None:
    """Except where a batch ends, and where rows move at the end of an epoch."""
    arrangement = np.random.default_rng(0).permutation(num_rows)
    block_of = np.empty(num_rows, int)
    block_of[arrangement] = np.arange(num_rows) // block
    order = GlobalOrder(num_rows, BatchSizes((0,), (16,)), 5, arrangement=arrangement, block=block)
    steps = range(num_rows // 16)
    batches = [np.array([row for row, _ in order.batch(step)]) for step in steps]
    seen = np.concatenate(batches)
    assert len(np.unique(seen)) == len(seen)
    together = [np.unique(block_of[batch], return_counts=True)[1] for batch in batches]
    assert np.mean(np.concatenate(together) == block) > 0.95
    stream = [draw for step in range(num_rows // 8) for draw in order.batch(step)]
    assert sorted(stream[:num_rows]) == [(row, 0) for row in range(num_rows)]
    first, second = stream[:16], stream[num_rows : num_rows + 16]
    assert {row for row, _ in first} != {row for row, _ in second}
