"""Cut the square for the vision tower, uint8; at random in training. Vary colours, sounds.

Evaluation resizes the whole image with torch and cuts its centre, as the saved processor does, bit for bit. Training crops at
whole pixels and resizes only these. Both use the same filter (bicubic, antialiased); torch takes a third of Pillow's time.
"""

import random
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from scipy.fft import irfft, next_fast_len, rfft
from torch import Tensor

from mm_utils.model.reading import center_of, center_square, resized

MAX_FIXED_SCALE = 1.5
"""Above this ratio of shorter side to input size, `fixed_square` would show less than half of an image."""

_KNOTS = (3, 6)  # least and most points of a curve over the frequencies
_LUMA = torch.tensor([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow's mode L


class Window(NamedTuple):
    """The part of an image that a square shows, in shares of the image's width and height."""

    left: float
    top: float
    right: float
    bottom: float


def center_window(width: int, height: int, size: int) -> Window:
    """Return the part that `center_square` shows of an image of `width` x `height` pixels."""
    width, height, left, top = center_of(width, height, size)
    return Window(left / width, top / height, (left + size) / width, (top + size) / height)


def random_square(pixels: np.ndarray, size: int, min_area: float, rng: random.Random) -> tuple[Tensor, Window]:
    """Crop `[height, width, 3]` at random and resize to uint8 `[3, size, size]`.

    Returns the square and the part that it shows. Up to rounding to whole pixels, the crop's area is uniform in
    [`min_area`, 1] of the largest square's, and its aspect ratio is between 3:4 and 4:3 where the image allows it.
    `min_area=1` returns `center_square`.
    """
    height, width = pixels.shape[:2]
    if min_area >= 1:
        return center_square(Image.fromarray(pixels), size), center_window(width, height, size)
    left, top, right, bottom = _random_box(width, height, min_area, rng)
    square = resized(pixels[top:bottom, left:right].copy(), size, size).contiguous()
    return square, Window(left / width, top / height, right / width, bottom / height)


def random_squares(frames: Sequence[np.ndarray], size: int, min_area: float, rng: random.Random) -> Tensor:
    """Crop all frames `[H, W, 3]` of a clip alike, by `random_square`; uint8 `[T, 3, S, S]`."""
    left, top, right, bottom = _random_box(frames[0].shape[1], frames[0].shape[0], min_area, rng)
    return torch.stack([resized(frame[top:bottom, left:right].copy(), size, size) for frame in frames])


def fixed_square(pixels: np.ndarray, size: int, rng: random.Random) -> tuple[Tensor, Window]:
    """Cut `[3, size, size]` out of `[height, width, 3]` at random; return also the part shown."""
    height, width = pixels.shape[:2]
    left, top = rng.randint(0, width - size), rng.randint(0, height - size)
    square = pixels[top : top + size, left : left + size].transpose(2, 0, 1)
    window = Window(left / width, top / height, (left + size) / width, (top + size) / height)
    return torch.from_numpy(np.ascontiguousarray(square)), window


def _random_box(width: int, height: int, min_area: float, rng: random.Random) -> tuple[int, int, int, int]:
    side = min(width, height) * rng.uniform(min_area, 1) ** 0.5
    stretch = min(max(rng.uniform(3 / 4, 4 / 3) ** 0.5, side / height), width / side)
    across, down = (max(1, round(length)) for length in (side * stretch, side / stretch))
    left, top = (round(rng.uniform(0, room)) for room in (width - across, height - down))
    return left, top, left + across, top + down


def jitter_colors(square: Tensor, strength: float, rng: random.Random) -> Tensor:
    """Change brightness, contrast, saturation of uint8 `[3, S, S]` or frames `[T, 3, S, S]`.

    Each is multiplied by a factor in [1 - strength, 1 + strength]. All three are linear in the colours and are applied as
    one matrix; values are clipped to 0 ... 255 once, at the end.
    """
    brightness, contrast, saturation = (rng.uniform(max(0.0, 1 - strength), 1 + strength) for _ in range(3))
    by_colour = square.movedim(-3, 0)
    colours = by_colour.reshape(3, -1).float()
    grey = brightness * (_LUMA @ colours.mean(1))
    matrix = brightness * contrast * (saturation * torch.eye(3) + (1 - saturation) * _LUMA)
    shift = ((1 - contrast) * grey).expand(3, 1)
    changed = torch.addmm(shift, matrix, colours).round_().clamp_(0, 255).to(torch.uint8)
    return changed.view(by_colour.shape).movedim(0, -3)


def vary_loudness(samples: np.ndarray, rate: int, decibels: float, rng: random.Random) -> np.ndarray:
    """Make a sound, int16 `[n]`, louder or softer, whole and in bands, by up to `decibels`.

    So do other distances, rooms and microphones; no pitch and no time changes. The bands are a line through 3 to 6 random
    points, evenly spaced in mel (FilterAugment, arXiv 2110.03282). What would be too loud for int16 is softer as a whole.

    Args:
        rate: samples a second.
    """
    whole, *points = (rng.uniform(-decibels, decibels) for _ in range(1 + rng.randint(*_KNOTS)))
    size = next_fast_len(len(samples), real=True)
    mel = _mel_scale(size, rate)
    curve = np.interp(mel, np.linspace(0, mel[-1], len(points)), points) + whole
    gains = np.power(np.float32(10), curve.astype(np.float32) / 20)
    changed = irfft(rfft(samples.astype(np.float32), size) * gains, size)[: len(samples)]
    loudest = max(1.0, float(abs(changed).max()) / 32767)
    return (changed / np.float32(loudest)).round().astype(np.int16)


@lru_cache(4)
def _mel_scale(size: int, rate: int) -> np.ndarray:
    """Return the frequencies of a real transform of n samples in mel, up to a factor."""
    return np.log1p(np.linspace(0, rate / 2, size // 2 + 1) / 700)
