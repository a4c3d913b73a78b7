"""The closed form beside a plain reference, and what it must not depend on."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from mm_utils.training.closed_form import FOLDS, Features, Maps, fit


def pairs(images: int = 60, captions: int = 1, noise: float = 0.3, seed: int = 0, names: bool = False) -> Features:
    """Features of 12 and 9 channels that share four directions, a mean, and noise."""
    draw = torch.Generator().manual_seed(seed)
    latent = torch.randn(images, 4, generator=draw)
    owner = torch.arange(images).repeat_interleave(captions)

    def side(channels: int, rows: Tensor) -> Tensor:
        mixing = torch.randn(4, channels, generator=draw)
        others = torch.randn(len(rows), channels, generator=draw)
        return rows @ mixing + noise * others + torch.linspace(1, 3, channels)

    text = side(9, latent[owner])
    return Features(side(12, latent), text, owner, text[::captions].clone() if names else None)


def inverse_root(matrix: Tensor) -> Tensor:
    values, vectors = torch.linalg.eigh(matrix)
    return vectors @ torch.diag(values.rsqrt()) @ vectors.T


def without_mean(rows: Tensor) -> Tensor:
    """Rows of unit length without the direction of their mean."""
    rows = F.normalize(rows.double(), dim=-1)
    direction = F.normalize(rows.mean(0), dim=0)
    return rows - torch.outer(rows @ direction, direction)


def reference_scores(features: Features, shrinkage: float, width: int) -> Tensor:
    """Inner products of mapped images and captions, by symmetric inverse roots and a full decomposition."""
    image, text = without_mean(features.image_MA), without_mean(features.text_TB)
    roots = []
    for rows in (image, text):
        covariance = rows.T @ rows / len(rows)
        mean_variance = covariance.trace() / len(covariance)
        roots.append(
            inverse_root(covariance + shrinkage * mean_variance * torch.eye(len(covariance), dtype=torch.double))
        )
    left, values, right = torch.linalg.svd(roots[0] @ image.T @ text / len(image) @ roots[1])
    strength = torch.diag(values[:width])
    return (image @ roots[0] @ left[:, :width]) @ strength @ (text @ roots[1] @ right.T[:, :width]).T


def scores(features: Features, maps: tuple[Tensor, Tensor]) -> Tensor:
    unit = features.unit()
    return (unit.image_MA @ maps[0]) @ (unit.text_TB @ maps[1]).T


@pytest.mark.parametrize("shrinkage", [0.1, 3.0])
@pytest.mark.parametrize("width", [2, 4, 8])
def test_the_maps_are_those_of_a_plain_reference(shrinkage: float, width: int) -> None:
    features = pairs()
    maps = Maps(features.unit().moments()).of(shrinkage, 0.0, width)
    torch.testing.assert_close(scores(features, maps), reference_scores(features, shrinkage, width), rtol=0, atol=1e-7)
    assert [tuple(side.shape) for side in maps] == [(12, width), (9, width)]


@given(st.integers(0, 1000), st.integers(1, 59))
def test_moments_without_a_part_are_those_of_the_rest(seed: int, cut: int) -> None:
    features = pairs(captions=2, seed=seed, names=True).unit()
    first = torch.arange(60) < cut
    sums = [each.moments() for each in (features, features.take(first), features.take(~first))]
    for whole, one, other in zip(*sums, strict=True):
        torch.testing.assert_close(whole - one, other, rtol=0, atol=1e-10)


def test_an_image_counts_once_however_many_captions_it_has() -> None:
    features = pairs(captions=2).unit()
    repeated = torch.cat([torch.arange(len(features.text_TB)), torch.arange(10)])
    owner, order = features.owner_T[repeated].sort(stable=True)
    weight, _, _, image_AA, *_ = Features(features.image_MA, features.text_TB[repeated[order]], owner).moments()
    torch.testing.assert_close(image_AA, features.image_MA.T @ features.image_MA)
    assert weight == pytest.approx(60)


def test_pairs_left_out_tell_signal_from_noise() -> None:
    chance = FOLDS / 400
    signal, noise = fit(pairs(400, noise=0.1), 4), fit(pairs(400, noise=100.0), 4)
    assert min(signal.recalls) > 0.5
    assert max(noise.recalls) < 5 * chance
    assert signal.scale > noise.scale
    assert signal.candidates == 100


def test_names_weigh_as_much_as_they_tell() -> None:
    few = pairs(40, noise=2.0, names=True)
    truth = pairs(40, noise=0.0, names=True).names_MB
    random = torch.randn(40, 9, generator=torch.Generator().manual_seed(1))
    assert fit(dataclasses.replace(few, names_MB=truth), 4).name_weight > 0
    assert fit(dataclasses.replace(few, names_MB=random), 4).name_weight == 0
    constant = fit(dataclasses.replace(few, names_MB=torch.ones(40, 9)), 4)  # names without any difference add nothing
    torch.testing.assert_close(constant.image_AE, fit(dataclasses.replace(few, names_MB=None), 4).image_AE)


@pytest.mark.parametrize("side", ["image_MA", "text_TB"])
def test_features_that_are_all_alike_or_not_finite(side: str) -> None:
    features = pairs(40, names=True)
    rows = getattr(features, side)
    found = fit(dataclasses.replace(features, **{side: torch.ones_like(rows)}), 4)
    assert not found.image_AE.any()
    assert not found.text_BE.any()
    with pytest.raises(ValueError, match="is not finite"):
        fit(dataclasses.replace(features, **{side: rows / 0}), 4)
    with pytest.raises(ValueError, match="is not finite"):
        fit(dataclasses.replace(features, names_MB=torch.full((40, 9), float("nan"))), 4)
