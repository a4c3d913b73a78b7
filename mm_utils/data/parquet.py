"""Read Parquet files of strangers in batches of bounded size.

A dictionary and a compressor make gigabytes of a file of kilobytes: 300,000 rows that repeat one caption of 3,000 letters
are 98 kB, and 900 MB when they are decoded.
"""

import os
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mm_utils.data.faults import Fault

_GROWTH, _ALLOWED = 100, 64 << 20  # the most decoded bytes per byte of the file, besides those that any file may have
_ROWS_ALLOWED = 20_000  # besides one row per byte of the file
_BATCH_BYTES = 256 << 20
_LEAST_ROWS = 8


class ParquetRows:
    """An open Parquet file, whose rows are read in batches; ValueError if it counts more rows than a file of its size holds."""

    def __init__(self, source: str | BinaryIO, name: str, buffer_size: int = 1 << 20):
        self.name = name
        # Without pre_buffer, Parquet is read page by page; with it, the whole row group comes into memory.
        self.file = pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer_size)
        self.schema = self.file.schema_arrow
        if isinstance(source, str):
            size = os.path.getsize(source)
        else:
            size = source.seek(0, os.SEEK_END)
            source.seek(0)
        self._most = _ALLOWED + _GROWTH * size
        rows = self.file.metadata.num_rows
        if rows > _ROWS_ALLOWED + size:
            raise ValueError(f"{name} has {rows:,} rows in {size:,} bytes; these cannot all be in it. Write it anew.")

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Read columns of a row group, at most `rows` rows at a time, fewer where cells are large; ValueError as of `cells`."""
        about = self.file.metadata.row_group(group)
        chunks = [about.column(at) for at in range(about.num_columns)]
        chunks = [
            each for each in chunks if f"{each.path_in_schema}.".startswith(tuple(f"{name}." for name in columns))
        ]
        largest = max((each.total_uncompressed_size for each in chunks), default=0)  # of a cell, too
        values = max((each.num_values for each in chunks), default=0)  # a value may take no byte of the file
        self._check_decoded(max(largest, values))
        rows = max(min(rows, _LEAST_ROWS), min(rows, _BATCH_BYTES // max(1, largest)))
        yield from self.file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)

    def cells(self, columns: Sequence[str], batch_rows: int, first: int = 0) -> Iterator[dict[str, Any] | Fault]:
        """Read some columns from row `first` on; yield the cells of each row, or why it has none.

        One row group is read after the other, so that batches are the same wherever the reading began. Raises ValueError if they
        are more bytes than a file of this size decodes to.
        """
        decoded = 0
        for group in range(self.file.num_row_groups):
            size = self.file.metadata.row_group(group).num_rows
            row, skipped = 0, min(first, size)
            first -= skipped
            if skipped == size:
                continue
            for batch in self.batches(group, columns, batch_rows):
                decoded += batch.nbytes
                self._check_decoded(decoded)
                yield from cells_of(batch.slice(min(max(0, skipped - row), len(batch))))
                row += len(batch)

    def _check_decoded(self, size: int) -> None:
        if size > self._most:
            raise ValueError(
                f"{self.name} decodes to more than {self._most:,} bytes, {_GROWTH} times its size and more. Write it anew."
            )


def cells_of(batch: pa.RecordBatch) -> list[dict[str, Any] | Fault]:
    """Return the rows of a batch; bad_encoding in place of one with a text that is not UTF-8."""
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        return [_cells_of_row(batch, row) for row in range(len(batch))]


def _cells_of_row(batch: pa.RecordBatch, row: int) -> dict[str, Any] | Fault:
    values: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            values[name] = column[row].as_py()
        except UnicodeDecodeError as error:
            return Fault("bad_encoding", f"column {name} is not UTF-8 text: byte {error.start + 1}")
    return values
