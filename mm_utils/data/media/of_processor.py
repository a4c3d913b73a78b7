"""What the processor of a model says of its medium; three attributes of ours are saved among the stock ones.

`preprocessor_config.json` keeps `window_seconds`, the length of what the model is shown of a clip or a sound (None: whole clips),
and of clips `clip_frames`. `settle_window` alone writes them, once, for a new model; a pretrained tower may fix them
(`mm_utils.model.processor`). `pads_frames` says of an AST extractor that what follows a short sound are empty frames, as its tower was
trained; models that were saved without it were trained with frames of silence.
"""

import math
from typing import Any

import datasets
import numpy as np
from transformers import ProcessorMixin

from mm_utils.data.media.log_mel import LogMel
from mm_utils.data.media.medium import Clip, Image, Medium, Sound

MOST_SECONDS = 10.0  # of a sound's window, where nothing else is asked for
CLIP_FRAMES = 16
_USUAL = 0.95  # quantile of the lengths of sounds
SOUND_JITTER = 6.0  # decibels, in training


def image_geometry(processor: ProcessorMixin) -> tuple[int, list[float], list[float]]:
    """Return the side of the processor's squares, and mean and std of its normalisation."""
    images = processor.image_processor
    return images.crop_size["height"], list(images.image_mean), list(images.image_std)


def kind_of_processor(processor: ProcessorMixin) -> str:
    """Return the kind of media that a processor is for."""
    if getattr(processor, "feature_extractor", None) is not None:
        return "sound"
    return "clip" if getattr(processor.image_processor, "clip_frames", None) else "image"


def read_by(
    processor: ProcessorMixin,
    min_crop_area: float = 1.0,
    fixed_crop: bool = False,
    sound_jitter: float | None = None,
) -> Any:
    """Return the `Medium` that reads as a processor says, with training's augmentation."""
    if kind_of_processor(processor) == "sound":
        extractor: Any = processor.feature_extractor  # type: ignore[attr-defined]
        jitter = SOUND_JITTER if sound_jitter is None else sound_jitter
        side = math.sqrt(min_crop_area)  # of which the smallest square leaves the rest
        return Sound(LogMel.of(extractor), extractor.window_seconds, side, jitter)
    images: Any = processor.image_processor  # type: ignore[attr-defined]
    squares = *image_geometry(processor), min_crop_area
    if kind_of_processor(processor) == "image":
        return Image(*squares, fixed_crop)
    return Clip(*squares, images.clip_frames, getattr(images, "window_seconds", None))


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
    """Write a new model's window into its processor; a present one stays.

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


def check_window(medium: Medium, seconds: float | None, frames: int | None) -> None:
    """Raise ValueError if flags ask for another window than the model's."""
    known: Any = getattr(medium, "seconds", None)
    if seconds is not None and seconds != known:
        why = f"the model takes {f'{known:g} s' if known else 'whole clips'}" if medium.lasts else "images do not last"
        raise ValueError(f"--medium_seconds is {seconds}; {why}. Give that, or drop it.")
    known = getattr(medium, "frames", None)
    if frames is not None and frames != known:
        why = f"the model takes {known}" if known else f"these are {medium.kind}s"
        raise ValueError(f"--clip_frames is {frames}; {why}. Drop it.")
