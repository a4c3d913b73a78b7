"""Read clips of any file, or of a list of pictures, as JPEG frames at a constant rate.

Animated GIF, WebP and PNG files and lists of pictures are read by Pillow; all else by
`mm_utils.data.media.containers`.
"""

import io
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from PIL import Image

from mm_utils.data.faults import Fault
from mm_utils.data.images import MOST_PIXELS, decoder_message, encode, open_image, shrink
from mm_utils.data.media.containers import (
    best_stream,
    check_cut,
    check_length,
    check_whole,
    declared_end,
    decoded,
    open_container,
    seconds_of,
    signature,
)
from mm_utils.model.reading import turn_of, upright

_ANIMATIONS = ("GIF", "WEBP", "PNG")
_STILLS = ("JPEG", "BMP", "TIFF", "AVIF")
_QUICKEST, _QUICK = (
    0.011,
    0.1,
)  # seconds: browsers show frames of a GIF that ask for less than this for as long as that
_SAME_TIME = 1e-4  # seconds
_MOST_PIXELS_IN_ALL = 20_000_000_000  # of all frames of a clip: a minute of 4K
_STRIP = 32  # pixels of a frame in a strip


@dataclass(frozen=True)
class Frame:
    """A frame shown from `time` to `end`, in seconds; `picture` decodes it to upright RGB."""

    time: float
    end: float
    picture: Callable[[], Image.Image]


@dataclass
class Clip:
    """Frames at a constant rate.

    Attributes:
        jpegs: JPEG files of one size; an empty one shows the frame before for longer.
        size: their width and height in pixels.
        seconds: the frames over their rate.
        original_size: width and height of the first frame of the file, upright.
        original_fps: frames a second in the file, on average.
    """

    jpegs: list[bytes] = field(default_factory=list)
    size: tuple[int, int] = (0, 0)
    seconds: float = 0.0
    original_size: tuple[int, int] = (0, 0)
    original_fps: float = 0.0


def read_clip(
    content: bytes,
    fps: float,
    short_side: int | None,
    start: float | None = None,
    end: float | None = None,
    *,
    max_seconds: float = 60.0,
    max_pixels: int = MOST_PIXELS,
    notes: list[str] | None = None,
) -> Clip:
    """Sample the frames of a file from `start` to `end` on its own clock.

    The frame of a time t is the one that players show then: the last whose time stamp is not after t, or the first frame
    if all are.

    Args:
        content: the whole file.
        fps: frames a second of the result.
        short_side: larger frames are shrunk to it, in pixels; None keeps their size.
        start, end: seconds; None for the beginning and the end.
        max_seconds: the longest clip that is wanted.
        max_pixels: of a frame; files with larger ones are refused before they are decoded.
        notes: keys of `NOTES` are added.

    Raises:
        Fault: if there is no such clip, for whatever reason; nothing else is raised, whatever the bytes.
    """
    check_cut(start, end)
    if end is not None:
        check_length(end - (start or 0.0), max_seconds)
    sampler = _Sampler(fps, short_side, start or 0.0, end, max_seconds, [] if notes is None else notes)
    header = None if signature(content) else _picture_header(content)
    if header is not None:
        return sampler.take(_animation(header, max_pixels))
    with open_container(content) as container:
        stream = best_stream(container, "video")
        said = declared_end(container, stream)
        if said is not None and end is None:
            check_length(said - (start or 0.0), max_seconds)
        return sampler.take(_video(container, stream, max_pixels, sampler), said)


