"""What kind of file some bytes are, and where the image in them ends; nothing is decoded."""

import re
import zlib

_MAX_SCANS = 500  # a progressive JPEG of a camera or an editor has about 10
_MAX_PARTS = 50_000  # keeps the walk over a hostile JPEG below a tenth of a second
_MAX_FILLER = 65_536  # bytes between segments, which Pillow skips one by one, 4 MB a second
_JPEG_MARKER = re.compile(rb"\xff[^\x00\xd0-\xd7\xff]", re.DOTALL)
KINDS = {
    "JPEG": re.compile(rb"\xff\xd8"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "GIF": re.compile(rb"GIF8[79]a"),
    "WEBP": re.compile(rb"RIFF....WEBP", re.DOTALL),
    "BMP": re.compile(rb"BM"),
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
    "AVIF": re.compile(rb"....ftypavi[fs]", re.DOTALL),
}
_OTHER_KINDS = {
    "SVG": re.compile(rb"\s*(<\?xml.{0,400})?<(!--.{0,400}-->|!DOCTYPE svg|svg)", re.DOTALL | re.IGNORECASE),
    "an HTML page": re.compile(rb"\s*<(!doctype html|html|head|body)", re.IGNORECASE),
    "XML": re.compile(rb"\s*<\?xml"),
    "JSON": re.compile(rb"\s*\{\s*\""),
    "a Git LFS pointer": re.compile(rb"version https://git-lfs"),
    "HEIC": re.compile(rb"....ftyp(hei[cmsx]|hev[cmsx]|mif1|msf1)", re.DOTALL),
    "a video": re.compile(rb"....ftyp|\x1aE\xdf\xa3", re.DOTALL),
    "PDF": re.compile(rb"%PDF"),
    "PostScript (EPS)": re.compile(rb"%!PS|\xc5\xd0\xd3\xc6"),
    "JPEG 2000": re.compile(rb"\0\0\0\x0cjP|\xff\x4f\xff\x51"),
    "JPEG XL": re.compile(rb"\xff\x0a|\0\0\0\x0cJXL "),
    "a Photoshop file": re.compile(rb"8BPS"),
    "an icon": re.compile(rb"\0\0[\x01\x02]\0"),
    "a compressed file": re.compile(rb"PK\x03\x04|\x1f\x8b|7z\xbc\xaf\x27\x1c|Rar!"),
}


class HostileFileError(ValueError):
    """An image file built to keep decoders busy."""


class CorruptFileError(ValueError):
    """An image file whose own check sum denies it."""


def kind_of(content: bytes) -> str | None:
    """A key of `KINDS`, or what else the bytes are known to be; None if nothing known."""
    head, kinds = content[:1024], {**KINDS, **_OTHER_KINDS}
    return next((name for name, magic in kinds.items() if magic.match(head)), None)


def end_of_image(content: bytes) -> int | None:
    """Where the image in the file ends; -1 if it does not, None if the format has no mark that says so.

    Raises:
        HostileFileError: if a JPEG has hundreds of scans, or there are more parts than an honest file has.
        CorruptFileError: if a check sum of a PNG is wrong; decoders look at few of them.
    """
    if KINDS["JPEG"].match(content):
        return _end_of_jpeg(content)
    if KINDS["PNG"].match(content):
        return _end_of_png(content)
    if KINDS["WEBP"].match(content):
        size = 8 + int.from_bytes(content[4:8], "little")
        return size if size <= len(content) else -1
    return None


def _end_of_jpeg(content: bytes) -> int:
    """Walk the segments: a thumbnail's end mark inside of one is not the image's."""
    at, scans = 2, 0
    for _ in range(_MAX_PARTS):
        match = _JPEG_MARKER.search(content, at)
        if match is None:
            return -1
        if not scans and match.start() - at > _MAX_FILLER:
            raise HostileFileError(f"a JPEG with {match.start() - at:,} bytes between two segments")
        at = match.end()
        if content[at - 1] == 0xD9:
            return at
        scans += content[at - 1] == 0xDA
        if scans > _MAX_SCANS:
            raise HostileFileError(f"a JPEG of more than {_MAX_SCANS} scans")
        at += int.from_bytes(content[at : at + 2], "big")
    raise HostileFileError(f"a JPEG of more than {_MAX_PARTS:,} segments")


def _end_of_png(content: bytes) -> int:
    view, at = memoryview(content), 8
    for _ in range(_MAX_PARTS):
        stop = at + 12 + int.from_bytes(content[at : at + 4], "big")
        if stop > len(content):
            return -1
        kind = content[at + 4 : at + 8]
        if zlib.crc32(view[at + 4 : stop - 4]) != int.from_bytes(content[stop - 4 : stop], "big"):
            raise CorruptFileError(f"a PNG whose part {kind!r} at byte {at:,} has a wrong check sum")
        if kind == b"IEND":
            return stop
        at = stop
    raise HostileFileError(f"a PNG of more than {_MAX_PARTS:,} parts")
