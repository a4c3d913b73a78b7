"""Squares: the centre for evaluation, random crops for training."""

import random

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data.media.medium import _random_box, squares, vary_loudness
from mm_utils.model.reading import center_square
from tests.kit.awkward import photo

RED = (200, 30, 60)


def window_of(square: torch.Tensor, width: int, height: int) -> tuple[float, float]:
    """Width and height of the window of `photo(width, height)` that was resized to `square`, from its colours."""
    size = square.shape[-1]
    scale = max(width - 1, height - 1) / 255
    low, high = size // 4, 3 * size // 4
    across = (square[0, :, high].float().mean() - square[0, :, low].float().mean()) * scale * size / (high - low)
    down = (square[1, high].float().mean() - square[1, low].float().mean()) * scale * size / (high - low)
    return float(across), float(down)


def test_center_square_is_the_centre() -> None:
    image = Image.new("RGB", (300, 100), "black")
    image.paste(RED, (100, 0, 200, 100))
    assert (center_square(image, 50).float().mean((1, 2)) - torch.tensor(RED)).abs().max() < 4
    assert torch.equal(center_square(photo(64, 64), 64), torch.from_numpy(np.array(photo(64, 64))).permute(2, 0, 1))


@given(st.integers(1, 400), st.integers(1, 400), st.integers(0, 2**32))
@settings(max_examples=20)
def test_whole_area_is_the_centre(width: int, height: int, seed: int) -> None:
    image = photo(width, height)
    assert torch.equal(squares([np.asarray(image)], 24, 1.0, random.Random(seed))[0][0], center_square(image, 24))


@given(st.integers(1, 2000), st.integers(1, 2000), st.floats(0.01, 0.999), st.integers(0, 2**32), st.integers(1, 10))
@settings(max_examples=150)
def test_crops_stay_inside_and_keep_their_area(
    width: int, height: int, min_area: float, seed: int, draws: int
) -> None:
    rng, largest = random.Random(seed), min(width, height) ** 2
    for _ in range(draws):
        left, top, right, bottom = _random_box(width, height, min_area, rng)
        assert 0 <= left < right <= width
        assert 0 <= top < bottom <= height
        across, down = right - left, bottom - top  # each rounded by half a pixel at most
        assert (across - 0.5) * (down - 0.5) <= largest * (1 + 1e-9)
        assert (across + 0.5) * (down + 0.5) >= largest * min_area * (1 - 1e-9)
        assert (across - 0.5) / (down + 0.5) <= 4 / 3 + 1e-9
        assert (across + 0.5) / max(0.1, down - 0.5) >= 3 / 4 - 1e-9


def test_crops_reach_every_place() -> None:
    rng, image = random.Random(0), np.asarray(photo(100, 100))
    shown = [squares([image], 8, 0.2, rng)[0][0].float() for _ in range(300)]
    for channel in (0, 1):
        assert min(square[channel].min() for square in shown) < 12
        assert max(square[channel].max() for square in shown) > 245
    areas = [across * down / 100**2 for across, down in (window_of(square, 100, 100) for square in shown)]
    assert 0.52 < sum(areas) / len(areas) < 0.68  # uniform in [0.2, 1]
    again = random.Random(0)
    assert torch.equal(shown[0], squares([image], 8, 0.2, again)[0][0].float())


# -- colours ------------------------------------------------------------------------------------------------------------
def tones(loud: float, count: int = 4000, rate: int = 8000) -> np.ndarray:
    """Two tones of 500 and 3,000 Hz, which are bins of the spectrum."""
    time = np.arange(count) / rate
    return (loud * (np.sin(2 * np.pi * 500 * time) + np.sin(2 * np.pi * 3000 * time))).astype(np.int16)


@given(st.integers(0, 999), st.sampled_from([0.0, 3.0, 12.0]))
@settings(max_examples=30, deadline=None)
def test_bands_are_louder_or_softer_and_nothing_moves(seed: int, decibels: float) -> None:
    before = tones(1000)
    after = vary_loudness(before, 8000, decibels, random.Random(seed))
    assert (after.shape, after.dtype) == (before.shape, np.int16)
    assert np.array_equal(after, vary_loudness(before, 8000, decibels, random.Random(seed)))
    was, found = (abs(np.fft.rfft(each)) for each in (before, after))
    bins = [250, 1500]
    changes = 20 * np.log10(found[bins] / was[bins])
    assert (abs(changes) <= 2 * decibels + 0.1).all()
    assert np.delete(found, bins).max() < 0.02 * found[bins].min() + 2 * len(before) ** 0.5  # no other tone; rounding
    if not decibels:
        assert np.array_equal(after, before)


def test_bands_differ_from_draw_to_draw_and_from_each_other() -> None:
    drawn = [abs(np.fft.rfft(vary_loudness(tones(1000), 8000, 6, random.Random(n))))[[250, 1500]] for n in range(9)]
    louder = np.log10(np.array(drawn))
    assert min(*louder.std(0), (louder[:, 0] - louder[:, 1]).std()) > 0.05


def test_what_would_be_too_loud_is_softer_as_a_whole() -> None:
    before = tones(16000)
    for seed in range(20):
        after = vary_loudness(before, 8000, 12, random.Random(seed))
        spectrum = abs(np.fft.rfft(after))
        assert abs(after.astype(int)).max() <= 32767
        assert np.delete(spectrum, [250, 1500]).max() < 0.01 * spectrum.max()  # nothing is cut off, which would buzz
