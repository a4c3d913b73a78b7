"""Features of a frozen tower beside the rows of a data set: their columns, tensors in and out of Arrow, what they follow.

A row is an image. What `mm_utils.feature_cache` lays beside it (C channels, N tokens of an image, L of a caption):

==================  =============================  =====================================================
column              a row's value                  meaning
==================  =============================  =====================================================
``vision_pooled``   `[C]`                          the image as one vector
``vision_taps_k``   `[C, h, w]` or `[N, C]`        what the fusion head reads of the k-th tapped layer
``vision_skipped``  string, mostly null            why there is no image
``text_pooled``     one `[C]` per caption          a caption as one vector
``text_states``     one `[L, C]` per caption       its last hidden states
==================  =============================  =====================================================

Whoever reads a row reads its few kilobytes of a memory-mapped file; no number becomes a Python object.
"""

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

SKIPPED = "vision_skipped"


def to_arrow(values: Tensor, *counts: Sequence[int]) -> pa.Array:
    """Rows `[n, ...]`, on any device, as lists of fixed length.

    Each of `counts` gathers what there is so far into lists of so many, the innermost first.
    """
    array = pa.array(values.reshape(-1).cpu().numpy())
    for size in reversed(values.shape[1:]):
        array = pa.FixedSizeListArray.from_arrays(array, size)
    for lengths in counts:
        array = pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), array)
    return array


def to_tensor(row: pa.Scalar) -> Tensor:
    """A row of `to_arrow`, or a caption of one: a list, whose items are of fixed length."""
    values = row.values
    shape = [len(values)]
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    return torch.tensor(values.to_numpy().reshape(shape))


class CachedFeatures:
    """The columns above that `rows` has; there may be none."""

    def __init__(self, rows: datasets.Dataset):
        self.names = [name for name in rows.column_names if name.startswith(("vision_", "text_"))]
        self.rows = rows.select_columns(self.names).with_format("arrow") if self.names else None
        self.has_vision = SKIPPED in self.names

    def __getitem__(self, rows: list[int]) -> dict[str, list[Any]]:
        """Columns of these rows, for `example`; and, where they stand for an image, why there is none as `image`."""
        if self.rows is None:
            return {}
        table = self.rows[rows]
        columns = {name: list(table[name]) for name in self.names}
        return {**columns, "image": [reason.as_py() for reason in columns[SKIPPED]]} if self.has_vision else columns

    def example(self, row: dict[str, Any], caption: int) -> dict[str, Tensor]:
        """The tensors of one row, with one of its captions."""
        return {
            name: to_tensor(row[name].values[caption] if name.startswith("text_") else row[name])
            for name in self.names
            if name != SKIPPED
        }

    def blank(self) -> dict[str, Tensor]:
        """What `example` gives, stacked, of no rows: `[0, ...]`; captions are one token long."""
        if self.rows is None:
            return {}
        types = {field.name: field.type for field in self.rows.features.arrow_schema}
        return {
            name: _no_rows(types[name].value_type if name.startswith("text_") else types[name])
            for name in self.names
            if name != SKIPPED
        }


def _no_rows(kind: pa.DataType) -> Tensor:
    shape = [0]
    while pa.types.is_nested(kind):
        shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else 1)
        kind = kind.value_type
    return torch.from_numpy(np.empty(shape, kind.to_pandas_dtype()))


def image_digest(rows: datasets.Dataset) -> str:
    """Of the images' contents as far as they show without being read: lengths of embedded bytes, sizes and times of files."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.select_columns(["image"]).with_format("arrow").iter(1000):
        sizes = pc.binary_length(pc.struct_field(batch["image"], "bytes")).to_pylist()
        paths = pc.struct_field(batch["image"], "path").to_pylist()
        for size, path in zip(sizes, paths, strict=True):
            digest.update(f"{size or _stamp(path)} ".encode())
    return digest.hexdigest()


def _stamp(path: str | None) -> str:
    try:
        found = Path(path or "").stat()
    except OSError as error:
        return type(error).__name__
    return f"{found.st_size}:{found.st_mtime_ns}"


def token_digest(rows: datasets.Dataset) -> str:
    """Of all captions' token ids."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in rows.select_columns(["input_ids"]).with_format("arrow").iter(10_000):
        captions = pc.list_flatten(batch["input_ids"])
        lengths = (pc.list_value_length(column) for column in (batch["input_ids"], captions))
        for column in (*lengths, pc.list_flatten(captions)):
            digest.update(column.to_numpy().tobytes())
    return digest.hexdigest()
