"""Read sounds of any file as mono samples of one rate, and draw them.

WAV files of plain samples are read here, without any codec; all else by `mm_utils.data.media.containers`.
"""

import itertools
import math
import re
import struct

import numpy as np
from PIL import Image

from mm_utils.data.faults import Fault
from mm_utils.data.media.containers import (
    TOLERANCE,
    best_stream,
    check_cut,
    check_length,
    check_whole,
    declared_end,
    decoded,
    open_container,
    signature,
)
from mm_utils.data.media.riff import MOST_RATE

LEAST_RATE = 1_000  # samples a second
_MOST_CHANNELS = 64
_SILENT = 3 / 32768  # the noise of rounding and dither
_SURPLUS = 0.1  # seconds
_MOST_LINKS, _DAY = 256, 86_400.0  # of a chained Ogg file; seconds
_GAP = 0.02  # seconds: where time stamps and samples differ by more, something is missing
_INTEGERS, _FLOATS, _EXTENSIBLE = 1, 3, 0xFFFE
_WAV_TYPES = {
    (_INTEGERS, 8): "u1",
    (_INTEGERS, 16): "<i2",
    (_INTEGERS, 32): "<i4",
    (_FLOATS, 32): "<f4",
    (_FLOATS, 64): "<f8",
}
_CELLS, _WINDOW, _FLOOR, _SILENCE = 32, 512, 40.0, 30.0  # of a picture: cells a side, samples, dB, dB


def read_sound(
    content: bytes,
    rate: int,
    start: float | None = None,
    end: float | None = None,
    *,
    max_seconds: float = 60.0,
    notes: list[str] | None = None,
    codecs: bool = True,
) -> tuple[np.ndarray, int]:
    """Read a file's sound, the mean of its channels, from `start` to `end` on its clock.

    Sound that is missing at the beginning or in between, as time stamps have it, is silence.

    Args:
        content: the whole file.
        rate: samples a second of the result.
        start, end: seconds; None for the beginning and the end.
        max_seconds: the longest sound that is wanted.
        notes: keys of `NOTES` are added.
        codecs: read more than WAV files of plain samples.

    Returns:
        int16 `[n]`, and the samples a second of the file.

    Raises:
        Fault: if there is no such sound, for whatever reason; nothing else is raised, whatever the bytes.
    """
    from scipy.signal import resample_poly

    check_cut(start, end)
    if end is not None:
        check_length(end - (start or 0.0), max_seconds)
    plain = _read_wav(content, start, end, max_seconds)
    if plain is None and not codecs:
        raise Fault("medium_unknown_format", "it is not a WAV file of plain samples")
    links = _links(content) if plain is None else []
    if len(links) > 1:
        plain = _read_chain(links, start, end, max_seconds, [] if notes is None else notes)
    samples, own = plain or _read_stream(content, start, end, max_seconds, [] if notes is None else notes)
    if not len(samples):
        raise Fault("medium_empty", "it holds no samples")
    if not np.isfinite(samples).all():
        raise Fault("medium_unreadable", "it holds samples that are not finite")
    if abs(samples).max() <= _SILENT:
        raise Fault("silent", f"{len(samples) / own:.2f} s without a sound")
    changed = samples if own == rate else resample_poly(samples, rate, own)
    return (changed * 32768).round().clip(-32768, 32767).astype(np.int16), own


