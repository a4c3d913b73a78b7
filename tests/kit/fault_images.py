"""Image files with one thing wrong with each, and odd ones that are whole; all are made of one smooth random picture."""

import io
import struct
import zlib
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageOps, features

from mm_utils.model.reading import FORMATS

AVIF = "avif" in features.modules and features.check("avif")
Make = Callable[[Image.Image], bytes]
Change = Callable[[Image.Image], Image.Image]
_PNG = b"\x89PNG\r\n\x1a\n"
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,  # what undoes the turn that this orientation asks for
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


class Broken(NamedTuple):
    """A file that must not be used: why, and its bytes."""

    kind: str
    reason: str
    make: Make


class Odd(NamedTuple):
    """A file that must be used: how its name ends, the notes on it, and what it shows if not the picture itself."""

    kind: str
    suffix: str
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
    return save(picture, "JPEG", quality=95, subsampling=0)


def jpeg_with_inner_damage(picture: Image.Image) -> bytes:
    """100 bytes in the middle are overwritten; only simplejpeg notices."""
    whole = bytearray(jpeg(picture))
    middle = len(whole) * 2 // 3
    whole[middle : middle + 100] = bytes(range(100, 200))
    return bytes(whole)


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _png_of(width: int, height: int, *chunks: bytes, depth: int = 8, colour: int = 2) -> bytes:
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return _PNG + _chunk(b"IHDR", header) + b"".join(chunks) + _chunk(b"IEND", b"")


def _one_bit_png(side: int) -> bytes:
    """A whole white image, of little more than a kilobyte for a million pixels."""
    rows = zlib.compress((b"\0" + b"\xff" * -(-side // 8)) * side, 9)
    return _png_of(side, side, _chunk(b"IDAT", rows), depth=1, colour=0)


def _with_chunk(whole: bytes, chunk: bytes) -> bytes:
    """A PNG with a chunk behind its header, which takes 8 + 25 bytes."""
    return whole[:33] + chunk + whole[33:]


def _flip(whole: bytes, at: int) -> bytes:
    return whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]


def _jpeg_of_size(picture: Image.Image, width: int, height: int) -> bytes:
    """A JPEG whose header lies about its size."""
    whole = jpeg(picture)
    at = whole.index(b"\xff\xc0") + 5
    return whole[:at] + struct.pack(">HH", height, width) + whole[at + 4 :]


def _with_thumbnail(picture: Image.Image) -> bytes:
    """A whole JPEG inside a segment of another."""
    small = save(picture.resize((16, 12)), "JPEG")
    return b"\xff\xd8\xff\xe1" + struct.pack(">H", len(small) + 2) + small + jpeg(picture)[2:]


def _jpeg_of_many_scans(picture: Image.Image) -> bytes:
    whole = save(picture, "JPEG", progressive=True)
    begin = whole.rindex(b"\xff\xda")
    return whole[:begin] + whole[begin:-2] * 600 + whole[-2:]


def _with_exif(picture: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = picture.resize((256, 192)).transpose(_TURNS[orientation])  # may be decoded at a reduced scale
    return save(stored, "JPEG", quality=95, subsampling=0, exif=exif)


def animated(form: str, **options: object) -> Make:
    """Makes files of the picture, its negative and its mirror image."""
    return lambda picture: save(
        picture, form, save_all=True, append_images=[ImageOps.invert(picture), ImageOps.mirror(picture)], **options
    )


def _converted(mode: str) -> Change:
    return lambda picture: picture.convert(mode)


def _faded(picture: Image.Image) -> Image.Image:
    """Transparent from the left to the right."""
    faded = picture.convert("RGBA")
    faded.putalpha(Image.linear_gradient("L").rotate(90).resize(picture.size))
    return faded


def _on_white(picture: Image.Image) -> Image.Image:
    layer = picture.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", layer.size, "white"), layer).convert("RGB")


def _grey(picture: Image.Image) -> Image.Image:
    return picture.convert("L")


def _sixteen_bits(picture: Image.Image) -> Image.Image:
    return Image.fromarray(np.asarray(_grey(picture)).astype(np.uint16) * 257)


def _floats(picture: Image.Image, worst: float = 0.5) -> Image.Image:
    values = np.asarray(_grey(picture)).astype(np.float32) / 255
    values[0, 0] = worst
    return Image.fromarray(values)


def _numbers(picture: Image.Image, dtype: type, low: float, high: float) -> bytes:
    """Grey values from `low` to `high` in a TIFF."""
    grey = np.asarray(ImageOps.autocontrast(_grey(picture)), np.float64) / 255
    return save(Image.fromarray((low + grey * (high - low)).astype(dtype)), "TIFF")


def _stretched(picture: Image.Image) -> Image.Image:
    return ImageOps.autocontrast(_grey(picture))


def _palette(picture: Image.Image) -> Image.Image:
    return picture.quantize(64)


def _cut(form: str, share: float) -> Make:
    return lambda picture: (lambda whole: whole[: int(len(whole) * share)])(save(picture, form))


def _sized(width: int, height: int, form: str = "PNG") -> Make:
    return lambda picture: save(picture.resize((width, height)), form)


def _with_text(whole: bytes) -> bytes:
    """100 MB of it, compressed."""
    return _with_chunk(whole, _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20), 1)))


