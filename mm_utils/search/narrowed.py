"""Search a part of an index, by folder and date; find the images that occur more than once; and print what was found."""

import datetime
import io
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
from PIL import Image
from tqdm.auto import tqdm

from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, fingerprint, groups, near_pairs
from mm_utils.distributed import available_cores
from mm_utils.text import printable, shortened

_DAY = re.compile(r"(\d{4})(?:-(\d\d))?(?:-(\d\d))?")
_ROWS = 1000  # whose thumbnails are in memory at a time


@dataclass(frozen=True)
class Filter:
    """Which rows of an index are searched.

    Attributes:
        folder: those whose id lies below it, such as `2024/italy`; an id is the path in the folder that was embedded.
        since, until: those whose file was last changed from then to then, both included, in local time: a day
            (2024-05-31), a month (2024-05) or a year. A row without a file has no date.

    Raises:
        ValueError: for a date of another form.
    """

    folder: str = ""
    since: str = ""
    until: str = ""

    def __post_init__(self) -> None:
        for name in ("since", "until"):
            if getattr(self, name):
                _span(name, getattr(self, name))

    def __bool__(self) -> bool:
        return any((self.folder.strip("/"), self.since, self.until))

    def __str__(self) -> str:
        return " ".join(f"--{name} {value}" for name, value in vars(self).items() if value)

    def mask(self, rows: datasets.Dataset) -> np.ndarray:
        """Return which rows fit, bool `[N]`."""
        fits = np.ones(len(rows), dtype=bool)
        if folder := self.folder.strip("/"):
            fits &= pc.starts_with(rows.data.column("id"), f"{folder}/").to_numpy()
        changed = rows.data.column("mtime_ns").to_numpy() if self.since or self.until else None
        if changed is not None:
            begin = _span("since", self.since)[0] if self.since else 1
            end = _span("until", self.until)[1] if self.until else np.iinfo(np.int64).max
            fits &= (changed >= max(1, begin)) & (changed < end)
        return fits


def _span(name: str, text: str) -> tuple[int, int]:
    """Return when a day, month or year begins and ends, in nanoseconds."""
    try:
        found = _DAY.fullmatch(text)
        if found is None:
            raise ValueError("it has another form")
        year, month, day = (int(part) if part else 0 for part in found.groups())
        begin = datetime.datetime(year, month or 1, day or 1)
        end = begin + datetime.timedelta(days=1 if day else 31 if month else 366)
        end = end if day else end.replace(day=1, month=end.month if month else 1)
        first, last = (int(each.timestamp()) * 10**9 for each in (begin, end))
    except (ValueError, OverflowError, OSError) as error:
        raise ValueError(f"--{name} is {text}; {error}. Give a day such as 2024-05-31, a month or a year.") from error
    return first, last


def copies(rows: datasets.Dataset) -> list[list[int]]:
    """Return groups of rows that show the same picture, by their thumbnails; rows and groups by the first row.

    Found are the same file, and one compressed, scaled, brightened, turned grey or cut by a few per cent, as by `prepare_data`.
    """

    def printed(thumbnail: bytes) -> bytes:
        return fingerprint(Image.open(io.BytesIO(thumbnail)).convert("RGB"))

    shown = rows.select_columns(["thumbnail"])
    with ThreadPoolExecutor(available_cores()) as pool, tqdm(total=len(rows), desc="Comparing", delay=2) as bar:
        prints: list[bytes] = []
        for block in shown.iter(_ROWS):
            prints += pool.map(printed, block["thumbnail"])
            bar.update(len(block["thumbnail"]))
    pairs = near_pairs(np.frombuffer(b"".join(prints), FINGERPRINT))
    found: dict[int, list[int]] = {}
    for row, group in enumerate(groups(len(rows), pairs).tolist()):
        found.setdefault(group, []).append(row)
    return [each for each in found.values() if len(each) > 1]


def table_of_hits(hits: Sequence[Any], reranks: bool, medium: str) -> list[str]:
    """Return a head, and a line for each hit."""
    lines = [f"rank   score{'  re-ranked' if reranks else ''}  {medium}"]
    for hit in hits:
        again = "" if not reranks else f"{'' if hit.reranked is None else f'{hit.reranked:.3f}':>11}"
        caption = f"  ({shortened(hit.captions[0], 60)})" if hit.captions else ""
        lines.append(printable(f"{hit.rank:>4}{hit.score:>8.3f}{again}  {hit.path or hit.id}{caption}"))
    return lines


def table_of_copies(groups: list[list[dict[str, Any]]]) -> list[str]:
    """Return a line for each image, groups apart, and how many there are."""
    lines = [line for group in groups for line in (*(printable(each["path"] or each["id"]) for each in group), "")]
    if not groups:
        return ["No picture occurs twice"]
    return [*lines, f"{len(groups):,} pictures occur {sum(map(len, groups)):,} times"]
