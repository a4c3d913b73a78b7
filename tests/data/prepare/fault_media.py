"""Rows of sounds and clips with one thing wrong with each, and odd ones that are whole."""

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from tests.kit.fault_images import save
from tests.kit.made_media import animation, encoded, picture, riff_wav, steady, tone, video, wav


class Case(NamedTuple):
    """A row: what is odd about it, the reason for which it is set aside ("" keeps it), its file, and further columns."""

    kind: str
    reason: str
    content: bytes | Callable[[], bytes]
    columns: dict[str, Any] = {}  # noqa: RUF012
    kept: bool | None = None  # the row, where it is not the row that is set aside
    suffix: str = ".bin"

    @property
    def stays(self) -> bool:
        return not self.reason if self.kept is None else self.kept


GOOD_SOUND, GOOD_CLIP = wav(tone(1.0, clicks=(0.5,))), animation(8)
_FLAC, _MP3 = encoded(tone(2.0), 8000, "flac", "flac"), encoded(tone(2.0, 16_000), 16_000, "mp3", "libmp3lame")
_MKV, _MP4 = video(steady(10, 2)), video(steady(10, 2), form="mp4")
_WITH_SOUND = video(steady(10, 1), sound=tone(1.0))
_NOISE = np.random.default_rng(0).bytes(4000)
_PCM = tone(1.0).tobytes()


def _moment(start: Any, end: Any, phrase: Any = "a click") -> dict[str, Any]:
    return {"moments": [{"span": [start, end], "phrase": phrase}, {"span": [0.2, 0.6], "phrase": "a tone"}]}


