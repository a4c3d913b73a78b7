"""What may be wrong with an image or a caption, each fault under a name that is counted and explained.

A fault sets a row aside; a note counts a harmless conversion and keeps it. Nothing is dropped without either. Checks that
cost memory come before the memory is taken: bytes before the header, the header before the pixels, characters before the
text is looked at.
"""

import math
import re
import struct
import unicodedata
from dataclasses import dataclass, fields
from pathlib import PurePosixPath
from typing import Any

import numpy as np
from PIL import Image

from mm_utils.arguments import arg
from mm_utils.data.images import FORMATS, decode, decoder_message, read_header
from mm_utils.data.prepare.signatures import KINDS, CorruptFileError, HostileFileError, end_of_image, kind_of
from mm_utils.data.raw.faults import Fault

_PILLOW_PIXELS = 178_956_970  # it takes larger images for an attack


@dataclass
class CheckArguments:
    """What an image and a caption may be."""

    max_image_pixels: int = arg(40_000_000, "Set larger images aside, before they are decoded.")
    max_image_bytes: int = arg(64 * 2**20, "Set larger image files aside, before they are decoded.")
    min_image_side: int = arg(16, "Set images with a shorter side below this aside: spacers and tracking pixels.")
    max_aspect_ratio: float = arg(
        8.0, "Set images longer than this times their shorter side aside: rules and banners."
    )
    max_caption_characters: int = arg(2000, "Cut longer captions at a word border.")

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not value >= 1:
                raise ValueError(f"--{field.name} is {value}; nothing would be left. Give at least 1.")
        if self.max_image_pixels > _PILLOW_PIXELS:
            raise ValueError(
                f"--max_image_pixels is {self.max_image_pixels}; Pillow refuses more than {_PILLOW_PIXELS}. "
                "Give at most that, and shrink larger images first."
            )


@dataclass(frozen=True)
class CheckedImage:
    """An image that passed.

    Attributes:
        image: upright RGB without metadata, perhaps decoded at a reduced scale.
        width, height: of the whole image, upright.
        format: as Pillow names it, e.g. JPEG.
        notes: keys of `NOTES`.
    """

    image: Image.Image
    width: int
    height: int
    format: str
    notes: tuple[str, ...]


# -- images -------------------------------------------------------------------------------------------------------------

_EXTENSIONS = {
    **dict.fromkeys((".jpg", ".jpeg", ".jpe", ".jfif", ".mpo"), "JPEG"),
    **dict.fromkeys((".tif", ".tiff"), "TIFF"),
    **{f".{form}": form.upper() for form in ("png", "gif", "webp", "bmp", "avif", "svg", "heic", "pdf")},
}


def check_image(data: bytes, limits: CheckArguments, name: str = "", min_side: int | None = None) -> CheckedImage:
    """Decode an image file to the last byte, by the rules of `mm_utils.data.images`.

    A PNG's own check sums find every flipped byte in it. Other formats have none: there a flipped byte may pass, though
    simplejpeg, where it is installed, finds most damage of more than a few bytes in a JPEG.

    Args:
        data: the whole file.
        name: its name; only compared with the content, for `wrong_extension`.
        min_side: a JPEG may be decoded at a reduced scale whose shorter side is at least this: half the time.

    Raises:
        Fault: whatever is wrong with it; nothing else is raised, whatever the bytes.
    """
    if not data:
        raise Fault("image_empty", "0 bytes")
    if len(data) > limits.max_image_bytes:
        raise Fault("too_many_bytes", f"{len(data):,} bytes")
    header, end = _read(data)
    _check_size(*header.size, limits)
    try:
        image, (width, height), notes = decode(header, data, min_side, strict=True)
    except Exception as error:  # seven decoders raise no closed set, either
        raise _decoder_fault(error) from error
    form = "JPEG" if header.format == "MPO" else str(header.format)
    found = list(notes)
    if end is not None and end < len(data) and header.format != "MPO":  # whose further pictures follow the first
        found.append("trailing_bytes")
    if _EXTENSIONS.get(PurePosixPath(name).suffix.lower(), form) != form:
        found.append("wrong_extension")
    return CheckedImage(image, width, height, form, tuple(found))


def _read(data: bytes) -> tuple[Image.Image, int | None]:
    """The header, and where the image ends as `end_of_image` has it."""
    try:
        end = end_of_image(data)
    except HostileFileError as error:
        raise Fault("too_many_parts", str(error)) from error
    except CorruptFileError as error:
        raise Fault("image_corrupt", str(error)) from error
    if end == -1:
        raise Fault("image_truncated", f"{kind_of(data)} without its end mark")
    try:
        return read_header(data), end
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Fault("too_many_pixels", decoder_message(error)) from error
    except Exception as error:  # damaged headers raise OSError, ValueError, SyntaxError, struct.error, KeyError ...
        raise _header_fault(data, error) from error


