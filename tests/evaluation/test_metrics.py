"""Intervals against a bootstrap over images, and by hand."""

import math
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import normalize

from mm_utils.evaluation.metrics import (
    helps,
    mean_interval,
    share_with_interval,
    spread,
    wilson_interval,
)
from tests.kit.truthful_model import split_of


def test_wilson_interval_by_hand() -> None:
    assert wilson_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)  # Brown, Cai and DasGupta's formula
    assert wilson_interval(0, 20)[0] == 0
    assert wilson_interval(20, 20)[1] == 1
    low, high = wilson_interval(1, 4)
    assert share_with_interval("x", 0.25, 4) == {"x": 0.25, "x_low": low, "x_high": high}


def test_mean_interval_agrees_with_a_bootstrap_over_images() -> None:
    """Captions of an image are mostly right or wrong together, so that they count for little more than one."""
    captions = 5
    generator = torch.Generator().manual_seed(5)
    ease_M = torch.rand(200, 1, generator=generator).round() * 0.8 + 0.1
    hit_MC = (torch.rand(200, captions, generator=generator) < ease_M).double()
    key_Q = (7 * torch.arange(200)).repeat_interleave(captions)
    shuffled = torch.randperm(len(key_Q), generator=generator)
    mean, half_width = mean_interval(hit_MC.flatten()[shuffled], key_Q[shuffled])
    drawn = torch.randint(0, 200, (20_000, 200), generator=generator)
    deviation = hit_MC.mean(1)[drawn].mean(1).std().item()
    assert mean == pytest.approx(hit_MC.mean().item())
    assert half_width == pytest.approx(1.96 * deviation, rel=0.03)
    assert half_width > 1.5 * 1.96 * math.sqrt(mean * (1 - mean) / len(key_Q))


def test_images_with_more_captions_count_more() -> None:
    """The mean of 3 captions of one image and 1 of another, and the variance of a ratio: by hand."""
    mean, half_width = mean_interval(torch.tensor([1, 1, 0, 0]), torch.tensor([5, 5, 5, 9]))
    assert mean == 0.5
    assert half_width == pytest.approx(1.959964 * math.sqrt((0.5**2 + 0.5**2) * 2 / 4**2))


def test_equal_values_have_the_interval_of_the_rule_of_three() -> None:
    assert mean_interval(torch.ones(600), torch.arange(300).repeat(2)) == (1.0, 0.01)
    assert mean_interval(torch.zeros(1), torch.tensor([4])) == (0.0, 1.0)


@pytest.mark.parametrize(
    ("better", "worse", "other", "expected"),
    [(60, 20, 0, True), (30, 20, 0, False), (60, 20, -1, False), (0, 0, 0, False)],
)
def test_a_head_helps_that_gains_more_than_chance_and_loses_nowhere(
    better: int, worse: int, other: int, expected: bool
) -> None:
    """Some of 1,000 captions get to the first place and some lose it; so do some of 200 images."""
    before = torch.tensor([2] * 500 + [1] * 500)
    after = before.index_fill(0, torch.arange(better), 1).index_fill(0, 500 + torch.arange(worse), 2)
    images = torch.ones(200, dtype=torch.long)
    directions = {
        "text_to_image": (before, after, torch.arange(1000) % 200),
        "image_to_text": (images, images.index_fill(0, torch.arange(-other), 2), torch.arange(200)),
    }
    ranks = {
        name: SimpleNamespace(cosine_Q=cosine_Q, reranked_Q=reranked_Q, queries=SimpleNamespace(group=group_Q))
        for name, (cosine_Q, reranked_Q, group_Q) in directions.items()
    }
    assert helps(ranks) == expected


def test_spread_is_the_mean_distance_from_the_centroid() -> None:
    rows = normalize(torch.randn(50, 16) + 0.2, dim=1)
    assert spread(rows) == pytest.approx((rows - rows.mean(0)).square().sum(1).mean().item(), rel=1e-5)
    assert abs(spread(rows[:1].expand(300, -1))) < 1e-6


def test_images_that_share_captions_are_one_group() -> None:
    """Also where only a third image connects two."""
    split = split_of(torch.zeros(4, 1), torch.zeros(6, 1), [0, 0, 1, 1, 2, 3])  # two captions of the first two images
    split.text_key_T = torch.tensor([5, 4, 4, 3, 3, 8])
    assert split.group_M.tolist() == [1000, 1000, 1000, 1021]
    split.text_key_T = None
    assert split.group_M is split.image_key_M
