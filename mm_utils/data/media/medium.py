"""A medium is an object: how an image, a clip or a sound is called, stored, and read as an example.

The classes hold what is true of all media of a kind (`MEDIA`), their objects how those of one model are read. The medium of a row is
in the column `image`, whose feature tells the kind: an image file, a WAV file, or an AVI file of JPEG frames.

An example of a sound is a window of it, in seconds: in training a random one, in evaluation the middle. After what is shorter, silence
follows, or the sound again (`mm_utils.model.reading.sound_input`). Clips are shown whole.

Three attributes of ours are saved among the stock ones of a processor: `window_seconds`, the length of what the model is shown of a
sound, and `clip_frames`, the frames of a clip. `pads_frames` says of an AST extractor that what follows a short sound are empty
frames, as its tower was trained; models that were saved without it were trained with frames of silence.
"""

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import datasets
import numpy as np
import torch
from datasets import Audio, Video
from PIL import Image as PictureFile
from torch import Tensor
from typing_extensions import override

from mm_utils.data.images import Stored, read_pixels
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.model.reading import MOST_SECONDS, UnreadableError, center_of, center_square, sound_input

if TYPE_CHECKING:
    from transformers import ProcessorMixin


_USUAL = 0.95  # quantile of the lengths of sounds
SOUND_JITTER = 6.0  # decibels, in training
_KNOTS = (3, 6)  # least and most points of a curve over the frequencies


class Window(NamedTuple):
    """The part of an image that a square shows, in shares of the image's width and height."""

    left: float
    top: float
    right: float
    bottom: float


class Shown(NamedTuple):
    """What an example shows of its medium."""

    # (width, height) in pixels or (seconds, 1) of the stored medium, that boxes and moments are stated in
    size: tuple[float, float]
    window: Window  # the part that is shown; its right end is beyond 1 where a sound is shorter than its window


class Medium(ABC):
    """How images, clips or sounds are called, stored and read.

    Attributes:
        column, feature: the column of stored data sets, the Hub's word, and its type.
        suffixes: how the names of its files end. A GIF counts as an image unless clips are asked for.
        holders: kinds of files that hold one, the best first.
        templates: captions of the name of a class, where a source has none.
        unused: flags of loading that mean nothing for it.
        lasts: whether it has a length in seconds.
        shape: of an example.
        key: all that an evaluated example depends on besides the medium, by the names in the identities of runs.
    """

    kind: ClassVar[str]
    column: ClassVar[str]
    feature: ClassVar[Any]
    suffixes: ClassVar[tuple[str, ...]]
    names: ClassVar[tuple[str, ...]]
    holders: ClassVar[tuple[str, ...]]
    templates: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    lasts: ClassVar[bool] = True
    shape: tuple[int, ...]
    key: dict[str, Any]

    @abstractmethod
    def read(self, value: Stored, rng: random.Random | None = None) -> tuple[Tensor, Shown]:
        """Return an example of a stored medium, `shape`, and what it shows; raise UnreadableError if it cannot be decoded.

        `rng` draws the window and the crop of training, which else are in the middle.
        """

    def features(self, shown: Tensor) -> Tensor:
        """Return the tower's input of examples `[B, ...]`, on their device."""
        return shown

    def blank(self, count: int) -> Tensor:
        """Return `count` examples of black squares or frames, or inputs of a sound tower that are 0, as they leave the workers."""
        return torch.zeros(count, *self.shape, dtype=torch.float32 if self.kind == "sound" else torch.uint8)


@lru_cache(16)
def _on_bytes(values: tuple[float, ...], device: torch.device) -> Tensor:
    return torch.tensor(values, device=device).view(-1, 1, 1) * 255


