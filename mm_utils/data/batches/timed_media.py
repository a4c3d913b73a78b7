"""Read media that last: a window of a clip or a sound, a function of the generator alone.

Seconds are counted here and in preparation, and nowhere else frames or samples. Training takes a random window, evaluation the
middle; what is shorter than the window begins with it, and then the last frame stays, or silence follows, or the sound again
(`LogMel.loops`). A window is told in shares of the medium's length, so that moments of it (`mm_utils.extras.grounding.regions`)
follow into the window, and none lies in what comes after the end.
"""

import math
import random
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from scipy.signal import resample_poly
from torch import Tensor
from transformers import ProcessorMixin

from mm_utils.data.batches.augment import Window, center_square, random_squares, vary_loudness
from mm_utils.data.images import UnreadableImageError, read_pixels
from mm_utils.data.media.log_mel import LogMel
from mm_utils.data.media.riff import read_avi, read_wav

MOST_SECONDS = 10.0  # of a sound's window, where nothing else is asked for
CLIP_FRAMES = 16
_USUAL = 0.95  # quantile of the lengths of sounds
SOUND_JITTER = 6.0  # decibels, in training


class Timed(ABC):
    """How clips or sounds are read.

    Attributes:
        kind: `clip` or `sound`.
        shape, dtype: of an example.
    """

    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @abstractmethod
    def read(self, value: dict[str, Any], rng: random.Random | None) -> tuple[Tensor, tuple[float, float], Window]:
        """Return an example of a stored medium.

        Args:
            value: bytes and path of a row.
            rng: draws the window and the crop; without it, they are in the middle.

        Returns:
            The example, `shape`; (seconds of the medium, 1), the size that moments are told in; and the window, whose right
            end is beyond 1 where the medium is shorter.

        Raises:
            UnreadableImageError: if it cannot be decoded.
        """

    @property
    @abstractmethod
    def settings(self) -> list[Any]:
        """All that an example depends on besides the medium, for keys of caches and runs."""


@dataclass
class Clips(Timed):
    """Frames spread evenly over a window of a clip: uint8 `[T, 3, S, S]`, one crop for all.

    Frames are never reversed and their pace never changes in training: captions say what comes first, and what is fast.

    Attributes:
        frames, image_size: T and S.
        seconds: length of the window; None takes the whole clip.
        min_crop_area: smallest area of a training crop, as a share of the largest square.
    """

    frames: int
    image_size: int
    seconds: float | None
    min_crop_area: float
    kind = "clip"
    dtype = torch.uint8

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of an example."""
        return self.frames, 3, self.image_size, self.image_size

    @property
    def settings(self) -> list[Any]:
        """See `Timed.settings`; the crop is one of training, as for images."""
        return ["clip", self.frames, self.image_size, self.seconds]

    def read(self, value: dict[str, Any], rng: random.Random | None) -> tuple[Tensor, tuple[float, float], Window]:
        """See `Timed.read`."""
        stored, fps = read_avi(value["bytes"] or b"")
        length = len(stored) / fps
        begin, seconds = _window(length, self.seconds or length, rng)
        within = 0.5 if rng is None else rng.random()  # of the time that each frame stands for
        times = begin + (np.arange(self.frames) + within) / self.frames * seconds
        places = np.clip((times * fps).astype(int), 0, len(stored) - 1).tolist()
        side = self.image_size if rng is None else int(self.image_size * self.min_crop_area**-0.5) + 1
        decoded = {at: read_pixels({"bytes": bytes(stored[at]), "path": None}, side)[0] for at in set(places)}
        if len({pixels.shape for pixels in decoded.values()}) > 1:
            raise UnreadableImageError("its frames differ in size")
        whole = [decoded[at] for at in places]
        if rng is None or self.min_crop_area == 1:
            shown = torch.stack([center_square(Image.fromarray(pixels), self.image_size) for pixels in whole])
        else:
            shown = random_squares(whole, self.image_size, self.min_crop_area, rng)
        return shown, (length, 1.0), Window(begin / length, 0.0, (begin + seconds) / length, 1.0)


@dataclass
class Sounds(Timed):
    """Samples of a window of a sound: int16 `[n]`.

    In training, a window may begin before the sound or end behind it, in silence, and its loudness varies. What is shorter than
    the window by as much is never cut.

    Attributes:
        log_mel: makes the sound tower's input of them, on the device.
        seconds: length of the window.
        min_share: a training window leaves a sound by at most the rest of this share of its own length.
        jitter: most decibels of `vary_loudness` in training.
    """

    log_mel: LogMel
    seconds: float
    min_share: float = 1.0
    jitter: float = 0.0
    kind = "sound"
    dtype = torch.int16

    @property
    def shape(self) -> tuple[int, ...]:  # type: ignore[override]
        """Shape of an example."""
        return (round(self.seconds * self.log_mel.rate),)

    @property
    def settings(self) -> list[Any]:
        """See `Timed.settings`."""
        return ["sound", self.seconds, self.log_mel.describe()]

    def read(self, value: dict[str, Any], rng: random.Random | None) -> tuple[Tensor, tuple[float, float], Window]:
        """See `Timed.read`."""
        samples, rate = read_wav(value["bytes"] or b"")
        if not len(samples):
            raise UnreadableImageError("a WAV file of no samples")
        length, wanted = len(samples) / rate, self.log_mel.rate
        begin, seconds = _window(length, self.seconds, rng, 1 - self.min_share)
        first, count = int(begin * rate), round(seconds * rate)
        part = samples[max(0, first) : first + count]
        if rate != wanted:
            part = resample_poly(part.astype(np.float32), wanted, rate).round().clip(-32768, 32767)
        shown = np.zeros(self.shape, np.int16)
        part = np.tile(part, self.log_mel.loops(len(part)))
        silent = max(0, -first) * wanted // rate
        shown[silent : silent + len(part)] = part[: len(shown) - silent]
        if rng is not None and self.jitter:
            shown = vary_loudness(shown, wanted, self.jitter, rng)
        window = Window(first / len(samples), 0.0, (first + count) / len(samples), 1.0)
        return torch.from_numpy(shown), (length, 1.0), window

    def features(self, samples: Tensor) -> Tensor:
        """Return the tower's input of samples `[B, n]`, on their device."""
        return self.log_mel(samples.float() / 32768)


