"""Captions in a photo's own metadata, as photo software writes them: XMP, IPTC and EXIF.

The first text of this order counts; descriptions come before titles, and newer standards before older ones:

    XMP    dc:description, of several languages the default one
    IPTC   Caption-Abstract (2:120)
    EXIF   ImageDescription, then XPComment (UTF-16, Windows), then UserComment (its first 8 bytes name its encoding)
    XMP    dc:title        IPTC   ObjectName (2:5)        EXIF   XPTitle

Texts that cameras and programs write into every photo are passed over. Metadata that cannot be parsed count as none, as
the rotation does. No pixel is decoded, no entity of XML is expanded, and no encoding is guessed: old texts are UTF-8 or none.
"""

import re
import warnings
from collections.abc import Callable
from typing import BinaryIO, NamedTuple
from xml.etree import ElementTree

from PIL import ExifTags, Image, IptcImagePlugin

from mm_utils.data.faults import Fault
from mm_utils.data.images import FORMATS, MOST_BYTES
from mm_utils.data.paths import file_fault
from mm_utils.data.prepare.checks import is_of_camera
from mm_utils.files import open_regular_file

_LONGEST = 1 << 20  # bytes of XMP, characters of a caption
_RDF, _DC = "{http://www.w3.org/1999/02/22-rdf-syntax-ns#}", "{http://purl.org/dc/elements/1.1/}"
_LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"
_PROGRAM = re.compile(
    r"dav|ptr|hdr|sdr|rhdr|mde|cof|fbt|hrh|edf|bty|oznor|screenshot|created with (?:the )?gimp|"  # of phones, too
    r"processed with .{0,60}|filter: ?-?\d+; .*|\{.*\}",
    re.IGNORECASE | re.DOTALL,
)


class PhotoCaption(NamedTuple):
    """A caption, and the note (a key of `NOTES`) that says where it was."""

    text: str
    note: str


def photo_caption(path: str) -> PhotoCaption | None:
    """Return the caption that the image file `path` has in its metadata, or None.

    Raises:
        Fault: caption_of_camera if there is nothing but a camera's or program's own text, and bad_encoding if there is
            nothing but a text that is not UTF-8; or as reading the file fails.
    """
    try:
        with open_regular_file(path) as (file, size), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Pillow's, of damaged metadata
            return _first_caption(file) if size <= MOST_BYTES else None
    except OSError as error:
        raise file_fault(error, path) from error


def _first_caption(file: BinaryIO) -> PhotoCaption | None:
    try:
        image = Image.open(file, formats=FORMATS)
    except Exception:  # what reads the pixels names the damage
        return None
    refused: Fault | None = None
    for note, read in _FIELDS:
        try:
            text = read(image)[:_LONGEST].strip()
        except UnicodeDecodeError as error:
            refused = refused or Fault("bad_encoding", f"{note}: not {error.encoding} text ({error.reason})")
            continue
        except Exception:  # damaged metadata make Pillow raise struct.error, SyntaxError and others
            continue
        if is_of_camera(text) or _PROGRAM.fullmatch(text):
            refused = Fault("caption_of_camera", f"{note}: {text!r}")
        elif text:
            return PhotoCaption(text, note)
    if refused is not None:
        raise refused
    return None


def _xmp(image: Image.Image, name: str) -> str:
    content = image.info.get("xmp") or b""
    text = content.rstrip(b"\0 ").decode("utf-8-sig")
    if not text or len(content) > _LONGEST or "<!DOCTYPE" in text:  # where entities are declared
        return ""
    root = ElementTree.fromstring(text)
    for description in root.iter(f"{_RDF}Description"):
        found = description.find(f"{_DC}{name}")
        if found is not None:
            texts = {each.get(_LANGUAGE, ""): each.text or "" for each in reversed([*found.iter(f"{_RDF}li")])}
            return texts.get("x-default") or next((text for text in [*texts.values()][::-1] if text), found.text or "")
    return ""


def _iptc(image: Image.Image, number: int) -> str:
    value = (IptcImagePlugin.getiptcinfo(image) or {}).get((2, number), b"")  # type: ignore[arg-type]
    return _until_zero(value[0] if isinstance(value, list) else value)


def _exif(image: Image.Image) -> Image.Exif:
    """Return the EXIF block; that of a PNG without decoding its pixels, as `getexif` would."""
    if image.format != "PNG":
        return image.getexif()
    exif = Image.Exif()
    exif.load(image.info.get("exif", b""))
    return exif


def _description(image: Image.Image) -> str:
    """Pillow reads ASCII tags as Latin-1; programs write UTF-8."""
    value = _exif(image).get(ExifTags.Base.ImageDescription, "")
    return _until_zero(value.encode("latin-1") if isinstance(value, str) else value)


def _windows(image: Image.Image, tag: int) -> str:
    value = _exif(image).get(tag, b"")
    return bytes(value).decode("utf-16-le").partition("\0")[0]


def _user_comment(image: Image.Image) -> str:
    exif = _exif(image)
    value = exif.get_ifd(ExifTags.IFD.Exif).get(ExifTags.Base.UserComment, b"")
    head, body = value[:8], value[8:]
    if head == b"UNICODE\0":
        return _utf16(body, exif.endian).partition("\0")[0]
    if head == b"JIS\0\0\0\0\0":
        return body.rstrip(b"\0 ").decode("iso2022_jp")
    return _until_zero(body if head in (b"ASCII\0\0\0", bytes(8)) else value)


def _utf16(body: bytes, endian: str | None) -> str:
    """Decode by the mark, else by the half with the zeros, else by the file's own order."""
    if body[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return body.decode("utf-16")
    first, second = body[0::2].count(0), body[1::2].count(0)
    big = first > second or (first == second and endian == ">")
    return body.decode("utf-16-be" if big else "utf-16-le")


def _until_zero(value: bytes) -> str:
    return value.partition(b"\0")[0].decode("utf-8")


_FIELDS: tuple[tuple[str, Callable[[Image.Image], str]], ...] = (
    ("caption_from_xmp", lambda image: _xmp(image, "description")),
    ("caption_from_iptc", lambda image: _iptc(image, 120)),
    ("caption_from_exif", _description),
    ("caption_from_exif", lambda image: _windows(image, ExifTags.Base.XPComment)),
    ("caption_from_exif", _user_comment),
    ("caption_from_xmp", lambda image: _xmp(image, "title")),
    ("caption_from_iptc", lambda image: _iptc(image, 5)),
    ("caption_from_exif", lambda image: _windows(image, ExifTags.Base.XPTitle)),
)
