"""Decode images of any kind to RGB by fixed rules; shrink them, and encode them for storage.

The rules, which give the same pixels on every machine. `decode` names each that changes something in its notes:
    formats         those of `FORMATS`, by content and never by name; vector formats would start other programs
    several frames  the first one: `animated_first_frame`, `multi_page_first` (TIFF, MPO)
    orientation     EXIF rotation and mirroring are applied, `exif_rotated`; unreadable EXIF is ignored
    transparency    laid on white, as most pages show it: `alpha_on_white`
    16 bits grey    value * 255 / 65535, rounded: `sixteen_bit_scaled`; 16-bit colour comes from Pillow as its high bytes
    float, 32 bits  floats in 0..1 times 255, integers in 0..65535 as 16 bits, all else stretched from its least to its
                    greatest value: `float_scaled`; refused if a value is not finite
    CMYK            converted without a profile, stored inverted as Adobe does: `cmyk_converted`
    palette         `palette_converted`;  colour profiles and all other metadata are dropped
"""

import io
import math
import re
from typing import Any

import numpy as np
import torch
from PIL import ExifTags, Image, features
from torch.nn.functional import interpolate

from mm_utils.files import is_passing, read_regular_file, retry

try:
    import simplejpeg
except ImportError:  # optional: it decodes to Pillow's pixels, and refuses inner damage that Pillow skips over
    simplejpeg = None

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF") + (("AVIF",) if "avif" in features.modules else ())
JPEG_QUALITY = 92
MOST_BYTES = 64 << 20  # of an image file
# At the scale of decoding: 9000 x 9000 white pixels are a file of 10 kB and take 1.5 GB to decode.
MOST_PIXELS = 40_000_000

_RAW = re.compile(r"raw:(\d{1,9})x(\d{1,9})")
_Turn = Image.Transpose
_TURNS = {
    2: _Turn.FLIP_LEFT_RIGHT,
    3: _Turn.ROTATE_180,
    4: _Turn.FLIP_TOP_BOTTOM,
    5: _Turn.TRANSPOSE,
    6: _Turn.ROTATE_270,
    7: _Turn.TRANSVERSE,
    8: _Turn.ROTATE_90,
}


class UnreadableImageError(ValueError):
    """An image that cannot be decoded; the message names it and the reason."""


class TooManyPixelsError(UnreadableImageError):
    """An image whose decoding would take too much memory."""


def open_image(value: dict[str, Any], min_side: int | None = None) -> Image.Image:
    """Decode `{"bytes": ..., "path": ...}` to upright RGB; see `open_sized`."""
    return open_sized(value, min_side)[0]


def open_sized(value: dict[str, Any], min_side: int | None = None) -> tuple[Image.Image, tuple[int, int]]:
    """Decode `{"bytes", "path"}` to upright RGB; return it with the size of the whole image.

    Args:
        value: as `datasets.Image(decode=False)` stores it; bytes win over the path. The path `raw:344x258` marks bytes
            that are the pixels themselves, see `pixels`.
        min_side: a JPEG may be decoded at a reduced scale whose shorter side is at least this.

    Raises:
        UnreadableImageError: if the image is missing, no regular file, truncated, of no known format, of more than
            `MOST_BYTES`, or of more than `MOST_PIXELS` at the scale of decoding.
    """
    name = value.get("path") or "embedded image"
    try:
        content = value.get("bytes") or (_read(value["path"]) if value.get("path") else b"")
        if not content:
            raise UnreadableImageError("it has 0 bytes")
        if raw_size(value) is not None:
            image = Image.fromarray(pixels(value))
            return image, image.size
        return decode(read_header(content), content, min_side, most_pixels=MOST_PIXELS)[:2]
    except Exception as error:  # a damaged file makes Pillow raise struct.error, RuntimeError and others, too
        raise UnreadableImageError(f"{name}: {decoder_message(error)}") from error


def read_pixels(value: dict[str, Any], min_side: int | None = None) -> tuple[np.ndarray, tuple[int, int]]:
    """Return the result of `open_sized` with the image as uint8 `[height, width, 3]`.

    A plain JPEG is decoded by simplejpeg, where installed, to the same pixels: both use libjpeg-turbo. One of 344 x 258
    pixels and 50 KB takes 0.64 ms instead of the 0.85 ms that Pillow takes until there is an array.
    """
    size = raw_size(value)
    if size is not None:
        return pixels(value), size
    content = value.get("bytes")
    if simplejpeg is not None and content and bytes(memoryview(content)[:3]) == b"\xff\xd8\xff":
        found = _plain_jpeg(bytes(content), min_side)
        if found is not None:
            return found
    image, size = open_sized(value, min_side)
    return np.asarray(image), size


