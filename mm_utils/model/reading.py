"""Open pictures, clips, sounds and texts by fixed rules: the same in preparation, training, search and a model's `encode`.

No other file opens media. This one is saved with every model, beside its code, and with exports. It depends on numpy and Pillow
alone; `center_square` needs torch, videos PyAV, and sounds of another rate scipy.

The rules of pictures, which give the same pixels on every machine. `decode` names each that changes something in its notes:
    formats         those of `FORMATS`, by content and never by name; vector formats would start other programs
    several frames  the first one: `animated_first_frame`, `multi_page_first` (TIFF, MPO)
    orientation     EXIF rotation and mirroring are applied, `exif_rotated`; unreadable EXIF is ignored
    transparency    laid on white, as most pages show it: `alpha_on_white`
    16 bits grey    value * 255 / 65535, rounded: `sixteen_bit_scaled`; 16-bit colour comes from Pillow as its high bytes
    float, 32 bits  floats in 0..1 times 255, integers in 0..65535 as 16 bits, all else stretched from its least to its
                    greatest value: `float_scaled`; refused if a value is not finite
    CMYK            converted without a profile, stored inverted as Adobe does: `cmyk_converted`
    palette         `palette_converted`;  colour profiles and all other metadata are dropped
"""

import io
import math
import os
import re
import urllib.request
import wave
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
from PIL import ExifTags, Image, ImageOps, features

try:
    import simplejpeg
except ImportError:  # optional: it yields Pillow's pixels, and refuses inner damage that Pillow skips over
    simplejpeg = None

try:
    from pillow_heif import register_heif_opener
except ImportError:  # optional: the photographs of telephones (HEIC); Pillow reads none
    _HEIF: tuple[str, ...] = ()
else:
    register_heif_opener()
    _HEIF = ("HEIF",)

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "TIFF") + (("AVIF",) if "avif" in features.modules else ()) + _HEIF
# At the scale of decoding: 9000 x 9000 white pixels are a file of 10 kB and take 1.5 GB to decode.
MOST_PIXELS = 40_000_000
MOST_BYTES = 64 << 20  # of an image file
MOST_MEDIUM_BYTES = 512 << 20  # of a clip's or a sound's
_STRIP = 8  # ratio of sides
_LARGE = 8_000_000  # pixels; resizing more in one step would take twelve bytes a pixel
_SECONDS = 30  # to wait for an address
CHARACTERS_PER_TOKEN = 32  # that are read of a text, so that none takes long
MOST_SECONDS = 10.0  # of a sound's window, where nothing else is asked for
CLIP_FRAMES = 16


class UnreadableError(ValueError):
    """An image, a clip or a sound that cannot be read; `reason` is a key of `mm_utils.data.faults.REASONS`."""

    def __init__(self, message: str, reason: str = "image_unreadable"):
        super().__init__(message)
        self.reason = reason