@dataclass
class Image(Medium):
    """Squares of images: uint8 `[3, S, S]`.

    The smallest area of a training crop is `min_crop_area`, a share of the largest square; 1 is the central square.
    """

    image_size: int
    mean: Sequence[float] = (0.5,) * 3
    std: Sequence[float] = (0.5,) * 3
    min_crop_area: float = 1.0
    kind = "image"
    column = "image"
    feature = datasets.Image(decode=False)
    lasts = False
    suffixes: ClassVar[tuple[str, ...]] = (
        *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
        *(".ppm", ".pgm", ".avif", ".heic", ".heif", ".jp2"),
    )
    names: ClassVar[tuple[str, ...]] = (
        *("image", "image_path", "image_file", "filepath", "file_path", "file_name", "filename", "path", "file"),
        *("img", "img_path", "picture", "photo", "jpg", "jpeg", "png", "webp"),
    )
    holders = ("image",)
    templates = ("a photo of a {}.", "a picture of a {}.", "an image of a {}.")
    unused: ClassVar[tuple[str, ...]] = ("clip_frames",)

    def __post_init__(self) -> None:
        self.shape = (3, self.image_size, self.image_size)
        self.key = {"image_size": self.image_size, "image mean and std": [list(self.mean), list(self.std)]}

    @override
    def features(self, shown: Tensor) -> Tensor:
        """Return normalised colours; converted first, as subtracting mixed types takes 3 times as long."""
        from torchvision.transforms.v2 import functional  # in here, as it takes 2.5 s, and preparing needs none

        # Of bytes: colours scaled to 0..1 first would take another pass, and differ by up to 5e-7.
        mean = _on_bytes(tuple(self.mean), shown.device)
        std = _on_bytes(tuple(self.std), shown.device)
        return functional.normalize(shown.float(), mean, std, inplace=True)

    @property
    def _largest_read(self) -> int:
        """Shorter side at which images are decoded for training: even the smallest crop is not enlarged."""
        # 224 pixels and 0.8: 251
        return int(self.image_size * self.min_crop_area**-0.5) + 1

    @override
    def read(self, value: Stored, rng: random.Random | None = None) -> tuple[Tensor, Shown]:
        side = self.image_size if rng is None or self.min_crop_area == 1 else self._largest_read
        pixels, size = read_pixels(value, side)
        shown, window = squares([pixels], self.image_size, self.min_crop_area, rng)
        return shown[0], Shown(size, window)


@dataclass
class Clip(Image):
    """Frames spread evenly over a clip: uint8 `[T, 3, S, S]`, one crop for all.

    Frames are never reversed and their pace never changes in training: captions say what comes first, and what is fast.
    """

    frames: int = 16
    kind = "clip"
    column = "video"
    feature = Video(decode=False)
    lasts = True
    suffixes = (
        *(".mp4", ".mkv", ".webm", ".mov", ".avi", ".m4v", ".mpg", ".mpeg", ".wmv", ".flv", ".ts", ".3gp", ".ogv"),
        ".gif",
    )
    names = ("video", "video_path", "video_file", "clip", "gif")
    holders = ("clip",)
    templates = ("a video of a {}.", "a clip of a {}.", "a recording of a {}.")
    unused = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.shape = (self.frames, *self.shape)
        self.key["medium"] = ["clip", self.frames, self.image_size]

    @override
    def read(self, value: Stored, rng: random.Random | None = None) -> tuple[Tensor, Shown]:
        stored, fps = read_avi(value["bytes"] or b"")
        within = 0.5 if rng is None else rng.random()  # of the time that each frame stands for
        # 16 of 40 in evaluation: 1, 3, 6, 8, ...
        places = [int((at + within) * len(stored) / self.frames) for at in range(self.frames)]
        side = self.image_size if rng is None else self._largest_read
        decoded = {at: read_pixels({"bytes": bytes(stored[at]), "path": None}, side)[0] for at in set(places)}
        if len({pixels.shape for pixels in decoded.values()}) > 1:
            raise UnreadableError("its frames differ in size")
        shown, _ = squares([decoded[at] for at in places], self.image_size, self.min_crop_area, rng)
        return shown, Shown((len(stored) / fps, 1.0), Window(0.0, 0.0, 1.0, 1.0))