def decoder_message(error: Exception) -> str:
    """Return a decoder's message in one line, without the address of the object it read from."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()) or type(error).__name__
    return re.sub(r" ?<_io\.BytesIO[^>]*>", " the file", text)[:300]


def raw_size(value: dict[str, Any]) -> tuple[int, int] | None:
    """Return (width, height) if the bytes of a stored image are its pixels, otherwise None."""
    match = _RAW.fullmatch(value.get("path") or "") if value.get("bytes") else None
    return (int(match[1]), int(match[2])) if match else None


def pixels(value: dict[str, Any]) -> np.ndarray:
    """View stored raw RGB pixels as read-only uint8 `[height, width, 3]`, without a copy.

    Raises:
        UnreadableImageError: if there are not width * height * 3 bytes, or no size.
    """
    size = raw_size(value)
    if size is None:
        raise UnreadableImageError(f"{value.get('path') or 'embedded image'}: it holds no raw pixels")
    width, height = size
    content = value["bytes"]
    if len(content) != width * height * 3:
        raise UnreadableImageError(
            f"{value['path']}: it has {len(content):,} bytes; raw pixels of that size take {width * height * 3:,}"
        )
    return np.frombuffer(content, np.uint8).reshape(height, width, 3)


def read_header(content: bytes) -> Image.Image:
    """Read the size, mode and format of an image file without decoding, as Pillow does."""
    return Image.open(io.BytesIO(content), formats=FORMATS)


def decode(
    header: Image.Image,
    content: bytes,
    min_side: int | None = None,
    *,
    strict: bool = False,
    most_pixels: int | None = None,
) -> tuple[Image.Image, tuple[int, int], tuple[str, ...]]:
    """Decode the image whose header is `read_header(content)`, by the rules above.

    Args:
        min_side: a JPEG may be decoded at half, quarter or eighth scale whose shorter side is at least this.
        strict: refuse a JPEG with inner damage that decoders skip over. Needs simplejpeg; ignored without it.
        most_pixels: refuse more, at the scale of decoding, before any is decoded.

    Returns:
        Upright RGB without metadata, perhaps reduced; (width, height) of the whole upright image; notes.

    Raises:
        TooManyPixelsError: above `most_pixels`.
        Exception: what the decoder raises at a damaged file, among others struct.error and RuntimeError.
    """
    width, height = header.size
    if min_side is not None:
        _draft(header, min_side)
    if most_pixels is not None and header.width * header.height > most_pixels:
        raise TooManyPixelsError(
            f"it has {width:,} x {height:,} pixels, {most_pixels:,} are the most; prepare_data can shrink it once"
        )
    if header.format == "PNG":
        header.load()  # here, as reading the EXIF block of a PNG decodes it, and hides its damage
    orientation, notes = _orientation(header), []
    if getattr(header, "is_animated", False):
        notes.append("multi_page_first" if header.format in ("TIFF", "MPO") else "animated_first_frame")
    image = _decode_strictly(header, content, (width, height)) if strict else None
    if image is None:
        header.load()
        image = header
    image = _flatten(image, notes)
    if orientation in _TURNS:
        notes.append("exif_rotated")
    if header.format == "TIFF":  # Pillow has turned it already
        width, height = image.size
    elif orientation in _TURNS:
        image = image.transpose(_TURNS[orientation])
        width, height = (height, width) if orientation >= 5 else (width, height)
    image.info = {}  # else `save` writes comments and profiles out again
    return image, (width, height), tuple(notes)


def shrink(image: Image.Image, short_side: int) -> Image.Image:
    """Resize the shorter side to `short_side`; a smaller image is left unchanged."""
    shorter = min(image.size)
    if shorter <= short_side:
        return image
    width, height = (max(short_side, round(side * short_side / shorter)) for side in image.size)
    if shorter >= 4 * short_side:
        image = image.reduce(shorter // (2 * short_side))  # averages whole pixels, down to 2 to 4 times the size
    # By torch: Pillow's pixels within 1 in 255, in half the time (640 x 480 to 344 x 258: 1.1 instead of 2.2 ms).
    pixels_HWC = torch.from_numpy(np.array(image))
    resized = interpolate(pixels_HWC.permute(2, 0, 1)[None], (height, width), mode="bicubic", antialias=True)
    return Image.fromarray(resized[0].permute(1, 2, 0).contiguous().numpy())


def encode(image: Image.Image, store: str, quality: int = JPEG_QUALITY) -> bytes:
    """Encode an RGB image as `jpeg`, `png` (lossless) or `raw` (see `pixels`), without metadata."""
    if store == "raw":
        return image.tobytes()
    buffer = io.BytesIO()
    if store == "jpeg":
        # At 344 x 258 and quality 92: 34 kB at 38.4 dB. Full colour (4:4:4) takes 15 % more bytes for 1.1 dB, and
        # optimised Huffman tables save 2.4 % of the bytes for 2.5 times the encoding time.
        image.save(buffer, "JPEG", quality=quality, subsampling="4:2:0")
    elif store == "png":
        image.save(buffer, "PNG")
    else:
        raise ValueError(f"store is {store!r}; images are stored as jpeg, png or raw. Give one of these.")
    return buffer.getvalue()


def psnr(image: Image.Image, other: Image.Image) -> float:
    """Return the peak signal-to-noise ratio in dB, 10 log10(255^2 / mean squared error)."""
    difference = np.asarray(image, np.float64) - np.asarray(other, np.float64)
    error = float((difference**2).mean())
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def _read(path: str) -> bytes:
    return retry(lambda: read_regular_file(path, MOST_BYTES), is_passing, (0.1, 0.2))


def _orientation(header: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; a garbled EXIF block counts as none."""
    try:
        value = header.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow parses lazily: struct.error, KeyError, SyntaxError, TypeError, ...
        return 1
    return value if value in range(1, 9) else 1


