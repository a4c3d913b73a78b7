"""Images become RGB by fixed rules, whichever way they are decoded; broken ones are named."""

import io
import math
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data import images
from mm_utils.data.images import encode, open_image, pixels, read_pixels, shrink
from mm_utils.model.reading import UnreadableError
from tests.kit.awkward import photo, turn
from tests.kit.fault_images import draw, save
from tests.kit.prepared import pixels_apart

RED = (200, 30, 60)


def stored(image: Image.Image, form: str = "PNG", **options: Any) -> dict[str, Any]:
    """`image` as a row holds it."""
    return {"bytes": save(image, form, **options), "path": None}


# -- modes --------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["RGB", "L", "I;16"])
def test_png_with_a_transparent_colour(kind: str) -> None:
    """tRNS of a PNG without an alpha channel: one colour that stands for nothing."""
    if kind == "I;16":
        value = stored(Image.fromarray(np.full((2, 2), 128 * 257, np.uint16)))
        chunk = b"tRNS" + struct.pack(">H", 7)
        header = value["bytes"].index(b"IDAT") - 4
        chunk = struct.pack(">I", 2) + chunk + struct.pack(">I", zlib.crc32(chunk))
        value["bytes"] = value["bytes"][:header] + chunk + value["bytes"][header:]
        assert np.asarray(open_image(value))[0, 0].tolist() == [128] * 3
        return
    colour = RED if kind == "RGB" else 80
    value = stored(Image.new(kind, (2, 2), colour), transparency=colour)
    assert np.asarray(open_image(value))[0, 0].tolist() == [255] * 3