def decoder_message(error: Exception) -> str:
    """Return a decoder's message in one line, without the address of the object it read from."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    text = " ".join(text.split()) or type(error).__name__
    return re.sub(r" ?<_io\.BytesIO[^>]*>", "", text)[:300]


def open_picture(source: Any, min_side: int | None = None) -> Image.Image:
    """Return a picture as upright RGB, by the rules above.

    Args:
        source: a path, an address (http), the bytes of a file, or a PIL image.
        min_side: a JPEG may be decoded at a reduced scale whose shorter side is at least this.

    Raises:
        UnreadableError: if it cannot be read, with its name and the reason.
    """
    if isinstance(source, Image.Image):
        return decode(source.copy(), b"")[0]
    if not isinstance(source, (bytes, str, os.PathLike)):
        kind = type(source).__name__
        raise UnreadableError(f"a picture is of type {kind}. Give a path, an address, bytes or a PIL image.")
    try:
        content = source if isinstance(source, bytes) else _content_of(source, MOST_BYTES)
        return decode(read_header(content), content, min_side, most_pixels=MOST_PIXELS)[0]
    except Exception as error:  # a damaged file makes Pillow raise struct.error, RuntimeError and others, too
        name = "the picture" if isinstance(source, bytes) else os.fspath(source)
        raise UnreadableError(f"{name}: {decoder_message(error)}") from error


def _content_of(place: Any, most: int) -> bytes:
    """Return the bytes at a path or an address (http), at most so many."""
    name = os.fspath(place)
    is_address = name.startswith(("http://", "https://"))
    with urllib.request.urlopen(name, timeout=_SECONDS) if is_address else open(name, "rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise UnreadableError(f"it has more than {most:,} bytes", "too_many_bytes")
    return content


def read_header(content: bytes) -> Image.Image:
    """Read the size, mode and format of an image file without decoding, as Pillow does."""
    return Image.open(io.BytesIO(content), formats=FORMATS)


def decode(
    header: Image.Image,
    content: bytes,
    min_side: int | None = None,
    *,
    strict: bool = False,
    most_pixels: int | None = None,
) -> tuple[Image.Image, tuple[int, int], tuple[str, ...]]:
    """Decode the image whose header is `read_header(content)`, by the rules above.

    Args:
        min_side: a JPEG may be decoded at half, quarter or eighth scale whose shorter side is at least this.
        strict: refuse a JPEG with inner damage that decoders skip over. Needs simplejpeg; ignored without it.
        most_pixels: refuse more, at the scale of decoding, before any is decoded.

    Returns:
        Upright RGB without metadata, perhaps reduced; (width, height) of the whole upright image; notes.

    Raises:
        UnreadableError: too_many_pixels, above `most_pixels`.
        Exception: what the decoder raises at a damaged file, among others struct.error and RuntimeError.
    """
    width, height = header.size
    if min_side is not None and min_side < min(width, height):  # `draft` keeps both sides at least as large as asked
        # 4000 x 3000 for 224: 298 x 224 is asked for, and libjpeg gives 500 x 375, an eighth
        header.draft("RGB", (width * min_side // min(width, height), height * min_side // min(width, height)))
    if most_pixels is not None and header.width * header.height > most_pixels:
        text = f"it has {width:,} x {height:,} pixels, {most_pixels:,} are the most; prepare_data can shrink it once"
        raise UnreadableError(text, "too_many_pixels")
    if header.format == "PNG":
        header.load()  # here, as reading the EXIF block of a PNG decodes it, and hides its damage
    orientation = _orientation_of(header)
    notes = []
    if getattr(header, "is_animated", False):
        notes.append("multi_page_first" if header.format in ("TIFF", "MPO") else "animated_first_frame")
    array = None
    with nullcontext() if strict else suppress(ValueError):
        array = _plain_jpeg(header, content, (width, height))
    if array is None:
        header.load()
    image = _flatten(header if array is None else Image.fromarray(array), notes)
    if orientation > 1:
        notes.append("exif_rotated")
    if header.format == "TIFF":  # Pillow has turned it already
        width, height = image.size
    elif orientation > 1:
        image.getexif()[ExifTags.Base.Orientation] = orientation
        image = ImageOps.exif_transpose(image)
        # 5 to 8 lie on their side
        width, height = (height, width) if orientation >= 5 else (width, height)
    image.info = {}  # else `save` writes comments and profiles out again
    return image, (width, height), tuple(notes)


def _orientation_of(header: Image.Image) -> int:
    """Return the EXIF orientation, 1 to 8; a garbled EXIF block counts as none."""
    try:
        value = header.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # Pillow parses lazily: struct.error, KeyError, SyntaxError, TypeError, ...
        return 1
    return value if value in range(1, 9) else 1


def _plain_jpeg(header: Image.Image, content: bytes, size: tuple[int, int]) -> np.ndarray | None:
    """Decode a colour JPEG of `size` at the scale of `header` by simplejpeg, to Pillow's pixels `[H, W, 3]`; None of other files.

    344 x 258 pixels take 0.64 ms, and 0.85 ms by Pillow. ValueError also at inner damage that Pillow skips over.
    """
    if simplejpeg is None or header.format != "JPEG" or header.mode != "RGB":
        return None
    smaller = {"min_width": header.width, "min_height": header.height, "min_factor": 2} if header.size != size else {}
    array: np.ndarray = simplejpeg.decode_jpeg(content, strict=True, **smaller)
    return array if array.shape[1::-1] == header.size else None  # (H, W, 3)[1::-1] is (W, H)


def _flatten(image: Image.Image, notes: list[str]) -> Image.Image:
    """Convert any mode to RGB; add the conversions to `notes`."""
    if image.mode == "F" or image.mode.startswith("I"):
        return _scale(image, notes)
    if image.mode in ("P", "PA"):
        notes.append("palette_converted")
    if image.mode == "CMYK":
        notes.append("cmyk_converted")
    if image.mode in ("RGBA", "RGBa", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        if image.getchannel("A").getextrema() != (255, 255):
            notes.append("alpha_on_white")
            image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image if image.mode == "RGB" else image.convert("RGB")


def _scale(image: Image.Image, notes: list[str]) -> Image.Image:
    """Scale grey values of more than 8 bits, which `convert` would clip to white."""
    values = np.asarray(image)
    low = float(values.min())
    high = float(values.max())
    if not (math.isfinite(low) and math.isfinite(high)):
        raise UnreadableError("it holds values that are not finite")
    top = 1.0 if image.mode == "F" else 65535.0
    is_within = low >= 0 and high <= top
    notes.append("sixteen_bit_scaled" if is_within and image.mode != "F" else "float_scaled")
    if is_within:
        low = 0.0
        high = top
    # 0.5 is added as `astype` cuts off
    grey = (values.astype(np.float32) - np.float32(low)) * np.float32(255 / ((high - low) or 1)) + np.float32(0.5)
    return Image.fromarray(grey.astype(np.uint8)).convert("RGB")


def center_square(image: Image.Image, size: int) -> Any:
    """Return the central square, resized, as uint8 `[3, size, size]`.

    Like the saved processor, it cuts at whole pixels of the image whose shorter side is resized to `size`. Only the centre of
    a strip or of a very large image is resized, with Pillow: a whole one could fill the memory.
    """
    image, (width, height, left, top) = centered(image, size)
    whole = resized(np.array(image), width, height)
    return whole[:, top : top + size, left : left + size].contiguous()


def centered(image: Image.Image, size: int) -> tuple[Image.Image, tuple[int, int, int, int]]:
    """Return a picture, of a strip or of a very large one its resized centre alone, with its `center_of`."""
    width, height, left, top = center_of(*image.size, size)
    if max(width, height) <= _STRIP * size and image.width * image.height <= _LARGE:
        return image, (width, height, left, top)
    across = image.width / width
    down = image.height / height
    box = (left * across, top * down, (left + size) * across, (top + size) * down)
    return image.resize((size, size), Image.Resampling.BICUBIC, box=box, reducing_gap=3.0), (size, size, 0, 0)


def resized(pixels: np.ndarray, width: int, height: int) -> Any:
    """Resize `[H, W, 3]` to a tensor `[3, height, width]`, uint8.

    torchvision's `resize` gives the same bytes; a saved model must open without it.
    """
    import torch  # here, as exports read pictures without it

    image = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)  # seen as channels last, which takes half the time
    return torch.nn.functional.interpolate(image, (height, width), mode="bicubic", antialias=True)[0]


def center_of(width: int, height: int, size: int) -> tuple[int, int, int, int]:
    """Return the width and height to resize to, the shorter being `size`, and left and top of the central square."""
    shorter = min(width, height)
    width = max(size, int(size * width / shorter))
    height = max(size, int(size * height / shorter))
    return width, height, (width - size) // 2, (height - size) // 2


# -- files of sound and video -------------------------------------------------------------------------------------------
# The clock of a file counts seconds from its beginning, the same for all of its streams: a sound that starts 0.3 s after the
# pictures stays 0.3 s behind them. Containers with time stamps of their own count from 0; one that begins more than a second
# later was cut out of a recording, and counts from its first frame, as do all others, whose stamps start anywhere.
#
# Files are untrusted. The kind is decided by the first bytes, before FFmpeg sees them; only demuxers of such files are
# allowed, and none of them may open a second file. Streams, frames and pixels have limits.

TOLERANCE = 0.25  # seconds by which a span may leave its medium: annotators round
_DEMUXERS = "mov,mp4,matroska,webm,avi,asf,flv,mpegts,mpeg,gif,apng,ogg,flac,mp3,aac,wav,w64,aiff,au,caf,amr,amrnb,amrwb,ac3,eac3"
_OWN_CLOCK = ("mov", "matroska", "avi", "asf", "flv")
_CUT_OUT = 1.0  # second
_MAGIC = re.compile(  # AVIF and HEIF, which begin with ftyp, too, are pictures
    rb"(RIFF|RF64)....WAVE|RIFF....AVI |....(ftyp(?!avi[fs]|hei[cmsx]|hev[cmsx]|mif1|msf1)|moov|mdat|wide|free|skip)"
    rb"|\x1aE\xdf\xa3|OggS|fLaC|ID3|\xff[\xe2-\xe7\xf2-\xf7\xfa-\xff]|\xff[\xf0\xf1\xf8\xf9]|FORM....AIF[FC]|\.snd|caff"
    rb"|GIF8|\x89PNG.{33}acTL|#!AMR|\x0bw|0&\xb2u\x8ef\xcf\x11|FLV\x01|G.{187}G|\0\0\x01\xba",
    re.DOTALL,
)
_MOST_STREAMS = 64
_MOST_DAMAGED = 0.02  # share of the packets of a stream that may fail, beside the first two
_SEEK_FROM = 10.0  # seconds: where seeking pays
_SEEK_BACK = 1.0  # seconds: decoders need a while to come to the right sound


def check_cut(start: float | None, end: float | None, seconds: float | None = None) -> None:
    """Raise span_reversed, span_empty or span_outside for a part, in seconds, of a medium that may not have it."""
    begin = 0.0 if start is None else start
    if begin < 0:
        raise UnreadableError(f"it starts at {begin:g} s", "span_outside")
    if end is not None and end <= begin:
        raise UnreadableError(f"from {begin:g} to {end:g} s", "span_empty" if end == begin else "span_reversed")
    if seconds is not None and begin >= seconds:
        raise UnreadableError(f"it ends before {begin:g} s", "span_outside")
    if seconds is not None and end is not None and end > seconds + TOLERANCE:
        raise UnreadableError(f"{begin:g} to {end:g} s of {seconds:.3f} s", "span_outside")


def _check_length(seconds: float, most: float) -> None:
    """Raise too_long if a medium, or its wanted part, has more than `most` seconds."""
    if seconds > most + TOLERANCE:
        raise UnreadableError(f"it has {seconds:,.1f} s or more, and --max_seconds is {most:g}", "too_long")


def _check_whole(end: float, said: float | None, is_exact: bool = False) -> None:
    """Raise medium_truncated if a stream ends at `end`, long before the header says, or at all where that counts samples."""
    if said is not None and end < said - (0.01 if is_exact else max(0.5, 0.05 * said)):
        raise UnreadableError(f"it ends at {end:.2f} s of {said:,.2f}", "medium_truncated")


@contextmanager
def _opened(content: bytes, medium: str) -> Iterator[tuple[Any, Any]]:
    """Open a file by PyAV; yield its container, and the stream of `video` or `audio` in it that players show.

    Raises:
        UnreadableError: also for whatever PyAV raises inside of the block.
    """
    if not _MAGIC.match(content):
        raise UnreadableError(f"it begins with {content[:16]!r}", "medium_unknown_format")
    # an MP4 may have its index, moov, at the end: without it nothing says where the frames are
    if content[4:8] in (b"ftyp", b"mdat", b"wide", b"free", b"skip") and b"moov" not in content:
        raise UnreadableError("MP4 without its index, which programs write last", "medium_truncated")
    ends = {b"GIF8": b";", b"\x89PNG": b"IEND\xaeB`\x82"}  # of animations, which FFmpeg reads as far as they go
    if not content.rstrip(b"\0").endswith(ends.get(content[:4], b"")):
        raise UnreadableError("an animation without its end", "medium_truncated")
    try:  # also hides it from what transformers wants installed before it loads any model with this file
        import av
    except ImportError as error:
        raise UnreadableError("it is not read without PyAV (pip install av)", "needs_av") from error

    def refuse(url: str, flags: int, options: Any) -> Any:
        raise PermissionError(f"the file names another one, {url}, which is not opened")

    options = {"format_whitelist": _DEMUXERS, "protocol_whitelist": "", "max_streams": str(_MOST_STREAMS)}
    try:
        with av.open(io.BytesIO(content), options=options, metadata_errors="replace", io_open=refuse) as container:
            yield container, _best_stream(container, medium)
    except UnreadableError:
        raise
    except EOFError as error:
        raise UnreadableError(decoder_message(error), "medium_truncated") from error
    except MemoryError as error:
        raise UnreadableError(f"more than {_MOST_STREAMS} streams, or a huge one", "too_many_parts") from error
    except Exception as error:  # FFmpeg's errors, ValueError and others, as the bytes have it
        raise UnreadableError(decoder_message(error), "medium_unreadable") from error


def _best_stream(container: Any, medium: str) -> Any:
    streams = container.streams
    name = container.format.name
    if len(streams) > _MOST_STREAMS:
        raise UnreadableError(f"{len(streams):,} streams", "too_many_parts")
    if not streams.video and not streams.audio:
        raise UnreadableError(f"{name} without a stream that can be read", "medium_unreadable")
    usable = [
        stream
        for stream in getattr(streams, medium)
        if stream.codec_context is not None
        and "attached_pic" not in str(stream.disposition).lower()  # the cover of a recording
    ]
    if not usable:
        held = ", ".join(sorted({str(stream.type) for stream in streams}))
        raise UnreadableError(f"{name} that holds {held}", f"no_{medium}_stream")
    best = streams.best(medium)
    stream = best if best in usable else usable[0]
    stream.codec_context.thread_count = 1
    return stream


def _clock_zero(container: Any) -> float:
    """Return the time stamp in seconds at which the clock of a file begins."""
    start = (container.start_time or 0) / 1e6  # of microseconds
    return 0.0 if container.format.name.split(",")[0] in _OWN_CLOCK and start <= _CUT_OUT else start


def _declared_end(container: Any, stream: Any) -> float | None:
    """Return a stream's end on the file's clock by the header; None where it only guesses."""
    name = container.format.name
    zero = _clock_zero(container)
    if name in ("mp3", "aac", "mpegts", "mpeg", "amr", "ac3", "eac3"):
        return None
    if stream.duration is not None and stream.time_base is not None:
        return float((stream.duration + (stream.start_time or 0)) * stream.time_base) - zero
    if container.duration is None:
        return None
    start = 0 if name.startswith("matroska") else container.start_time or 0  # Matroska counts from 0
    return (container.duration + start) / 1e6 - zero


def _decoded(container: Any, stream: Any, start: float, notes: list[str]) -> Iterator[tuple[float | None, Any]]:
    """Yield a stream's frames with their times on the file's clock, None where they have none.

    A file that breaks off ends there. Frames that end before `start`, in seconds, may be left out. A few damaged packets are
    skipped and noted as packets_skipped; more are medium_unreadable.
    """
    zero = _clock_zero(container)
    count = 0
    failed = 0
    if start >= _SEEK_FROM:
        try:
            container.seek(int(max(0.0, start + zero - _SEEK_BACK) * 1e6))  # to microseconds
        except OSError:  # of FFmpeg: then everything is decoded from the beginning
            container.seek(0)
    packets = iter(container.demux(stream))
    while True:
        try:
            packet = next(packets)
        except MemoryError:
            raise
        except Exception:  # StopIteration; of a file that breaks off, see `_opened`
            break
        count += 1
        try:
            frames = packet.decode()
        except Exception as error:
            failed += 1
            if failed > max(2, _MOST_DAMAGED * count):
                text = f"{failed:,} of {count:,} packets: {decoder_message(error)}"
                raise UnreadableError(text, "medium_unreadable") from error
            continue
        for frame in frames:
            yield None if frame.pts is None else float(frame.pts * frame.time_base) - zero, frame
    if failed:
        notes.append("packets_skipped")


# -- clips --------------------------------------------------------------------------------------------------------------

CLIP_FPS = 4.0  # frames a second that are kept of clips, where nothing else is asked for
_SAME_TIME = 1e-4  # seconds
_HOUR = 3600.0  # seconds
_MOST_PIXELS_IN_ALL = 20_000_000_000  # of all frames of a clip: a minute of 4K


@dataclass(frozen=True)
class Frame:
    """A frame that is shown from `time` to `end`, in seconds; `picture` decodes it to upright RGB."""

    time: float
    end: float
    picture: Callable[[], Image.Image]


def read_frames(
    content: bytes,
    fps: float,
    start: float | None = None,
    end: float | None = None,
    *,
    max_seconds: float = 60.0,
    max_pixels: int = MOST_PIXELS,
    notes: list[str] | None = None,
) -> Iterator[Frame]:
    """Yield the frames of a clip's file at `start`, `start` + 1 / fps, ... before `end`, by its own clock.

    The frame of a time is the one that players show then: the last whose time stamp is not later, or the first frame if all are;
    one that is shown for longer comes again.

    Args:
        content: the whole file.
        fps: frames a second of the result.
        start, end: seconds; None for the beginning and the end.
        max_seconds: the longest clip that is wanted.
        max_pixels: of a frame; files with larger ones are refused before they are decoded.
        notes: keys of `mm_utils.data.faults.NOTES` are added.

    Raises:
        UnreadableError: if there is no such clip, for whatever reason; nothing else is raised, whatever the bytes.
    """
    check_cut(start, end)
    begin = start or 0.0
    shown = None
    yielded = 0
    with _opened(content, "video") as (container, stream):
        said = _declared_end(container, stream)
        if (last := said if end is None else end) is not None:
            _check_length(last - begin, max_seconds)
        for frame in chain(_video(container, stream, max_pixels, begin, [] if notes is None else notes), [None]):
            if frame is not None and shown is not None and frame.time <= shown.time:
                continue  # stamps that go back show nothing new
            current = shown or frame
            if current is None:
                _check_whole(0.0, said)
                raise UnreadableError("it holds no frame that can be shown", "medium_empty")
            until = current.end if frame is None else frame.time
            if frame is None and (end is None or until < end):
                _check_whole(until, said if end is None else min(said or 0.0, end))
                if begin or end is not None:
                    check_cut(begin, end, until)
            while begin + yielded / fps < (until if end is None else min(until, end)) - _SAME_TIME:
                _check_length(yielded / fps, max_seconds)
                yield current
                yielded += 1
            if end is not None and until >= end:
                break
            shown = frame
    if not yielded:
        raise UnreadableError("it holds no frame that is shown for any time", "medium_empty")


def _video(container: Any, stream: Any, max_pixels: int, begin: float, notes: list[str]) -> Iterator[Frame]:
    """Yield the frames of a stream; raise too_many_pixels before memory is taken for more."""
    _check_pixels(stream.codec_context.width, stream.codec_context.height, max_pixels)
    rate = stream.average_rate or stream.guessed_rate or 25
    pixels = 0
    last = -1 / float(rate)  # so that a first frame without a stamp is at 0
    for stamp, frame in _decoded(container, stream, begin, notes):
        _check_pixels(frame.width, frame.height, max_pixels)
        pixels += frame.width * frame.height
        if pixels > _MOST_PIXELS_IN_ALL:
            raise UnreadableError(f"{pixels:,} in all frames", "too_many_pixels")
        time = last + 1 / float(rate) if stamp is None else stamp
        lasts = float(frame.duration * frame.time_base) if frame.duration else 1 / float(rate)
        last = time
        turns = 0
        if abs(frame.rotation) <= 360:  # a matrix of zeros turns by no angle
            turns = round(frame.rotation / 90) % 4
        if turns and "turned" not in notes:
            notes.append("turned")
        yield Frame(time, time + lasts, partial(_upright, frame, stream.sample_aspect_ratio, turns))


def _upright(frame: Any, shape: Any, turns: int) -> Image.Image:
    """Return a frame of PyAV as RGB, turned by quarters, with square pixels; `shape` is the width of one over its height."""
    try:
        has_alpha = frame.format.name in ("bgra", "rgba")  # of an animation
        image = _flatten(Image.fromarray(frame.to_ndarray(format="rgba")), []) if has_alpha else frame.to_image()
    except Exception as error:  # see `_opened`
        raise UnreadableError(f"a frame: {decoder_message(error)}", "medium_unreadable") from error
    if shape and shape != 1 and 0.25 <= shape <= 4:
        image = image.resize((max(1, round(image.width * float(shape))), image.height), Image.Resampling.BICUBIC)
    return image.rotate(90 * turns, expand=True) if turns else image


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadableError(f"{width:,} x {height:,} pixels", "too_many_pixels")


def frames_of(clip: Any, count: int) -> list[Any]:
    """Return `count` frames of a clip, a path or PIL images, each the one that is shown in the middle of an equal part."""
    if isinstance(clip, (list, tuple, range)):
        # 3 of 10 frames: 1, 5, 8
        return [clip[(2 * at + 1) * len(clip) // (2 * count)] for at in range(count)]
    try:
        content = _content_of(clip, MOST_MEDIUM_BYTES)
        stored = sum(1 for _ in read_frames(content, CLIP_FPS, max_seconds=_HOUR))
        places = [(2 * at + 1) * stored // (2 * count) for at in range(count)]
        frames = zip(range(places[-1] + 1), read_frames(content, CLIP_FPS, max_seconds=_HOUR), strict=False)
        pictures = {at: frame.picture() for at, frame in frames if at in places}
    except UnreadableError as error:
        raise ValueError(f"{clip}: {error}. Pass another file, or a list of PIL images.") from error
    return [pictures[at] for at in places]


# -- sounds -------------------------------------------------------------------------------------------------------------

LEAST_RATE = 1_000  # samples a second
MOST_RATE = 384_000
_MOST_CHANNELS = 64
_SILENT = 3 / 32768  # the noise of rounding and dither
_SURPLUS = 0.1  # seconds
_SHORTEST = 400  # samples: a frame of AST's extractor
_GAP = 0.02  # seconds: where time stamps and samples differ by more, something is missing


def read_sound(
    content: bytes,
    rate: int,
    start: float | None = None,
    end: float | None = None,
    *,
    max_seconds: float = 60.0,
    notes: list[str] | None = None,
    codecs: bool = True,
) -> np.ndarray:
    """Read a file's sound, the mean of its channels, from `start` to `end` on its clock: int16 `[n]`.

    Sound that is missing at the beginning or in between, as time stamps have it, is silence. Further arguments and errors are
    those of `read_frames`.

    Args:
        rate: samples a second of the result.
        codecs: read more than WAV files of plain samples.
    """
    check_cut(start, end)
    if end is not None:
        _check_length(end - (start or 0.0), max_seconds)
    plain = wav_samples(content)
    if plain is not None:
        whole, own = plain
        check_cut(start, end, len(whole) / own)
        first = round((start or 0.0) * own)
        last = len(whole) if end is None else min(len(whole), round(end * own))
        _check_length((last - first) / own, max_seconds)
        samples = _floats(whole[first:last]).mean(axis=1)
    elif codecs:
        samples, own = _read_stream(content, start, end, max_seconds, [] if notes is None else notes)
    else:
        raise UnreadableError(
            "it is not a WAV file of plain samples, as ffmpeg -i FILE sound.wav writes", "medium_unknown_format"
        )
    if not len(samples):
        raise UnreadableError("it holds no samples", "medium_empty")
    if not np.isfinite(samples).all():
        raise UnreadableError("it holds samples that are not finite", "medium_unreadable")
    if abs(samples).max() <= _SILENT:
        raise UnreadableError(f"{len(samples) / own:.2f} s without a sound", "silent")
    return _stored(samples, own, rate)


def _stored(samples: np.ndarray, own: int, rate: int) -> np.ndarray:
    """Return samples `[n]` of one rate at another one, as prepared sets store them: int16."""
    if own != rate:
        from scipy.signal import resample_poly

        samples = resample_poly(samples, rate, own)
    return (samples * 32768).round().clip(-32768, 32767).astype(np.int16)


def wav_samples(content: bytes) -> tuple[np.ndarray, int] | None:
    """Return the samples `[n, channels]` of a WAV file of integers, and their rate; None of any other file.

    Raises:
        UnreadableError: if it is cut or damaged.
    """
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return None
    try:
        with wave.open(io.BytesIO(content)) as file:
            channels, width, rate, count, *_ = file.getparams()
            data = file.readframes(count)
    except EOFError as error:
        raise UnreadableError("a WAV file that ends in its header", "medium_truncated") from error
    except (wave.Error, RuntimeError) as error:
        if not re.search(rb"data....", content, re.DOTALL):
            raise UnreadableError("a WAV file without its sound", "medium_truncated") from error
        return None  # floats, a codec, or sizes that contradict each other
    if width > 4:
        raise UnreadableError(f"a WAV file of {8 * width} bits a sample", "medium_unreadable")
    _check_layout(rate, channels)
    frame = channels * width
    if len(data) < count * frame and count < 0xFFFFFFFF // frame:  # this many writes a program into a pipe
        text = f"a WAV file with {len(data):,} of {count * frame:,} bytes of sound"
        raise UnreadableError(text, "medium_truncated")
    if not data:
        raise UnreadableError("a WAV file of no samples", "medium_empty")
    values = np.frombuffer(data[: len(data) // frame * frame], {1: "u1", 2: "<i2", 3: "u1", 4: "<i4"}[width])
    if width == 3:
        # a zero below makes 32 bits of 24
        values = np.pad(values.reshape(-1, 3), ((0, 0), (1, 0))).view("<i4")
    return values.reshape(-1, channels), rate


def _floats(samples: np.ndarray) -> np.ndarray:
    """Return samples of any type as float32, 1 at full scale."""
    if samples.dtype.kind == "u":
        return (samples.astype(np.float32) - 128) / 128  # 8 bits of a WAV file are unsigned, around 128
    if samples.dtype.kind == "i":
        return samples.astype(np.float32) / np.float32(2.0 ** (8 * samples.dtype.itemsize - 1))
    return samples.astype(np.float32)


def _check_layout(rate: int, channels: int) -> None:
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise UnreadableError(f"{rate:,} samples a second", "bad_sound_rate")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise UnreadableError(f"{channels} channels", "medium_unreadable")


def _read_stream(
    content: bytes, start: float | None, end: float | None, most: float, notes: list[str]
) -> tuple[np.ndarray, int]:
    """Decode the best stream of sound of a file and put it on the clock: float32 `[n]`, and its rate."""
    begin = start or 0.0
    pieces = [np.empty(0, np.float32)]
    count = 0
    rate = 0
    longest = most + TOLERANCE if end is None else end - begin
    limit = 0
    with _opened(content, "audio") as (container, stream):
        said = _declared_end(container, stream)
        is_flac = container.format.name == "flac"
        if said is not None and end is None:
            _check_length(said - begin, most)
        for time, frame in _decoded(container, stream, begin, notes):
            if not rate:
                rate = frame.sample_rate
                _check_layout(rate, len(frame.layout.channels))
                limit = round(longest * rate)
            if frame.sample_rate != rate:
                text = f"its rate changes from {rate:,} to {frame.sample_rate:,}"
                raise UnreadableError(text, "medium_unreadable")
            at = count if time is None else round((time - begin) * rate)
            if count and abs(at - count) <= _GAP * rate:
                at = count
            gap = np.zeros(max(0, min(at, limit) - count), np.float32)
            pieces += [gap, _mono(frame)[max(0, count - at) :]]
            count += len(gap) + len(pieces[-1])
            if count >= limit:
                break
    if rate and count >= limit:
        if end is None:
            raise UnreadableError(f"it has more than {most:g} s, which is --max_seconds", "too_long")
    else:
        seconds = count / rate if rate else 0.0
        _check_whole(begin + seconds, said if end is None else min(said or 0.0, end), is_flac)
        if start is not None or end is not None:
            check_cut(start, end, begin + seconds)
    samples = np.concatenate(pieces)[:limit]
    surplus = len(samples) - round(((said or 0.0) - begin) * rate)
    # The last packet of Ogg Vorbis is longer than the sound in it.
    return samples[: len(samples) - surplus] if 0 < surplus < _SURPLUS * rate else samples, rate


def _mono(frame: Any) -> np.ndarray:
    """Return the mean of the channels of a frame of PyAV, float32 `[n]`."""
    channels = len(frame.layout.channels)
    values = _floats(frame.to_ndarray())
    # [channels, n], or [1, n x channels] where samples take turns
    return values.mean(axis=0) if len(values) == channels else values.reshape(-1, channels).mean(axis=1)


def samples_of(sound: Any, rate: int, seconds: float | None = None) -> np.ndarray:
    """Return the samples `[n]` of a sound, (samples in [-1, 1], their rate) or a path, at a rate; of its middle `seconds`: int16."""
    if isinstance(sound, tuple):
        samples = np.asarray(sound[0])
        own = sound[1]
        if samples.ndim != 1 or samples.dtype.kind != "f":  # filled up to the window, a second dimension is huge
            shape = f"{samples.dtype} {list(samples.shape)}"
            raise ValueError(
                f"a sound is (samples, rate), and its samples are {shape}. Give floats of one channel, [n]."
            )
        stored = _stored(samples.astype(np.float32), own, rate)
    else:
        try:
            stored = read_sound(_content_of(sound, MOST_MEDIUM_BYTES), rate, max_seconds=_HOUR)
        except UnreadableError as error:
            raise ValueError(f"{sound}: {error}. Give another file, or (samples, rate).") from error
    length = len(stored) / rate
    seconds = seconds or length
    return stored[int(max(0.0, length - seconds) / 2 * rate) :][: round(seconds * rate)]


def sound_input(extractor: Any, samples: np.ndarray, size: int) -> np.ndarray:
    """Return a sound tower's input of the samples of a window, int16 `[n]`, as its feature extractor makes it: float32.

    A sound that is shorter than the window, `size` samples, comes again by CLAP's extractor and is followed by empty frames by
    AST's; silence follows it for all others, and for an AST that was trained so: `pads_frames`, see `mm_utils.data.media.medium`.
    """
    waves = samples.astype(np.float32) / 32768
    fills = hasattr(extractor, "padding") or getattr(extractor, "pads_frames", False)
    missing = (_SHORTEST if fills else size) - len(waves)
    waves = np.pad(waves, (0, max(0, missing)))
    found = extractor(waves, sampling_rate=extractor.sampling_rate, return_tensors="np")
    [values] = found["input_features" if "input_features" in found else "input_values"]
    # A fused CLAP's makes four of a window: the first is the whole one.
    return np.asarray(values[:1] if getattr(extractor, "truncation", None) == "fusion" else values, np.float32)


# -- texts --------------------------------------------------------------------------------------------------------------


def token_ids(tokenizer: Any, texts: Sequence[str], most: int) -> list[list[int]]:
    """Return the token ids of texts, at most `most` of each; special tokens that a text names are text."""
    options = {"split_special_tokens": True, "return_special_tokens_mask": True}
    encoded = tokenizer(list(texts), truncation=True, max_length=most, **options)
    # A Unigram vocabulary (T5, XLM-R, mBART, SigLIP) has special tokens as pieces, which it also finds in split text.
    others = [token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"]
    special = set(tokenizer.all_special_ids)
    if tokenizer.unk_token not in others:
        special.discard(tokenizer.unk_token_id)
    rows = []
    for ids, added in zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True):
        rows.append([token for token, is_added in zip(ids, added, strict=True) if is_added or token not in special])
    return rows
