"""Image files with one thing wrong with each, odd ones that are whole, and awkward texts; all pictures are smooth and random."""

import io
import struct
import zlib
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, features

from mm_utils.model.reading import FORMATS

Make = Callable[[Image.Image], bytes]
Change = Callable[[Image.Image], Image.Image]
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # what undoes the turn that this orientation asks for
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


_BEST = {"quality": 95, "subsampling": 0}


class Broken(NamedTuple):
    """A file that must not be used: why, and its bytes."""

    kind: str
    reason: str
    make: Make


class Odd(NamedTuple):
    """A file that must be used: the notes on it, and what it shows if not the picture itself."""

    kind: str
    make: Make
    notes: tuple[str, ...] = ()
    shows: Change = lambda picture: picture


def draw(number: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A picture that no other number's is like: 8 x 6 random colours, smoothly joined."""
    cells = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC)


def save(picture: Image.Image, form: str = "PNG", **options: object) -> bytes:
    """The bytes of an image file."""
    buffer = io.BytesIO()
    picture.save(buffer, form, **options)
    return buffer.getvalue()


def saved(form: str, change: Change = lambda picture: picture, **options: object) -> Make:
    """Makes files of a format, of the picture or of what `change` makes of it."""
    return lambda picture: save(change(picture), form, **options)


def png(picture: Image.Image) -> bytes:
    return save(picture, "PNG")


def grey(shade: int) -> bytes:
    """A PNG of 8 x 8 equal pixels."""
    return png(Image.new("RGB", (8, 8), (shade, shade, shade)))


def jpeg(picture: Image.Image) -> bytes:
    """Baseline, with full colour."""
    return save(picture, "JPEG", **_BEST)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png_of(width: int, height: int, data: bytes = b"", depth: int = 8, colour: int = 2) -> bytes:
    header = _chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + _chunk(b"IDAT", data) * bool(data) + _chunk(b"IEND", b"")


def _with_chunk(chunk: bytes) -> Make:
    """PNGs with a chunk behind the header, which takes 8 + 25 bytes."""
    return lambda picture: png(picture)[:33] + chunk + png(picture)[33:]


def _flipped(at: int) -> Make:
    return lambda picture: (lambda whole: whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])(png(picture))


def _jpeg_of_65_000(picture: Image.Image) -> bytes:
    """A JPEG whose header lies about its size."""
    whole = jpeg(picture)
    at = whole.index(b"\xff\xc0") + 5
    return whole[:at] + struct.pack(">HH", 65_000, 65_000) + whole[at + 4 :]


def _with_thumbnail(picture: Image.Image) -> bytes:
    """A whole JPEG inside a segment of another."""
    small = save(picture.resize((16, 12)), "JPEG")
    return b"\xff\xd8\xff\xe1" + struct.pack(">H", len(small) + 2) + small + jpeg(picture)[2:]


def _jpeg_of_many_scans(picture: Image.Image) -> bytes:
    whole = save(picture, "JPEG", progressive=True)
    begin = whole.rindex(b"\xff\xda")
    return whole[:begin] + whole[begin:-2] * 600 + whole[-2:]


def jpeg_with_inner_damage(picture: Image.Image) -> bytes:
    """100 bytes in the middle are overwritten; only simplejpeg notices."""
    whole = jpeg(picture)
    middle = len(whole) * 2 // 3
    return whole[:middle] + bytes(range(100, 200)) + whole[middle + 100 :]