def loudness_picture(samples: np.ndarray, rate: int) -> Image.Image:
    """Draw a sound's loudness, int16 `[n]`: 32 parts left to right, 32 mel bands downwards.

    White is the loudest cell, black 40 dB below it. Silence before and behind the sound is left out: what is 30 dB below
    the loudest 20 ms. A picture is what `perceptual_hash.fingerprint` takes: copies that are
    louder, compressed or cut a little have nearly the same lowest frequencies of it.
    """
    floats, step = samples.astype(np.float32) / 32768, rate // 50
    steps = np.add.reduceat(floats**2, np.arange(0, len(floats), step))
    heard = np.flatnonzero(steps >= steps.max() * 10 ** (-_SILENCE / 10))
    floats = floats[heard[0] * step : (heard[-1] + 1) * step]
    padded = np.pad(floats, (0, max(0, 2 * _WINDOW - len(floats))))
    count = min(max(2 * _CELLS, 2 * len(padded) // _WINDOW), 16 * _CELLS)
    begins = np.linspace(0, len(padded) - _WINDOW, count).astype(int)
    windows = padded[begins[:, None] + np.arange(_WINDOW)] * np.hanning(_WINDOW).astype(np.float32)
    power_tb = abs(np.fft.rfft(windows, axis=1)) ** 2 @ _mel_bands(rate)
    cells = np.stack([part.mean(axis=0) for part in np.array_split(power_tb, _CELLS)])
    loudness = 10 * np.log10(np.maximum(cells, 1e-12))
    grey = 255 * (1 + np.maximum(loudness - loudness.max(), -_FLOOR) / _FLOOR)
    return Image.fromarray(grey.round().astype(np.uint8).T.copy()).convert("RGB")


def _mel_bands(rate: int) -> np.ndarray:
    """Return weights [frequencies, bands] that average power, even in mel, 100 to 3,800 Hz."""
    low, high = (2595 * math.log10(1 + hertz / 700) for hertz in (100.0, 3800.0))
    edges = 700 * (10 ** (np.linspace(low, high, _CELLS + 1) / 2595) - 1)
    hertz = np.linspace(0, rate / 2, _WINDOW // 2 + 1)[:, None]
    width = rate / _WINDOW
    weights = np.clip(np.minimum(hertz - edges[:-1], edges[1:] - hertz) / width + 0.5, 0, 1)
    return (weights / np.maximum(weights.sum(axis=0), 1e-6)).astype(np.float32)


def _read_wav(content: bytes, start: float | None, end: float | None, most: float) -> tuple[np.ndarray, int] | None:
    """Read a WAV file of plain samples; None if it is another file, or needs a codec."""
    found = _wav_chunks(content)
    if found is None:
        return None
    layout, data = found
    tag, channels, rate, _, frame, bits = struct.unpack_from("<HHIIHH", layout)
    if tag == _EXTENSIBLE and len(layout) >= 26:
        tag = struct.unpack_from("<H", layout, 24)[0]
    if tag not in (_INTEGERS, _FLOATS):
        return None
    _check_layout(rate, channels)
    if (tag, bits) not in _WAV_TYPES and (tag, bits) != (_INTEGERS, 24):
        raise Fault("medium_unreadable", f"a WAV file of {bits} bits a sample")
    if frame != channels * bits // 8:
        raise Fault("medium_unreadable", f"a WAV file of {channels} channels of {bits} bits in {frame} bytes")
    count = len(data) // frame
    if not count:
        raise Fault("medium_empty", "a WAV file of no samples")
    check_cut(start, end, count / rate)
    first, last = _places(start, end, rate, count)
    check_length((last - first) / rate, most)
    return _mono(data[first * frame : last * frame], tag, bits, channels), rate


def _wav_chunks(content: bytes) -> tuple[bytes, memoryview] | None:
    """Return format and samples of a WAV file, None if it is none; raise `Fault` if cut."""
    if content[:4] != b"RIFF" or content[8:12] != b"WAVE":
        return None
    view, at, layout = memoryview(content), 12, b""
    while at + 8 <= len(content):
        name, size = content[at : at + 4], int.from_bytes(content[at + 4 : at + 8], "little")
        body, at = at + 8, at + 8 + size + size % 2
        if name == b"fmt ":
            layout = content[body : body + size]
        if name == b"data":
            if size in (0, 0xFFFFFFFF):  # of a program that wrote into a pipe
                size = len(content) - body
            if body + size > len(content):
                raise Fault("medium_truncated", f"a WAV file with {len(content) - body:,} of {size:,} bytes of sound")
            if len(layout) < 16:
                raise Fault("medium_unreadable", "a WAV file without its format")
            return layout, view[body : body + size]
    raise Fault("medium_truncated", "a WAV file without its sound")


def _mono(data: memoryview, tag: int, bits: int, channels: int) -> np.ndarray:
    """Return samples as float32 `[n]`, 1 at full scale, the mean of the channels."""
    if bits == 24:
        triples = np.frombuffer(data, "u1").reshape(-1, 3)
        values = np.zeros((len(triples), 4), "u1")
        values[:, 1:] = triples
        samples = values.view("<i4")[:, 0]
    else:
        samples = np.frombuffer(data, _WAV_TYPES[tag, bits])
    return _to_float(samples).reshape(-1, channels).mean(axis=1)


def _to_float(samples: np.ndarray) -> np.ndarray:
    if samples.dtype.kind == "u":
        return (samples.astype(np.float32) - 128) / 128
    if samples.dtype.kind == "i":
        return samples.astype(np.float32) / np.float32(2.0 ** (8 * samples.dtype.itemsize - 1))
    return samples.astype(np.float32)


def _places(start: float | None, end: float | None, rate: int, count: int) -> tuple[int, int]:
    first = round((start or 0.0) * rate)
    return first, count if end is None else min(count, round(end * rate))


def _check_layout(rate: int, channels: int) -> None:
    if not LEAST_RATE <= rate <= MOST_RATE:
        raise Fault("bad_sound_rate", f"{rate:,} samples a second")
    if not 1 <= channels <= _MOST_CHANNELS:
        raise Fault("medium_unreadable", f"{channels} channels")


def _links(content: bytes) -> list[bytes]:
    """Return the links of a chained Ogg file, as recorders of radio write them; of any other file itself."""
    if signature(content) != "Ogg":
        return [content]
    pages = [(page.start(), bool(page[1][0] & 2)) for page in re.finditer(rb"OggS\0(.)", content, re.DOTALL)]
    begins = [at for (_, was_first), (at, is_first) in itertools.pairwise(pages) if is_first and not was_first]
    return [content[begin:end] for begin, end in itertools.pairwise([0, *begins, len(content)])]


def _read_chain(
    links: list[bytes], start: float | None, end: float | None, most: float, notes: list[str]
) -> tuple[np.ndarray, int]:
    """Read the links of a chain one after another, at the rate of the first."""
    from scipy.signal import resample_poly

    if len(links) > _MOST_LINKS:
        raise Fault("too_many_parts", f"an Ogg file of {len(links):,} links")
    longest = most if start is None and end is None else _DAY
    parts = [_read_stream(link, None, None, longest, notes) for link in links]
    rate = parts[0][1]
    whole = np.concatenate([part if own == rate else resample_poly(part, rate, own) for part, own in parts])
    check_cut(start, end, len(whole) / rate)
    first, last = _places(start, end, rate, len(whole))
    check_length((last - first) / rate, most)
    return whole[first:last], rate


def _read_stream(
    content: bytes, start: float | None, end: float | None, most: float, notes: list[str]
) -> tuple[np.ndarray, int]:
    """Decode the best stream of sound of a file: float32 `[n]`, and its rate."""
    with open_container(content) as container:
        stream = best_stream(container, "audio")
        said, is_flac = declared_end(container, stream), container.format.name == "flac"
        begin = start or 0.0
        if said is not None and end is None:
            check_length(said - begin, most)
        track = _Track(begin, most + TOLERANCE if end is None else end - begin)
        for time, frame in decoded(container, stream, begin, notes):
            track.add(time, frame)
            if track.is_full:
                break
    if track.is_full and end is None:
        raise Fault("too_long", f"it has more than {most:g} s, which is --max_seconds")
    if not track.is_full:
        check_whole(begin + track.seconds, said if end is None else min(said or 0.0, end), is_flac)
        if start is not None or end is not None:
            check_cut(start, end, begin + track.seconds if track.seconds else begin)
    samples = track.samples()
    surplus = len(samples) - round(((said or 0.0) - begin) * track.rate)
    # The last packet of Ogg Vorbis is longer than the sound in it.
    return samples[: len(samples) - surplus] if 0 < surplus < _SURPLUS * track.rate else samples, track.rate


class _Track:
    """Puts decoded frames on the clock, from `begin` on, until it has `most` seconds.

    Attributes:
        rate: samples a second, once there is a frame.
    """

    def __init__(self, begin: float, most: float):
        self._begin, self._most = begin, most
        self._pieces: list[np.ndarray] = []
        self._count = self.rate = 0

    @property
    def seconds(self) -> float:
        return self._count / self.rate if self.rate else 0.0

    @property
    def is_full(self) -> bool:
        return self.rate > 0 and self._count >= round(self._most * self.rate)

    def add(self, time: float | None, frame) -> None:  # type: ignore[no-untyped-def]
        """Lay a frame of `av` behind the others, after a gap, or from where they end."""
        values = frame.to_ndarray()
        channels = len(frame.layout.channels)
        if not self.rate:
            self.rate = frame.sample_rate
            _check_layout(self.rate, channels)
        if frame.sample_rate != self.rate:
            raise Fault("medium_unreadable", f"its rate changes from {self.rate:,} to {frame.sample_rate:,}")
        floats = _to_float(values)
        mono = floats.mean(axis=0) if len(floats) == channels else floats.reshape(-1, channels).mean(axis=1)
        at = self._count if time is None else round((time - self._begin) * self.rate)
        if self._pieces and abs(at - self._count) <= _GAP * self.rate:
            at = self._count
        if at > self._count:
            self._append(np.zeros(min(at, round(self._most * self.rate)) - self._count, np.float32))
        self._append(mono[max(0, self._count - at) :] if at < self._count else mono)

    def _append(self, piece: np.ndarray) -> None:
        if len(piece):
            self._pieces.append(piece)
            self._count += len(piece)

    def samples(self) -> np.ndarray:
        whole = np.concatenate([np.empty(0, np.float32), *self._pieces])
        return whole[: round(self._most * self.rate)]