def _patched(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def _declared_hours(content: bytes) -> bytes:
    """An MP4 file whose header says that it lasts for a day."""
    for name in (b"mvhd", b"mdhd"):
        at = content.index(name) + 4
        content = _patched(content, at + 16, struct.pack(">I", 86_400 * struct.unpack_from(">I", content, at + 12)[0]))
    return _patched(content, content.index(b"tkhd") + 24, struct.pack(">I", 86_400_000))


def _many_streams() -> bytes:
    """An AVI file that declares a thousand streams."""
    stream = b"strl" + b"strh" + struct.pack("<I", 56) + b"vidsMJPG" + bytes(48)
    stream = b"LIST" + struct.pack("<I", len(stream)) + stream
    headers = b"hdrl" + b"avih" + struct.pack("<I", 56) + bytes(56) + 1000 * stream
    body = b"AVI LIST" + struct.pack("<I", len(headers)) + headers
    return b"RIFF" + struct.pack("<I", len(body)) + body


SOUNDS = [
    Case("0 bytes", "medium_empty", b""),
    Case("no samples", "medium_empty", riff_wav(b"")),
    Case("FLAC without frames", "medium_truncated", lambda: _FLAC[:42]),
    Case("an HTML page", "medium_unknown_format", b"<!doctype html><title>404</title>"),
    Case("a playlist that names a file", "medium_unknown_format", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"),
    Case("a picture", "medium_unknown_format", save(picture(False), "PNG")),
    Case("random bytes", "medium_unknown_format", b"\x03" + _NOISE),
    Case("WAV cut in half", "medium_truncated", GOOD_SOUND[: len(GOOD_SOUND) // 2]),
    Case("WAV cut in its header", "medium_truncated", GOOD_SOUND[:30]),
    Case("WAV without samples", "medium_truncated", GOOD_SOUND[:36]),
    Case("FLAC cut in half", "medium_truncated", lambda: _FLAC[: len(_FLAC) // 2]),
    Case("FLAC cut by 5 %", "medium_truncated", lambda: _FLAC[: len(_FLAC) * 19 // 20]),
    Case("Matroska cut in half", "medium_truncated", lambda: _long_track()[: len(_long_track()) // 2]),
    Case("MP4 cut in its index", "medium_unreadable", lambda: _MP4[: len(_MP4) // 2]),
    Case("MP4 without its index", "medium_truncated", lambda: _MP4[: _MP4.index(b"moov") - 4]),
    Case("noise behind the mark of Ogg", "medium_unreadable", b"OggS" + _NOISE),
    Case("noise behind the mark of Matroska", "medium_unreadable", b"\x1aE\xdf\xa3" + _NOISE),
    Case("WAV of 12 bits", "medium_unreadable", riff_wav(_PCM, bits=12)),
    Case("WAV of no channel", "medium_unreadable", riff_wav(_PCM, channels=0)),
    Case("WAV of 1,000 channels", "medium_unreadable", riff_wav(_PCM, channels=1000)),
    Case(
        "floats that are not finite", "medium_unreadable", riff_wav(np.full(800, np.nan, "<f4").tobytes(), 3, bits=32)
    ),
    Case("WAV of 0 samples a second", "bad_sound_rate", riff_wav(_PCM, rate=0)),
    Case("WAV of 4 billion samples a second", "bad_sound_rate", riff_wav(_PCM, rate=2**32 - 1)),
    Case("WAV of 100 samples a second", "bad_sound_rate", riff_wav(_PCM, rate=100)),
    Case("digital silence", "silent", wav(np.zeros(8000, np.int16))),
    Case("the noise of dither", "silent", wav((np.arange(8000) % 3 - 1).astype(np.int16))),
    Case("a silent part", "silent", wav(np.concatenate([np.zeros(8000, np.int16), tone()])), {"start": 0, "end": 0.9}),
    Case("a video without sound", "no_audio_stream", _MKV),
    Case("too long", "too_long", wav(tone(6.0))),
    Case("a WAV header of an hour, cut", "medium_truncated", riff_wav(_PCM, size=8000 * 2 * 3600)),
    Case("too long a FLAC", "too_long", lambda: encoded(tone(6.0), 8000, "flac", "flac")),
    Case("too long an MP3", "too_long", lambda: encoded(tone(6.0, 16_000), 16_000, "mp3", "libmp3lame")),
    Case("too long a part", "too_long", GOOD_SOUND, {"start": 0, "end": 7}),
    Case("a part behind the end", "span_outside", GOOD_SOUND, {"start": 2, "end": 3}),
    Case("a part behind the end of MP3", "span_outside", _MP3, {"start": 4, "end": 4.5}),
    Case("a part that leaves", "span_outside", GOOD_SOUND, {"start": 0.5, "end": 2}),
    Case("a part before the beginning", "span_outside", GOOD_SOUND, {"start": -1, "end": 0.5}),
    Case("an empty part", "span_empty", GOOD_SOUND, {"start": 0.5, "end": 0.5}),
    Case("a reversed part", "span_reversed", GOOD_SOUND, {"start": 0.7, "end": 0.2}),
    Case("a start in words", "bad_times", GOOD_SOUND, {"start": "half a second"}),
    Case("a start without bound", "bad_times", GOOD_SOUND, {"start": float("inf")}),
    Case("a huge number", "bad_times", GOOD_SOUND, {"end": 10**400}),
    Case("moments as a text", "bad_moments", GOOD_SOUND, {"moments": "0.2-0.6: a click"}),
    Case("a moment without a span", "bad_moments", GOOD_SOUND, {"moments": [{"phrase": "a click"}]}, True),
    Case("a moment of one time", "bad_moments", GOOD_SOUND, {"moments": [{"span": [1], "phrase": "x"}]}, True),
    Case("a moment in words", "bad_times", GOOD_SOUND, _moment("early", "late"), True),
    Case("a moment behind the end", "span_outside", GOOD_SOUND, _moment(3, 4), True),
    Case("a reversed moment", "span_reversed", GOOD_SOUND, _moment(0.6, 0.2), True),
    Case("an empty moment", "span_empty", GOOD_SOUND, _moment(0.6, 0.6), True),
    Case("a moment without words", "caption_empty", GOOD_SOUND, _moment(0.2, 0.6, " "), True),
    Case("an empty cell", "medium_empty", b"", {"audio": ""}),
    Case("a cell that is null", "medium_empty", b"", {"audio": None}),
    Case("no such file", "image_missing", b"", {"audio": "media/none.wav"}),
    Case("a path that leads out", "outside_root", b"", {"audio": "../../../etc/hostname"}),
    Case("an address", "url_not_allowed", b"", {"audio": "http://localhost/a.wav"}),
    Case("a cell that is a number", "bad_path", b"", {"audio": 7}),
    # odd, and whole
    Case("WAV of 8 bits", "", wav(width=1)),
    Case("WAV of 24 bits and two channels", "", wav(width=3, channels=2)),
    Case("WAV of floats", "", riff_wav((tone() / 32768).astype("<f4").tobytes(), 3, bits=32)),
    Case("WAV of doubles", "", riff_wav((tone() / 32768).astype("<f8").tobytes(), 3, bits=64)),
    Case("WAV out of a pipe", "", riff_wav(_PCM, size=0xFFFFFFFF)),
    Case("WAV with bytes behind it", "", GOOD_SOUND + b"LIST\4\0\0\0junk"),
    Case("WAV of mu-law", "", lambda: encoded(tone(), 8000, "wav", "pcm_mulaw")),
    Case("a named end only", "", GOOD_SOUND, {"end": 0.8}),
    Case("an end that is rounded up", "", GOOD_SOUND, {"start": 0.1, "end": 1.2}),
    Case("times as text", "", GOOD_SOUND, {"start": "0.2", "end": "0.8"}),
    Case("FLAC under another name", "", _FLAC, {}, None, ".mp3"),
    Case("the sound of a video", "", _WITH_SOUND),
    Case("a sound that is 50 ms long", "", wav(tone(0.05, clicks=(0.01,)))),
    Case("moments in whole seconds", "", wav(tone(2.0)), {"moments": [{"span": [0, 2], "phrase": "a tone"}]}),
]
CLIPS = [
    Case("0 bytes", "medium_empty", b""),
    Case("an HTML page", "medium_unknown_format", b"<html><body>gone</body></html>"),
    Case("random bytes", "medium_unknown_format", b"\x03" + _NOISE),
    Case("a still JPEG", "no_video_stream", save(picture(False), "JPEG")),
    Case("a GIF of one frame", "no_video_stream", save(picture(False), "GIF")),
    Case("a sound in Matroska", "no_video_stream", encoded(tone(), 8000, "matroska", "pcm_s16le")),
    Case("a WAV file", "no_video_stream", GOOD_SOUND),
    Case("GIF cut in half", "medium_truncated medium_unreadable", GOOD_CLIP[: len(GOOD_CLIP) // 2]),
    Case("GIF cut in its header", "medium_unreadable", GOOD_CLIP[:11]),
    Case("WebP cut in half", "medium_truncated medium_unreadable", animation(8, "WEBP")[:400]),
    Case("MP4 cut in its index", "medium_unreadable", _MP4[: len(_MP4) // 2]),
    Case("Matroska cut in half", "medium_truncated", _MKV[: len(_MKV) // 2]),
    Case("AVI of a thousand streams", "too_many_parts", _many_streams()),
    Case("a header of a day over a table of 2 s", "", _declared_hours(_MP4)),
    Case("too long", "too_long", lambda: video(steady(5, 6))),
    Case("too long a GIF", "too_long", animation(8, duration=900)),
    Case("more pixels than there may be", "too_many_pixels", video([0.0, 0.1], size=(128, 128))),
    Case("a GIF of 50 million pixels", "too_many_pixels", _patched(GOOD_CLIP, 6, struct.pack("<HH", 7200, 7200))),
    Case("a part behind the end", "span_outside", _MKV, {"start": 4, "end": 4.5}),
    Case("a part that leaves", "span_outside", _MKV, {"start": 1, "end": 4}),
    Case("a reversed part", "span_reversed", _MKV, {"start": 1, "end": 0.5}),
    Case("a moment behind the end", "span_outside", GOOD_CLIP, _moment(30, 40), True),
    # odd, and whole
    Case("WebP", "", animation(6, "WEBP")),
    Case("APNG", "", animation(6, "PNG")),
    Case("motion JPEG", "", video(steady(10, 1), form="avi", codec="mjpeg")),
    Case("MPEG transport stream", "", video(steady(25, 1), form="mpegts", codec="mpeg4")),
    Case("an end that is rounded up", "", _MKV, {"start": 0.4, "end": 2.1}),
    Case("one frame", "", video([0.0])),
    Case("odd sides", "", video(steady(10, 1), codec="mjpeg", size=(34, 50))),
]
FRAMES = [
    Case("frames and no times in order", "bad_times", b"", {"frames": ["a.png", "b.png"], "times": [1, 0]}),
    Case("frames and too few times", "bad_times", b"", {"frames": ["a.png", "b.png"], "times": [0]}),
    Case("times that are not numbers", "bad_times", b"", {"frames": ["a.png", "b.png"], "times": ["0", None]}),
    Case("no frames", "medium_empty", b"", {"frames": []}),
    Case("a frame that is missing", "image_missing", b"", {"frames": ["a.png", "none.png"]}),
    Case("a frame that is cut", "image_truncated", b"", {"frames": ["a.png", "cut.png"], "times": [0, 1]}),
    Case("frames without times", "", b"", {"frames": ["a.png", "b.png"]}),
    Case("frames with times", "", b"", {"frames": ["a.png", "b.png"], "times": [0.5, 1.5]}),
]


def _long_track() -> bytes:
    return encoded(tone(3.0), 8000, "matroska", "pcm_s16le")
