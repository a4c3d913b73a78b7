"""Read a table for training: one `Row` per usable row, and a warning that counts the others.

A bad row never stops the reading and is never lost in silence: it is counted by reason, and one warning per reason
names the first three. A line that cannot be read at all is an error.
"""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from mm_utils.data.raw.columns import SPLIT_NAMES, captions_of, is_null, split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.tables import Embedded, Table, image_path, path_id
from mm_utils.data.raw.text_files import BadLine

logger = logging.getLogger(__name__)

# A reason is counted over all rows, so its words must not differ from row to row.
_WORDS = {
    "image_missing": "image file not found",
    "image_empty": "image is empty",
    "bad_path": "image is not a path",
    "url_not_allowed": "image is a URL; download it first",
    "outside_root": "image lies outside --image_root; --allow_outside_root accepts it",
    "not_a_file": "image is not a file",
    "path_too_long": "image path is too long",
    "permission_denied": "image may not be read",
    "read_error": "image cannot be found out about",
    "languages_mismatch": "captions and languages differ in number",
    "unknown_split": "split is not train, validation or test",
}


@dataclass(slots=True)
class Row:
    """One image with its captions; later rows of the same image are merged into the first.

    `at` counts rows from 0; `line` is the number people see. `id_from_path` says that the source has no id, so that
    equal ids below different folders are different images. `path` is absolute, or None where the bytes are embedded;
    `size` is the length of those bytes. `captions` maps each caption to its language ("" where unknown).
    """

    at: int
    line: int
    id: str
    id_from_path: bool
    path: str | None
    size: int
    captions: dict[str, str]
    regions: Any
    split: str

    def merge(self, other: "Row") -> None:
        """Take over the captions and regions of another row of the same image; repeats are kept once."""
        for caption, language in other.captions.items():
            self.captions.setdefault(caption, language)
        if not self.regions:
            self.regions = other.regions
        elif isinstance(self.regions, list) and isinstance(other.regions, list):
            self.regions = self.regions + [region for region in other.regions if region not in self.regions]


@dataclass
class _Tally:
    count: int = 0
    rows: int = 0
    lines: list[int] = field(default_factory=list)

    def add(self, line: int, count: int = 1) -> None:
        self.count += count
        self.rows += 1
        if len(self.lines) < 3:
            self.lines.append(line)


class _BadRow(Exception):
    """The reason why a row cannot be used."""


def read_table(table: Table, split: str, divide: bool, by_folder: bool = False) -> Iterator[Row]:
    """Give the usable rows of `table`, and log the others when the last row is read.

    With `divide` the split of a row is the value of its `split` column; otherwise, with `by_folder`, the first folder
    of its path if that is named like a split; otherwise `split`. Raises a ValueError at a line that cannot be read, if
    no row is usable, or if more than half are not: then a column or the image folder is wrong, not the data.
    """
    skipped: dict[str, _Tally] = {}
    dropped = _Tally()
    total, first_missing = 0, None
    for at, (line, values) in enumerate(table.records):
        if isinstance(values, BadLine):
            raise ValueError(values.message) from values.fault
        total += 1
        try:
            row = _parse(table, at, line, values, dropped)
            row.split = _split(row, values, table, split, divide, by_folder)
        except UnicodeEncodeError:
            skipped.setdefault("text is not valid Unicode", _Tally()).add(line)
        except _BadRow as reason:
            skipped.setdefault(str(reason), _Tally()).add(line)
        except Fault as fault:
            skipped.setdefault(_WORDS[fault.reason], _Tally()).add(line)
            if fault.reason == "image_missing":
                first_missing = first_missing or fault.detail
        else:
            yield row
    _report(table, total, skipped, dropped, first_missing)


def _report(table: Table, total: int, skipped: dict[str, _Tally], dropped: _Tally, first_missing: str | None) -> None:
    for reason, tally in skipped.items():
        where = _where(table.unit, tally)
        logger.warning(
            "%s: %s of %s rows skipped: %s (%s)", table.name, f"{tally.count:,}", f"{total:,}", reason, where
        )
    if dropped.count:
        where = _where(table.unit, dropped)
        logger.warning("%s: %s empty captions dropped (%s)", table.name, f"{dropped.count:,}", where)
    bad = sum(tally.count for tally in skipped.values())
    if 2 * bad <= total:
        return
    left = "zero pairs are" if bad == total else f"only {total - bad:,} pairs are"
    reasons = ", ".join(f"{reason}: {tally.count:,}" for reason, tally in skipped.items())
    most = max(skipped, key=lambda reason: skipped[reason].count)
    if most == _WORDS["image_missing"]:
        advice = f"The first image was looked for at {first_missing}. Set --image_root to the folder of the images."
    elif most == _WORDS["outside_root"]:
        advice = f"Set --image_root, now {table.jail.root}, to a folder above the images, or --allow_outside_root."
    else:
        advice = "Check --image_column and --caption_column, or repair the rows."
    raise ValueError(f"{table.title}; {left} left of {total:,} rows ({reasons}). {advice}")


def _where(unit: str, tally: _Tally) -> str:
    plural = "s" if tally.rows > 1 else ""
    return f"{unit}{plural} {', '.join(map(str, tally.lines))}{' ...' if tally.rows > len(tally.lines) else ''}"


def _parse(table: Table, at: int, line: int, values: dict[str, Any], dropped: _Tally) -> Row:
    if None in values:
        raise _BadRow("more cells than columns; a separator without quotes?")
    path, size, key = _image(values.get(str(table.columns.image)), table)
    captions, empty = _captions(values, table)
    if table.columns.id is not None:
        given = values.get(table.columns.id)
        if is_null(given):
            raise _BadRow("id is empty")
        key = str(given)
    # A lone surrogate, as a broken "\ud83d" in JSON gives, is a string in Python but cannot be stored as UTF-8.
    "\n".join((key, path or "", *captions)).encode()
    if empty:
        dropped.add(line, empty)
    from_path = table.columns.id is None and path is not None
    return Row(at, line, key, from_path, path, size, captions, values.get("regions"), "")


def _image(value: Any, table: Table) -> tuple[str | None, int, str]:
    """Give the absolute path, the number of embedded bytes, and the id that follows from the image itself."""
    if isinstance(value, Embedded):
        if value.size == 0:
            raise _BadRow("image bytes are empty")
        return None, value.size, value.digest or ""
    path = image_path(value, table.jail)
    return path, 0, path_id(path, table.id_root, value["path"] if isinstance(value, dict) else value)


def _captions(values: dict[str, Any], table: Table) -> tuple[dict[str, str], int]:
    """Give the usable captions with their languages, and how many of a list were not usable."""
    texts, languages = captions_of(values, table.columns)
    good: dict[str, str] = {}
    empty = 0
    for text, language in zip(texts, languages or [""] * len(texts), strict=True):
        if is_null(text):
            empty += 1
        elif isinstance(text, str):
            good.setdefault(text, language)
        else:
            raise _BadRow("caption is not a string")
    if not good:
        raise _BadRow("caption is empty")
    return good, empty


def _split(row: Row, values: dict[str, Any], table: Table, split: str, divide: bool, by_folder: bool) -> str:
    if divide and "split" in table.names:
        return split_of(values.get("split"))
    if by_folder and row.path is not None:
        folder = os.path.relpath(row.path, table.jail.root).split(os.sep)[0]
        return SPLIT_NAMES.get(folder.lower(), split)
    return split
