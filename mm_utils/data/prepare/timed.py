"""Store clips and sounds: the arguments, and the columns of a row."""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from PIL import Image

from mm_utils.arguments import arg
from mm_utils.data.media.clip_files import clip_of_frames, read_clip, strip
from mm_utils.data.media.containers import seconds_of
from mm_utils.data.media.riff import MOST_RATE, write_avi, write_wav
from mm_utils.data.media.sound_files import LEAST_RATE, loudness_picture, read_sound
from mm_utils.data.paths import MEDIA_LIMITS
from mm_utils.data.prepare.perceptual_hash import fingerprint
from mm_utils.model.reading import CLIP_FPS

MOST_BYTES = MEDIA_LIMITS.max_bytes  # --max_image_bytes raises it, too
_MOST_FPS, _MOST_SECONDS = 60, 3600


@dataclass
class TimedArguments:
    """How clips and sounds are kept: frames as JPEG at a constant rate, samples of 16 bits."""

    clip_fps: float = arg(CLIP_FPS, "Frames a second that are kept of clips.")
    sound_rate: int = arg(16_000, "Samples a second that are kept of sounds: what the sound tower takes.")
    max_seconds: float = arg(60.0, "Set longer clips and sounds aside, or longer parts of them by start and end.")

    def __post_init__(self) -> None:
        if not 0 < self.clip_fps <= _MOST_FPS:
            raise ValueError(f"--clip_fps is {self.clip_fps}; give frames a second, above 0 and at most {_MOST_FPS}.")
        if not LEAST_RATE <= self.sound_rate <= MOST_RATE:
            raise ValueError(
                f"--sound_rate is {self.sound_rate}; give samples a second, {LEAST_RATE:,} to {MOST_RATE:,}, usually 16,000."
            )
        if not 0 < self.max_seconds <= _MOST_SECONDS:
            raise ValueError(
                f"--max_seconds is {self.max_seconds}; give seconds, above 0 and at most {_MOST_SECONDS}."
            )


@dataclass(frozen=True)
class Medium:
    """A clip or sound as a row describes it.

    Attributes:
        kind: clip or sound.
        contents: its file, or the picture files of its frames.
        cut: unchecked start and end, in seconds.
        pictures: what checks and decodes the frames, if it is a list of them; returns something with an `image`.
        times: unchecked seconds at which the frames are shown.
    """

    kind: str
    contents: list[bytes]
    cut: tuple[Any, Any] = (None, None)
    pictures: Sequence[Callable[[], Any]] | None = None
    times: tuple[Any, ...] | None = None


def store_medium(
    medium: Medium, args: TimedArguments, short_side: int | None, max_pixels: int, notes: list[str]
) -> dict[str, Any]:
    """Decode and store a clip or sound; return its columns of a part.

    Args:
        short_side: larger frames are shrunk to it, in pixels; None keeps their size.
        max_pixels: of a frame.
        notes: keys of `NOTES` are added.

    Raises:
        Fault: if it cannot be used.
    """
    start, end = (None if time is None else seconds_of(time) for time in medium.cut)
    options: dict[str, Any] = {"start": start, "end": end, "max_seconds": args.max_seconds, "notes": notes}
    if medium.kind == "sound":
        samples, rate = read_sound(medium.contents[0], args.sound_rate, **options)
        stored, picture = write_wav(samples, args.sound_rate), loudness_picture(samples, args.sound_rate)
        row: dict[str, Any] = {"seconds": len(samples) / args.sound_rate, "rate": float(rate)}
    else:
        if medium.pictures is not None:
            pictures = [partial(_image_of, picture) for picture in medium.pictures]
            clip = clip_of_frames(pictures, medium.times, args.clip_fps, short_side, **options)
        else:
            clip = read_clip(medium.contents[0], args.clip_fps, short_side, max_pixels=max_pixels, **options)
        stored, picture = write_avi(clip.jpegs, args.clip_fps, clip.size), strip(clip.jpegs)
        row = {"seconds": clip.seconds, "rate": clip.original_fps}
        row |= dict(zip(("width", "height"), clip.size, strict=True))
        row |= dict(zip(("original_width", "original_height"), clip.original_size, strict=True))
    file_hash = _hash_of(medium.contents, medium.times)
    is_whole = not start and end is None
    return row | {
        "image": {"bytes": stored, "path": None},
        "image_hash": file_hash if is_whole else _hash_of([file_hash.encode()], (start, end)),
        "file_hash": file_hash,
        "stored_hash": hashlib.blake2b(stored, digest_size=16).hexdigest(),
        "stored_bytes": len(stored),
        "original_bytes": sum(map(len, medium.contents)),
        "fingerprint": fingerprint(picture),
        "psnr": None,
    }


def _image_of(picture: Callable[[], Any]) -> Image.Image:
    image: Image.Image = picture().image
    return image


def _hash_of(contents: list[bytes], times: Any) -> str:
    """Return the SHA-256 of files, and of times, if there are any."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    if times is not None:
        digest.update(repr(times).encode())
    return digest.hexdigest()
