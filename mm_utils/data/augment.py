"""From a decoded image to the square that the vision tower takes, as uint8: central for evaluation, random in training."""

import random

import numpy as np
import torch
from PIL import Image


def center_square(image: Image.Image, size: int) -> torch.Tensor:
    """The central square, resized: uint8 `[3, size, size]`. What evaluation does, and the saved processor.

    As the processor, it cuts at whole pixels of the image whose shorter side has been resized to `size`.
    """
    shorter = min(image.size)
    width, height = (max(size, int(size * side / shorter)) for side in image.size)
    left, top = (width - size) // 2, (height - size) // 2
    across, down = image.width / width, image.height / height
    return _resize(image, size, (left * across, top * down, (left + size) * across, (top + size) * down))


def random_square(image: Image.Image, size: int, min_area: float, rng: random.Random) -> torch.Tensor:
    """A random crop, resized: uint8 `[3, size, size]`.

    The crop's area is uniform in [`min_area`, 1] of the largest square's, its aspect ratio between 3:4 and 4:3 where the
    image allows it. `min_area=1` gives `center_square`.
    """
    if min_area >= 1:
        return center_square(image, size)
    side = min(image.size) * rng.uniform(min_area, 1) ** 0.5
    stretch = min(max(rng.uniform(3 / 4, 4 / 3) ** 0.5, side / image.height), image.width / side)
    width, height = min(side * stretch, image.width), min(side / stretch, image.height)
    left, top = rng.uniform(0, image.width - width), rng.uniform(0, image.height - height)
    return _resize(image, size, (left, top, left + width, top + height))


def _resize(image: Image.Image, size: int, box: tuple[float, float, float, float]) -> torch.Tensor:
    image = image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0)
    return torch.from_numpy(np.array(image)).permute(2, 0, 1).contiguous()
