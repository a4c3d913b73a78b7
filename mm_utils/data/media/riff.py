"""WAV and AVI files without a codec: sounds of 16-bit samples, clips of JPEG frames.

Prepared sounds and clips are kept as such files, which any player opens. Both are RIFF containers: chunks of a name of four
letters, a size, the content, and a byte of padding where the size is odd ("Multimedia Programming Interface and Data
Specifications 1.0", IBM and Microsoft, 1991).
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from PIL import Image

from mm_utils.data.images import encode, shrink
from mm_utils.model.reading import Frame, UnreadableError, wav_samples

_REASON = "medium_unreadable"
_MOST_CHUNKS = 250_000  # of a file: an hour of 60 frames a second
_JPEG = b"\xff\xd8"  # the first bytes of a frame
_PCM, _SAMPLE = 1, 2  # format tag of plain samples; bytes of one
_WAV_FORMAT = struct.Struct("<HHIIHH")  # tag, channels, samples and bytes a second, bytes of a frame, bits of a sample
_AVI_HEADER = struct.Struct("<14I")
_STREAM_HEADER = struct.Struct("<4s4sIHHIIIIIIII4H")
_PICTURE_FORMAT = struct.Struct("<IiiHH4sIiiII")
_INDEX_ENTRY = struct.Struct("<4sIII")
_FRAME, _HAS_INDEX, _KEY_FRAME = b"00dc", 0x10, 0x10


def write_wav(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV file of mono int16 samples `[n]`, at `rate` a second."""
    layout = _WAV_FORMAT.pack(_PCM, 1, rate, rate * _SAMPLE, _SAMPLE, 8 * _SAMPLE)
    content = np.ascontiguousarray(samples, "<i2").tobytes()
    return _chunk(b"RIFF", b"WAVE" + _chunk(b"fmt ", layout) + _chunk(b"data", content))


def read_wav(content: bytes) -> tuple[np.ndarray, int]:
    """View the samples of a file of `write_wav`, int16 `[n]`, uncopied; return their rate too.

    Raises:
        UnreadableError: if it is none.
    """
    found = wav_samples(content)
    if found is None or found[0].dtype != np.int16 or found[0].shape[1] != 1:
        raise UnreadableError("it is no WAV file of one channel of 16 bits, as prepared sounds are", _REASON)
    return found[0][:, 0], found[1]


@dataclass
class StoredClip:
    """A clip as prepared sets store it.

    Attributes:
        jpegs: JPEG files of one size; an empty one shows the frame before for longer.
        content: the AVI file of them.
        size: their width and height in pixels.
        original_size: width and height of the first frame of the file, upright.
    """

    jpegs: list[bytes]
    content: bytes
    size: tuple[int, int]
    original_size: tuple[int, int]


def store_clip(
    frames: Iterable[Frame], fps: float, short_side: int | None = None, notes: list[str] | None = None
) -> StoredClip:
    """Encode frames of a constant rate, as `read_frames` yields them.

    Args:
        short_side: larger frames are shrunk to it, in pixels; None keeps their size.
        notes: frames_fitted is added if they differ in size.
    """
    jpegs, size, original_size, last = list[bytes](), (0, 0), (0, 0), None
    for frame in frames:
        if frame is last:
            jpegs.append(b"")
            continue
        last, image = frame, frame.picture()
        original_size = original_size if jpegs else image.size
        image = image if short_side is None else shrink(image, short_side)
        size = size if jpegs else image.size
        if image.size != size:
            image = image.resize(size, Image.Resampling.BICUBIC)
            if notes is not None:
                notes.append("frames_fitted")
        jpegs.append(encode(image, "jpeg"))
    return StoredClip(jpegs, write_avi(jpegs, fps, size), size, original_size)


