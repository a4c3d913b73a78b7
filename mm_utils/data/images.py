"""Decode images: any format to RGB, a JPEG at the smallest DCT scale that is still large enough."""

import io
from typing import Any

import numpy as np
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