def _check_size(width: int, height: int, limits: CheckArguments) -> None:
    shape = f"{width} x {height} pixels"
    if width * height > limits.max_image_pixels:
        raise Fault("too_many_pixels", shape)
    if min(width, height) < limits.min_image_side:
        raise Fault("too_small", shape)
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise Fault("extreme_aspect", shape)


def _header_fault(data: bytes, error: Exception) -> Fault:
    kind = kind_of(data)
    if kind not in KINDS:
        return Fault("image_unknown_format", kind or f"it begins with {data[:8].hex(' ')}")
    if kind == "AVIF" and "AVIF" not in FORMATS:
        return Fault("image_unknown_format", "AVIF, which this Pillow cannot read")
    if kind == "PNG" and 0 in struct.unpack(">II", data[16:24].ljust(8, b"\1")):
        return Fault("zero_size", "a PNG header that says so")
    return Fault("image_unreadable", f"{kind}: {decoder_message(error)}")


def _decoder_fault(error: Exception) -> Fault:
    text = decoder_message(error)
    if "truncated" in text.lower() or "premature end of jpeg file" in text.lower() or isinstance(error, EOFError):
        return Fault("image_truncated", text)
    return Fault("image_corrupt" if text.startswith("Corrupt JPEG") else "image_unreadable", text)


# -- captions -----------------------------------------------------------------------------------------------------------

_BLANK = "\u2800\u115f\u1160\u3164\uffa0\ufffd"  # letters and symbols that show nothing
_SURROGATE = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_CONTROL = re.compile(
    r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]"
)  # those that `str.split` does not take for white space
_PLACEHOLDERS = {"nan", "none", "null", "nil", "n/a", "na", "undefined", "object object", "no caption", "untitled"}
_LONGEST_NAME = 300
_SUFFIX = r"\.(?:jpe?g|jfif|png|gif|webp|bmp|tiff?|avif|hei[cf]|svg|raw|dng|cr2|nef|psd)"
_FILE_NAME = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://|www\.)\S+"  # an address and nothing else
    rf"|(?:[a-z]:[\\/]|\\\\|\.{{0,2}}/).*{_SUFFIX}"  # a path, spaces allowed
    rf"|\S+(?: \S+)?{_SUFFIX}"  # up to two words; three and more describe something
    r"|(?:img|dsc[a-z]?|pict?|pxl|mvimg|gopr?|dji|sam|cimg|p(?=\d{7}))[-_]?\d{3,}[-_\w]*(?: ?\(\d+\))?",  # of cameras
    re.IGNORECASE,
)
_SPECIAL_TOKEN = re.compile(r"\[(?:PAD|UNK|CLS|SEP|MASK|BOS|EOS)\]|</?s>|<(?:pad|unk|mask|bos|eos)>|<\|\w{1,40}\|>")


def check_caption(value: Any, limits: CheckArguments) -> tuple[str, tuple[str, ...]]:
    """The text of a caption: composed (NFC), free of control characters, single spaces, of bounded length.

    Emoji, right-to-left marks, joiners, look-alike letters and strings like `[PAD]` are kept: they are text. The work is
    bounded by the limit, however long the value is.

    Returns:
        The text and the notes (keys of `NOTES`).

    Raises:
        Fault: if it says nothing about an image.
    """
    if value is None or (isinstance(value, float | np.floating) and math.isnan(value)):
        raise Fault("caption_null", str(value))
    if not isinstance(value, str):
        raise Fault("caption_not_text", f"{type(value).__name__} {str(value)[:80]!r}")
    limit = limits.max_caption_characters
    whole = value.strip()
    part = whole[: 2 * limit]  # composing takes quadratic time in a run of combining marks
    text, notes = _clean(part)
    if not any(unicodedata.category(character)[0] in "LNS" and character not in _BLANK for character in text):
        raise Fault("caption_empty", ascii(part[:80]))
    if text.casefold().strip(" .\"'<>()[]{}#") in _PLACEHOLDERS:
        raise Fault("caption_nan", repr(text))
    if len(text) <= _LONGEST_NAME and _FILE_NAME.fullmatch(text):
        raise Fault("caption_is_file_name", repr(text))
    if len(text) > limit or len(part) < len(whole):
        border = text.rfind(" ", limit // 2, limit + 1)
        text = text[: limit if border == -1 else border]
        notes.append("caption_cut")
    if _SPECIAL_TOKEN.search(text):
        notes.append("caption_special_token")
    return text, tuple(notes)


def _clean(text: str) -> tuple[str, list[str]]:
    notes = []
    if not (text.isascii() and text.isprintable()):
        if _SURROGATE.search(text):
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            notes.append("caption_surrogate_replaced")
        plain = _CONTROL.sub("", _ESCAPE.sub("", text)).strip("\ufeff")
        if plain != text.strip("\ufeff"):
            notes.append("caption_controls_removed")
        text = unicodedata.normalize("NFC", plain)
    return " ".join(text.split()), notes