def turn(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def _turned(orientation: int) -> Make:
    """Makes JPEGs that may be decoded at a reduced scale."""
    change = _TURNS[orientation]
    return saved("JPEG", lambda picture: picture.resize((256, 192)).transpose(change), **_BEST, exif=turn(orientation))


def _several(form: str) -> Make:
    """Makes files of the picture, its negative and its mirror image."""
    return lambda picture: save(
        picture, form, save_all=True, append_images=[ImageOps.invert(picture), ImageOps.mirror(picture)], quality=95
    )


def _converted(mode: str) -> Change:
    return lambda picture: picture.convert(mode)


def _faded(picture: Image.Image) -> Image.Image:
    """Transparent from the left to the right."""
    faded = picture.convert("RGBA")
    faded.putalpha(Image.linear_gradient("L").rotate(90).resize(picture.size))
    return faded


def _on_white(change: Change) -> Change:
    def shown(picture):
        layer = change(picture).convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")

    return shown


def _numbers(dtype: type, low: float, high: float) -> Change:
    """Grey values from `low` to `high`."""
    return lambda picture: Image.fromarray((low + np.asarray(_stretched(picture)) / 255 * (high - low)).astype(dtype))


def _stretched(picture: Image.Image) -> Image.Image:
    return ImageOps.autocontrast(picture.convert("L"))


def _cut(form: str, share: float) -> Make:
    return lambda picture: (lambda whole: whole[: int(len(whole) * share)])(save(picture, form))


def _sized(width: int, height: int, form: str = "PNG") -> Make:
    return lambda picture: save(picture.resize((width, height)), form)


_ZEROS = "a JPEG whose end is zeros, as a power failure leaves it"
_HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)
_WHITE = zlib.compress((b"\0" + b"\xff" * 1125) * 9000, 1)  # 81 million pixels of one bit
_TEXT = _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(8 << 20), 1))  # 8 MB of it
_REASONS = {
    "image_empty": {"an empty file": b""},
    "image_unknown_format": {
        "a file of zeros": bytes(5000),
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "an EPS": saved("EPS"),
        **({} if "HEIF" in FORMATS else {"a HEIC": _HEIC}),
    },
    "no_image": {
        "a page of a web server": b"<!DOCTYPE html><html>404</html>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "a video": b"\0\0\0\x18ftypmp42" + bytes(99),
    },
    "image_truncated": {
        **{f"a {form} cut at {share}": _cut(form, share) for form in ("JPEG", "PNG") for share in (0.1, 0.5, 0.99)},
        **{f"a {form} cut in half": _cut(form, 0.5) for form in ("TIFF", "BMP", "GIF")},
        "an end mark in a thumbnail alone": lambda picture: _with_thumbnail(picture)[:-2],
        _ZEROS: lambda picture: jpeg(picture)[:-600] + bytes(600),
    },
    "image_unreadable": {
        "a PNG with a flipped byte": _flipped(900),
        "a flipped byte in the header": _flipped(18),
        "a WEBP cut in half": _cut("WEBP", 0.5),
        "a JPEG of 600 scans": _jpeg_of_many_scans,
        "a PNG of what is not a deflate stream": _png_of(64, 48, b"no deflate stream"),
        "a TIFF with a value that is not a number": saved(
            "TIFF", lambda picture: Image.fromarray(np.full((48, 64), np.nan, np.float32))
        ),
        "a PNG with 8 MB of compressed text": _with_chunk(_TEXT),
        **({"a HEIC": _HEIC} if "HEIF" in FORMATS else {}),
    },
    "too_many_pixels": {
        "a PNG header of 50,000 x 50,000": _png_of(50_000, 50_000),
        "a JPEG header of 65,000 x 65,000": _jpeg_of_65_000,
        "a PNG of 9,000 x 9,000, which Pillow would take": _png_of(9000, 9000, _WHITE, depth=1, colour=0),
        "a GIF header of 65,535 x 65,535": lambda picture: b"GIF89a" + b"\xff" * 4 + save(picture, "GIF")[10:],
    },
    "zero_size": {"a PNG without width": _png_of(0, 48), "a PNG without height": _png_of(48, 0)},
    "too_small": {"a tracking pixel": _sized(1, 1, "GIF"), "an image of 64 x 15": _sized(64, 15)},
    "extreme_aspect": {"a rule of 1000 x 20": _sized(1000, 20), "a banner of 20 x 1000": _sized(20, 1000)},
}
BROKEN = [
    Broken(kind, reason, (lambda _, made=made: made) if isinstance(made, bytes) else made)
    for reason, cases in _REASONS.items()
    for kind, made in cases.items()
]


