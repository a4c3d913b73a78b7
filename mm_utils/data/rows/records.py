"""Records: one row of a source with its place, or the reason why the row cannot be used; nothing is decoded here."""

import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from datasets.table import MemoryMappedTable

from mm_utils.data.arguments import SPLIT_NAMES
from mm_utils.data.faults import Fault, excerpt, storable
from mm_utils.data.images import encode, open_image, raw_size
from mm_utils.data.parquet import ParquetRows
from mm_utils.data.paths import Jail, is_url, read_file
from mm_utils.data.rows.columns import (
    BESIDE,
    JOIN_FRAMES,
    Columns,
    answers_of,
    captions_of,
    id_of,
    is_null,
    split_cell,
    split_of,
    split_of_path,
    texts_of,
)
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.text_files import Rows, Values
from mm_utils.text import one_line

_PARQUET_BATCH = 32  # rows of images that a process holds at a time


@dataclass(frozen=True, slots=True)
class ImageRef:
    """A place where the bytes of an image are; `name` is for people."""

    name: str

    def read(self, most: int) -> bytes:
        """Return the bytes, at least one and at most `most`; raises a `Fault`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FileImage(ImageRef):
    """A regular file; its name is the absolute path, as a `Jail` resolved it."""

    def read(self, most: int) -> bytes:
        """Read the whole file."""
        return read_file(self.name, most)


@dataclass(frozen=True, slots=True)
class BytesImage(ImageRef):
    """Bytes in memory."""

    data: bytes | None

    def read(self, most: int) -> bytes:
        """Return the bytes."""
        return checked_bytes(self.data, self.name, most)


@dataclass(frozen=True, slots=True)
class StoredImage(BytesImage):
    """Bytes that were read from the file `path`, by whose size and date the cache knows them."""

    data: bytes | None = field(repr=False)
    path: str


@dataclass(frozen=True, slots=True)
class CellImage(ImageRef):
    """A cell of a Parquet file, or of an Arrow file of `datasets`; each process keeps its place in two columns of Parquet."""

    path: str
    row: int
    column: str

    def read(self, most: int) -> bytes:
        """Read the cell; raises read_error if the file is damaged there."""
        try:
            if self.path.lower().endswith(".arrow"):
                cell = _mapped(self.path).fast_slice(self.row, 1).column(self.column)[0].as_py()
            else:
                cell = _cursor(self.path, self.column).cell(self.row)
        except (pa.ArrowException, OSError, StopIteration, ValueError) as error:
            _cursor.cache_clear()
            raise Fault("read_error", f"{self.name}: {one_line(error)}") from error
        # Raw pixels that were saved anew are no image file, see `mm_utils.data.images.pixels`
        if isinstance(cell, dict):
            cell = encode(open_image(cell), "png") if raw_size(cell) else cell["bytes"]
        return checked_bytes(cell, self.name, most)


@dataclass(slots=True)
class Record:
    """One row of a source.

    Attributes:
        where: the place in the source, such as "line 12" or "member 000123".
        id: the source's own id, or the image's path relative to its folder, or None for embedded bytes without an id
            column. Rows of equal ids name the same image; readers do not merge them.
        captions, regions, negatives, moments: unchecked values.
        cut: unchecked start and end, in seconds, of the part of a clip or sound that the captions are about.
        split: train, validation or test; None where the source does not say.
        group: rows of one group come into one split.
        answers: of a labelled row, the names of its label, several where several people answered. It has at most one caption.
        classes: names of all classes in order, where the source has them.
    """

    source: str
    where: str
    id: str | None
    image: ImageRef
    captions: list[Any]
    regions: Any = None
    split: str | None = None
    negatives: Any = None
    medium: str = "image"
    cut: tuple[Any, Any] = (None, None)
    moments: Any = None
    group: str | None = None
    answers: list[str] | None = None
    classes: tuple[str, ...] = field(default=(), repr=False)


@dataclass(slots=True)
class BadRow:
    """A row without a record: the reason, the beginning of the row, escaped, and its split, where that is known."""

    source: str
    where: str
    fault: Fault
    raw: str = ""
    split: str | None = None


Records = Iterator[Record | BadRow]
"""What a reader yields, row after row."""


class RecordBuilder:
    """Makes the records of a source: resolves images, fills in values that hold for all rows.

    Args:
        default_root: the folder of images if neither the source nor the flags give one, by default the source's.
        id_root: the folder that ids made of paths are relative to; by default that of the images.
        also: further folders where images may lie.
    """

    def __init__(
        self,
        source: Source,
        default_root: str | os.PathLike[str] = "",
        id_root: str = "",
        also: Iterable[str] = (),
    ) -> None:
        self.source = source
        given = source.image_root or source.paths.image_root
        own = source.path if os.path.isdir(source.path) else os.path.dirname(source.path) or "."
        root = given or os.fspath(default_root) or own
        if not os.path.isdir(root):
            raise ValueError(f"{source.title}; its image_root {root} is not a folder. Give the folder of the images.")
        self.jail = Jail(root, source.paths.allow_outside_root, also)
        self._id_root = os.path.abspath(given or id_root or root)
        self.medium = "image" if source.medium == "auto" else source.medium

    def _image(self, value: Any) -> tuple[ImageRef, str | None]:
        """Return the medium that a cell names, and the id that follows from its path."""
        if isinstance(value, ImageRef):
            return value, None
        if self.medium != "image" and (is_null(value) or value == []):
            raise Fault("medium_empty", f"the cell of the {self.medium} is empty")
        written = value
        if isinstance(value, dict) and {"bytes", "path"} & set(value):
            written = value.get("path") or value.get("bytes")
        if isinstance(written, str) and written.startswith("data:"):
            raise Fault("bad_path", f"{written[:40]}... is a file written as text, not a path")
        if isinstance(written, str) and written.startswith("file:///"):
            # 'file:///data/a%20b.jpg' -> '/data/a b.jpg'
            written = unquote(written.removeprefix("file://"))
        path = image_path(written, self.jail)
        inside = path.startswith(self._id_root + os.sep)
        key = path[len(self._id_root) + 1 :].replace(os.sep, "/") if inside else str(written)
        return FileImage(path), storable(key)

    def bad(self, where: str, fault: Fault, raw: str = "", split: Any = None) -> BadRow:
        """Return the bad row of a fault."""
        split = self.source.split or SPLIT_NAMES.get(str(split).lower())
        return BadRow(self.source.name, storable(where), fault, excerpt(raw), split)

    def records(
        self, columns: Columns, rows: Rows, file: str = "", split: str | None = None, by_folder: bool = False
    ) -> Records:
        """Return the records of the rows of a file.

        `split` is that of rows that name none; with `by_folder`, a folder in the path of their image may name it.
        """
        self.medium = columns.medium
        for place, values in rows:
            where = ", ".join(filter(None, (file, place)))
            if isinstance(values, Fault):
                yield self.bad(where, values, values.raw, split)
                continue
            try:
                yield self._record(columns, where, values, split, by_folder)
            except Fault as fault:
                shown = {key: value for key, value in values.items() if not isinstance(value, ImageRef)}
                yield self.bad(where, fault, str(shown), split_cell(values) or split)

    def _record(self, columns: Columns, where: str, values: Values, split: str | None, by_folder: bool) -> Record:
        if None in values:
            raise Fault("malformed_row", "more cells than columns; a separator without quotes?")
        for column in filter(None, (columns.image, columns.caption, columns.label)):
            if column not in values and column not in columns.parts:  # of a template, any may be missing
                raise Fault("missing_column", f"there is no {column}")
        captions = captions_of(values, columns)
        image, key = self._image(values[str(columns.image)])
        key = id_of(values, columns) or key
        stated = split_cell(values)
        if stated is not None and self.source.split is None:
            split = split_of(stated)
        elif by_folder and not os.path.isabs(written := str(values[str(columns.image)])):
            split = split_of_path(written)
        known = {name: value for name, value in values.items() if not is_null(value)}
        beside: Values = {name: known.get(name) for name in BESIDE}
        if self.medium != "image":
            cut = tuple(_time_of(values.get(name)) for name in ("start", "end"))
            beside |= {"cut": cut, "moments": known.get("moments")}
            if key is not None and cut != (None, None):
                # 'a.mp4#2.5-7.0', or 'a.mp4#2.5-' up to the end
                key = storable(f"{key}#{'-'.join('' if time is None else str(time) for time in cut)}")
        if columns.group and not is_null(group := values.get(columns.group)):
            beside["group"] = storable(str(group).strip())
        if columns.label is not None:
            beside["answers"] = answers_of(values[columns.label], columns.classes)
        beside |= {"split": self.source.split or split, "medium": self.medium, "classes": columns.classes}
        return Record(self.source.name, storable(where), key, image, texts_of(captions), **beside)


def _time_of(value: Any) -> Any:
    """Return a number that a CSV file has as text; anything else as it is, null as None."""
    with suppress(ValueError):
        return None if is_null(value) else float(value) if isinstance(value, str) else value
    return value


def image_path(value: Any, jail: Jail) -> str:
    """Return the absolute path of an image from its cell; raise a `Fault` of a cell that holds no path, or as `Jail` does."""
    if is_null(value):
        raise Fault("image_empty", "the cell of the image is empty")
    if not isinstance(value, str):
        if isinstance(value, (list, tuple)):
            raise Fault("list_of_frames", f"a list of {len(value)}")
        raise Fault("bad_path", f"image is a {type(value).__name__}, not a path")
    if is_url(value):
        raise Fault("url_not_allowed", f"{value[:200]} is an address, not a path")
    return jail.resolve(value)


class _Cursor:
    """A place in the image column of a Parquet file, which moves forward, and goes back to the begin of a row group."""

    def __init__(self, path: str, column: str) -> None:
        self._file = ParquetRows(path, path)
        self._column = column
        self._next = 0
        self._cells = self._file.cells([column], _PARQUET_BATCH)
        self._held: Values | Fault = {}

    def cell(self, row: int) -> Any:
        # the row that is held and the next 32 are reached by reading on
        if not self._next - 1 <= row <= self._next + _PARQUET_BATCH:
            self._next = row
            self._cells = self._file.cells([self._column], _PARQUET_BATCH, row)
        while self._next <= row:
            self._held = next(self._cells)
            self._next = self._next + 1
        if isinstance(self._held, Fault):
            raise self._held
        return self._held[self._column]


_cursor = lru_cache(maxsize=2)(_Cursor)
_mapped = lru_cache(maxsize=8)(MemoryMappedTable.from_file)


def checked_bytes(data: bytes | None, name: str, most: int) -> bytes:
    """Return the bytes of an image; raise image_empty or too_many_bytes."""
    if not data:
        raise Fault("image_empty", f"{name} has {'no' if data is None else '0'} bytes")
    if len(data) > most:
        raise Fault("too_many_bytes", f"{name} has {len(data):,} bytes; {most:,} is the most")
    return data
