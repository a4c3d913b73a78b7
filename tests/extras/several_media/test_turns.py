"""The medium of a step: even, periodic, and each medium's own steps counted without a gap."""

from itertools import accumulate

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.extras.several_media.turns import Turns

SHARES = st.lists(st.integers(1, 12), min_size=2, max_size=4).map(
    lambda shares: dict(zip(("image", "sound", "clip", "scan"), shares, strict=False))
)


@given(SHARES)
@settings(max_examples=60, deadline=None)
def test_no_medium_is_a_step_away_from_its_share(shares: dict[str, int]) -> None:
    turns, total = Turns(shares), sum(shares.values())
    media = [turns.medium(step) for step in range(2 * total)]
    for medium, share in shares.items():
        taken = list(accumulate((each == medium for each in media), initial=0))
        assert [turns.before(medium, step) for step in range(2 * total + 1)] == taken
        assert max(abs(count - step * share / total) for step, count in enumerate(taken)) < 1
        assert taken[-1] == 2 * share
    assert media == [turns.medium(step + 10 * turns.period) for step in range(2 * total)]


def test_shares_have_no_common_factor() -> None:
    few, many = Turns({"image": 3, "sound": 1}), Turns({"image": 300, "sound": 100})
    assert many.period == 4
    assert [few.medium(step) for step in range(8)] == [many.medium(step) for step in range(8)]
    assert [few.medium(step) for step in range(4)].count("sound") == 1


@given(SHARES, st.lists(st.integers(1, 30), min_size=0, max_size=3, unique=True))
@settings(max_examples=60, deadline=None)
def test_batch_sizes_hold_in_each_mediums_own_steps(shares: dict[str, int], later: list[int]) -> None:
    sizes = BatchSizes((0, *sorted(later)), tuple(4 * (place + 1) for place in range(len(later) + 1)))
    turns = Turns(shares)
    own = {medium: turns.batch_sizes(medium, sizes) for medium in shares}
    pairs = dict.fromkeys(shares, 0)
    for step in range(60):
        medium = turns.medium(step)
        mine = turns.before(medium, step)
        assert own[medium].at(mine) == sizes.at(step)
        assert own[medium].before(mine) == pairs[medium]
        pairs[medium] += sizes.at(step)


def test_each_medium_sees_each_of_its_rows_once_an_epoch() -> None:
    turns, sizes = Turns({"image": 2, "sound": 1}), BatchSizes((0, 9), (4, 8))
    rows = {"image": 24, "sound": 16}
    orders = {name: GlobalOrder(count, turns.batch_sizes(name, sizes), seed=3) for name, count in rows.items()}
    seen: dict[str, list[int]] = {name: [] for name in rows}
    for step in range(30):
        medium = turns.medium(step)
        draws = orders[medium].batch(turns.before(medium, step))
        assert len({row for row, _ in draws}) == sizes.at(step)
        seen[medium] += [row for row, epoch in draws if epoch == 0]
    for name, count in rows.items():
        assert sorted(seen[name]) == list(range(count))


@pytest.mark.parametrize(
    "shares", [{"image": 0, "sound": 1}, {"image": -1, "sound": 1}, {"image": 1, "sound": 10_000}]
)
def test_shares_that_cannot_be(shares: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=r"--media_share is .*; give whole numbers"):
        Turns(shares)