def _draft(header: Image.Image, min_side: int) -> None:
    """Ask for a reduced decode; `draft` keeps both sides at least as large as asked."""
    shorter = min(header.size)
    if min_side < shorter:
        header.draft("RGB", (header.width * min_side // shorter, header.height * min_side // shorter))


def _decode_strictly(header: Image.Image, content: bytes, size: tuple[int, int]) -> Image.Image | None:
    """Decode a plain colour JPEG by simplejpeg at the scale of `header`, or return None."""
    if simplejpeg is None or header.format != "JPEG" or header.mode != "RGB":
        return None
    smaller = {}
    if header.size != size:
        smaller = {"min_width": header.width, "min_height": header.height, "min_factor": 2}
    array = simplejpeg.decode_jpeg(content, "RGBX", strict=True, **smaller)
    if array.shape[1::-1] != header.size:
        return None
    return Image.frombytes("RGB", header.size, array.data, "raw", "RGBX")


def _flatten(image: Image.Image, notes: list[str]) -> Image.Image:
    """Convert any mode to RGB; add the conversions to `notes`."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _scale(image, notes)
    if image.mode in ("P", "PA"):
        notes.append("palette_converted")
    if image.mode == "CMYK":
        notes.append("cmyk_converted")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            notes.append("alpha_on_white")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale(image: Image.Image, notes: list[str]) -> Image.Image:
    """Scale grey values of more than 8 bits, which `convert` would clip to white."""
    values = np.asarray(image)
    low, high = float(values.min()), float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UnreadableImageError("it holds values that are not finite")
    top = 1.0 if image.mode == "F" else 65535.0
    if low < 0 or high > top or image.mode == "F":
        notes.append("float_scaled")
    else:
        notes.append("sixteen_bit_scaled")
    if low >= 0 and high <= top:
        low, high = 0.0, top
    grey = (values.astype(np.float32) - np.float32(low)) * np.float32(255 / ((high - low) or 1)) + np.float32(0.5)
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def _plain_jpeg(content: bytes, min_side: int | None) -> tuple[np.ndarray, tuple[int, int]] | None:
    """Decode a JPEG by simplejpeg if that yields exactly Pillow's pixels, or return None."""
    if b"Exif\0\0" in content or b"tiff:Orientation" in content:
        return None
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(content)
        scale = _draft_scale(height, width, min_side)
        if (
            colours != "YCbCr"
            or height * width > (Image.MAX_IMAGE_PIXELS or 0)
            or height * width > MOST_PIXELS * scale**2
        ):
            return None
        least = {"min_height": -(-height // scale), "min_width": -(-width // scale), "min_factor": 2}
        return simplejpeg.decode_jpeg(content, **(least if scale > 1 else {})), (width, height)
    except ValueError:
        return None


def _draft_scale(height: int, width: int, min_side: int | None) -> int:
    """Return the factor by which Pillow's `draft` would reduce a JPEG."""
    shorter = min(height, width)
    if min_side is None or min_side >= shorter:
        return 1
    allowed = min(side // max(1, side * min_side // shorter) for side in (height, width))
    return max(scale for scale in (1, 2, 4, 8) if scale <= allowed)
