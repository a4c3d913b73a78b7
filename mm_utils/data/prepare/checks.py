"""Check images and captions; every fault has a name that is counted and explained.

A fault sets a row aside; a note counts a harmless conversion and keeps it. Nothing is dropped without either. Limits are
checked before memory is taken: bytes before the header, the header before the pixels, characters before the text.
"""

import math
import re
import struct
import unicodedata
import zlib
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

    A PNG's own check sums find every flipped byte in it. Other formats have none: there a flipped byte may pass, though
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
    end = _end_of_image(data)
    if end == -1:
        raise Fault("image_truncated", f"{_kind_of(data)} without its end mark")
    header = _header(data, limits)
    try:
        image, (width, height), notes = decode(header, data, min_side, strict=True, most_pixels=most_pixels)
    except UnreadableError as error:
        raise Fault(error.reason, str(error)) from error
    except Exception as error:  # the decoders raise no closed set of errors, either
        text = decoder_message(error)
        is_cut = isinstance(error, EOFError) or re.search("truncated|premature end of jpeg file", text, re.IGNORECASE)
        reason = "image_corrupt" if text.startswith("Corrupt JPEG") else "image_unreadable"
        raise Fault("image_truncated" if is_cut else reason, text) from error
    form = "JPEG" if header.format == "MPO" else str(header.format)
    found = list(notes)
    if end is not None and end < len(data) and header.format != "MPO":  # whose further pictures follow the first
        found.append("trailing_bytes")
    return CheckedImage(image, width, height, form, tuple(found))


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
    if kind == "PNG" and 0 in struct.unpack(">II", data[16:24].ljust(8, b"\1")):
        return Fault("zero_size", "a PNG header that says so")
    return Fault("image_unreadable", f"{kind}: {decoder_message(error)}")


# -- file signatures ----------------------------------------------------------------------------------------------------

_MAX_SCANS = 500  # a progressive JPEG of a camera or an editor has about 10
_MAX_PARTS = 50_000  # keeps the walk over a hostile JPEG below a tenth of a second
_MAX_FILLER = 65_536  # bytes between segments, which Pillow skips one by one, 4 MB a second
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
_KINDS = {
    "JPEG": re.compile(rb"\xff\xd8"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "GIF": re.compile(rb"GIF8[79]a"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "AVIF": re.compile(rb"....ftypavi[fs]", re.DOTALL),
    "HEIC": re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL),
}
_OTHER_KINDS = {
    "SVG": re.compile(rb"\s*(<\?xml.{0,400})?<(!--.{0,400}-->|!DOCTYPE svg|svg)", re.DOTALL | re.IGNORECASE),
    "an HTML page": re.compile(rb"\s*<(!doctype html|html|head|body)", re.IGNORECASE),
    "a Git LFS pointer": re.compile(rb"version https://git-lfs"),
    "a video": re.compile(rb"....ftyp|\x1aE\xdf\xa3", re.DOTALL),
    "PDF": re.compile(rb"%PDF"),
    "PostScript (EPS)": re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"),
}
_NO_IMAGES = ("an HTML page", "a Git LFS pointer", "a video")


def _kind_of(content: bytes) -> str | None:
    """Return the kind of file, a key of `_KINDS` or another known one, or None."""
    head = content[:1024]
    kinds = {**_KINDS, **_OTHER_KINDS}
    return next((name for name, magic in kinds.items() if magic.match(head)), None)


def _end_of_image(content: bytes) -> int | None:
    """Return where the image in the file ends; -1 if it does not, None if it has no mark.

    Raises too_many_parts if a JPEG has hundreds of scans, or there are more parts than an honest file has, and
    image_corrupt if a check sum of a PNG is wrong; decoders look at few of them.
    """
    if _KINDS["JPEG"].match(content):
        return _end_of_jpeg(content)
    if _KINDS["PNG"].match(content):
        return _end_of_png(content)
    if _KINDS["WEBP"].match(content):
        size = 8 + int.from_bytes(content[4:8], "little")
        return size if size <= len(content) else -1
    return None


def _end_of_jpeg(content: bytes) -> int:
    """Walk the segments: a thumbnail's end mark inside one is not the image's."""
    at = 2
    scans = 0
    for _ in range(_MAX_PARTS):
        match = _JPEG_MARKER.search(content, at)
        if match is None:
            return -1
        if not scans and match.start() - at > _MAX_FILLER:
            raise Fault("too_many_parts", f"a JPEG with {match.start() - at:,} bytes between two segments")
        at = match.end()
        if content[at - 1] == 0xD9:
            return at
        scans += content[at - 1] == 0xDA
        if scans > _MAX_SCANS:
            raise Fault("too_many_parts", f"a JPEG of more than {_MAX_SCANS} scans")
        at += int.from_bytes(content[at : at + 2], "big")
    raise Fault("too_many_parts", f"a JPEG of more than {_MAX_PARTS:,} segments")


def _end_of_png(content: bytes) -> int:
    view = memoryview(content)
    at = 8
    for _ in range(_MAX_PARTS):
        stop = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if stop > len(content):
            return -1
        kind = content[at + 4 : at + 8]
        if zlib.crc32(view[at + 4 : stop - 4]) != int.from_bytes(content[stop - 4 : stop], "big"):
            raise Fault("image_corrupt", f"a PNG whose part {kind!r} at byte {at:,} has a wrong check sum")
        if kind == b"IEND":
            return stop
        at = stop
    raise Fault("too_many_parts", f"a PNG of more than {_MAX_PARTS:,} parts")


# -- captions -----------------------------------------------------------------------------------------------------------

_BLANK = "\u2800\u115f\u1160\u3164\uffa0\ufffd"  # letters and symbols that show nothing
_SURROGATE = re.compile("[\ud800-\udfff]")
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
    if not any(unicodedata.category(character)[0] in "LNS" and character not in _BLANK for character in text):
        raise Fault("caption_empty", ascii(part[:80]))
    if not _PLACEHOLDERS.isdisjoint((text.casefold(), text.casefold().strip(" .\"'<>()[]{}#"))):
        raise Fault("caption_nan", repr(text))
    if _NUMBERS.fullmatch(text):
        raise Fault("caption_not_text", f"numbers alone, as of boxes: {text[:80]!r}")
    if len(text) <= _LONGEST_NAME and _FILE_NAME.fullmatch(text):
        raise Fault("caption_is_file_name", repr(text))
    if len(text) > limit or len(part) < len(whole):
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
