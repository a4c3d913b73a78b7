"""Pixels are Pillow's, whichever way they are decoded."""

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mm_utils.data import decoding
from mm_utils.data.decoding import read_pixels
from mm_utils.data.images import UnreadableImageError, encode, open_image

needs_simplejpeg = pytest.mark.skipif(decoding.simplejpeg is None, reason="simplejpeg is not installed")


def photo(width: int, height: int, mode: str = "RGB") -> Image.Image:
    noise = np.random.default_rng(width + height).integers(0, 256, (9, 9, 3), dtype=np.uint8)
    return Image.fromarray(noise).resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def stored(image: Image.Image, kind: str = "JPEG", **options: Any) -> dict[str, Any]:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return {"bytes": buffer.getvalue(), "path": None}


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


VALUES = {
    **{
        f"{w} x {h}": stored(photo(w, h), quality=92)
        for w, h in ((344, 258), (258, 344), (640, 481), (1, 1), (17, 900))
    },
    "full colour": stored(photo(100, 80), subsampling="4:4:4"),
    "progressive": stored(photo(100, 80), progressive=True),
    "grey": stored(photo(100, 80, "L")),
    "four inks": stored(photo(100, 80, "CMYK")),
    "turned": stored(photo(100, 80), exif=turned(6)),
    "lossless": stored(photo(100, 80), "PNG"),
    "transparent": stored(photo(100, 80, "RGBA"), "PNG"),
}


@needs_simplejpeg
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("min_side", [None, 5, 20, 100, 251])
def test_pixels_are_what_pillow_gives(name: str, min_side: int | None) -> None:
    pixels, size = read_pixels(VALUES[name], min_side)
    assert np.array_equal(pixels, np.asarray(open_image(VALUES[name], min_side)))
    assert size == open_image(VALUES[name]).size  # of the whole image, however much smaller it was decoded


@needs_simplejpeg
def test_plain_jpegs_take_the_short_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "open_sized", lambda *_: pytest.fail("Pillow decoded it"))
    assert read_pixels(VALUES["344 x 258"])[0].shape == (258, 344, 3)
    assert read_pixels(VALUES["640 x 481"], 200)[0].shape == (241, 320, 3)


def test_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoding, "simplejpeg", None)
    for value in VALUES.values():
        assert np.array_equal(read_pixels(value)[0], np.asarray(open_image(value)))


def test_raw_pixels_are_a_view() -> None:
    image = photo(30, 20)
    content = encode(image, "raw")
    pixels, size = read_pixels({"bytes": content, "path": "raw:30x20"}, 10)
    assert np.array_equal(pixels, np.asarray(image))
    assert size == (30, 20)
    assert pixels.base is not None
    assert not pixels.flags.writeable


@pytest.mark.parametrize(
    "value",
    [
        {"bytes": VALUES["344 x 258"]["bytes"][:2000], "path": None},
        {"bytes": VALUES["344 x 258"]["bytes"][:3], "path": None},
        {"bytes": b"", "path": None},
        {"bytes": b"\0" * 99, "path": "raw:30x20"},
        {"bytes": None, "path": "raw:30x20"},
        {"bytes": None, "path": None},
    ],
)
def test_what_cannot_be_decoded(value: dict[str, Any]) -> None:
    with pytest.raises(UnreadableImageError):
        read_pixels(value)
