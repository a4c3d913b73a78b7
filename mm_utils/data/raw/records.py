"""What every raw source gives, whatever its format: a `Record` for each row that can be read, a `BadRow` for the rest.

Nothing is decoded and nothing is dropped here. A record does not hold its image but an `ImageRef`: small, picklable,
and turned into bytes by the process that decodes them.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets.table import MemoryMappedTable

from mm_utils.data.raw.downloads import download
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Limits, read_file

_PARQUET_BATCH = 32  # rows of images that a process holds at a time


class ImageRef:
    """Where the bytes of an image lie."""

    __slots__ = ()

    @property
    def name(self) -> str:
        """What people read: a path, a member of an archive, an address."""
        raise NotImplementedError

    def read(self, limits: Limits) -> bytes:
        """Give the bytes, at most `limits.max_bytes` of them and at least one; raises a `Fault`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class FileImage(ImageRef):
    """A regular file by its absolute path, as a `Jail` resolved it."""

    path: str

    @property
    def name(self) -> str:
        """The path."""
        return self.path

    def read(self, limits: Limits) -> bytes:
        """Give the whole file."""
        return read_file(self.path, limits)


@dataclass(frozen=True, slots=True)
class MemberImage(ImageRef):
    """A member of an uncompressed tar archive: where its bytes begin, and how many there are."""

    path: str
    member: str
    offset: int
    size: int

    @property
    def name(self) -> str:
        """The archive and the member."""
        return f"{self.path}, member {self.member}"

    def read(self, limits: Limits) -> bytes:
        """Give the member's bytes, without looking at the rest of the archive."""
        return read_file(self.path, limits, self.offset, self.size)


@dataclass(frozen=True, slots=True)
class UrlImage(ImageRef):
    """An image at an http(s) address."""

    url: str

    @property
    def name(self) -> str:
        """The address."""
        return self.url

    def read(self, limits: Limits) -> bytes:
        """Fetch the image, from a public address only."""
        return _checked(download(self.url, limits), self.name, limits)


@dataclass(frozen=True, slots=True)
class BytesImage(ImageRef):
    """Bytes at hand, for the few sources that lie in memory as a whole."""

    data: bytes | None
    label: str

    @property
    def name(self) -> str:
        """The row that held them."""
        return self.label

    def read(self, limits: Limits) -> bytes:
        """Give the bytes."""
        return _checked(self.data, self.name, limits)


@dataclass(frozen=True, slots=True)
class ArrowImage(ImageRef):
    """A cell of an Arrow file as `datasets` writes it: memory-mapped, found in constant time, in any order."""

    path: str
    row: int
    column: str

    @property
    def name(self) -> str:
        """The file and the row."""
        return f"{self.path}, row {self.row}"

    def read(self, limits: Limits) -> bytes:
        """Give the bytes of the cell."""
        cell = _mapped(self.path).fast_slice(self.row, 1).column(self.column)[0]
        return _checked(_bytes_of(cell), self.name, limits)


@dataclass(frozen=True, slots=True)
class ParquetImage(ImageRef):
    """A cell of a Parquet file: row `row` of row group `group`.

    Each process holds its place in the last two row groups it read and the few rows around it. Rows that are asked for
    in their order are decompressed once, and memory does not grow with the size of a row group.
    """

    path: str
    group: int
    row: int
    column: str

    @property
    def name(self) -> str:
        """The file and the row."""
        return f"{self.path}, row group {self.group}, row {self.row}"

    def read(self, limits: Limits) -> bytes:
        """Give the bytes of the cell; raises read_error if the file is damaged there."""
        try:
            cell = _cursor(self.path, self.group, self.column).cell(self.row)
        except (pa.ArrowException, OSError, StopIteration) as error:
            _cursor.cache_clear()
            raise Fault("read_error", f"{self.name}: {str(error).split(chr(10))[0]}") from error
        return _checked(_bytes_of(cell), self.name, limits)


@dataclass(slots=True)
class Record:
    """One row as the source has it.

    `where` places it in the source ("line 12", "member 000123"). `id` is the source's own, or the image's path
    relative to its folder, or None: embedded bytes without an id column have none. Rows with equal ids name the same
    image, and it is for the reader to merge them. `captions` are unchecked values. `languages` has one code per
    caption, "" where unknown, or is None where the source says nothing. `split` is ``train``, ``validation`` or
    ``test``, or None where the source does not say.
    """

    source: str
    where: str
    id: str | None
    image: ImageRef
    captions: list[Any]
    languages: list[str] | None = None
    regions: Any = None
    split: str | None = None


@dataclass(slots=True)
class BadRow:
    """A row that gives no record: why, and the begin of it, escaped, in at most 200 characters."""

    source: str
    where: str
    fault: Fault
    raw: str = ""


class _Cursor:
    """A place in the image column of one row group, which moves forward."""

    def __init__(self, path: str, group: int, column: str) -> None:
        # Without pre_buffer, Parquet is read page by page; with it, the whole row group comes into memory.
        self._file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
        self._group, self._column = group, column
        self._rewind()

    def _rewind(self) -> None:
        self._batches: Iterator[pa.RecordBatch] = self._file.iter_batches(
            _PARQUET_BATCH, row_groups=[self._group], columns=[self._column]
        )
        self._begin, self._held = 0, next(self._batches)

    def cell(self, row: int) -> pa.Scalar:
        if row < self._begin:
            self._rewind()
        while row >= self._begin + len(self._held):
            self._begin += len(self._held)
            self._held = next(self._batches)
        return self._held.column(0)[row - self._begin]


@lru_cache(maxsize=2)
def _cursor(path: str, group: int, column: str) -> _Cursor:
    return _Cursor(path, group, column)


@lru_cache(maxsize=8)
def _mapped(path: str) -> MemoryMappedTable:
    return MemoryMappedTable.from_file(path)


def _bytes_of(cell: pa.Scalar) -> bytes | None:
    """The bytes of a binary cell, or of the field `bytes` of a struct."""
    value = cell["bytes"] if isinstance(cell, pa.StructScalar) and cell.is_valid else cell
    return value.as_py()


def _checked(data: bytes | None, name: str, limits: Limits) -> bytes:
    if not data:
        raise Fault("image_empty", f"{name} has {'no' if data is None else '0'} bytes")
    if len(data) > limits.max_bytes:
        raise Fault("too_many_bytes", f"{name} has {len(data):,} bytes; {limits.max_bytes:,} is the most")
    return data
