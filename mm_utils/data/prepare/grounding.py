"""What a row says about places and times in its medium, moved onto what is stored of it."""

from collections.abc import Mapping
from typing import Any

from mm_utils.data.faults import Fault, unreadable_as_fault
from mm_utils.data.prepare.checks import CheckArguments, check_caption
from mm_utils.data.rows.records import Record
from mm_utils.model.reading import TOLERANCE, check_cut

Parts = tuple[list[dict[str, Any]] | None, list[Fault], list[str]]
"""What is stored, the faults of the others, and notes."""
_FOREVER = 1e9  # seconds


def stored_regions(record: Record, image: Mapping[str, Any], checks: CheckArguments) -> Parts:
    """Return a record's boxes as x, y, width, height in pixels of the stored image, each with its phrase.

    Args:
        image: the sizes of the stored image and of the original; without them, nothing is stored.

    Raises:
        Fault: bad_regions.
    """
    if image.get("width") is None:
        return None, [], []
    across = image["width"] / image["original_width"]
    down = image["height"] / image["original_height"]
    boxes = []
    try:
        for region in record.regions:
            x, y, w, h = map(float, region["box"])
            # In its image, up to a pixel of rounding.
            inside = min(x, y) >= -1 and x + w <= image["original_width"] + 1 and y + h <= image["original_height"] + 1
            if not (w > 0 and h > 0 and inside):
                size = f"{image['original_width']} x {image['original_height']} pixels"
                raise ValueError(f"box {[x, y, w, h]} of an image of {size}")
            phrase = check_caption(region["phrase"], checks)[0]
            boxes.append({"box": [x * across, y * down, w * across, h * down], "phrase": phrase})
    except (TypeError, ValueError, KeyError) as error:
        if isinstance(error, Fault):
            raise
        raise Fault("bad_regions", f"not a list of box (x, y, width, height) and phrase: {error!r}") from error
    return boxes, [], []


def stored_moments(record: Record, medium: Mapping[str, Any], checks: CheckArguments) -> Parts:
    """Return a record's moments, on the clock of its file, as spans of the part that is stored.

    Args:
        medium: the `seconds` that are stored.

    Raises:
        Fault: bad_moments if they are not a list.
    """
    moments, cut, seconds = record.moments, record.cut, medium.get("seconds", 0.0)
    if not isinstance(moments, list):
        raise Fault("bad_moments", f"moments are a {type(moments).__name__}, not a list")
    begin, is_cut = seconds_of(cut[0] or 0), cut != (None, None)
    good, faults, notes = [], list[Fault](), list[str]()
    for moment in moments:
        try:
            span = moment.get("span") if isinstance(moment, Mapping) else None
            if not isinstance(span, (list, tuple)) or len(span) != 2 or "phrase" not in moment:
                raise Fault("bad_moments", f"{str(moment)[:200]} has no span of two times, or no phrase")
            start, end = map(seconds_of, span)
            with unreadable_as_fault():
                check_cut(start, end, None if is_cut else max(seconds, TOLERANCE))
            low, high = max(0.0, start - begin), min(seconds, end - begin)
            if is_cut and (low, high) != (start - begin, end - begin):
                notes.append("moment_cut")
            if low < high:
                text, found = check_caption(moment["phrase"], checks)
                good.append({"span": [low, high], "phrase": text})
                notes += found
        except Fault as fault:
            faults.append(fault)
    return good, faults, notes


def seconds_of(value: Any) -> float:
    """Return a time that a row states, in seconds; raises bad_times."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not abs(value) < _FOREVER:
        raise Fault("bad_times", f"{value!r:.80} is not a time in seconds")
    return float(value)


STORED = {"regions": stored_regions, "moments": stored_moments}
"""By the field of a record, what moves it onto what is stored of the medium."""
