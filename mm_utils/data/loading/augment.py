"""From a decoded image to the square that the vision tower takes, as uint8: central for evaluation, random in training.

Evaluation resizes as the saved processor does, with Pillow. Training crops at whole pixels and resizes with torch, which
takes a third of the time: 0.22 against 0.69 ms from 258 to 224 pixels. Both filter alike (bicubic, antialiased); on
photographs they differ by 2 in 255 at most, but for the edges of a crop, where Pillow looks at what lies beyond.
"""

import random
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.functional import interpolate

MOST_FIXED = 1.5
"""Of an image whose shorter side is larger than this times the input, `fixed_square` would show less than half."""

_LUMA = torch.tensor([0.299, 0.587, 0.114])  # ITU-R BT.601, as Pillow's mode L


class Window(NamedTuple):
    """The part of an image that became a square, in shares of the image's width and height."""

    left: float
    top: float
    right: float
    bottom: float


def center_square(image: Image.Image, size: int) -> Tensor:
    """The central square, resized: uint8 `[3, size, size]`. What evaluation does, and the saved processor.

    As the processor, it cuts at whole pixels of the image whose shorter side has been resized to `size`.
    """
    width, height, left, top = _center(*image.size, size)
    across, down = image.width / width, image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    square = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return torch.from_numpy(np.array(square)).permute(2, 0, 1).contiguous()


def center_window(width: int, height: int, size: int) -> Window:
    """What `center_square` shows of an image of `width` x `height` pixels."""
    width, height, left, top = _center(width, height, size)
    return Window(left / width, top / height, (left + size) / width, (top + size) / height)


def _center(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Width and height whose shorter one is `size`, and where the central square begins in them."""
    shorter = min(width, height)
    width, height = (max(size, int(size * side / shorter)) for side in (width, height))
    return width, height, (width - size) // 2, (height - size) // 2


def random_square(pixels: np.ndarray, size: int, min_area: float, rng: random.Random) -> tuple[Tensor, Window]:
    """A random crop of `[height, width, 3]`, resized: uint8 `[3, size, size]`, and where it was.

    Up to whole pixels, the crop's area is uniform in [`min_area`, 1] of the largest square's, its aspect ratio between
    3:4 and 4:3 where the image allows it. `min_area=1` gives `center_square`.
    """
    height, width = pixels.shape[:2]
    if min_area >= 1:
        return center_square(Image.fromarray(pixels), size), center_window(width, height, size)
    left, top, right, bottom = _random_box(width, height, min_area, rng)
    crop = pixels[top:bottom, left:right].copy()
    image = torch.from_numpy(crop).permute(2, 0, 1)[None]
    square = interpolate(image, (size, size), mode="bicubic", antialias=True)[0].contiguous()
    return square, Window(left / width, top / height, right / width, bottom / height)


def fixed_square(pixels: np.ndarray, size: int, rng: random.Random) -> tuple[Tensor, Window]:
    """A square of `[height, width, 3]` at a random place, not resized: uint8 `[3, size, size]`, and where it was."""
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
    """Brightness, contrast and saturation of uint8 `[3, S, S]`, each times a factor in [1 - strength, 1 + strength].

    All three are linear in the colours and are applied as one matrix; what leaves 0 ... 255 is cut once, at the end.
    """
    brightness, contrast, saturation = (rng.uniform(max(0.0, 1 - strength), 1 + strength) for _ in range(3))
    colours = square.reshape(3, -1).float()
    grey = brightness * (_LUMA @ colours.mean(1))
    matrix = brightness * contrast * (saturation * torch.eye(3) + (1 - saturation) * _LUMA)
    shift = ((1 - contrast) * grey).expand(3, 1)
    return torch.addmm(shift, matrix, colours).round_().clamp_(0, 255).to(torch.uint8).view_as(square)