def clip_of_frames(
    pictures: Sequence[Callable[[], Image.Image]],
    times: Sequence[Any] | None,
    fps: float,
    short_side: int | None,
    start: float | None = None,
    end: float | None = None,
    *,
    max_seconds: float = 60.0,
    notes: list[str] | None = None,
) -> Clip:
    """Sample a clip that is given as pictures; see `read_clip`.

    Args:
        pictures: what decodes each to upright RGB, in order.
        times: when each is shown, in seconds; None shows them one after another, each once. The last is shown as long as
            the others are on average.

    Raises:
        Fault: bad_times, or as `read_clip`.
    """
    check_cut(start, end)
    given = [at / fps for at in range(len(pictures))] if times is None else _checked_times(times, len(pictures))
    if not given:
        raise Fault("medium_empty", "the list of frames is empty")
    gap = (given[-1] - given[0]) / (len(given) - 1) if len(given) > 1 else 1 / fps
    ends = [*given[1:], given[-1] + gap]
    check_length(min(ends[-1], math.inf if end is None else end) - (start or 0.0), max_seconds)
    sampler = _Sampler(fps, short_side, start or 0.0, end, max_seconds, [] if notes is None else notes)
    return sampler.take(map(Frame, given, ends, pictures))


def strip(jpegs: Sequence[bytes]) -> Image.Image:
    """Lay three frames of a clip, of its thirds, side by side: for a fingerprint of it."""
    picture = Image.new("RGB", (3 * _STRIP, _STRIP))
    for place in range(3):
        at = int((2 * place + 1) / 6 * len(jpegs))
        while not jpegs[at]:
            at -= 1
        frame = open_image({"bytes": jpegs[at]}, _STRIP)
        picture.paste(frame.resize((_STRIP, _STRIP), Image.Resampling.BOX), (place * _STRIP, 0))
    return picture


class _Sampler:
    """Takes the frames that are shown at begin, begin + 1 / fps, ... and stores them."""

    def __init__(
        self, fps: float, short_side: int | None, begin: float, end: float | None, most: float, notes: list[str]
    ):
        self.notes, self.begin, self.end = notes, begin, end
        self._fps, self._short_side, self._most = fps, short_side, most
        self._clip = Clip()
        self._stored: Frame | None = None

    def take(self, frames: Iterator[Frame], said: float | None = None) -> Clip:
        """Sample all frames; `said` is where the file says that they end."""
        shown: Frame | None = None
        count, last, first_time = 0, 0.0, 0.0
        for frame in frames:
            if shown is not None and frame.time <= shown.time:
                continue  # stamps that go back show nothing new
            self._store(shown or frame, until=frame.time)
            first_time = frame.time if shown is None else first_time
            shown, count, last = frame, count + 1, frame.end
            if self.end is not None and frame.time >= self.end:
                last = self.end
                break
        if shown is None:
            check_whole(0.0, said)
            raise Fault("medium_empty", "it holds no frame that can be shown")
        if self.end is None or last < self.end:
            check_whole(last, said if self.end is None else min(said or 0.0, self.end))
            if self.begin or self.end is not None:
                check_cut(self.begin, self.end, last)
        self._store(shown, until=last if self.end is None else min(self.end, last))
        clip = self._clip
        if not clip.jpegs:
            raise Fault("medium_empty", "it holds no frame that is shown for any time")
        clip.original_fps = count / max(last - first_time, 1e-3)
        clip.seconds = len(clip.jpegs) / self._fps
        return clip

    def _store(self, frame: Frame, until: float) -> None:
        """Store a frame for all times before `until` that have none yet, and before the end."""
        limit = until if self.end is None else min(until, self.end)
        while self.begin + len(self._clip.jpegs) / self._fps < limit - _SAME_TIME:
            check_length((len(self._clip.jpegs) + 1) / self._fps - 1 / self._fps, self._most)
            self._clip.jpegs.append(b"" if frame is self._stored else self._encoded(frame))
            self._stored = frame

    def _encoded(self, frame: Frame) -> bytes:
        image = frame.picture()
        clip = self._clip
        if not clip.jpegs:
            clip.original_size = image.size
        image = image if self._short_side is None else shrink(image, self._short_side)
        if not clip.jpegs:
            clip.size = image.size
        elif image.size != clip.size:
            self.notes.append("frames_fitted")
            image = image.resize(clip.size, Image.Resampling.BICUBIC)
        return encode(image, "jpeg")