# -- broken images ------------------------------------------------------------------------------------------------------
JPEG = stored(photo(80, 60), "JPEG")["bytes"]
_HEADER = b"IHDR" + struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0)
PNG = stored(photo(8, 6))["bytes"]
BOMB = PNG[:8] + struct.pack(">I", 13) + _HEADER + struct.pack(">I", zlib.crc32(_HEADER)) + PNG[33:]
UNREADABLE: list[tuple[bytes | None, str | None, str]] = [
    # bytes and path of the value, and what the message names; a path of bytes is written
    *((content, None, "embedded image: .") for content in (b"", b"<html>404</html>", JPEG[: len(JPEG) // 2], None)),
    *((None, name, f"{name}: .") for name in ("gone.png", "folder")),
    *((bytes(24), path, f"{path}: .") for path in ("raw:4x3", "raw:0x0", "raw:-4x-2", "raw:4", "raw.jpg")),
    (None, "raw:30x20", "raw:30x20: ."),
    (BOMB, "bomb.png", r"bomb\.png: .*2500000000 pixels"),
]


@pytest.mark.parametrize("read", [open_image, read_pixels, pixels])
@pytest.mark.parametrize(("content", "path", "message"), UNREADABLE)
def test_unreadable_images_are_named(
    content: bytes | None, path: str | None, message: str, read: Callable[..., Any], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    values = [{"bytes": content, "path": path}]
    if content is not None and path is not None and not path.startswith("raw"):
        (tmp_path / path).write_bytes(content)
        values.append({"bytes": None, "path": path})
    for value in values if read is not pixels or str(path).startswith("raw:") else ():
        with pytest.raises(UnreadableError, match=message):
            read(value)


def test_a_pipe_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.jpg")
    for path in (tmp_path / "pipe.jpg", Path("/dev/zero")):
        with pytest.raises(UnreadableError, match=f"{path.name}: it is not a regular file"):
            open_image({"bytes": None, "path": str(path)})


# -- reduced decoding ---------------------------------------------------------------------------------------------------
@given(st.integers(1, 700), st.integers(1, 700), st.integers(1, 300))
@settings(max_examples=60)
def test_reduced_decode_is_never_too_small(width: int, height: int, min_side: int) -> None:
    value = stored(Image.new("RGB", (width, height)), "JPEG")
    opened = open_image(value, min_side)
    assert min(opened.size) >= min(min_side, width, height)
    assert opened.size in [(math.ceil(width / scale), math.ceil(height / scale)) for scale in (1, 2, 4, 8)]
    assert open_image(value).size == (width, height)


# -- storage ------------------------------------------------------------------------------------------------------------
@given(st.integers(1, 400), st.integers(1, 400), st.integers(1, 300))
@settings(max_examples=60)
def test_shrinking_keeps_the_shape_and_never_enlarges(width: int, height: int, side: int) -> None:
    image = Image.new("RGB", (width, height), RED)
    small = shrink(image, side)
    if min(width, height) <= side:
        assert small is image
        return
    assert min(small.size) == side
    scale = side / min(width, height)
    assert abs(small.width - width * scale) <= 0.5
    assert abs(small.height - height * scale) <= 0.5
    assert small.getpixel((side // 2, side // 2)) == RED


def test_a_reduced_decode_and_shrinking_show_what_a_full_one_shows() -> None:
    noisy = np.asarray(photo(1600, 1200)).astype(int) + np.random.default_rng(0).integers(0, 40, (1200, 1600, 3))
    value = stored(Image.fromarray(noisy.clip(0, 255).astype(np.uint8)), "JPEG")
    reduced = shrink(open_image(value, 258), 258)
    assert pixels_apart(reduced, open_image(value).resize(reduced.size, Image.Resampling.BICUBIC)) < 2.5


def test_stored_images_come_back() -> None:
    image = photo(90, 70)
    for store in ("png", "raw"):
        path = "raw:90x70" if store == "raw" else None
        assert np.array_equal(open_image({"bytes": encode(image, store), "path": path}), image)
    jpeg = {"bytes": encode(image, "jpeg"), "path": None}
    assert pixels_apart(open_image(jpeg), image) < 4
    with Image.open(io.BytesIO(jpeg["bytes"])) as opened:
        assert "progressive" not in opened.info
        assert opened.layer[0][1:3] == (2, 2)
    assert len(encode(image, "jpeg", 60)) < len(jpeg["bytes"])
    with pytest.raises(ValueError, match=r"^store is 'gif'; .* Give one of these\.$"):
        encode(image, "gif")


# -- arrays of pixels ---------------------------------------------------------------------------------------------------
needs_simplejpeg = pytest.mark.skipif(images.simplejpeg is None, reason="simplejpeg is not installed")


def noisy(width: int, height: int, mode: str = "RGB") -> Image.Image:
    return draw(width + height, (width, height)).convert(mode)


VALUES = {
    **{
        f"{w} x {h}": stored(noisy(w, h), "JPEG", quality=92)
        for w, h in ((344, 258), (258, 344), (640, 481), (1, 1), (17, 900))
    },
    "full colour": stored(noisy(100, 80), "JPEG", subsampling="4:4:4"),
    "progressive": stored(noisy(100, 80), "JPEG", progressive=True),
    "grey": stored(noisy(100, 80, "L"), "JPEG"),
    "four inks": stored(noisy(100, 80, "CMYK"), "JPEG"),
    "turned": stored(noisy(100, 80), "JPEG", exif=turn(6)),
    "lossless": stored(noisy(100, 80), "PNG"),
    "transparent": stored(noisy(100, 80, "RGBA"), "PNG"),
}


@needs_simplejpeg
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("min_side", [None, 5, 20, 100, 251])
def test_pixels_equal_those_of_pillow(name: str, min_side: int | None) -> None:
    array, size = read_pixels(VALUES[name], min_side)
    assert np.array_equal(array, np.asarray(open_image(VALUES[name], min_side)))
    assert size == open_image(VALUES[name]).size  # of the whole image, however much smaller it was decoded


def test_without_simplejpeg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "simplejpeg", None)
    for value in VALUES.values():
        assert np.array_equal(read_pixels(value)[0], np.asarray(open_image(value)))


def test_raw_pixels_are_a_view() -> None:
    image = noisy(30, 20)
    content = encode(image, "raw")
    array, size = read_pixels({"bytes": content, "path": "raw:30x20"}, 10)
    assert np.array_equal(array, np.asarray(image))
    assert size == (30, 20)
    assert np.shares_memory(array, np.frombuffer(content, np.uint8))
    assert not array.flags.writeable
