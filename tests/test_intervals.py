"""Intervals against a bootstrap over images, and by hand."""

import math

import pytest
import torch

from mm_utils.intervals import mean_interval


@pytest.mark.parametrize("captions", [1, 5])
def test_agrees_with_a_bootstrap_over_images(captions: int) -> None:
    """Captions of an image are mostly right or wrong together, so that they count for little more than one."""
    generator = torch.Generator().manual_seed(captions)
    ease_M = torch.rand(200, 1, generator=generator).round() * 0.8 + 0.1
    hit_MC = (torch.rand(200, captions, generator=generator) < ease_M).double()
    key_Q = (7 * torch.arange(200)).repeat_interleave(captions)
    shuffled = torch.randperm(len(key_Q), generator=generator)
    mean, half_width = mean_interval(hit_MC.flatten()[shuffled], key_Q[shuffled])
    drawn = torch.randint(0, 200, (20_000, 200), generator=generator)
    deviation = hit_MC.mean(1)[drawn].mean(1).std().item()
    assert mean == pytest.approx(hit_MC.mean().item())
    assert half_width == pytest.approx(1.96 * deviation, rel=0.03)
    if captions == 5:
        assert half_width > 1.5 * 1.96 * math.sqrt(mean * (1 - mean) / len(key_Q))


def test_images_with_more_captions_count_more() -> None:
    """The mean of 3 captions of one image and 1 of another, and the variance of a ratio: by hand."""
    mean, half_width = mean_interval(torch.tensor([1, 1, 0, 0]), torch.tensor([5, 5, 5, 9]))
    assert mean == 0.5
    assert half_width == pytest.approx(1.959964 * math.sqrt((0.5**2 + 0.5**2) * 2 / 4**2))


def test_differences_have_intervals_too() -> None:
    value_Q = torch.tensor([1.0, 0, -1, 1])
    mean, half_width = mean_interval(value_Q, torch.arange(4))
    assert mean == 0.25
    assert half_width == pytest.approx(1.959964 * value_Q.double().std().item() / 2)


def test_where_all_agree_the_rule_of_three_holds() -> None:
    assert mean_interval(torch.ones(600), torch.arange(300).repeat(2)) == (1.0, 0.01)
    assert mean_interval(torch.zeros(1), torch.tensor([4])) == (0.0, 1.0)
