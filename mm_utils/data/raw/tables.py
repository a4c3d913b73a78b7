"""Open a table of image-caption rows: a JSONL, JSON, CSV or TSV file, or a `datasets.Dataset`.

A `Table` knows its columns and gives its rows one after another; `mm_utils.data.rows` reads them for training and
`mm_utils.data.raw.formats` for the preparation of a data set. Images are not opened here: a path is only looked up, and of
embedded bytes only the length is read (the bytes too where there is no id).
"""

import hashlib
import itertools
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, Image, Value

from mm_utils.data.raw.columns import Columns, find_columns, is_null
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail, is_url
from mm_utils.data.raw.text_files import Rows, text_records


class Embedded(NamedTuple):
    """An image whose bytes lie in the table: their length, and their digest where the table has no id."""

    size: int
    digest: str | None


@dataclass
class Table:
    """An opened table.

    `title` opens error messages ("--train_file is pairs.jsonl"); `name` opens warnings. `unit` is what `records` are
    numbered by. `jail` resolves image paths, `id_root` is the folder that ids made from paths are relative to.
    """

    title: str
    name: str
    unit: str
    jail: Jail
    id_root: str
    names: list[str]
    columns: Columns
    records: Rows
    dataset: Dataset | None = None
    embedded: bool = False


def open_text_table(
    path: Path, title: str, jail: Jail, wanted: Columns, id_root: str | None = None, kind: str | None = None
) -> Table:
    """Open a JSONL, JSON, CSV or TSV file; its rows are read as they are asked for.

    `kind` is the suffix that says how to read it, by default its own.
    Raises a ValueError if the file is empty, is not what its suffix says, or lacks a column.
    """
    unit, records = text_records(path, kind)
    first = list(itertools.islice(records, 100))
    if not first:
        raise ValueError(f"{title}; the file holds no rows. Give a file with one image and its caption per row.")
    rows = [values for _, values in first if isinstance(values, dict)]
    bad = [values.message for _, values in first if not isinstance(values, dict)]
    if not rows:
        raise ValueError(bad[0])
    names = list(dict.fromkeys(key for values in rows for key in values if key is not None))
    return Table(
        title=title,
        name=str(path),
        unit=unit,
        jail=jail,
        id_root=os.path.abspath(id_root or jail.root),
        names=names,
        columns=find_columns(names, title, wanted),
        records=itertools.chain(first, records),
    )


def open_dataset_table(
    dataset: Dataset,
    title: str,
    name: str,
    jail: Jail,
    wanted: Columns,
    num_proc: int | None,
    id_root: str | None = None,
    *,
    trust_image_type: bool = False,
) -> Table:
    """Open a `Dataset` whose image column holds paths, bytes, ``{"bytes", "path"}`` or `Image`; rows count from 0.

    With `trust_image_type` the paths in a column of type `Image` may lie anywhere: `datasets` itself wrote them there,
    for the files in its cache.

    Raises a ValueError if it is empty, lacks a column, or holds something else in the image column.
    """
    if len(dataset) == 0:
        raise ValueError(f"{title}; it holds no rows. Give a source with one image and its caption per row.")
    names = dataset.column_names
    typed = [name for name in names if isinstance(dataset.features[name], Image)]
    columns = find_columns(names, title, wanted, spare_image=typed[0] if len(typed) == 1 else None)
    if trust_image_type and columns.image in typed:
        jail = Jail(jail.root, allow_outside=True)
    dataset, embedded = with_raw_images(dataset, str(columns.image), title)
    return Table(
        title=title,
        name=name,
        unit="row",
        jail=jail,
        id_root=os.path.abspath(id_root or jail.root),
        names=names,
        columns=columns,
        records=_dataset_records(dataset, columns, embedded, num_proc),
        dataset=dataset,
        embedded=embedded,
    )


def one_line(error: BaseException) -> str:
    """The type of an error's cause and the first line of its message."""
    cause = error.__cause__ or error
    lines = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {lines[0] if lines else 'no message'}"


def image_path(value: Any, jail: Jail) -> str:
    """Give the absolute path of an image from the value of its cell, a path or ``{"path": ...}``.

    Raises a `Fault`: image_empty for an empty cell, bad_path for what is no text, url_not_allowed, or as `Jail` does.
    """
    if isinstance(value, dict):
        value = value.get("path")
    if is_null(value):
        raise Fault("image_empty", "the cell of the image is empty")
    if not isinstance(value, str):
        raise Fault("bad_path", f"image is a {type(value).__name__}, not a path")
    if is_url(value):
        raise Fault("url_not_allowed", f"{value[:200]} is an address, not a path")
    return jail.resolve(value)


def path_id(path: str, id_root: str, written: Any) -> str:
    """The id of an image that has none of its own: its path relative to `id_root`, or as written if it lies outside."""
    inside = path.startswith(id_root + os.sep)
    named = path[len(id_root) + 1 :].replace(os.sep, "/") if inside else str(written)
    return named.encode("utf-8", "backslashreplace").decode()


def with_raw_images(dataset: Dataset, column: str, title: str) -> tuple[Dataset, bool]:
    """Make the image column undecoded `Image` or plain paths, and say whether it holds the images' bytes."""
    feature = dataset.features[column]
    dtype = feature.dtype if isinstance(feature, Value) else ""
    if dtype in ("string", "large_string"):
        return dataset, False
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    if not (isinstance(feature, Image) or is_struct or dtype in ("binary", "large_binary")):
        raise ValueError(
            f"{title}; the image column {column} holds {feature}, not paths or images. Set --image_column."
        )
    dataset = dataset.cast_column(column, Image(decode=False))
    stored = pc.struct_field(dataset.data.column(column), "bytes")
    return dataset, stored.null_count < len(stored)


def other_columns(columns: Columns, names: list[str]) -> list[str]:
    """The columns beside the image that are read."""
    wanted = (columns.caption, columns.id, columns.language, "split", "regions")
    return [name for name in names if name in wanted and name != columns.image]


def _dataset_records(dataset: Dataset, columns: Columns, embedded: bool, num_proc: int | None) -> Rows:
    image = str(columns.image)
    others = other_columns(columns, dataset.column_names)
    digests = iter(_digests(dataset, image, num_proc)) if embedded and columns.id is None else itertools.repeat(None)
    at = itertools.count()
    for batch in dataset.select_columns([image, *others]).with_format("arrow").iter(batch_size=1000):
        if embedded:
            sizes = pc.binary_length(pc.struct_field(batch[image], "bytes")).to_pylist()
            images: list[Any] = [Embedded(size or 0, next(digests)) for size in sizes]
        else:
            images = batch[image].to_pylist()
        for value, record in zip(images, batch.select(others).to_pylist(), strict=True):
            yield next(at), {**record, image: value}


def _digests(dataset: Dataset, image: str, num_proc: int | None) -> list[str]:
    """Hash the images' bytes, so that equal images get equal ids on every machine; `datasets` caches the result."""
    hashed = (
        dataset.select_columns([image])
        .with_format("arrow")
        .map(
            _hash_batch,
            fn_kwargs={"image": image},
            batched=True,
            batch_size=256,
            remove_columns=[image],
            num_proc=num_proc,
            desc="Hashing images",
        )
    )
    return hashed.with_format("arrow")[:]["digest"].to_pylist()


def _hash_batch(batch: pa.Table, image: str) -> pa.Table:
    stored = pc.struct_field(batch[image], "bytes")
    digests = [hashlib.blake2b(item.as_buffer() or b"", digest_size=16).hexdigest() for item in stored]
    return pa.table({"digest": digests})