_same, _grey, _cmyk, _bit = (_converted(mode) for mode in ("RGB", "L", "CMYK", "1"))
_glass = lambda picture: _faded(picture).convert("LA")  # noqa: E731
_indexed = lambda picture: picture.quantize(64)  # noqa: E731
# What is odd, the format, what is saved in it, the notes, what is shown, options of the format.
_SAVED = [
    ("progressive", "JPEG", _same, "", _same, {"progressive": True}),
    ("grey", "JPEG", _grey, "", _grey, {}),
    *((f"a {form}", form, _same, "", _same, {}) for form in ("BMP", "WEBP", "TIFF")),
    ("a photograph", "JPEG", lambda picture: picture.resize((1600, 1200)), "", _same, {}),
    ("print colours", "JPEG", _cmyk, "cmyk_converted", _same, {}),
    ("print colours in a TIFF", "TIFF", _cmyk, "cmyk_converted", _same, {}),
    ("opaque transparency", "PNG", _converted("RGBA"), "", _same, {}),
    ("16 bits", "PNG", _numbers(np.uint16, 0, 65535), "sixteen_bit_scaled", _stretched, {}),
    ("16 bits in 32", "TIFF", _numbers(np.int32, 0, 65535), "sixteen_bit_scaled", _stretched, {}),
    ("32-bit integers", "TIFF", _numbers(np.int32, -1000, 1000), "float_scaled", _stretched, {}),
    ("floats beyond 1", "TIFF", _numbers(np.float32, 3, 7), "float_scaled", _stretched, {}),
    ("floats", "TIFF", _numbers(np.float32, 0, 1), "float_scaled", _stretched, {}),
    ("one bit", "PNG", _bit, "", _bit, {}),
    ("a palette", "PNG", _indexed, "palette_converted", _indexed, {}),
    ("transparency", "PNG", _faded, "alpha_on_white", _on_white(_faded), {}),
    ("grey glass", "PNG", _glass, "alpha_on_white", _on_white(_glass), {}),
    ("unreadable EXIF", "JPEG", _same, "", _same, {"exif": b"Exif\0\0garbage" * 3}),
    ("an unreadable colour profile", "PNG", _same, "", _same, {"icc_profile": b"garbage" * 9}),
    *([("an AVIF", "AVIF", _same, "", _same, {})] if features.check("avif") else []),
]
_FRAMES = {"GIF": "animated_first_frame palette_converted", "TIFF": "multi_page_first"}
_FRAMES |= {"WEBP": "animated_first_frame", "PNG": "animated_first_frame", "MPO": "multi_page_first"}
ODD = [
    *(
        Odd(kind, saved(form, change, quality=95, **options), tuple(notes.split()), shows)
        for kind, form, change, notes, shows, options in _SAVED
    ),
    Odd("a JPEG with a thumbnail", _with_thumbnail),
    *(
        Odd(f"bytes behind a {form}", lambda picture, f=form: save(picture, f) + b"rest")
        for form in ("JPEG", "PNG", "WEBP")
    ),
    *(Odd(f"EXIF {orientation}", _turned(orientation), ("exif_rotated",)) for orientation in _TURNS),
    *(Odd(f"several in a {form}", _several(form), tuple(notes.split())) for form, notes in _FRAMES.items()),
]


def awkward_pictures() -> dict[str, bytes]:
    """Whole files that many a reader reads otherwise: every door has to read them in one way."""
    picture = draw(0, (70, 50))
    sizes = {"tiny": (2, 1), "extreme aspect": (900, 9), "larger than it is shown": (410, 300)}
    return {
        **{case.kind: case.make(picture) for case in ODD},
        **{f"turned {form}": save(picture, form, exif=turn(7)) for form in ("PNG", "WEBP")},
        **{name: save(picture.resize(size), "JPEG") for name, size in sizes.items()},
    }


TEXTS = [
    *("a red [SEP] circle", "[MASK] picture", "[PAD] [CLS]", "picture one " * 400, "picture" * 900, ""),
    *("a 😀 picture 👩‍🚀", "cafe\u0301", "caf\u00e9", "图片", "qqq Жж", " PICTURE \n one\t", "a\0b", "picture seven"),
]
