"""Open images as rows hold them, shrink them, and encode them for storage; the rules are those of `mm_utils.model.reading`."""

import io
import re
from typing import Any

import numpy as np
from PIL import Image

from mm_utils.files import is_passing, read_regular_file, retry
from mm_utils.model.reading import (
    MOST_BYTES,
    MOST_PIXELS,
    UnreadableError,
    decode,
    decoder_message,
    read_header,
    resized,
)

_RAW = re.compile(r"raw:(\d{1,9})x(\d{1,9})")
Stored = dict[str, Any]
"""`bytes` and `path` of a medium."""


def open_image(value: Stored, min_side: int | None = None) -> Image.Image:
    """Decode `{"bytes": ..., "path": ...}` to upright RGB; bytes win over the path.

    The path `raw:344x258` marks bytes that are the pixels themselves, see `pixels`. A JPEG may be decoded at a reduced scale whose
    shorter side is at least `min_side`.

    Raises:
        UnreadableError: if the image is missing, no regular file, truncated, of no known format, of more than
            `MOST_BYTES`, or of more than `MOST_PIXELS` at the scale of decoding.
    """
    return _open_sized(value, min_side)[0]


def _open_sized(value: Stored, min_side: int | None) -> tuple[Image.Image, tuple[int, int]]:
    """Return what `open_image` does, with the size of the whole image."""
    name = value.get("path") or "embedded image"
    try:
        content = value.get("bytes")
        if not content and value.get("path"):
            content = retry(lambda: read_regular_file(value["path"], MOST_BYTES), is_passing, (0.1, 0.2))
        if not content:
            raise UnreadableError("it has 0 bytes")
        if raw_size(value) is not None:
            image = Image.fromarray(pixels(value))
            return image, image.size
        return decode(read_header(content), content, min_side, most_pixels=MOST_PIXELS)[:2]
    except Exception as error:  # a damaged file makes Pillow raise struct.error, RuntimeError and others, too
        raise UnreadableError(f"{name}: {decoder_message(error)}") from error


def read_pixels(value: Stored, min_side: int | None = None) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the result of `open_image` as uint8 `[height, width, 3]`, and the size of the whole image."""
    size = raw_size(value)
    if size is not None:
        return pixels(value), size
    image, size = _open_sized(value, min_side)
    return np.asarray(image), size


def raw_size(value: Stored) -> tuple[int, int] | None:
    """Return (width, height) if the bytes of a stored image are its pixels, otherwise None."""
    match = _RAW.fullmatch(value.get("path") or "") if value.get("bytes") else None
    return (int(match[1]), int(match[2])) if match else None


def pixels(value: Stored) -> np.ndarray:
    """View stored raw RGB pixels as read-only uint8 `[height, width, 3]`, without a copy; UnreadableError if they are not as many."""
    width, height = raw_size(value) or (0, 0)
    content = value["bytes"]
    wanted = width * height * 3
    if len(content) != wanted:
        raise UnreadableError(
            f"{value['path']}: it has {len(content):,} bytes; raw pixels of that size take {wanted:,}"
        )
    return np.frombuffer(content, np.uint8).reshape(height, width, 3)


def shrink(image: Image.Image, short_side: int) -> Image.Image:
    """Resize the shorter side to `short_side`; a smaller image is left unchanged."""
    shorter = min(image.size)
    if shorter <= short_side:
        return image
    width = max(short_side, round(image.width * short_side / shorter))
    height = max(short_side, round(image.height * short_side / shorter))
    if shorter >= 4 * short_side:
        # 3,000 pixels for 258 are averaged by 5 to 600
        image = image.reduce(shorter // (2 * short_side))  # averages whole pixels, down to 2 to 4 times the size
    # By torch: Pillow's pixels within 1 in 255, in a quarter of the time (640 x 480 to 344 x 258: 0.7 instead of 3.0 ms).
    shrunk = resized(np.array(image), width, height)
    return Image.fromarray(shrunk.permute(1, 2, 0).contiguous().numpy())


def encode(image: Image.Image, store: str) -> bytes:
    """Encode an RGB image as `jpeg`, `png` (lossless) or `raw` (see `pixels`), without metadata."""
    if store == "raw":
        return image.tobytes()
    buffer = io.BytesIO()
    if store == "png":
        image.save(buffer, "PNG")
    else:
        # At 344 x 258 and quality 92: 34 kB at 38.4 dB. Full colour (4:4:4) takes 15 % more bytes for 1.1 dB, and
        # optimised Huffman tables save 2.4 % of the bytes for 2.5 times the encoding time.
        image.save(buffer, "JPEG", quality=92, subsampling="4:2:0")
    return buffer.getvalue()