def _video(container: Any, stream: Any, max_pixels: int, sampler: _Sampler) -> Iterator[Frame]:
    """Yield the frames of a stream; raise too_many_pixels before memory is taken for more."""
    _check_pixels(stream.codec_context.width, stream.codec_context.height, max_pixels)
    rate = stream.average_rate or stream.guessed_rate
    usual = 1 / float(rate) if rate else 1 / 25
    pixels, last = 0, -usual
    for stamp, frame in decoded(container, stream, sampler.begin, sampler.notes):
        _check_pixels(frame.width, frame.height, max_pixels)
        pixels += frame.width * frame.height
        if pixels > _MOST_PIXELS_IN_ALL:
            raise Fault("too_many_pixels", f"{pixels:,} in all frames")
        time = last + usual if stamp is None else stamp
        own = float(frame.duration * frame.time_base) if frame.duration else usual
        last = time
        if "turned" not in sampler.notes and turn_of(frame) is not None:
            sampler.notes.append("turned")
        yield Frame(time, time + own, partial(upright, frame, stream.sample_aspect_ratio))


def _picture_header(content: bytes) -> Image.Image | None:
    """Read the header of a file of pictures; None if it is none."""
    try:
        header = Image.open(io.BytesIO(content), formats=(*_ANIMATIONS, *_STILLS))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise Fault("too_many_pixels", decoder_message(error)) from error
    except Exception:  # not a picture, or its header is damaged: see `checks.check_image`
        _check_damaged(content)
        return None
    return header


def _check_damaged(content: bytes) -> None:
    if content[:4] in (b"GIF8", b"\x89PNG") or (content[:4] == b"RIFF" and content[8:12] == b"WEBP"):
        raise Fault("medium_unreadable", "an animation with a damaged header")


def _animation(header: Image.Image, max_pixels: int) -> Iterator[Frame]:
    """Yield the frames of an animated GIF, WebP or PNG file, transparency on white."""
    if header.format not in _ANIMATIONS or not getattr(header, "is_animated", False):
        raise Fault("no_video_stream", f"a still picture, {header.format}")
    _check_pixels(*header.size, max_pixels)
    time, pixels, at = 0.0, 0, 0
    while True:
        try:
            header.seek(at)
            header.load()
        except EOFError as error:
            if at < 2:
                raise Fault("medium_truncated", f"{header.format}: {decoder_message(error)}") from error
            return
        except Exception as error:  # decoders raise no closed set of errors
            text = decoder_message(error)
            reason = "medium_truncated" if "truncated" in text.lower() else "medium_unreadable"
            raise Fault(reason, f"{header.format}, frame {at}: {text}") from error
        pixels += header.width * header.height
        if pixels > _MOST_PIXELS_IN_ALL:
            raise Fault("too_many_pixels", f"{pixels:,} in all frames")
        asked = float(header.info.get("duration") or 0) / 1000
        lasts = _QUICK if asked < _QUICKEST else asked
        picture = header.convert("RGBA")
        yield Frame(time, time + lasts, lambda picture=picture: _on_white(picture))  # type: ignore[misc]
        time, at = time + lasts, at + 1


def _on_white(picture: Image.Image) -> Image.Image:
    return Image.alpha_composite(Image.new("RGBA", picture.size, "white"), picture).convert("RGB")


def _checked_times(times: Any, count: int) -> list[float]:
    if not isinstance(times, Sequence) or isinstance(times, str) or len(times) != count:
        raise Fault("bad_times", f"{count} frames, and times are {times!r:.80}")
    seconds = [seconds_of(time) for time in times]
    if seconds and (seconds[0] < 0 or any(after <= before for before, after in itertools.pairwise(seconds))):
        raise Fault("bad_times", f"times do not rise from 0 on: {seconds!r:.80}")
    return seconds


def _check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise Fault("too_many_pixels", f"{width:,} x {height:,} pixels")
