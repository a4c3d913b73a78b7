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
    """A file that must not be used: why, how its name ends, and its bytes."""

    kind: str
    reason: str
    suffix: str
    make: Make


class Odd(NamedTuple):
    """A file that must be used: the notes on it, and what it shows if not the picture itself."""

    kind: str
    notes: tuple[str, ...]
    suffix: str
    make: Make
    shows: Change = lambda picture: picture


def draw(number: int, size: tuple[int, int] = (64, 48)) -> Image.Image:
    """A picture that no other number's is like: 8 x 6 random colours, smoothly joined."""
    cells = np.random.default_rng(number).integers(0, 256, (6, 8, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize(size, Image.Resampling.BICUBIC)


def save(picture: Image.Image, form: str, **options: object) -> bytes:
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
    stored = picture.transpose(_TURNS[orientation])
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


def _opaque(picture: Image.Image) -> Image.Image:
    return picture.convert("RGBA")


def _see_through_palette(picture: Image.Image) -> Image.Image:
    coloured = picture.quantize(32)
    coloured.info["transparency"] = 3
    return coloured


def _exactly(content: bytes) -> Make:
    return lambda picture: content


def _cut(form: str, share: float) -> Make:
    return lambda picture: (lambda whole: whole[: int(len(whole) * share)])(save(picture, form))


def _sized(width: int, height: int) -> Make:
    return lambda picture: png(picture.resize((width, height)))


BROKEN = [
    # nothing, or no image
    Broken("an empty file", "image_empty", ".jpg", _exactly(b"")),
    Broken("a file of one byte", "image_unknown_format", ".jpg", _exactly(b"\xff")),
    Broken("a file of zeros", "image_unknown_format", ".jpg", _exactly(bytes(5000))),
    Broken("a page of a web server", "image_unknown_format", ".jpg", _exactly(b"<!DOCTYPE html><html>404</html>")),
    Broken("an answer in JSON", "image_unknown_format", ".jpg", _exactly(b'{"error": "not found"}')),
    Broken(
        "a Git LFS pointer", "image_unknown_format", ".png", _exactly(b"version https://git-lfs.github.com/spec/v1\n")
    ),
    Broken("plain text", "image_unknown_format", ".png", _exactly(b"there is no image here\n" * 9)),
    Broken("an SVG", "image_unknown_format", ".svg", _exactly(b'<svg xmlns="http://www.w3.org/2000/svg"/>')),
    Broken(
        "a HEIC",
        "image_unreadable" if "HEIF" in FORMATS else "image_unknown_format",
        ".heic",
        _exactly(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic" + bytes(99)),
    ),
    Broken("a PDF", "image_unknown_format", ".pdf", saved("PDF")),
    Broken("an EPS", "image_unknown_format", ".eps", saved("EPS")),
    Broken("a video", "image_unknown_format", ".jpg", _exactly(b"\0\0\0\x18ftypmp42" + bytes(99))),
    Broken("a ZIP archive", "image_unknown_format", ".png", _exactly(b"PK\x03\x04" + bytes(99))),
    Broken("a JPEG 2000", "image_unknown_format", ".jp2", _exactly(b"\0\0\0\x0cjP  \r\n\x87\n")),
    Broken("a PCX", "image_unknown_format", ".pcx", saved("PCX")),
    Broken("an icon", "image_unknown_format", ".ico", saved("ICO")),
    # cut short
    *(
        Broken(f"a JPEG cut at {share:.0%}", "image_truncated", ".jpg", _cut("JPEG", share))
        for share in (0.1, 0.5, 0.99)
    ),
    Broken("a JPEG of its first two bytes", "image_truncated", ".jpg", _exactly(b"\xff\xd8")),
    Broken("a JPEG without end mark", "image_truncated", ".jpg", lambda picture: jpeg(picture)[:-2]),
    Broken(
        "an end mark in a thumbnail alone", "image_truncated", ".jpg", lambda picture: _with_thumbnail(picture)[:-2]
    ),
    Broken(
        "a JPEG whose end is zeros, as a power failure leaves it",
        "image_truncated",
        ".jpg",
        lambda picture: jpeg(picture)[:-600] + bytes(600),
    ),
    *(
        Broken(f"a PNG cut at {share:.0%}", "image_truncated", ".png", _cut("PNG", share))
        for share in (0.1, 0.5, 0.99)
    ),
    Broken("a PNG of its header", "image_truncated", ".png", lambda picture: png(picture)[:33]),
    Broken("a TIFF cut in half", "image_truncated", ".tiff", _cut("TIFF", 0.5)),
    Broken("a WebP cut in half", "image_truncated", ".webp", _cut("WEBP", 0.5)),
    Broken("a BMP cut in half", "image_truncated", ".bmp", _cut("BMP", 0.5)),
    Broken("a GIF cut in half", "image_truncated", ".gif", _cut("GIF", 0.5)),
    # damaged inside
    Broken("a PNG with a flipped byte", "image_corrupt", ".png", lambda picture: _flip(png(picture), 900)),
    Broken(
        "a PNG with a flipped byte in its header", "image_corrupt", ".png", lambda picture: _flip(png(picture), 18)
    ),
    Broken(
        "a PNG of what is not a deflate stream",
        "image_unreadable",
        ".png",
        _exactly(_png_of(64, 48, _chunk(b"IDAT", b"no deflate stream"))),
    ),
    Broken(
        "a TIFF with a value that is not a number",
        "image_unreadable",
        ".tiff",
        lambda picture: save(_floats(picture, float("nan")), "TIFF"),
    ),
    # built to take memory or time
    Broken("a PNG header of 50,000 x 50,000", "too_many_pixels", ".png", _exactly(_png_of(50_000, 50_000))),
    Broken(
        "a JPEG header of 65,000 x 65,000",
        "too_many_pixels",
        ".jpg",
        lambda picture: _jpeg_of_size(picture, 65_000, 65_000),
    ),
    Broken("a PNG of 9,000 x 9,000, which Pillow would take", "too_many_pixels", ".png", lambda _: _one_bit_png(9000)),
    Broken(
        "a GIF header of 65,535 x 65,535",
        "too_many_pixels",
        ".gif",
        lambda picture: b"GIF89a" + b"\xff" * 4 + save(picture, "GIF")[10:],
    ),
    Broken(
        "a PNG with 100 MB of compressed text",
        "image_unreadable",
        ".png",
        lambda picture: _with_chunk(png(picture), _chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(100 << 20), 1))),
    ),
    Broken("a JPEG of 600 scans", "too_many_parts", ".jpg", _jpeg_of_many_scans),
    Broken(
        "a JPEG of 100 kB of filler",
        "too_many_parts",
        ".jpg",
        lambda picture: b"\xff\xd8" + b"\xff" * 100_000 + jpeg(picture)[2:],
    ),
    Broken(
        "a PNG of 60,000 parts",
        "too_many_parts",
        ".png",
        lambda picture: _with_chunk(png(picture), _chunk(b"tEXt", b"a\0b") * 60_000),
    ),
    # of no use
    Broken("a PNG without width", "zero_size", ".png", _exactly(_png_of(0, 48))),
    Broken("a PNG without height", "zero_size", ".png", _exactly(_png_of(48, 0))),
    Broken("a tracking pixel", "too_small", ".gif", lambda picture: save(picture.resize((1, 1)), "GIF")),
    Broken("an image of 64 x 15", "too_small", ".png", _sized(64, 15)),
    Broken("a rule of 1000 x 20", "extreme_aspect", ".png", _sized(1000, 20)),
    Broken("a banner of 20 x 1000", "extreme_aspect", ".png", _sized(20, 1000)),
]

ODD = [
    Odd("a baseline JPEG", (), ".jpg", jpeg),
    Odd("a progressive JPEG", (), ".jpg", saved("JPEG", quality=95, progressive=True)),
    Odd("a grey JPEG", (), ".jpeg", lambda picture: jpeg(_grey(picture)), _grey),
    Odd("a BMP", (), ".bmp", saved("BMP")),
    Odd("a WebP", (), ".webp", saved("WEBP", lossless=True)),
    Odd("a TIFF", (), ".tif", saved("TIFF")),
    Odd("a photograph of 1600 x 1200", (), ".JPG", lambda picture: jpeg(picture.resize((1600, 1200)))),
    Odd("a JPEG named .png", ("wrong_extension",), ".png", jpeg),
    Odd("a PNG named .jpg", ("wrong_extension",), ".jpg", png),
    Odd("a name without a suffix", (), "", png),
    Odd(
        "a JPEG with bytes behind it", ("trailing_bytes",), ".jpg", lambda picture: jpeg(picture) + b"<!-- x -->" * 99
    ),
    Odd("a PNG with bytes behind it", ("trailing_bytes",), ".png", lambda picture: png(picture) + bytes(999)),
    Odd(
        "a WebP with bytes behind it",
        ("trailing_bytes",),
        ".webp",
        lambda picture: save(picture, "WEBP", quality=95) + b"rest",
    ),
    Odd("a JPEG with a thumbnail", (), ".jpg", _with_thumbnail),
    Odd("print colours in a TIFF", ("cmyk_converted",), ".tif", saved("TIFF", _converted("CMYK"))),
    Odd("opaque transparency", (), ".png", saved("PNG", _opaque)),
    Odd("an MPO", ("multi_page_first",), ".jpg", animated("MPO", quality=95)),
    *([Odd("an AVIF", (), ".avif", saved("AVIF", quality=95))] if AVIF else []),
    Odd("print colours", ("cmyk_converted",), ".jpg", lambda picture: jpeg(picture.convert("CMYK"))),
    Odd("16 bits of grey", ("sixteen_bit_scaled",), ".png", saved("PNG", _sixteen_bits), _grey),
    Odd("16 bits of grey in a TIFF", ("sixteen_bit_scaled",), ".tif", saved("TIFF", _sixteen_bits), _grey),
    Odd(
        "16 bits in 32",
        ("sixteen_bit_scaled",),
        ".tif",
        lambda picture: _numbers(picture, np.int32, 0, 65535),
        _stretched,
    ),
    Odd(
        "32-bit integers",
        ("float_scaled",),
        ".tif",
        lambda picture: _numbers(picture, np.int32, -1000, 1000),
        _stretched,
    ),
    Odd("floats beyond 1", ("float_scaled",), ".tif", lambda picture: _numbers(picture, np.float32, 3, 7), _stretched),
    Odd("floats", ("float_scaled",), ".tiff", saved("TIFF", _floats), _grey),
    Odd("one bit", (), ".png", saved("PNG", _converted("1")), _converted("1")),
    Odd(
        "a palette",
        ("palette_converted",),
        ".png",
        lambda picture: png(picture.quantize(64)),
        lambda picture: picture.quantize(64),
    ),
    Odd(
        "a palette with a transparent colour",
        ("palette_converted", "alpha_on_white"),
        ".png",
        saved("PNG", _see_through_palette),
        lambda picture: _on_white(_see_through_palette(picture)),
    ),
    Odd("transparency", ("alpha_on_white",), ".png", saved("PNG", _faded), lambda picture: _on_white(_faded(picture))),
    Odd(
        "grey with transparency",
        ("alpha_on_white",),
        ".png",
        lambda picture: png(_faded(picture).convert("LA")),
        lambda picture: _on_white(_faded(picture).convert("LA")),
    ),
    *(
        Odd(f"EXIF orientation {turn}", ("exif_rotated",), ".jpg", partial(_with_exif, orientation=turn))
        for turn in _TURNS
    ),
    Odd("unreadable EXIF", (), ".jpg", saved("JPEG", quality=95, exif=b"Exif\0\0garbage" * 3)),
    Odd("an unreadable colour profile", (), ".png", saved("PNG", icc_profile=b"garbage" * 9)),
    Odd("an animated GIF", ("animated_first_frame", "palette_converted"), ".gif", animated("GIF")),
    Odd("an animated PNG", ("animated_first_frame",), ".png", animated("PNG")),
    Odd("an animated WebP", ("animated_first_frame",), ".webp", animated("WEBP", quality=95)),
    Odd("a TIFF of three pages", ("multi_page_first",), ".tif", animated("TIFF")),
]
