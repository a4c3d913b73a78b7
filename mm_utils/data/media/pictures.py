"""Pictures of media for people: an image, four frames of a clip, a sound's spectrogram; and of clips and sounds for fingerprints."""

import io
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from PIL import Image
from scipy.signal import spectrogram

from mm_utils.data.images import open_image, shrink
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.model.reading import UnreadableError

SIDE = 256  # pixels: width of a spectrogram, and shorter side of a frame that moves
_GAP = 2  # pixels between the frames of a clip
_ROWS = 176  # pixels of a spectrogram
_WINDOW = 0.032  # seconds of a Fourier transform
_MOST_WINDOWS = 1024  # of a sound: those of an hour would be gigabytes
_DECIBELS = 70.0  # below the loudest spot, where the darkest colour begins
_MOST_FRAMES = 32  # of a clip that moves


def picture(value: Mapping[str, Any], kind: str = "image", min_side: int | None = None) -> Image.Image:
    """Return an RGB picture of a medium.

    Of a clip these are four frames spread evenly over it, two by two: in a square tile they are twice as large as side by side.
    Of a sound it is the spectrogram.

    Args:
        value: `{"bytes", "path"}`, as rows have it; a clip and a sound are files of `mm_utils.data.media.riff`.
        min_side: an image, or a frame, may be decoded at a reduced scale whose shorter side is at least this.

    Raises:
        UnreadableError: if it cannot be read.
    """
    if kind == "image":
        return open_image(dict(value), min_side)
    if not value.get("bytes"):
        raise UnreadableError(f"{value.get('path') or f'embedded {kind}'}: it has 0 bytes")
    if kind == "sound":
        return _spectrogram(value["bytes"])
    frames, _ = read_avi(value["bytes"])
    shown = [_frame(frames[(2 * quarter + 1) * len(frames) // 8], min_side) for quarter in range(4)]
    width, height = shown[0].size
    found = Image.new("RGB", (2 * width + _GAP, 2 * height + _GAP), "white")
    for place, frame in enumerate(shown):
        row, column = divmod(place, 2)
        found.paste(frame, (column * (width + _GAP), row * (height + _GAP)))
    return found


def animation(content: bytes) -> bytes:
    """Return a clip as animated WebP for browsers, of at most 32 frames, spread evenly; damaged ones are left out.

    Raises:
        UnreadableError: if it cannot be read, or none of them can.
    """
    frames, fps = read_avi(content)
    count = min(_MOST_FRAMES, len(frames))
    shown = []
    for place in range(count):
        with suppress(UnreadableError):
            shown.append(shrink(_frame(frames[place * len(frames) // count], SIDE), SIDE))
    if not shown:
        raise UnreadableError("none of its frames can be decoded")
    buffer = io.BytesIO()
    each = round(1000 * len(frames) / fps / count)  # milliseconds
    shown[0].save(buffer, "WEBP", save_all=True, append_images=shown[1:], duration=each, loop=0, quality=70, method=2)
    return buffer.getvalue()


def _frame(content: memoryview, min_side: int | None = None) -> Image.Image:
    return open_image({"bytes": bytes(content), "path": None}, min_side)


def _spectrogram(content: bytes) -> Image.Image:
    """Draw a sound over its time, the highest frequency on top."""
    from matplotlib import colormaps

    samples, rate = read_wav(content)
    size = max(16, round(_WINDOW * rate))
    step = max(size // 4, -(-len(samples) // _MOST_WINDOWS))
    waves = np.pad(samples, size // 2) / np.float32(2**15)
    power_FT = spectrogram(waves, rate, "hann", size, size - step, detrend=False, scaling="spectrum")[2]
    level_FT = 10 * np.log10(np.maximum(power_FT[::-1], 1e-14))
    # Silence stays dark: the loudest spot counts as at most 40 dB below a tone of full scale, of -3 dB.
    top = max(level_FT.max(), -43)
    shade_FT = np.clip(1 + (level_FT - top) / _DECIBELS, 0, 1).astype(np.float32)
    shade = Image.fromarray(shade_FT).resize((SIDE, _ROWS), Image.Resampling.BOX)
    return Image.fromarray(np.ascontiguousarray(colormaps["viridis"](np.asarray(shade), bytes=True)[..., :3]))


# -- for fingerprints ---------------------------------------------------------------------------------------------------
_STRIP = 32  # pixels of a frame in a strip
_CELLS, _PART, _RANGE, _SILENCE = 32, 512, 40.0, 30.0  # cells a side, samples, dB, dB


def strip(jpegs: Sequence[bytes]) -> Image.Image:
    """Lay three frames of a clip, of its thirds, side by side: for a fingerprint of it."""
    found = Image.new("RGB", (3 * _STRIP, _STRIP))
    for place in range(3):
        at = int((2 * place + 1) / 6 * len(jpegs))
        while not jpegs[at]:
            at -= 1
        frame = open_image({"bytes": jpegs[at]}, _STRIP)
        found.paste(frame.resize((_STRIP, _STRIP), Image.Resampling.BOX), (place * _STRIP, 0))
    return found


def loudness_picture(samples: np.ndarray, rate: int) -> Image.Image:
    """Draw a sound's loudness, int16 `[n]`: 32 parts left to right, 32 mel bands downwards.

    White is the loudest cell, black 40 dB below it. Silence before and behind the sound is left out: what is 30 dB below
    the loudest 20 ms. Copies that are louder, compressed or cut a little have nearly the same `fingerprint` of it.
    """
    floats, step = samples.astype(np.float32) / 32768, rate // 50
    steps = np.add.reduceat(floats**2, np.arange(0, len(floats), step))
    heard = np.flatnonzero(steps >= steps.max() * 10 ** (-_SILENCE / 10))
    floats = floats[heard[0] * step : (heard[-1] + 1) * step]
    padded = np.pad(floats, (0, max(0, 2 * _PART - len(floats))))
    step = (len(padded) - _PART) // (16 * _CELLS - 1) or 1  # 512 windows, however long it is
    hertz, _, power_FT = spectrogram(padded, rate, "hann", _PART, _PART - step, detrend=False)
    # Even in mel, from 100 to 3,800 Hz; a band that is narrower than a frequency's is that.
    edges = np.searchsorted(hertz, 700 * (np.geomspace(1 + 100 / 700, 1 + 3800 / 700, _CELLS + 1) - 1))
    bands_bT = np.add.reduceat(power_FT, edges.clip(max=len(hertz) - 1), axis=0)[:-1]
    cells = np.stack([part.mean(axis=1) for part in np.array_split(bands_bT, _CELLS, axis=1)], axis=1)
    loudness = 10 * np.log10(np.maximum(cells, cells.max() * 10 ** (-_RANGE / 10)))
    grey = 255 * (1 + (loudness - loudness.max()) / _RANGE)
    return Image.fromarray(grey.round().astype(np.uint8)).convert("RGB")
