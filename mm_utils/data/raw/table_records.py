"""Records of tables: text files, Parquet files and `datasets` of any kind."""

import bisect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from datasets import Dataset, Image

from mm_utils.data.raw.columns import SPLIT_NAMES, Columns, captions_of, find_columns, is_null, split_of
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Jail, PathArguments
from mm_utils.data.raw.records import ArrowImage, BadRow, BytesImage, ImageRef, ParquetImage, Record
from mm_utils.data.raw.specs import Maker, Source
from mm_utils.data.raw.stores import load_splits
from mm_utils.data.raw.tables import Table, one_line, open_text_table, other_columns, with_raw_images
from mm_utils.data.raw.text_files import BadLine, Rows

_ROWS = 1000  # at a time, without their images


def read_text(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read a JSONL, JSON, CSV or TSV file."""
    path = Path(source.path)
    maker = Maker(source, safety, path.parent)
    table = open_text_table(path, source.title, maker.jail, source.columns, kind=f".{source.format}")
    return _records(table, maker)


def read_metadata(source: Source, safety: PathArguments, files: dict[str | None, Path]) -> Iterator[Record | BadRow]:
    """Read the metadata files of an image folder, each for a split or, below None, one for all.

    One for all is divided by the first folder of the paths where that is named like a split.
    """
    for split, path in files.items():
        maker = Maker(source, safety, path.parent)
        if path.suffix == ".parquet":
            tables = [_parquet_table(path, maker)]
        else:
            tables = [open_text_table(path, source.title, maker.jail, source.columns)]
        for table in tables:
            prefix = f"{path.parent.name}/{path.name}, " if len(files) > 1 else ""
            yield from _records(table, maker, prefix, split, by_folder=split is None)


def read_parquet(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read a Parquet file, or all in a folder, which may be named like splits (train-00000-of-00008.parquet)."""
    path = Path(source.path)
    if not path.is_dir():
        yield from _records(_parquet_table(path, maker := Maker(source, safety, path.parent)), maker)
        return
    maker = Maker(source, safety, path)
    for file in sorted(path.rglob("*.parquet")):
        split = SPLIT_NAMES.get(file.name.replace(".", "-").split("-")[0].lower()) or SPLIT_NAMES.get(file.parent.name)
        yield from _records(_parquet_table(file, maker), maker, f"{file.relative_to(path)}, ", split)


def read_datasets(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read all splits of a data set on the Hub or on disk."""
    folder = Path(source.path)
    maker = Maker(source, safety, folder if folder.is_dir() else ".")
    for given, dataset in load_splits(source.path, source.config, None, source.title).items():
        split = source.split or SPLIT_NAMES.get(given.lower())
        if split is None:
            detail = f"the split {given} of {len(dataset):,} rows is not train, validation or test"
            yield maker.bad(f"split {given}", Fault("unknown_split", detail))
            continue
        prefix = f"split {given}, "
        yield from _records(_dataset_table(dataset, f"{source.title}, split {given}", maker), maker, prefix, split)


def _records(
    table: Table, maker: Maker, prefix: str = "", split: str | None = None, by_folder: bool = False
) -> Iterator[Record | BadRow]:
    for number, values in table.records:
        where = f"{prefix}{table.unit} {number}"
        if isinstance(values, BadLine):
            yield BadRow(maker.source.name, where, values.fault, values.raw)
            continue
        try:
            yield _record(table, maker, where, values, split, by_folder)
        except Fault as fault:
            shown = {key: value for key, value in values.items() if not isinstance(value, ImageRef)}
            yield maker.bad(where, fault, str(shown))


def _record(
    table: Table, maker: Maker, where: str, values: dict[str, Any], split: str | None, by_folder: bool
) -> Record:
    if None in values:
        raise Fault("malformed_row", "more cells than columns; a separator without quotes?")
    columns = table.columns
    for column in (columns.image, columns.caption):
        if column not in values:
            raise Fault("missing_column", f"there is no {column}")
    captions, languages = captions_of(values, columns)
    image, key = maker.image(values[str(columns.image)], table.jail)
    if columns.id is not None:
        if is_null(values.get(columns.id)):
            raise Fault("missing_column", f"{columns.id}, the id, is empty")
        key = str(values[columns.id])
    if maker.source.split is None:
        if not is_null(values.get("split")):
            split = split_of(values["split"])
        elif by_folder and key is not None:
            split = SPLIT_NAMES.get(str(values[str(columns.image)]).split("/")[0].lower(), split)
    return maker.record(where, (image, key), captions, languages=languages, regions=values.get("regions"), split=split)


def _parquet_table(path: Path, maker: Maker) -> Table:
    title = f"{maker.source.title}, {path.name}"
    try:
        file = pq.ParquetFile(path, pre_buffer=False, buffer_size=1 << 20)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({one_line(error)}). Write it anew.") from error
    names = file.schema_arrow.names
    images = [name for name in names if _is_image(file.schema_arrow.field(name).type)]
    columns = find_columns(names, title, maker.source.columns, spare_image=images[0] if len(images) == 1 else None)
    return Table(
        title=title,
        name=str(path),
        unit="row",
        jail=maker.jail,
        id_root=maker.jail.root,
        names=names,
        columns=columns,
        records=_parquet_rows(file, path, columns, _embeds(file, columns, title)),
    )


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return {kind.field(at).name for at in range(kind.num_fields)} == {"bytes", "path"}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _embeds(file: pq.ParquetFile, columns: Columns, title: str) -> bool:
    """Whether the image column holds bytes rather than paths, by its type and the statistics of the file."""
    kind = file.schema_arrow.field(columns.image).type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return False
    if not _is_image(kind):
        raise ValueError(
            f"{title}; the image column {columns.image} holds {kind}, not paths or images. Set image_column=."
        )
    if not pa.types.is_struct(kind):
        return True
    parts = [
        group.column(at)
        for group in map(file.metadata.row_group, range(file.num_row_groups))
        for at in range(group.num_columns)
        if group.column(at).path_in_schema == f"{columns.image}.bytes"
    ]
    return not all(part.statistics is not None and part.statistics.null_count == part.num_values for part in parts)


def _parquet_rows(file: pq.ParquetFile, path: Path, columns: Columns, embedded: bool) -> Rows:
    image = str(columns.image)
    others = other_columns(columns, file.schema_arrow.names)
    wanted = others if embedded else [*others, image]
    number = itertools.count()
    for group in range(file.num_row_groups):
        at = itertools.count()
        for batch in file.iter_batches(_ROWS, row_groups=[group], columns=wanted):
            for values in batch.to_pylist():
                if embedded:
                    values[image] = ParquetImage(str(path), group, next(at), image)
                yield next(number), values


def _dataset_table(dataset: Dataset, title: str, maker: Maker) -> Table:
    names = dataset.column_names
    typed = [name for name in names if isinstance(dataset.features[name], Image)]
    columns = find_columns(names, title, maker.source.columns, spare_image=typed[0] if len(typed) == 1 else None)
    # `datasets` gives the files of its cache by absolute paths in a column of its type `Image`.
    jail = Jail(maker.jail.root, allow_outside=True) if columns.image in typed else maker.jail
    stored = dataset
    dataset, embedded = with_raw_images(dataset, str(columns.image), title)
    return Table(
        title=title,
        name=title,
        unit="row",
        jail=jail,
        id_root=jail.root,
        names=names,
        columns=columns,
        records=_dataset_rows(stored, dataset, columns, embedded),
    )


def _dataset_rows(stored: Dataset, dataset: Dataset, columns: Columns, embedded: bool) -> Rows:
    image = str(columns.image)
    others = other_columns(columns, dataset.column_names)
    places = _Places(stored, image) if embedded else None
    wanted = others if places is not None and places.mapped else [*others, image]
    number = itertools.count()
    for batch in dataset.select_columns(wanted).with_format("arrow").iter(batch_size=_ROWS):
        for values in batch.to_pylist():
            at = next(number)
            if places is not None:
                cell = values.get(image) or {}
                values[image] = places.image(at) or BytesImage(cell.get("bytes"), f"row {at}")
            yield at, values


class _Places:
    """Where the rows of a `Dataset` lie in its Arrow files, if it was read from files alone."""

    def __init__(self, dataset: Dataset, column: str) -> None:
        self._column = column
        self._indices = None if dataset._indices is None else dataset._indices.column(0)
        self._files = [file["filename"] for file in dataset.cache_files]
        if self._indices is not None:  # `cache_files` ends with the file of the indices, if they have one
            self._files = [name for name in self._files if "indices" not in Path(name).name]
        lengths = [_num_rows(name, column) for name in self._files]
        self._ends = list(itertools.accumulate(lengths))
        self.mapped = bool(self._ends) and self._ends[-1] == len(dataset.data)

    def image(self, at: int) -> ArrowImage | None:
        """The image of row `at`, or None if it lies in memory."""
        if not self.mapped:
            return None
        row = at if self._indices is None else self._indices[at].as_py()
        file = bisect.bisect_right(self._ends, row)
        return ArrowImage(self._files[file], row - (self._ends[file - 1] if file else 0), self._column)


def _num_rows(path: str, column: str) -> int:
    with pa.memory_map(path) as file:
        table = pa.ipc.open_stream(file).read_all()
        return table.num_rows if column in table.column_names else 0
