"""Decode images and bring them to the square that the vision tower takes, as uint8.

Everything stays uint8 until it is on the device (`mm_utils.data.loaders.DeviceLoader` normalises there): a 224 px image
is 150 kB, as float32 it would be 600 kB. JPEGs are decoded at the smallest DCT scale that is still large enough, and
crop and resize are one Pillow call.
"""

import io
import random
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

Image.MAX_IMAGE_PIXELS = 178_956_970  # Pillow warns above half of this and refuses above it


class UnreadableImageError(ValueError):
    """An image that cannot be decoded; the message says which and why."""


def open_image(value: dict[str, Any], min_side: int | None = None) -> Image.Image:
    """Decode `{"bytes": ..., "path": ...}` to RGB, its EXIF rotation applied.

    Args:
        value: as `datasets.Image(decode=False)` stores it; bytes win over the path.
        min_side: a JPEG may be decoded at a reduced scale whose shorter side is at least this.

    Raises:
        UnreadableImageError: if the image is missing, truncated, too large, or of no known format.
    """
    name = value.get("path") or "embedded image"
    if not (value.get("bytes") or value.get("path")):
        raise UnreadableImageError(f"{name}: it has 0 bytes")
    try:
        image = Image.open(io.BytesIO(value["bytes"]) if value.get("bytes") else value["path"])
        if min_side is not None:
            _draft(image, min_side)
        image.load()
        return _flatten(ImageOps.exif_transpose(image))
    except Exception as error:  # a damaged file makes Pillow raise struct.error, RuntimeError and what not, too
        raise UnreadableImageError(f"{name}: {error}") from error


def _draft(image: Image.Image, min_side: int) -> None:
    """Ask for a reduced decode; `draft` keeps both sides at least as large as asked."""
    shorter = min(image.size)
    if min_side < shorter:
        image.draft("RGB", (image.width * min_side // shorter, image.height * min_side // shorter))


def _flatten(image: Image.Image) -> Image.Image:
    """Any mode to RGB; transparency is laid on white, which is what the pages it was cut from usually show."""
    if image.mode.startswith("I"):  # 16 bits, which `convert` would clip to white
        return Image.fromarray((np.asarray(image) // 256).astype(np.uint8)).convert("RGB")
    if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")
    return image.convert("RGB")


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
