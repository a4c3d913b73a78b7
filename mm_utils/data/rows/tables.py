"""Records of tables: text files, Parquet files, and `datasets` of any kind."""

import bisect
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from datasets import Audio, ClassLabel, Dataset, Features, Image, Value, Video

from mm_utils.data.faults import Fault, storable
from mm_utils.data.media import FEATURES
from mm_utils.data.parquet import ParquetRows, cells_of
from mm_utils.data.paths import Jail, check_own_file
from mm_utils.data.rows.columns import (
    BESIDE,
    BESIDE_TIME,
    SPLIT_NAMES,
    SUFFIXES,
    Columns,
    answers_of,
    captions_of,
    find_columns,
    id_of,
    is_null,
    split_of,
)
from mm_utils.data.rows.folders import Unread, files_below, split_of_path, walk
from mm_utils.data.rows.records import (
    NO_MEDIUM,
    ArrowImage,
    BadRow,
    BytesImage,
    ImageRef,
    ParquetImage,
    Record,
    RecordBuilder,
)
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.stored import dataset_jail, load_splits
from mm_utils.data.rows.text_files import BadLine, Rows, text_records
from mm_utils.text import one_line

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_ROWS = 1000  # read at a time, without their images
_KINDS = {Image: "image", Video: "clip", Audio: "sound"}


@dataclass
class Table:
    """Rows of a file or split; embedded images are `ImageRef`s, `jail` resolves paths."""

    unit: str
    columns: Columns
    rows: Rows
    jail: Jail


