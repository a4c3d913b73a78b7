"""Store clips and sounds: the arguments, and the columns of a row."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from mm_utils.arguments import arg
from mm_utils.data.faults import Fault
from mm_utils.data.paths import Limits
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.decoding.clips import clip_fingerprint, clip_of_frames, clips_alike, read_clip
from mm_utils.data.prepare.decoding.containers import seconds_of
from mm_utils.data.prepare.decoding.sounds import (
    LEAST_RATE,
    MOST_RATE,
    read_sound,
    sound_fingerprint,
    sounds_alike,
)
from mm_utils.data.riff import write_avi, write_wav
from mm_utils.data.sources.records import FramesImage, Record

ALIKE: Mapping[str, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {"clip": clips_alike, "sound": sounds_alike}
"""What confirms pairs of fingerprints, by the medium; images have their own."""
_MOST_BYTES = 512 << 20  # of a file of sound or video; --max_image_bytes raises it, too
_MOST_FPS, _MOST_SECONDS = 60, 3600


@dataclass
class TimedArguments:
    """The form in which clips and sounds are kept: frames as JPEG at a constant rate, and samples of 16 bits."""

    clip_fps: float = arg(4.0, "Frames a second that are kept of clips.")
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


def store_medium(
    record: Record, checks: CheckArguments, args: TimedArguments, short_side: int | None, notes: list[str]
) -> dict[str, Any]:
    """Decode and store the clip or sound of a record; return its columns of a part.

    Args:
        short_side: larger frames are shrunk to it, in pixels; None keeps their size.
        notes: keys of `NOTES` are added.

    Raises:
        Fault: if it cannot be used.
    """
    start, end = (None if time is None else seconds_of(time) for time in record.cut)
    limits = Limits(max_bytes=max(_MOST_BYTES, checks.max_image_bytes))
    most = args.max_seconds
    try:
        contents = (
            record.image.contents(limits) if isinstance(record.image, FramesImage) else [record.image.read(limits)]
        )
    except Fault as fault:
        raise Fault("medium_empty", fault.detail) if fault.reason == "image_empty" else fault from fault
    if record.medium == "sound":
        samples, rate = read_sound(contents[0], args.sound_rate, start, end, max_seconds=most, notes=notes)
        stored, print_ = write_wav(samples, args.sound_rate), sound_fingerprint(samples, args.sound_rate)
        row: dict[str, Any] = {"seconds": len(samples) / args.sound_rate, "rate": float(rate)}
    else:
        options: dict[str, Any] = {"max_seconds": most, "checks": checks, "notes": notes}
        if isinstance(record.image, FramesImage):
            clip = clip_of_frames(contents, record.image.times, args.clip_fps, short_side, start, end, **options)
        else:
            clip = read_clip(contents[0], args.clip_fps, short_side, start, end, **options)
        stored, print_ = write_avi(clip.jpegs, args.clip_fps, clip.size), clip_fingerprint(clip.jpegs)
        row = {"seconds": clip.seconds, "rate": clip.original_fps}
        row |= dict(zip(("width", "height"), clip.size, strict=True))
        row |= dict(zip(("original_width", "original_height"), clip.original_size, strict=True))
    file_hash = _hash_of(contents, getattr(record.image, "times", None))
    is_whole = not start and end is None
    return row | {
        "image": {"bytes": stored, "path": None},
        "image_hash": file_hash if is_whole else _hash_of([file_hash.encode()], (start, end)),
        "file_hash": file_hash,
        "stored_hash": hashlib.blake2b(stored, digest_size=16).hexdigest(),
        "stored_bytes": len(stored),
        "original_bytes": sum(map(len, contents)),
        "fingerprint": print_,
        "psnr": None,
    }


def _hash_of(contents: list[bytes], times: Any) -> str:
    """Return the SHA-256 of files, and of times, if there are any."""
    digest = hashlib.sha256()
    for content in contents:
        digest.update(content)
    if times is not None:
        digest.update(repr(times).encode())
    return digest.hexdigest()
