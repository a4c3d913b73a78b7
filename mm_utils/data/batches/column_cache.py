"""Columns beside the rows of a data set: computed once, cached on disk, read without copies.

Features are written by `mm_utils.training.feature_cache` and read in the tower's place (C channels, N tokens of an image, L of a
caption, E embedding width):

==================  =============================  =====================================================
column              a row's value                  meaning
==================  =============================  =====================================================
``vision_pooled``   `[C]`                          the image as one vector
``vision_taps_k``   `[C, h, w]` or `[N, C]`        the k-th tapped layer, input of the fusion head
``vision_skipped``  string, mostly null            reason for there being no image
``text_pooled``     one `[C]` per caption          a caption as one vector
``text_states``     one `[L, C]` per caption       its last hidden states
``teacher_image``   `[E]`                          the image as a teacher embeds it
``teacher_text``    one `[E]` per caption          a caption as a teacher embeds it
==================  =============================  =====================================================

Values become tensors straight from the memory-mapped file, without a Python object per number.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from torch import Tensor

Columns = dict[str, list]
FEATURES = ("vision_pooled", "vision_taps_", "text_pooled", "text_states", "teacher_")  # beginnings of columns
OF_TEACHER = "teacher_"
_PER_CAPTION = ("text_", "teacher_text")
SKIPPED = "vision_skipped"


# -- features of a frozen tower -----------------------------------------------------------------------------------------


def to_arrow(values: Tensor, *counts: Sequence[int]) -> pa.Array:
    """Convert rows `[n, ...]`, on any device, to Arrow lists of fixed length.

    Each of `counts` groups the items so far into lists of these lengths, the innermost first.
    """
    array = pa.array(values.reshape(-1).cpu().numpy())
    for size in reversed(values.shape[1:]):
        # of [n, 3, 4]: lists of 4, then lists of 3 of these
        array = pa.FixedSizeListArray.from_arrays(array, size)
    for lengths in counts:
        # lengths 2, 1, 3 are the offsets 0, 2, 3, 6
        array = pa.ListArray.from_arrays(np.cumsum([0, *lengths], dtype=np.int32), array)
    return array


def add_weights(digest: Any, weights: Mapping[str, Tensor]) -> None:
    """Add names, types, shapes and values of weights to a hash, sorted by name."""
    for name, value in sorted(weights.items()):
        digest.update(f"{name} {value.dtype} {tuple(value.shape)}".encode())
        # as bytes, since numpy has no bfloat16
        digest.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


def to_tensor(row: pa.Scalar) -> Tensor:
    """Convert a row of `to_arrow`, or a caption of one: a list, whose items have a fixed length."""
    values = row.values
    shape = [len(values)]
    while pa.types.is_fixed_size_list(values.type):
        shape.append(values.type.list_size)
        values = values.flatten()
    return torch.tensor(values.to_numpy().reshape(shape))


def feature_tensors(row: dict[str, Any], captions: Sequence[int]) -> dict[str, list[Tensor]]:
    """Return the features of a row, whose values are Arrow scalars: one value, or one for each of some captions."""
    found = {}
    for name in row:
        if name.startswith(_PER_CAPTION):
            found[name] = [to_tensor(row[name].values[caption]) for caption in captions]
        elif name.startswith(FEATURES):
            found[name] = [to_tensor(row[name])]
    return found


def empty_features(rows: datasets.Dataset) -> dict[str, Tensor]:
    """Return the features of no rows, `[0, ...]`, by column; captions are one token long."""
    found = {}
    for column in rows.features.arrow_schema:
        if column.name.startswith(FEATURES):
            kind = column.type.value_type if column.name.startswith(_PER_CAPTION) else column.type
            shape = [0]
            while pa.types.is_nested(kind):
                shape.append(kind.list_size if pa.types.is_fixed_size_list(kind) else 1)
                kind = kind.value_type
            found[column.name] = torch.from_numpy(np.empty(shape, kind.to_pandas_dtype()))
    return found


def image_digest(rows: datasets.Dataset) -> str:
    """Hash the images: content ids of checked rows; of the embedded scenes, which are small, the bytes."""
    if "content_id" in rows.column_names:
        return column_digest(rows, "content_id")
    digest = hashlib.blake2b(digest_size=16)
    # Not by `arrow_batches`, which would bring all images of picked rows into memory.
    for batch in rows.select_columns(["image"]).with_format("arrow").iter(100):
        for content in pc.struct_field(batch["image"], "bytes").to_pylist():
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()


def column_digest(rows: datasets.Dataset, column: str) -> str:
    """Hash the values of a column of small cells."""
    digest = hashlib.blake2b(digest_size=16)
    for batch in arrow_batches(rows, [column], 10_000):
        digest.update("".join(map(repr, batch[column].to_pylist())).encode())
    return digest.hexdigest()


# -- private attributes of `datasets` -----------------------------------------------------------------------------------
# There is no public name for the fingerprint of rows, nor for their places in the table they were picked from. Computing a
# column once needs the first; without the second, picked rows would have to be copied, images and all.


def fingerprint_of(rows: datasets.Dataset) -> str:
    """Return the name under which `datasets` caches results that depend on these rows."""
    return rows._fingerprint


def arrow_batches(rows: datasets.Dataset, columns: Sequence[str], batch_size: int) -> Iterator[pa.Table]:
    """Yield columns in the order of the rows, as Arrow tables."""
    # `Dataset.iter` takes picked rows one by one, at 20 us each.
    table = rows.data.table.select(columns)
    places = picked(rows)
    if places is not None:
        table = table.combine_chunks()
    for start in range(0, len(rows), batch_size):
        yield table.slice(start, batch_size) if places is None else table.take(places.slice(start, batch_size))


def picked(rows: datasets.Dataset) -> pa.ChunkedArray | None:
    """Return the places of the rows in their table, None if they are the whole table."""
    return None if rows._indices is None else rows._indices.column(0)