def read_text(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read a JSONL, JSON, CSV or TSV file."""
    path = Path(source.path)
    builder = RecordBuilder(source, safety, path.parent)
    return records_of(_text_table(path, builder, f".{source.format}"), builder)


def read_metadata(source: Source, safety: PathArguments, files: list[Path]) -> Iterator[Record | BadRow]:
    """Read the metadata files of an image folder and of the folders in it; count the images that they do not name.

    The split of a row is that of the file's folder or of the folders in the image's path, where they are named like one.
    """
    named = set[str]()
    for path in files:
        check_own_file(path, source.path, safety.allow_outside_root, source.title)
        split = split_of_path(os.path.relpath(path, source.path))
        builder = RecordBuilder(source, safety, path.parent, source.path)
        table = _parquet_table(path, builder) if path.suffix == ".parquet" else _text_table(path, builder)
        prefix = f"{path.parent.name}/{path.name}, " if len(files) > 1 else ""
        for row in records_of(table, builder, prefix, split, by_folder=split is None):
            if isinstance(row, Record):
                named.update(frame.name for frame in getattr(row.image, "frames", (row.image,)))
            yield row
    unread = Unread()
    for place, names in walk(source.path):
        for name in names:
            path = Path(os.path.abspath(os.path.join(place, name)))
            is_other = name.lower() in METADATA_FILES and path not in map(Path.absolute, files)
            if is_other or (name.lower().endswith(SUFFIXES[builder.medium]) and str(path) not in named):
                unread.add("not_read", os.path.relpath(path, os.path.abspath(source.path)))
    yield from unread.rows(builder)


def read_parquet(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read a Parquet file or a folder of them, whose names may begin with a split's."""
    path = Path(source.path)
    if not path.is_dir():
        builder = RecordBuilder(source, safety, path.parent)
        yield from records_of(_parquet_table(path, builder), builder)
        return
    builder = RecordBuilder(source, safety, path)
    unread = Unread()
    for name in sorted(files_below(path, (".parquet",), unread)):
        check_own_file(path / name, path, safety.allow_outside_root, source.title)
        table = _parquet_table(path / name, builder)
        yield from records_of(table, builder, f"{name}, ", split_of_path(name, by_words=True))
    yield from unread.rows(builder)


def read_datasets(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read all splits of a data set on the Hub or on disk."""
    folder = Path(source.path)
    builder = RecordBuilder(source, safety, folder if folder.is_dir() else ".")
    splits = load_splits(source.path, source.config, None, source.title, safety.allow_outside_root)
    jail = dataset_jail(source.path, source.image_root or safety.image_root, safety.allow_outside_root)
    if source.split is None and not any(str(name).lower() in SPLIT_NAMES for name in splits):
        raise ValueError(f"{source.title}; its splits are {', '.join(splits)}. Name them train, validation and test.")
    for given, dataset in splits.items():
        split = source.split or SPLIT_NAMES.get(str(given).lower())
        if split is None:
            detail = f"the split {given} of {len(dataset):,} rows is not train, validation or test"
            yield builder.bad(f"split {given}", Fault("unknown_split", detail))
            continue
        table = _dataset_table(dataset, f"{source.title}, split {given}", builder, jail)
        yield from records_of(table, builder, f"split {given}, ", split)


def text_table(
    path: Path, title: str, kind: str | None = None, delimiter: str | None = None
) -> tuple[str, list[str], Rows]:
    """Open a text file; return the unit, the names of its columns, and its rows, lazily.

    Raises:
        ValueError: if there are no rows, or none of the first hundred can be read.
    """
    unit, records = text_records(path, kind, delimiter)
    first = list(itertools.islice(records, 100))
    if not first:
        raise ValueError(f"{title}; the file holds no rows. Give a file with one image and its caption per row.")
    number, values = first[0]
    if isinstance(values, BadLine) and all(isinstance(row, BadLine) for _, row in first):
        raise ValueError(values.describe(path, f"{unit} {number}"))
    names = [key for _, row in first if isinstance(row, dict) for key in row if key is not None]
    return unit, list(dict.fromkeys(names)), itertools.chain(first, records)


def with_raw_images(dataset: Dataset, column: str, title: str, medium: str = "image") -> tuple[Dataset, bool | None]:
    """Make the medium's column undecoded media or paths; return whether it holds bytes, None if paths, too."""
    feature = dataset.features[column]
    if medium == "clip" and _is_list(feature):
        return dataset, False
    dtype = feature.dtype if isinstance(feature, Value) else ""
    if dtype in ("string", "large_string"):
        return dataset, False
    is_struct = isinstance(feature, dict) and set(feature) == {"bytes", "path"}
    if not (isinstance(feature, type(FEATURES[medium])) or is_struct or dtype in ("binary", "large_binary")):
        raise ValueError(
            f"{title}; the {medium} column {column} holds {feature}, not paths or {medium}s. Set image_column to another."
        )
    dataset = dataset.cast_column(column, FEATURES[medium])
    stored = pc.struct_field(dataset.data.column(column), "bytes")
    if stored.null_count in (0, len(stored)):
        return dataset, not stored.null_count
    return dataset, None


def records_of(
    table: Table, builder: RecordBuilder, prefix: str = "", split: str | None = None, by_folder: bool = False
) -> Iterator[Record | BadRow]:
    """Return the records of a table's rows, `split` where they name none."""
    for number, values in table.rows:
        where = f"{prefix}{table.unit} {number}"
        if isinstance(values, BadLine):
            yield builder.bad(where, values.fault, values.text)
            continue
        try:
            yield _record(table, builder, where, values, split, by_folder)
        except Fault as fault:
            shown = {key: value for key, value in values.items() if not isinstance(value, ImageRef)}
            yield builder.bad(where, fault, str(shown))


def _record(
    table: Table, builder: RecordBuilder, where: str, values: dict[str, Any], split: str | None, by_folder: bool
) -> Record:
    if None in values:
        raise Fault("malformed_row", "more cells than columns; a separator without quotes?")
    columns = table.columns
    for column in filter(None, (columns.image, columns.caption, columns.label)):
        if column not in values and column not in columns.parts:  # of a template, any may be missing
            raise Fault("missing_column", f"there is no {column}")
    captions = captions_of(values, columns)
    builder.medium = columns.medium
    image, key = NO_MEDIUM, None
    if columns.image is not None:
        image, key = builder.image(values[columns.image], table.jail, values.get("times"))
    key = id_of(values, columns) or key
    if builder.source.split is None:
        if not is_null(values.get("split")):
            split = split_of(values["split"])
        elif by_folder and not os.path.isabs(written := str(values[str(columns.image)])):
            split = split_of_path(written)
    beside: dict[str, Any] = {name: values.get(name) for name in (*BESIDE, "moments")}
    cut = (time_of(values.get("start")), time_of(values.get("end")))
    group = values.get(columns.group) if columns.group else None
    beside["group"] = None if is_null(group) else storable(str(group).strip())
    if columns.label is not None:
        beside["answers"] = answers_of(values[columns.label], columns.classes)
    record = builder.record(where, (image, key), captions, split=split, cut=cut, **beside)
    record.classes = columns.classes
    return record


def time_of(value: Any) -> Any:
    """Return a number that a CSV file has as text; anything else as it is, null as None."""
    if is_null(value):
        return None
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _text_table(path: Path, builder: RecordBuilder, kind: str | None = None) -> Table:
    title, wanted = builder.source.title, builder.source.columns
    unit, names, rows = text_table(path, title, kind, builder.source.delimiter)
    head = list(itertools.islice(rows, 100))
    first: dict[str, Any] = {}
    for _, row in reversed(head):
        first |= {} if isinstance(row, BadLine) else {name: value for name, value in row.items() if not is_null(value)}
    columns = find_columns(names, title, wanted, first=first)
    return Table(unit, columns, itertools.chain(head, rows), builder.jail)


def _parquet_table(path: Path, builder: RecordBuilder) -> Table:
    title = f"{builder.source.title}, {path.name}"
    try:
        opened = ParquetRows(str(path), title)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({one_line(error)}). Write it anew.") from error
    columns = find_table_columns(opened.file.schema_arrow, title, builder.source.columns)
    rows = _parquet_rows(opened, path, columns, _embeds(opened.file, columns, title))
    return Table("row", columns, rows, builder.jail)


def find_table_columns(schema: pa.Schema, title: str, wanted: Columns) -> Columns:
    """Find the columns of a table by their names; a single column of images may have any."""
    images = [field.name for field in schema if _is_image(field.type)]
    spare = images[0] if len(images) == 1 else None
    known = [
        field for field in schema if _is_image(field.type) or pa.types.is_integer(field.type)
    ]  # others may have no feature
    features = Features.from_arrow_schema(pa.schema(known, metadata=schema.metadata))
    typed = {} if wanted.medium == "image" and not wanted.labelled else _typed(features)
    return find_columns(schema.names, title, wanted, spare_image=spare, typed=typed, labels=_classes(features))


def _typed(features: Features) -> dict[str, str]:
    """Return the kinds of the columns whose feature is of one."""
    return {name: _KINDS[type(feature)] for name, feature in features.items() if type(feature) in _KINDS}


def _classes(features: Features) -> dict[str, list[str]]:
    """Return the names of the classes of the columns whose feature has them."""
    return {name: feature.names for name, feature in features.items() if isinstance(feature, ClassLabel)}


def _is_list(kind: Any) -> bool:
    """Return whether a type of Arrow or `datasets` is a list of texts: paths of frames."""
    if isinstance(kind, pa.DataType):
        return pa.types.is_list(kind) and pa.types.is_string(kind.value_type)
    return getattr(getattr(kind, "feature", None), "dtype", "") == "string"


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return {kind.field(at).name for at in range(kind.num_fields)} == {"bytes", "path"}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _embeds(file: pq.ParquetFile, columns: Columns, title: str) -> bool | None:
    """Return whether the image column holds bytes, by its type and the file's statistics; None if it has paths, too."""
    if columns.image is None:
        return False
    kind = file.schema_arrow.field(str(columns.image)).type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or (columns.medium == "clip" and _is_list(kind)):
        return False
    if not _is_image(kind):
        raise ValueError(
            f"{title}; the {columns.medium} column {columns.image} holds {kind}, not paths or {columns.medium}s. Set "
            "image_column to another."
        )
    if not pa.types.is_struct(kind):
        return True
    if pa.types.is_null(kind.field("bytes").type):
        return False
    parts = [
        group.column(at)
        for group in map(file.metadata.row_group, range(file.num_row_groups))
        for at in range(group.num_columns)
        if group.column(at).path_in_schema == f"{columns.image}.bytes"
    ]
    counts = [part.statistics and (part.statistics.null_count, part.num_values) for part in parts]
    if all(each is not None and each[0] == each[1] for each in counts):
        return False
    return True if all(each is None or not each[0] for each in counts) else None


def _parquet_rows(opened: ParquetRows, path: Path, columns: Columns, embedded: bool | None) -> Rows:
    image = str(columns.image)
    wanted = _read_columns(columns, opened.file.schema_arrow.names, with_image=not embedded)
    for number, (group, row, values) in enumerate(opened.cells(wanted, _ROWS)):
        if isinstance(values, Fault):
            yield number, BadLine(values, "")
            continue
        if embedded or (embedded is None and _bytes_in(values[image])):
            values[image] = ParquetImage(f"{path}, row group {group}, row {row}", str(path), group, row, image)
        yield number, values


def _bytes_in(cell: Any) -> bool:
    """Return whether a cell holds bytes, not a path alone."""
    return isinstance(cell, bytes) or (isinstance(cell, dict) and (cell.get("bytes") or not cell.get("path")))


def _dataset_table(dataset: Dataset, title: str, builder: RecordBuilder, jail: Jail) -> Table:
    typed = _typed(dataset.features)
    spare = next(iter(typed)) if len(typed) == 1 else None
    wanted = builder.source.columns
    columns = find_columns(dataset.column_names, title, wanted, spare, typed, labels=_classes(dataset.features))
    if columns.image is None:
        return Table("row", columns, dataset_rows(dataset, dataset, columns, False), jail)
    raw, embedded = with_raw_images(dataset, columns.image, title, columns.medium)
    return Table("row", columns, dataset_rows(dataset, raw, columns, embedded), jail)


def dataset_rows(stored: Dataset, raw: Dataset, columns: Columns, embedded: bool | None) -> Rows:
    """Yield a split's rows by number, embedded media as `ImageRef`; see `with_raw_images`."""
    image = str(columns.image)
    cells = _ImageCells(stored, image) if embedded is not False else None
    wanted = _read_columns(columns, raw.column_names, with_image=not embedded or cells is None or not cells.mapped)
    number = itertools.count()
    for batch in (
        raw.select_columns(wanted).with_format("arrow").iter(batch_size=_ROWS if embedded is not None else 64)
    ):
        for values in cells_of(batch):
            at = next(number)
            if isinstance(values, Fault):
                yield at, BadLine(values, "")
                continue
            if cells is not None and (embedded or _bytes_in(values[image])):
                held = values.get(image) or {}
                values[image] = cells.ref(at) if cells.mapped else BytesImage(f"row {at}", held.get("bytes"))
            yield at, values


def _read_columns(columns: Columns, names: list[str], with_image: bool) -> list[str]:
    """Return the columns to read: those beside the image and, where asked for, the image."""
    time = () if columns.medium == "image" else BESIDE_TIME
    wanted = (columns.caption, *columns.parts, columns.id, columns.group, columns.label, "split", *BESIDE, *time)
    return [name for name in names if (with_image if name == columns.image else name in wanted)]


class _ImageCells:
    """Finds the rows of a `Dataset` in its Arrow files, if it was read from files (`mapped`)."""

    def __init__(self, dataset: Dataset, column: str) -> None:
        self._column = column
        self._indices = None if dataset._indices is None else dataset._indices.column(0)
        self._files = [file["filename"] for file in dataset.cache_files]
        if self._indices is not None:  # `cache_files` ends with the file of the indices, if they have one
            self._files = [name for name in self._files if "indices" not in Path(name).name]
        self._ends = list(itertools.accumulate(_num_rows(name, column) for name in self._files))
        self.mapped = bool(self._ends) and self._ends[-1] == len(dataset.data)

    def ref(self, at: int) -> ArrowImage:
        row = at if self._indices is None else self._indices[at].as_py()
        file = bisect.bisect_right(self._ends, row)
        path, place = self._files[file], row - (self._ends[file - 1] if file else 0)
        return ArrowImage(f"{path}, row {place}", path, place, self._column)


def _num_rows(path: str, column: str) -> int:
    with pa.memory_map(path) as file:
        table = pa.ipc.open_stream(file).read_all()
        return table.num_rows if column in table.column_names else 0