def write_avi(frames: Sequence[bytes], fps: float, size: tuple[int, int]) -> bytes:
    """Return an AVI file of JPEG frames.

    Args:
        frames: JPEG files of one size; an empty one shows the frame before for longer.
        fps: frames a second.
        size: width and height of the frames, in pixels.
    """
    width, height = size
    rate = Fraction(fps).limit_denominator(1_000_000)
    largest = max(map(len, frames), default=0)
    main = _AVI_HEADER.pack(
        round(1e6 / rate), largest * -(-rate.numerator // rate.denominator), 0, _HAS_INDEX, len(frames), 0, 1, largest,
        width, height, 0, 0, 0, 0,
    )  # fmt: skip
    stream = _STREAM_HEADER.pack(
        b"vids", b"MJPG", 0, 0, 0, 0, rate.denominator, rate.numerator, 0, len(frames), largest, 0xFFFFFFFF, 0,
        0, 0, width, height,
    )  # fmt: skip
    picture = _PICTURE_FORMAT.pack(40, width, height, 1, 24, b"MJPG", width * height * 3, 0, 0, 0, 0)
    streams = b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", picture)
    headers = b"hdrl" + _chunk(b"avih", main) + _chunk(b"LIST", streams)
    chunks = [_chunk(_FRAME, frame) for frame in frames]
    at, entries = len(b"movi"), []
    for frame, chunk in zip(frames, chunks, strict=True):
        entries.append(_INDEX_ENTRY.pack(_FRAME, _KEY_FRAME if frame else 0, at, len(frame)))
        at += len(chunk)
    movie = _chunk(b"LIST", b"movi" + b"".join(chunks))
    return _chunk(b"RIFF", b"AVI " + _chunk(b"LIST", headers) + movie + _chunk(b"idx1", b"".join(entries)))


def read_avi(content: bytes) -> tuple[list[memoryview], float]:
    """View the JPEG frames of a file of `write_avi`, uncopied; return the frames a second too.

    A frame that shows for longer is given again.

    Raises:
        UnreadableError: if it is none.
    """
    header, frames = None, list[memoryview]()
    for name, data in _chunks(memoryview(content), b"RIFF", b"AVI "):
        if name == b"LIST" and data[:4] == b"hdrl":
            header = _stream_header(data[4:])
        elif name == b"LIST" and data[:4] == b"movi":
            frames = [frame for kind, frame in _walk(data[4:]) if kind == _FRAME]
    if header is None or not frames or not len(frames[0]):
        raise UnreadableError("an AVI file without JPEG frames; prepared clips have one stream of them", _REASON)
    if any(len(frame) and bytes(frame[:2]) != _JPEG for frame in frames):  # only these are decoded at a small scale
        raise UnreadableError("an AVI file with frames that are not JPEG files", _REASON)
    for at, frame in enumerate(frames):
        frames[at] = frame if len(frame) else frames[at - 1]
    return frames, header


def _stream_header(headers: memoryview) -> float | None:
    """Return the frames a second of the first stream, if it is one of JPEG frames."""
    for name, data in _walk(headers):
        if name == b"LIST" and data[:4] == b"strl":
            for part, fields in _walk(data[4:]):
                if part == b"strh" and len(fields) >= _STREAM_HEADER.size:
                    values = _STREAM_HEADER.unpack_from(fields)
                    return values[7] / values[6] if values[1] == b"MJPG" and values[6] and values[7] else None
    return None


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def _chunks(content: memoryview, name: bytes, form: bytes) -> Iterator[tuple[bytes, memoryview]]:
    if content[:4] != name or content[8:12] != form:
        raise UnreadableError(f"it is not in the format {form.decode().strip()}", _REASON)
    end = 8 + int.from_bytes(content[4:8], "little")
    if end > len(content):
        raise UnreadableError(f"it has {len(content):,} of its {end:,} bytes", _REASON)
    yield from _walk(content[12:end])


def _walk(content: memoryview) -> Iterator[tuple[bytes, memoryview]]:
    """Yield name and content of each chunk; a cut one is an error, and so are too many."""
    at = count = 0
    while at < len(content):
        count += 1
        if count > _MOST_CHUNKS:
            raise UnreadableError(f"it has more than {_MOST_CHUNKS:,} parts", _REASON)
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        if at + 8 + size > len(content):
            raise UnreadableError(f"it ends within a part of {size:,} bytes", _REASON)
        yield bytes(content[at : at + 4]), content[at + 8 : at + 8 + size]
        at += 8 + size + size % 2