@dataclass
class Sound(Medium):
    """The tower's input of a window of a sound, float32, as its feature extractor makes it.

    In training, a window may begin before the sound or end behind it, in silence, and its loudness varies. What is shorter than
    the window by as much is never cut.

    Attributes:
        seconds: length of the window.
        min_share: a training window leaves a sound by at most the rest of this share of its own length.
        jitter: most decibels of `vary_loudness` in training.
    """

    extractor: Any
    seconds: float
    min_share: float = 1.0
    jitter: float = 0.0
    kind = "sound"
    column = "audio"
    feature = Audio(decode=False)
    suffixes = (
        *(".wav", ".flac", ".mp3", ".ogg", ".oga", ".opus", ".m4a", ".aac", ".aif", ".aiff", ".au", ".wma", ".amr"),
    )
    names = ("audio", "audio_path", "audio_file", "sound", "wav", "speech")
    holders = ("sound", "clip")
    templates = ("the sound of a {}.", "a recording of a {}.", "this is the sound of a {}.")
    unused = ("clip_frames", "horizontal_flip")

    def __post_init__(self) -> None:
        self.rate: int = self.extractor.sampling_rate
        # measured on one sample of silence
        self.shape = sound_input(self.extractor, np.zeros(1, np.int16), round(self.seconds * self.rate)).shape
        own = ["sound", self.seconds, self.extractor.to_dict()]
        self.key = {"image_size": 0, "image mean and std": [[], []], "medium": own}  # the first two as in earlier runs

    @override
    def read(self, value: Stored, rng: random.Random | None = None) -> tuple[Tensor, Shown]:
        from scipy.signal import resample_poly

        samples, rate = read_wav(value["bytes"] or b"")
        length = len(samples) / rate
        room = length - self.seconds
        beyond = (1 - self.min_share) * self.seconds
        if rng is None:
            begin = max(0.0, room) / 2
        else:  # what is shorter lies anywhere in a window that may leave it
            # a sound of 4 s in a window of 10 s that may leave it: from -6 to 0 s
            low, high = (min(-beyond, room), room + beyond) if beyond else (0.0, room)
            begin = rng.uniform(low, max(0.0, high))
        first = int(begin * rate)
        count = round(self.seconds * rate)
        part = samples[max(0, first) : first + count]
        if rate != self.rate:
            part = resample_poly(part.astype(np.float32), self.rate, rate).round().clip(-32768, 32767).astype(np.int16)
        if rng is not None and self.jitter:
            part = vary_loudness(part, self.rate, self.jitter, rng)
        size = round(self.seconds * self.rate)
        # silence before the sound, in samples of the tower's rate
        part = np.pad(part, (max(0, -first) * self.rate // rate, 0))[:size]
        shown = sound_input(self.extractor, part, size)
        window = Window(first / len(samples), 0.0, (first + count) / len(samples), 1.0)
        return torch.from_numpy(shown), Shown((length, 1.0), window)


MEDIA: dict[str, type[Medium]] = {each.kind: each for each in (Image, Clip, Sound)}


def medium_of(features: Mapping[str, Any]) -> type[Medium]:
    """Return the medium in the column `image`; unknown features count as images."""
    found = type(features.get("image"))
    return next((each for each in MEDIA.values() if type(each.feature) is found), Image)


def kind_of(features: Mapping[str, Any]) -> str:
    """Return the kind of the medium in the column `image`."""
    return medium_of(features).kind


# -- the medium of a processor ------------------------------------------------------------------------------------------


def image_geometry(processor: "ProcessorMixin") -> tuple[int, list[float], list[float]]:
    """Return the side of the processor's squares, and mean and std of its normalisation."""
    images = processor.image_processor
    return images.crop_size["height"], list(images.image_mean), list(images.image_std)


def kind_of_processor(processor: "ProcessorMixin") -> str:
    """Return the kind of media that a processor is for."""
    if getattr(processor, "feature_extractor", None) is not None:
        return "sound"
    return "clip" if getattr(processor.image_processor, "clip_frames", None) else "image"


def read_by(processor: "ProcessorMixin", min_crop_area: float = 1.0) -> Any:
    """Return the `Medium` that reads as a processor says, with training's augmentation."""
    if kind_of_processor(processor) == "sound":
        extractor: Any = processor.feature_extractor  # type: ignore[attr-defined]
        side = math.sqrt(min_crop_area)  # of which the smallest square leaves the rest
        return Sound(extractor, extractor.window_seconds, side, SOUND_JITTER)
    images: Any = processor.image_processor  # type: ignore[attr-defined]
    squares = *image_geometry(processor), min_crop_area
    if kind_of_processor(processor) == "image":
        return Image(*squares)
    return Clip(*squares, images.clip_frames)


def default_seconds(rows: datasets.Dataset) -> float:
    """Return the window of sounds: what 95 % of them do not exceed.

    One long sound would leave silence in the windows of all others. Tenths of a second; the rest of one is not waited for.
    """
    usual = np.quantile(rows["seconds"], _USUAL) if len(rows) else MOST_SECONDS
    return min(MOST_SECONDS, max(0.1, math.floor(10 * usual) / 10))


# -- squares of images, loudness of sounds ------------------------------------------------------------------------------


def squares(
    frames: Sequence[np.ndarray], size: int, min_area: float, rng: random.Random | None
) -> tuple[Tensor, Window]:
    """Cut the same square of all frames `[H, W, 3]`, and resize it to uint8 `[T, 3, size, size]`; return the part shown, too.

    In evaluation, and with a `min_area` of 1, this is the `center_square` of the saved processor, bit for bit. In training, up to
    rounding to whole pixels, the area of a random crop is uniform in [`min_area`, 1] of the largest square's, and its aspect ratio is between
    3:4 and 4:3 where the image allows it.
    """
    from torchvision.transforms.v2 import InterpolationMode, functional  # in here, as in `Image.features`

    height, width = frames[0].shape[:2]
    if rng is None or min_area >= 1:
        across, down, left, top = center_of(width, height, size)
        window = Window(left / across, top / down, (left + size) / across, (top + size) / down)
        return torch.stack([center_square(PictureFile.fromarray(frame), size) for frame in frames]), window
    left, top, right, bottom = _random_box(width, height, min_area, rng)
    # The part is cut before it is resized: torchvision's `resized_crop` takes a quarter longer, because it copies the part once more.
    cut = np.stack([frame[top:bottom, left:right] for frame in frames])
    frames_first = torch.from_numpy(cut).permute(0, 3, 1, 2)
    shown = functional.resize(frames_first, [size, size], InterpolationMode.BICUBIC)
    return shown, Window(left / width, top / height, right / width, bottom / height)


def _random_box(width: int, height: int, min_area: float, rng: random.Random) -> tuple[int, int, int, int]:
    side = min(width, height) * rng.uniform(min_area, 1) ** 0.5
    # no side may be longer than that of the image
    stretch = min(max(rng.uniform(3 / 4, 4 / 3) ** 0.5, side / height), width / side)
    across = max(1, round(side * stretch))
    down = max(1, round(side / stretch))
    left = round(rng.uniform(0, width - across))
    top = round(rng.uniform(0, height - down))
    return left, top, left + across, top + down


def vary_loudness(samples: np.ndarray, rate: int, decibels: float, rng: random.Random) -> np.ndarray:
    """Make a sound, int16 `[n]`, louder or softer, whole and in bands, by up to `decibels`.

    So do other distances, rooms and microphones; no pitch and no time changes. The bands are a line through 3 to 6 random
    points, evenly spaced in mel (FilterAugment, arXiv 2110.03282). What would be too loud for int16 is softer as a whole.
    """
    from scipy.fft import irfft, next_fast_len, rfft

    whole, *points = [rng.uniform(-decibels, decibels) for _ in range(1 + rng.randint(*_KNOTS))]
    size = next_fast_len(len(samples), real=True)
    mel = np.log1p(np.linspace(0, rate / 2, size // 2 + 1) / 700)  # up to a factor
    curve = np.interp(mel, np.linspace(0, mel[-1], len(points)), points) + whole
    gains = np.power(np.float32(10), curve.astype(np.float32) / 20)  # 20 decibels are a factor of 10
    changed = irfft(rfft(samples.astype(np.float32), size) * gains, size)[: len(samples)]
    loudest = max(1.0, float(abs(changed).max()) / 32767)
    return (changed / np.float32(loudest)).round().astype(np.int16)