_REASONS: dict[str, dict[str, bytes | Make]] = {
    "image_empty": {"an empty file": b""},
    "image_unknown_format": {
        "a file of one byte": b"\xff",
        "a file of zeros": bytes(5000),
        "a page of a web server": b"<!DOCTYPE html><html>404</html>",
        "a Git LFS pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "plain text": b"there is no image here\n" * 9,
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg"/>',
        "a PDF": saved("PDF"),
        "an EPS": saved("EPS"),
        "a video": b"\0\0\0\x18ftypmp42" + bytes(99),
        "a ZIP archive": b"PK\x03\x04" + bytes(99),
        "a PCX": saved("PCX"),
        "an icon": saved("ICO"),
    },
    "image_truncated": {
        **{
            f"a {form} cut at {share:.0%}": _cut(form, share) for form in ("JPEG", "PNG") for share in (0.1, 0.5, 0.99)
        },
        **{f"a {form} cut in half": _cut(form, 0.5) for form in ("TIFF", "WEBP", "BMP", "GIF")},
        "a JPEG of its first two bytes": b"\xff\xd8",
        "a JPEG without end mark": lambda picture: jpeg(picture)[:-2],
        "an end mark in a thumbnail alone": lambda picture: _with_thumbnail(picture)[:-2],
        "a JPEG whose end is zeros, as a power failure leaves it": lambda picture: jpeg(picture)[:-600] + bytes(600),
        "a PNG of its header": lambda picture: png(picture)[:33],
    },
    "image_corrupt": {
        "a PNG with a flipped byte": lambda picture: _flip(png(picture), 900),
        "a PNG with a flipped byte in its header": lambda picture: _flip(png(picture), 18),
    },
    "image_unreadable": {
        "a PNG of what is not a deflate stream": _png_of(64, 48, _chunk(b"IDAT", b"no deflate stream")),
        "a TIFF with a value that is not a number": lambda picture: save(_floats(picture, float("nan")), "TIFF"),
        "a PNG with 100 MB of compressed text": lambda picture: _with_text(png(picture)),
    },
    "too_many_pixels": {
        "a PNG header of 50,000 x 50,000": _png_of(50_000, 50_000),
        "a JPEG header of 65,000 x 65,000": lambda picture: _jpeg_of_size(picture, 65_000, 65_000),
        "a PNG of 9,000 x 9,000, which Pillow would take": _one_bit_png(9000),
        "a GIF header of 65,535 x 65,535": lambda picture: b"GIF89a" + b"\xff" * 4 + save(picture, "GIF")[10:],
    },
    "too_many_parts": {
        "a JPEG of 600 scans": _jpeg_of_many_scans,
        "a JPEG of 100 kB of filler": lambda picture: b"\xff\xd8" + b"\xff" * 100_000 + jpeg(picture)[2:],
        "a PNG of 60,000 parts": lambda picture: _with_chunk(png(picture), _chunk(b"tEXt", b"a\0b") * 60_000),
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
_HEIC = b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)
BROKEN.append(Broken("a HEIC", "image_unreadable" if "HEIF" in FORMATS else "image_unknown_format", lambda _: _HEIC))
# What only preparing finds, or refuses.
_SHOWN = {"too_small", "extreme_aspect", "too_many_parts", "a JPEG whose end is zeros, as a power failure leaves it"}
UNDECODABLE = [case for case in BROKEN if not {case.reason, case.kind} & _SHOWN]


def _see_through_palette(picture: Image.Image) -> Image.Image:
    coloured = picture.quantize(32)
    coloured.info["transparency"] = 3
    return coloured


def _grey_glass(picture: Image.Image) -> Image.Image:
    return _faded(picture).convert("LA")


def _behind(make: Make, rest: bytes) -> Make:
    return lambda picture: make(picture) + rest


_WEBP = saved("WEBP", quality=95)
_SIXTEEN, _SCALED, _CMYK = ("sixteen_bit_scaled",), ("float_scaled",), ("cmyk_converted",)
_FIRST_FRAME, _ON_WHITE = ("animated_first_frame",), ("alpha_on_white",)
ODD = [
    Odd("a baseline JPEG", ".jpg", jpeg),
    Odd("a progressive JPEG", ".jpg", saved("JPEG", quality=95, progressive=True)),
    Odd("a grey JPEG", ".jpeg", lambda picture: jpeg(_grey(picture)), (), _grey),
    Odd("a BMP", ".bmp", saved("BMP")),
    Odd("a WebP", ".webp", saved("WEBP", lossless=True)),
    Odd("a TIFF", ".tif", saved("TIFF")),
    Odd("a photograph of 1600 x 1200", ".JPG", lambda picture: jpeg(picture.resize((1600, 1200)))),
    Odd("a JPEG named .png", ".png", jpeg, ("wrong_extension",)),
    Odd("a PNG named .jpg", ".jpg", png, ("wrong_extension",)),
    Odd("a name without a suffix", "", png),
    Odd("a JPEG with bytes behind it", ".jpg", _behind(jpeg, b"<!-- x -->" * 99), ("trailing_bytes",)),
    Odd("a PNG with bytes behind it", ".png", _behind(png, bytes(999)), ("trailing_bytes",)),
    Odd("a WebP with bytes behind it", ".webp", _behind(_WEBP, b"rest"), ("trailing_bytes",)),
    Odd("a JPEG with a thumbnail", ".jpg", _with_thumbnail),
    Odd("print colours in a TIFF", ".tif", saved("TIFF", _converted("CMYK")), _CMYK),
    Odd("opaque transparency", ".png", saved("PNG", _converted("RGBA"))),
    Odd("an MPO", ".jpg", animated("MPO", quality=95), ("multi_page_first",)),
    *([Odd("an AVIF", ".avif", saved("AVIF", quality=95))] if AVIF else []),
    Odd("print colours", ".jpg", lambda picture: jpeg(picture.convert("CMYK")), _CMYK),
    Odd("16 bits of grey", ".png", saved("PNG", _sixteen_bits), _SIXTEEN, _grey),
    Odd("16 bits of grey in a TIFF", ".tif", saved("TIFF", _sixteen_bits), _SIXTEEN, _grey),
    Odd("16 bits in 32", ".tif", lambda picture: _numbers(picture, np.int32, 0, 65535), _SIXTEEN, _stretched),
    Odd("32-bit integers", ".tif", lambda picture: _numbers(picture, np.int32, -1000, 1000), _SCALED, _stretched),
    Odd("floats beyond 1", ".tif", lambda picture: _numbers(picture, np.float32, 3, 7), _SCALED, _stretched),
    Odd("floats", ".tiff", saved("TIFF", _floats), _SCALED, _grey),
    Odd("one bit", ".png", saved("PNG", _converted("1")), (), _converted("1")),
    Odd("a palette", ".png", saved("PNG", _palette), ("palette_converted",), _palette),
    Odd(
        "a palette with a transparent colour",
        ".png",
        saved("PNG", _see_through_palette),
        ("palette_converted", "alpha_on_white"),
        lambda picture: _on_white(_see_through_palette(picture)),
    ),
    Odd("transparency", ".png", saved("PNG", _faded), _ON_WHITE, lambda picture: _on_white(_faded(picture))),
    Odd("grey glass", ".png", saved("PNG", _grey_glass), _ON_WHITE, lambda picture: _on_white(_grey_glass(picture))),
    *(
        Odd(f"EXIF orientation {turn}", ".jpg", partial(_with_exif, orientation=turn), ("exif_rotated",))
        for turn in _TURNS
    ),
    Odd("unreadable EXIF", ".jpg", saved("JPEG", quality=95, exif=b"Exif\0\0garbage" * 3)),
    Odd("an unreadable colour profile", ".png", saved("PNG", icc_profile=b"garbage" * 9)),
    Odd("an animated GIF", ".gif", animated("GIF"), ("animated_first_frame", "palette_converted")),
    Odd("an animated PNG", ".png", animated("PNG"), _FIRST_FRAME),
    Odd("an animated WebP", ".webp", animated("WEBP", quality=95), _FIRST_FRAME),
    Odd("a TIFF of three pages", ".tif", animated("TIFF"), ("multi_page_first",)),
]