def _window(length: float, seconds: float, rng: random.Random | None, beyond: float = 0.0) -> tuple[float, float]:
    """Return begin and length, in seconds, of a window of a medium so long.

    Args:
        beyond: a drawn window may leave the medium by this share of its length; what is shorter lies anywhere in it.
    """
    room, most = length - seconds, beyond * seconds
    if rng is None:
        return max(0.0, room) * 0.5, seconds
    low, high = (min(-most, room), room + most) if beyond else (0.0, room)
    return rng.uniform(low, max(0.0, high)), seconds


# -- what the processor of a model says --------------------------------------------------------------------------------


def medium_of(processor: ProcessorMixin) -> str:
    """Return the kind of media that a processor is for."""
    if getattr(processor, "feature_extractor", None) is not None:
        return "sound"
    return "clip" if getattr(processor.image_processor, "clip_frames", None) else "image"


def default_seconds(medium: str, rows: datasets.Dataset) -> float | None:
    """Return the window: what 95 % of the sounds do not exceed; None for whole clips.

    One long sound would leave silence in the windows of all others. Tenths of a second; the rest of one is not waited for.
    """
    if medium != "sound":
        return None
    usual = np.quantile(rows["seconds"], _USUAL) if len(rows) else MOST_SECONDS
    return min(MOST_SECONDS, max(0.1, math.floor(10 * usual) / 10))


def settle_window(
    processor: ProcessorMixin, medium: str, seconds: float | None, frames: int | None, default: float | None
) -> None:
    """Write a new model's window into its processor; what is there stays.

    Args:
        seconds, frames: as the flags say, or None.
        default: `default_seconds` of the training data.
    """
    if medium == "image":
        return
    owner: Any = processor.feature_extractor if medium == "sound" else processor.image_processor  # type: ignore[attr-defined]
    owner.window_seconds = getattr(owner, "window_seconds", None) or seconds or default
    if medium == "clip":
        owner.clip_frames = getattr(owner, "clip_frames", None) or frames or CLIP_FRAMES


def check_window(timed: Timed | None, seconds: float | None, frames: int | None) -> None:
    """Raise ValueError if flags ask for another window than the model's."""
    if seconds is not None and seconds != (known := getattr(timed, "seconds", None)):
        why = (
            "images do not last" if timed is None else f"the model takes {f'{known:g} s' if known else 'whole clips'}"
        )
        raise ValueError(f"--medium_seconds is {seconds}; {why}. Give that, or drop it.")
    if frames is not None and frames != (known := getattr(timed, "frames", None)):
        why = f"the model takes {known}" if known else f"these are {'images' if timed is None else 'sounds'}"
        raise ValueError(f"--clip_frames is {frames}; {why}. Drop it.")


def timed_of(processor: ProcessorMixin, min_crop_area: float, sound_jitter: float | None = None) -> Timed | None:
    """Return what reads a processor's media, with training's augmentation; None for images."""
    medium = medium_of(processor)
    if medium == "image":
        return None
    if medium == "sound":
        extractor: Any = processor.feature_extractor  # type: ignore[attr-defined]
        jitter = SOUND_JITTER if sound_jitter is None else sound_jitter
        side = math.sqrt(min_crop_area)  # of which the smallest square leaves the rest
        return Sounds(LogMel.of(extractor), extractor.window_seconds, side, jitter)
    images: Any = processor.image_processor  # type: ignore[attr-defined]
    return Clips(
        images.clip_frames, images.crop_size["height"], getattr(images, "window_seconds", None), min_crop_area
    )
