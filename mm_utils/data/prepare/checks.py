"""Check images and captions; every fault has a name that is counted and explained.

A fault sets a row aside; a note counts a harmless conversion and keeps it. Nothing is dropped without either. Limits are
checked before memory is taken: bytes before the header, the header before the pixels, characters before the text.
"""

import math
import re
import struct
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from PIL import Image

from mm_utils.data.faults import Fault
from mm_utils.data.prepare.arguments import CheckArguments
from mm_utils.model.reading import FORMATS, UnreadableError, decode, decoder_message, read_header


@dataclass(frozen=True)
class CheckedImage:
    """An image that passed: upright RGB without metadata, perhaps decoded at a reduced scale, and the whole image's size."""

    image: Image.Image
    width: int
    height: int
    format: str  # as Pillow names it, e.g. JPEG
    notes: tuple[str, ...]  # keys of `NOTES`


# -- images -------------------------------------------------------------------------------------------------------------


def check_image(
    data: bytes, limits: CheckArguments, min_side: int | None = None, most_pixels: int | None = None
) -> CheckedImage:
    """Decode an image file to the last byte, by the rules of `mm_utils.model.reading`.

    A PNG's own check sums find flipped bytes in it. Other formats have none: there a flipped byte may pass, though
    simplejpeg, where it is installed, finds most damage of more than a few bytes in a JPEG.

    A JPEG may be decoded at a reduced scale whose shorter side is at least `min_side`: half the time. `most_pixels` is a further
    limit, at the scale of decoding.

    Raises:
        Fault: if anything is wrong with it; nothing else is raised, whatever the bytes.
    """
    if not data:
        raise Fault("image_empty", "0 bytes")
    if len(data) > limits.max_image_bytes:
        raise Fault("too_many_bytes", f"{len(data):,} bytes")
    header = _header(data, limits)
    try:
        image, (width, height), notes = decode(header, data, min_side, strict=True, most_pixels=most_pixels)
    except UnreadableError as error:
        raise Fault(error.reason, str(error)) from error
    except Exception as error:  # the decoders raise no closed set of errors, either
        raise _decoder_fault(data, error) from error
    form = "JPEG" if header.format == "MPO" else str(header.format)  # more pictures follow the first JPEG
    return CheckedImage(image, width, height, form, notes)


def _header(data: bytes, limits: CheckArguments) -> Image.Image:
    try:
        header = read_header(data)
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Fault("too_many_pixels", decoder_message(error)) from error
    except Exception as error:  # damaged headers raise OSError, ValueError, SyntaxError, struct.error, KeyError ...
        raise _header_fault(data, error) from error
    (width, height) = header.size
    shape = "{} x {} pixels".format(*header.size)
    if width * height > limits.max_image_pixels:
        raise Fault("too_many_pixels", shape)
    if min(width, height) < limits.min_image_side:
        raise Fault("too_small", shape)
    if max(width, height) > limits.max_aspect_ratio * min(width, height):
        raise Fault("extreme_aspect", shape)
    return header


def _header_fault(data: bytes, error: Exception) -> Fault:
    kind = _kind_of(data)
    if kind in _NO_IMAGES:
        return Fault("no_image", kind)
    if kind not in _KINDS:
        return Fault("image_unknown_format", kind or f"it begins with {data[:8].hex(' ')}")
    if kind == "HEIC" and "HEIF" not in FORMATS:
        return Fault("image_unknown_format", "HEIC, which is read after pip install pillow-heif")
    # width and height; what a cut header lacks counts as 1s
    if kind == "PNG" and 0 in struct.unpack(">II", data[16:24].ljust(8, b"\1")):
        return Fault("zero_size", "a PNG header that says so")
    return _decoder_fault(data, error)


