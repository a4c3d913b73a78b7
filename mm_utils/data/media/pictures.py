"""Pictures of media for people: an image, four frames of a clip, a sound's spectrogram."""

import io
from collections.abc import Mapping
from typing import Any

import numpy as np
from PIL import Image

from mm_utils.data.images import open_image
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.model.reading import UnreadableError

SIDE = 256  # pixels: width of a spectrogram
_MOST_FRAMES = 120  # of a moving picture, which take a second to encode
_GAP = 2  # pixels between the frames of a clip
_ROWS = 176  # pixels of a spectrogram
_WINDOW = 0.032  # seconds of a Fourier transform
_MOST_WINDOWS = 1024  # of a sound: those of an hour would be gigabytes
_DECIBELS = 70.0  # below the loudest spot, where the darkest colour begins


def picture(value: Mapping[str, Any], kind: str = "image", min_side: int | None = None) -> Image.Image:
    """Return an RGB picture of a medium.

    Of a clip these are four frames spread evenly over it, two by two; of a sound it is the spectrogram. An image, or a frame, may be
    decoded at a reduced scale whose shorter side is at least `min_side`. Raises UnreadableError.
    """
    if kind == "image":
        return open_image(dict(value), min_side)
    if not value.get("bytes"):
        raise UnreadableError(f"{value.get('path') or f'embedded {kind}'}: it has 0 bytes")
    if kind == "sound":
        return _spectrogram(value["bytes"])
    frames, _ = read_avi(value["bytes"])
    places = [(2 * quarter + 1) * len(frames) // 8 for quarter in range(4)]  # of 8 frames: 1, 3, 5, 7
    shown = [open_image({"bytes": bytes(frames[place]), "path": None}, min_side) for place in places]
    width, height = shown[0].size
    found = Image.new("RGB", (2 * width + _GAP, 2 * height + _GAP), "white")
    for place, frame in enumerate(shown):
        row, column = divmod(place, 2)
        found.paste(frame, (column * (width + _GAP), row * (height + _GAP)))
    return found


def moving_picture(content: bytes) -> bytes:
    """Return the WebP of a stored clip, which browsers show as it moves, without an end; of a long clip it has some of the frames."""
    frames, fps = read_avi(content)
    step = -(-len(frames) // _MOST_FRAMES)
    shown = [open_image({"bytes": bytes(frame), "path": None}) for frame in frames[::step]]
    moving = io.BytesIO()
    shown[0].save(moving, "WEBP", save_all=True, append_images=shown[1:], duration=round(1000 * step / fps), loop=0, method=0)
    return moving.getvalue()


def _spectrogram(content: bytes) -> Image.Image:
    """Draw a sound over its time, the highest frequency on top."""
    from matplotlib import colormaps
    from scipy.signal import spectrogram  # a tenth of the start of a search

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
