"""Store clips and sounds, and move what a row says about places and times onto what is stored of its medium."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from mm_utils.data.faults import Fault, unreadable_as_fault
from mm_utils.data.media.riff import store_clip, write_wav
from mm_utils.data.prepare.arguments import CheckArguments, TimedArguments
from mm_utils.data.prepare.checks import check_caption
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT
from mm_utils.data.rows.records import Record
from mm_utils.model.reading import (
    MOST_MEDIUM_BYTES,
    TOLERANCE,
    check_cut,
    read_frames,
    read_sound,
)

_FOREVER = 1e9  # seconds
Moved = tuple[list[dict[str, Any]] | None, list[Fault], list[str]]
"""What is stored, the faults of the others, and notes."""


def store_medium(
    record: Record, checks: CheckArguments, args: TimedArguments, short_side: int | None, notes: list[str]
) -> dict[str, Any]:
    """Decode and store the clip or sound of a record; return its columns of a part, or raise a `Fault`.

    Frames are shrunk to `short_side` pixels, if it is given; keys of `NOTES` are added to `notes`.
    """
    try:
        content = record.image.read(max(MOST_MEDIUM_BYTES, checks.max_image_bytes))
    except Fault as fault:
        raise Fault("medium_empty", fault.detail) if fault.reason == "image_empty" else fault from fault
    start, end = [None if time is None else seconds_of(time) for time in record.cut]
    options: dict[str, Any] = {"start": start, "end": end, "max_seconds": args.max_seconds}
    row: dict[str, Any]
    with unreadable_as_fault():
        if record.medium == "sound":
            samples = read_sound(content, args.sound_rate, **options, notes=notes)
            stored = write_wav(samples, args.sound_rate)
            row = {"seconds": len(samples) / args.sound_rate}
        else:
            most = checks.max_image_pixels
            frames = read_frames(content, args.clip_fps, **options, max_pixels=most, notes=notes)
            stored, row = store_clip(frames, args.clip_fps, short_side, notes)
    file_hash = hashlib.sha256(content).hexdigest()
    is_whole = not start and end is None
    of_part = file_hash if is_whole else hashlib.sha256(f"{file_hash}{(start, end)!r}".encode()).hexdigest()
    return row | {
        "image": {"bytes": stored, "path": None},
        "image_hash": of_part,
        "file_hash": file_hash,
        "stored_hash": hashlib.blake2b(stored, digest_size=16).hexdigest(),
        "fingerprint": bytes(FINGERPRINT.itemsize),  # as of a flat image, which resembles none
    }


def stored_regions(record: Record, image: Mapping[str, Any], checks: CheckArguments) -> Moved:
    """Return a record's boxes as x, y, width, height in pixels of the stored `image`, each with its phrase; raises bad_regions."""
    if image.get("width") is None:
        return None, [], []
    width = image["original_width"]
    height = image["original_height"]
    across = image["width"] / width
    down = image["height"] / height
    boxes = []
    faults = list[Fault]()
    for region in _listed(record.regions, "bad_regions"):
        try:
            try:
                x, y, w, h = map(float, region["box"])
                text = region["phrase"]
            except (TypeError, ValueError, KeyError):
                raise Fault("bad_regions", f"{str(region)[:200]} has no box of four numbers, or no phrase") from None
            # In its image, up to a pixel of rounding.
            inside = min(x, y) >= -1 and x + w <= width + 1 and y + h <= height + 1
            if not (w > 0 and h > 0 and inside):
                raise Fault("bad_regions", f"box {[x, y, w, h]} of an image of {width} x {height} pixels")
            if max(x + w, y + h) <= 1:
                raise Fault("bad_regions", f"box {[x, y, w, h]} is a share of 0 to 1: multiply it by width and height")
            phrase, _ = _phrase(text, "bad_regions", checks)
            boxes.append({"box": [x * across, y * down, w * across, h * down], "phrase": phrase})
        except Fault as fault:
            faults.append(fault)
    return boxes, faults, []


def stored_moments(record: Record, medium: Mapping[str, Any], checks: CheckArguments) -> Moved:
    """Return a record's moments, on the clock of its file, as spans of the part that is stored; raises bad_moments."""
    moments = _listed(record.moments, "bad_moments")
    cut = record.cut
    seconds = medium.get("seconds", 0.0)
    begin = seconds_of(cut[0] or 0)
    is_cut = cut != (None, None)
    good = []
    faults = list[Fault]()
    notes = list[str]()
    for moment in moments:
        try:
            span = moment.get("span") if isinstance(moment, Mapping) else None
            if not isinstance(span, (list, tuple)) or len(span) != 2 or "phrase" not in moment:
                raise Fault("bad_moments", f"{str(moment)[:200]} has no span of two times, or no phrase")
            start, end = map(seconds_of, span)
            with unreadable_as_fault():
                check_cut(start, end, None if is_cut else max(seconds, TOLERANCE))
            low = max(0.0, start - begin)
            high = min(seconds, end - begin)
            if is_cut and (low, high) != (start - begin, end - begin):
                notes.append("moment_cut")
            if low < high:
                text, found = _phrase(moment["phrase"], "bad_moments", checks)
                good.append({"span": [low, high], "phrase": text})
                notes += found
        except Fault as fault:
            faults.append(fault)
    return good, faults, notes


def _listed(value: Any, reason: str) -> list[Any]:
    """Return a list, or one that a CSV file has as JSON; raises `reason` of anything else."""
    if isinstance(value, str):
        with suppress(ValueError, RecursionError):
            value = json.loads(value)
    if not isinstance(value, list):
        raise Fault(reason, f"{str(value)[:80]!r} is a {type(value).__name__}, not a list")
    return value


def _phrase(text: Any, reason: str, checks: CheckArguments) -> tuple[str, tuple[str, ...]]:
    """Return what `check_caption` does of a phrase; raises `reason` of one that says nothing."""
    try:
        return check_caption(text, checks)
    except Fault as fault:
        raise Fault(reason, f"the phrase {text!r:.80} says nothing") from fault


def seconds_of(value: Any) -> float:
    """Return a time that a row states, in seconds; raises bad_times."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < _FOREVER:
        raise Fault("bad_times", f"{value!r:.80} is not a time in seconds")
    return float(value)