def _decoder_fault(data: bytes, error: Exception) -> Fault:
    kind = _kind_of(data)
    text = decoder_message(error)
    is_cut = re.search("truncated|premature end", text, re.IGNORECASE) or isinstance(error, EOFError)
    if is_cut or (kind == "JPEG" and b"\xff\xd9" not in data):  # its end mark
        return Fault("image_truncated", f"{kind}: {text}")
    return Fault("image_corrupt" if text.startswith("Corrupt JPEG") else "image_unreadable", f"{kind}: {text}")


# -- file signatures ----------------------------------------------------------------------------------------------------

_KINDS = {
    "JPEG": rb"\xff\xd8",
    "PNG": rb"\x89PNG\r\n\x1a\n",
    "GIF": rb"GIF8[79]a",
    "WEBP": rb"RIFF....WEBP",
    "BMP": rb"BM",
    "TIFF": rb"II[*+]\0|MM\0[*+]",  # of both byte orders, and BigTIFF with its +
    "AVIF": rb"....ftypavi[fs]",
    "HEIC": rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)",
}
_NO_IMAGES = {
    "an HTML page": rb"\s*<(!doctype html|html|head|body)",
    "a Git LFS pointer": rb"version https://git-lfs",
    "a video": rb"....ftyp|\x1aE\xdf\xa3",  # behind AVIF and HEIC, which have ftyp too
}
_OTHER_KINDS = {
    "SVG": rb"\s*(<\?xml.{0,400})?<(!--.{0,400}-->|!DOCTYPE svg|svg)",
    "PDF": rb"%PDF",
    "PostScript (EPS)": rb"%!PS|\xc5\xd0\xd3\xc6",
}


def _kind_of(content: bytes) -> str | None:
    """Return the kind of file, a key of one of these tables, or None."""
    kinds = _KINDS | _NO_IMAGES | _OTHER_KINDS
    return next(
        (name for name, magic in kinds.items() if re.match(magic, content[:1024], re.DOTALL | re.IGNORECASE)), None
    )


# -- captions -----------------------------------------------------------------------------------------------------------

_BLANK = "\u2800\u115f\u1160\u3164\uffa0\ufffd"  # letters and symbols that show nothing
_SURROGATE = re.compile("[\ud800-\udfff]")
# commands to a terminal, such as '\x1b[31m' for red
_ESCAPE = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\))")
_CONTROL = re.compile(r"[\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f]")  # those that `str.split` does not take for space
_PLACEHOLDERS = {
    *("nan", "none", "null", "nil", "n/a", "na", "undefined", "object object", "no caption", "untitled"),
    *("#ref!", "#value!", "#div/0!", "#name?", "#num!", "#null!"),  # Excel's
}
_LONGEST_NAME = 300
_SUFFIX = r"\.(?:jpe?g|jfif|png|gif|webp|bmp|tiff?|avif|hei[cf]|svg|raw|dng|cr2|nef|psd)"
_FILE_NAME = re.compile(
    r"(?:[a-z][a-z0-9+.-]*://|www\.)\S+"  # an address and nothing else
    rf"|(?:[a-z]:[\\/]|\\\\|\.{{0,2}}/).*{_SUFFIX}"  # a path, spaces allowed
    rf"|\S+(?: \S+)?{_SUFFIX}"  # up to two words; three and more describe something
    r"|(?:img|dsc[a-z]?|pict?|pxl|mvimg|gopr?|dji|sam|cimg|p(?=\d{7}))[-_]?\d{3,}[-_\w]*(?: ?\(\d+\))?",  # of cameras
    re.IGNORECASE,
)
# four numbers and more: '12, 40, 210.5, 96'
_NUMBERS = re.compile(r"[-+]?\d[\d.]*(?:[ ,;]+[-+]?\d[\d.e-]*){3,}")
_MARKUP = re.compile(
    r"&(?:[a-z]{2,8}\d{0,2}|#\d{1,7}|#x[0-9a-f]{1,6});|"
    r"</?(?:a|b|br|div|em|font|h[1-6]|i|img|li|ol|p|span|strong|su[bp]|t[dr]|table|u|ul)(?:\s[^<>]{0,300})?/?>",
    re.IGNORECASE,
)
# UTF-8 that was read as Latin-1 or Windows-1252 leaves pairs such as Ã© or â€™, which no language writes.
_MOJIBAKE = re.compile(
    "[ÂÃ][\u0080-\u00bf‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]|â(?:€|\u0080)[\u0080-\u00bf‚ƒ„…†‡ˆ‰Š‹ŒŽ‘’“”•–—˜™š›œžŸ]"
)


