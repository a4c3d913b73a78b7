"""Read Parquet files in batches of bounded size, so that large cells do not fill the memory."""

from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

import pyarrow as pa
import pyarrow.parquet as pq

from mm_utils.data.faults import Fault

_BATCH_BYTES = 256 << 20
_LEAST_ROWS = 8


class ParquetRows:
    """An open Parquet file, whose rows are read in batches."""

    def __init__(self, source: str | BinaryIO, name: str, buffer_size: int = 1 << 20):
        self.name = name
        # Without pre_buffer, Parquet is read page by page; with it, the whole row group comes into memory.
        self.file = pq.ParquetFile(source, pre_buffer=False, buffer_size=buffer_size)
        self.schema = self.file.schema_arrow

    def batches(self, group: int, columns: Sequence[str], rows: int) -> Iterator[Any]:
        """Read columns of a row group, at most `rows` rows at a time, fewer where cells are large."""
        about = self.file.metadata.row_group(group)
        begins = tuple(f"{name}." for name in columns)
        chunks = map(about.column, range(about.num_columns))
        # with the dot, column `image` has 'image.bytes' and not 'image_id'
        sizes = [each.total_uncompressed_size for each in chunks if f"{each.path_in_schema}.".startswith(begins)]
        largest = max(sizes, default=0)  # of a cell, too
        rows = max(min(rows, _LEAST_ROWS), min(rows, _BATCH_BYTES // max(1, largest)))
        yield from self.file.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)

    def cells(self, columns: Sequence[str], batch_rows: int, first: int = 0) -> Iterator[dict[str, Any] | Fault]:
        """Read some columns from row `first` on; yield the cells of each row, or why it has none.

        One row group is read after the other, so that batches are the same wherever the reading began.
        """
        for group in range(self.file.num_row_groups):
            size = self.file.metadata.row_group(group).num_rows
            if first >= size:
                first -= size
                continue
            for batch in self.batches(group, columns, batch_rows):
                yield from cells_of(batch.slice(min(first, len(batch))))
                first = max(0, first - len(batch))


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
