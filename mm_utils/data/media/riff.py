"""WAV and AVI files without a codec: sounds of 16-bit samples, clips of JPEG frames.

Prepared sounds and clips are kept as such files, which any player opens. An AVI file is of chunks: a name of four letters, a size,
the content, and a byte of padding where the size is odd ("Multimedia Programming Interface and Data Specifications 1.0", 1991).
"""

import io
import struct
import wave
from collections.abc import Iterable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from PIL import Image

from mm_utils.data.images import encode, shrink
from mm_utils.model.reading import Frame, UnreadableError, wav_samples

_REASON = "medium_unreadable"
_MOST_FRAMES = 250_000  # an hour of 60 frames a second
_FRAME = b"00dc"
_INDEX = b"idx1"
_KEY_FRAME = 0x10
_HEADERS = 512  # bytes, within which the frames begin


def write_wav(samples: np.ndarray, rate: int) -> bytes:
    """Return a WAV file of mono int16 samples `[n]`, at `rate` a second."""
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((1, 2, rate, 0, "NONE", ""))  # channels, bytes a sample, rate, frames
        file.writeframes(np.ascontiguousarray(samples, "<i2").tobytes())
    return buffer.getvalue()


def read_wav(content: bytes) -> tuple[np.ndarray, int]:
    """Return the samples of a file of `write_wav`, int16 `[n]`, and their rate; UnreadableError if it is none."""
    found = wav_samples(content)
    if found is None or found[0].dtype != np.int16 or found[0].shape[1] != 1:
        raise UnreadableError("it is no WAV file of one channel of 16 bits, as prepared sounds are", _REASON)
    return found[0][:, 0], found[1]


def store_clip(
    frames: Iterable[Frame], fps: float, short_side: int | None = None, notes: list[str] | None = None
) -> tuple[bytes, dict[str, Any]]:
    """Encode frames of a constant rate as an AVI file, larger ones shrunk to `short_side` pixels.

    Returns:
        The file, and columns of it: `seconds`, `width` and `height`, and `original_width` and `original_height` of the first
        frame, upright. Frames of different sizes are fitted to the first, which is noted as frames_fitted.
    """
    jpegs = list[bytes]()
    size = (0, 0)
    original_size = (0, 0)
    last = None
    for frame in frames:
        if frame is last:  # the same object: it is shown for longer
            jpegs.append(b"")
            continue
        last = frame
        image = frame.picture()
        original_size = original_size if jpegs else image.size
        image = image if short_side is None else shrink(image, short_side)
        size = size if jpegs else image.size
        if image.size != size:
            image = image.resize(size, Image.Resampling.BICUBIC)
            if notes is not None:
                notes.append("frames_fitted")
        jpegs.append(encode(image, "jpeg"))
    names = "seconds", "width", "height", "original_width", "original_height"
    return write_avi(jpegs, fps, size), dict(zip(names, (len(jpegs) / fps, *size, *original_size), strict=True))


def write_avi(frames: Sequence[bytes], fps: float, size: tuple[int, int]) -> bytes:
    """Return an AVI file of JPEG frames of one `size`, (width, height); an empty one shows the frame before for longer."""
    rate = Fraction(fps).limit_denominator(1_000_000)  # 29.97 -> 2997 / 100
    count = len(frames)
    largest = max(map(len, frames), default=0)
    most = largest * -(-rate.numerator // rate.denominator)  # bytes a second
    # microseconds a frame, bytes a second, -, it has an index, frames, -, streams, largest frame, size
    main = struct.pack("<14I", round(1e6 / rate), most, 0, 0x10, count, 0, 1, largest, *size, 0, 0, 0, 0)
    timing = (rate.denominator, rate.numerator, 0, count, largest, 0xFFFFFFFF, 0)
    stream = struct.pack("<4s4sIHHIIIIIIII4H", b"vids", b"MJPG", 0, 0, 0, 0, *timing, 0, 0, *size)
    picture = struct.pack("<IiiHH4sIiiII", 40, *size, 1, 24, b"MJPG", size[0] * size[1] * 3, 0, 0, 0, 0)
    streams = _chunk(b"LIST", b"strl" + _chunk(b"strh", stream) + _chunk(b"strf", picture))
    headers = _chunk(b"LIST", b"hdrl" + _chunk(b"avih", main) + streams)
    chunks = [_chunk(_FRAME, frame) for frame in frames]
    at = len(b"movi")  # offsets of the index count from this word
    entries = []
    for frame, chunk in zip(frames, chunks, strict=True):
        entries.append(struct.pack("<4sIII", _FRAME, _KEY_FRAME if frame else 0, at, len(frame)))
        at += len(chunk)
    movie = _chunk(b"LIST", b"movi" + b"".join(chunks))
    index = _chunk(_INDEX, b"".join(entries))
    return _chunk(b"RIFF", b"AVI " + headers + movie + index)


def _chunk(name: bytes, content: bytes) -> bytes:
    return name + struct.pack("<I", len(content)) + content + b"\0" * (len(content) % 2)


def read_avi(content: bytes) -> tuple[list[memoryview], float]:
    """View the JPEG frames of a file of `write_avi`, uncopied; return the frames a second too.

    A frame that shows for longer is given again.

    Raises:
        UnreadableError: if it is none.
    """
    stream = content.find(b"vidsMJPG", 0, _HEADERS)
    at = content.find(b"movi", 0, _HEADERS) + 4
    if content[:4] != b"RIFF" or content[8:12] != b"AVI " or not 0 < stream < at - 28:
        raise UnreadableError("it is no AVI file of JPEG frames, as prepared clips are", _REASON)
    frames = list[memoryview]()
    end = 8 + int.from_bytes(content[4:8], "little")
    if end > len(content):
        raise UnreadableError(f"it has {len(content):,} of its {end:,} bytes", _REASON)
    while content[at : at + 4] == _FRAME:
        begin = at + 8
        size = int.from_bytes(content[at + 4 : at + 8], "little")
        frame = memoryview(content)[begin : begin + size]
        at = begin + size + size % 2
        if at > end or len(frames) == _MOST_FRAMES:
            raise UnreadableError(f"it ends within a frame, or has more than {_MOST_FRAMES:,}", _REASON)
        # Only JPEG is decoded at a small scale
        if bytes(frame[:2]) != b"\xff\xd8" and (size or not frames):
            raise UnreadableError("an AVI file with frames that are not JPEG files", _REASON)
        frames.append(frame if size else frames[-1])
    # in the stream's header, they stand behind 'vids', 'MJPG' and 12 bytes more
    scale, rate = struct.unpack_from("<2I", content, stream + 20)
    if not (scale and rate and frames) or content[at : at + 4] != _INDEX:
        raise UnreadableError("an AVI file that is damaged between its frames", _REASON)
    return frames, rate / scale