def check_caption(value: Any, limits: CheckArguments) -> tuple[str, tuple[str, ...]]:
    """Return a caption's text: composed (NFC), printable, with single spaces, bounded.

    Emoji, right-to-left marks, joiners, look-alike letters and strings like `[PAD]` are kept: they are text. The work is
    bounded by the limit, however long the value is. Notes (keys of `NOTES`) stand beside the text; raises a `Fault` if it says
    nothing about an image.
    """
    if value is None or (isinstance(value, float) and math.isnan(value)):
        raise Fault("caption_null", str(value))
    if not isinstance(value, str):
        raise Fault("caption_not_text", f"{type(value).__name__} {str(value)[:80]!r}")
    limit = limits.max_caption_characters
    whole = value.strip()
    part = whole[: 2 * limit]  # composing takes quadratic time in a run of combining marks
    text, notes = _clean(part)
    # letters, numbers and symbols, of which emoji are some
    if not any(unicodedata.category(character)[0] in "LNS" and character not in _BLANK for character in text):
        raise Fault("caption_empty", ascii(part[:80]))
    # 'N/A', '<nan>', '[object Object]'
    if not _PLACEHOLDERS.isdisjoint((text.casefold(), text.casefold().strip(" .\"'<>()[]{}#"))):
        raise Fault("caption_nan", repr(text))
    if _NUMBERS.fullmatch(text):
        raise Fault("caption_not_text", f"numbers alone, as of boxes: {text[:80]!r}")
    if len(text) <= _LONGEST_NAME and _FILE_NAME.fullmatch(text):
        raise Fault("caption_is_file_name", repr(text))
    if len(text) > limit or len(part) < len(whole):
        # the last blank of the second half; without one, a word is cut
        border = text.rfind(" ", limit // 2, limit + 1)
        text = text[: limit if border == -1 else border]
        notes.append("caption_cut")
    if _MARKUP.search(text):
        notes.append("caption_markup")
    if not part.isascii() and _MOJIBAKE.search(part):
        notes.append("caption_mojibake")
    return text, tuple(notes)


def check_captions(captions: Sequence[Any], limits: CheckArguments) -> tuple[list[str], list[Fault], list[str]]:
    """Return the good captions of one image, each once, the faults of the others, at least one if none is good, and the notes."""
    good: dict[str, None] = {}
    faults = []
    notes = list[str]()
    for value in captions:
        try:
            text, found = check_caption(value, limits)
        except Fault as fault:
            faults.append(fault)
            continue
        notes += [*found, *(["caption_repeated"] if text in good else [])]
        good[text] = None
    if not good and not faults:
        faults.append(Fault("no_caption_left", "it has no captions"))
    return list(good), faults, notes


def _clean(text: str) -> tuple[str, list[str]]:
    notes = []
    if not (text.isascii() and text.isprintable()):
        if _SURROGATE.search(text):
            # two halves of a pair become one character, and a lone one U+FFFD
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
            notes.append("caption_surrogate_replaced")
        plain = _CONTROL.sub("", _ESCAPE.sub("", text)).strip("\ufeff")
        if plain != text:
            notes.append("caption_controls_removed")
        text = unicodedata.normalize("NFC", plain)
        if text != plain:
            notes.append("caption_composed")
    joined = " ".join(text.split())
    if joined != text.strip():
        notes.append("caption_spaces_joined")
    return joined, notes
