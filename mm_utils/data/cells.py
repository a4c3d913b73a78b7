"""Cells of a data set straight from its Arrow table, where `datasets` makes Python objects of whole rows.

A row of `rows[places]` is copied twice and costs 60 us; a cell here costs 1 and an image 6, and is not copied at all: what
its decoder reads is the memory-mapped file. Nothing is held but where the chunks of the table begin.
"""

from typing import Any

import datasets
import numpy as np
import pyarrow as pa


class Cells:
    """Reads any `datasets.Dataset`: loaded, selected, shuffled, concatenated, in memory or memory-mapped."""

    def __init__(self, rows: datasets.Dataset):
        self.dataset = rows
        self.column_names = rows.column_names
        self._open()

    def __len__(self) -> int:
        return len(self.dataset)

    def cell(self, name: str, row: int) -> pa.Scalar:
        """What column `name` holds in a row; lists in it share the table's memory."""
        return self._columns[name][self._place(row)]

    def value(self, name: str, row: int) -> Any:
        """The same as Python objects; None where there is no such column."""
        return self.cell(name, row).as_py() if name in self._columns else None

    def image(self, row: int) -> dict[str, Any]:
        """`{"bytes": ..., "path": ...}` of an image that is stored undecoded; the bytes are a view of the table."""
        place = self._place(row)
        chunk = int(self._starts.searchsorted(place, "right")) - 1
        image = self._columns["image"].chunk(chunk).slice(place - int(self._starts[chunk]), 1)
        if image.null_count:
            return {"bytes": None, "path": None}
        return {"bytes": _view(image.field("bytes")), "path": image.field("path")[0].as_py()}

    def _place(self, row: int) -> int:
        return row if self._order is None else self._order[row].as_py()

    def _open(self) -> None:
        table, order = self.dataset.data.table, self.dataset._indices
        self._columns: dict[str, pa.ChunkedArray] = {name: table.column(name) for name in self.column_names}
        self._order = None if order is None else order.table.column(0)
        if "image" in self._columns:
            lengths = [len(chunk) for chunk in self._columns["image"].chunks]
            self._starts = np.cumsum([0, *lengths[:-1]])

    def __getstate__(self) -> datasets.Dataset:
        return self.dataset  # which sends the name of a memory-mapped file and not what is in it

    def __setstate__(self, dataset: datasets.Dataset) -> None:
        self.__init__(dataset)  # type: ignore[misc]


def _view(one: pa.Array) -> pa.Buffer | None:
    """The bytes of an array of one binary value."""
    if one.null_count:
        return None
    if not (pa.types.is_binary(one.type) or pa.types.is_large_binary(one.type)):
        return one[0].as_buffer()  # e.g. binary_view, which has no offsets
    width = np.dtype(np.int32 if pa.types.is_binary(one.type) else np.int64)
    _, offsets, data = one.buffers()
    start, stop = np.frombuffer(offsets, width, 2, one.offset * width.itemsize).tolist()
    return data.slice(start, stop - start) if stop > start else pa.py_buffer(b"")
