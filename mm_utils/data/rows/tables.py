"""Records of tables: text files, Parquet files, `datasets` of any kind, and databases of SQLite."""

import itertools
import logging
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Audio, ClassLabel, Dataset, Features, Image, Video

from mm_utils.data.arguments import SPLIT_NAMES
from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.media import FEATURES
from mm_utils.data.parquet import ParquetRows, cells_of
from mm_utils.data.paths import check_own_file
from mm_utils.data.rows.columns import (
    BESIDE,
    BESIDE_TIME,
    JOIN_FRAMES,
    Columns,
    find_columns,
    is_null,
    is_split,
    split_of_path,
    tell_once,
)
from mm_utils.data.rows.folders import TABLES, Unread, own_files, walk
from mm_utils.data.rows.records import CellImage, ImageRef, Record, RecordBuilder, Records, StoredImage
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.stored import folders_of, load_splits
from mm_utils.data.rows.text_files import Rows, Values, text_rows
from mm_utils.text import one_line

METADATA_FILES = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_ROWS = 1000  # read at a time, without their images
_ROWS_WITH_BYTES = 32
_NAMED = 3  # tables of a folder that the log names
_KINDS = {Image: "image", Video: "clip", Audio: "sound"}
Table = tuple[Columns, Rows]
"""The columns of a file or split, and its rows, in which embedded images are `ImageRef`s."""


def read_tables(source: Source) -> Records:
    """Read a file of Parquet, JSONL, JSON, CSV or TSV, or a folder of such files, whose names may begin with a split's."""
    path = Path(source.path)
    kind = f".{source.format}"
    if not path.is_dir():
        yield from RecordBuilder(source).records(*_table(path, source, kind))
        return
    kinds = TABLES if source.format == "tables" else (kind,)
    names = own_files(source.path, kinds, source.paths.allow_outside_root, source.title, Unread())
    files = [path / name for name in names]
    yield from _read_folder(source, _agreeing(files, source) if len(kinds) > 1 else files)


def read_metadata(source: Source, files: list[Path]) -> Records:
    """Read the metadata files of an image folder and of the folders in it.

    The split of a row is that of the file's folder or of the folders in the image's path, where they are named like one.
    """
    for path in files:
        check_own_file(path, source.path, source.paths.allow_outside_root, source.title)
    yield from _read_folder(source, files, is_metadata=True)


def _read_folder(source: Source, files: list[Path], is_metadata: bool = False) -> Records:
    """Read tables of a folder, each with the paths relative to itself; count what they do not name, and all other files."""
    named = set(map(os.path.abspath, files))
    root = os.path.abspath(source.path)
    unread = Unread()
    if len(files) > 1:
        first = ", ".join(os.path.relpath(path, source.path) for path in files[:_NAMED])
        more = ", ..." if len(files) > _NAMED else ""
        tell_once(f"{source.title}; {len(files):,} tables are read together: {first}{more}", logging.INFO)
    for path in files:
        name = os.path.relpath(path, source.path)
        split = split_of_path(name, by_words=not is_metadata)
        builder = RecordBuilder(source, path.parent, source.path)
        for row in builder.records(
            *_table(path, source),
            "" if is_metadata and len(files) == 1 else name,
            split,
            by_folder=is_metadata and split is None,
        ):
            if isinstance(row, Record):
                named.add(row.image.name)
            yield row
    for place, names in walk(root, unread):
        unread.pass_by(root, place, [name for name in names if os.path.join(place, name) not in named], ())
    yield from unread.rows(builder)


def _agreeing(files: list[Path], source: Source) -> list[Path]:
    """Return those of several kinds of tables that hold pairs; ValueError if their columns differ, or none holds any."""
    found = dict[Path, list[str]]()
    faults = list[ValueError]()
    for file in files:
        try:
            held, _ = _table(file, source)
            found[file] = [str(name).lower() for name in (held.image, held.caption, held.label, held.group) if name]
        except ValueError as error:
            faults.append(error)
    if not found:
        raise faults[0]
    (first, columns), *others = found.items()
    for other, its_columns in others:
        if its_columns != columns:
            raise ValueError(
                f"{source.title}; {first.name} has the columns {', '.join(columns)}, and {other.name} {', '.join(its_columns)}; "
                "tables of several kinds are read together only if these names are equal. Rename the columns, or give one table."
            )
    return list(found)


def readable(files: Iterable[str], source: Source) -> bool:
    """Return whether one of some tables has the columns that are asked for."""
    for file in files:
        with suppress(ValueError):
            _table(Path(file), source)
            return True
    return False


def _table(path: Path, source: Source, kind: str = "") -> Table:
    kind = kind or path.suffix.lower()
    return _parquet_table(path, source) if kind == ".parquet" else table_of(text_rows(path, kind), source, path)


def read_datasets(source: Source) -> Records:
    """Read all splits of a data set on the Hub or on disk."""
    builder = RecordBuilder(source, "" if os.path.isdir(source.path) else ".", also=folders_of(source.path))
    splits = load_splits(source.path, source.title, source.paths.allow_outside_root, source.config)
    if source.split is None and not any(str(name).lower() in SPLIT_NAMES for name in splits):
        raise ValueError(f"{source.title}; its splits are {', '.join(splits)}. Name them train, validation and test.")
    for given, dataset in splits.items():
        split = source.split or SPLIT_NAMES.get(str(given).lower())
        if split is None:
            fault = Fault(
                "unknown_split", f"the split {given} of {len(dataset):,} rows is not train, validation or test"
            )
            yield from (builder.bad(f"split {given}, row {row}", fault) for row in range(len(dataset)))
            continue
        table = _dataset_table(dataset, f"{source.title}, split {given}", source)
        yield from builder.records(*table, f"split {given}", split)


def table_of(rows: Rows, source: Source, file: str | Path) -> Table:
    """Return rows with their columns, which the first hundred tell; ValueError if there is none, or the first is a fault of the file."""
    title = _title(source, file)
    head = list(itertools.islice(rows, 100))
    if not head:
        raise ValueError(f"{title}; the file holds no rows. Give a file with one image and its caption per row.")
    place, values = head[0]
    read = [row for _, row in head if isinstance(row, dict)]
    if isinstance(values, Fault) and not read:
        raise ValueError(f"{file}, {place} is {values.detail}. {REASONS[values.reason]}")
    names = dict.fromkeys(name for row in read for name in row if name is not None)
    # of each column the first value that is not null, as earlier rows are laid over later ones
    first = {name: value for row in reversed(read) for name, value in row.items() if not is_null(value)}
    columns = find_columns(list(names), title, source.columns, first=first)
    return columns, itertools.chain(head, rows)


def _title(source: Source, file: str | Path) -> str:
    """Return the beginning of a message about a file, which is named where the source is a folder."""
    is_whole = str(file) in (source.title, os.path.normpath(source.path))
    return source.title if is_whole else f"{source.title}, {os.path.relpath(file, source.path)}"


def _parquet_table(path: Path, source: Source) -> Table:
    title = _title(source, path)
    try:
        opened = ParquetRows(str(path), title)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{title}; it cannot be read as Parquet ({one_line(error)}). Write it anew.") from error
    schema = opened.schema
    about = opened.file.metadata
    columns = find_table_columns(schema, title, source.columns, lambda names: opened.cells(names, 1))
    image = str(columns.image)
    embeds = _holds_media(schema, columns, title)
    is_mixed = False
    # The file's statistics tell whether cells have no bytes; these are paths.
    if embeds and pa.types.is_struct(schema.field(image).type):
        groups = map(about.row_group, range(about.num_row_groups))
        parts = [group.column(at) for group in groups for at in range(group.num_columns)]
        parts = [part for part in parts if part.path_in_schema == f"{image}.bytes"]  # 'image.bytes'
        known = all(part.statistics and part.statistics.has_null_count for part in parts)
        nulls = sum(part.statistics.null_count for part in parts) if known else 1
        held = not pa.types.is_null(schema.field(image).type.field("bytes").type)
        embeds = held and (not known or nulls < sum(part.num_values for part in parts))
        is_mixed = embeds and nulls > 0
    refs = (CellImage(f"{path}, row {row}", str(path), row, image) for row in itertools.count())
    wanted = read_columns(columns, schema.names, with_image=is_mixed or not embeds)
    cells = opened.cells(wanted, _ROWS_WITH_BYTES if is_mixed else _ROWS)
    return columns, _rows(cells, image, embeds, refs)


def find_table_columns(
    schema: pa.Schema, title: str, wanted: Columns, read: Callable[[list[str]], Iterable[Values | Fault]] | None = None
) -> Columns:
    """Find the columns of a table by their names; a single column of images may have any.

    `read` yields the cells of some columns, the first of which tell what columns of texts hold.
    """
    images = [field.name for field in schema if _is_image(field.type)]
    spare = images[0] if len(images) == 1 else None
    # Others may have no feature.
    known = [field for field in schema if _is_image(field.type) or pa.types.is_integer(_item(field.type))]
    features = Features.from_arrow_schema(pa.schema(known, metadata=schema.metadata))
    typed = {name: _KINDS[type(feature)] for name, feature in features.items() if type(feature) in _KINDS}
    kinds = {name: getattr(feature, "feature", feature) for name, feature in features.items()}  # of lists, of items
    labels = {name: kind.names for name, kind in kinds.items() if isinstance(kind, ClassLabel)}
    texts = [field.name for field in schema if pa.types.is_string(field.type)]
    first = next(iter(read(texts)), None) if read and texts else None
    return find_columns(schema.names, title, wanted, spare, typed, first if isinstance(first, dict) else {}, labels)


def _item(kind: pa.DataType) -> pa.DataType:
    return kind.value_type if pa.types.is_list(kind) or pa.types.is_large_list(kind) else kind


def _is_image(kind: pa.DataType) -> bool:
    if pa.types.is_struct(kind):
        return {kind.field(at).name for at in range(kind.num_fields)} == {"bytes", "path"}
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)


def _holds_media(schema: pa.Schema, columns: Columns, title: str) -> bool:
    """Return whether the cells of the image column are media, and not paths; raise ValueError if they are neither."""
    kind = schema.field(str(columns.image)).type
    text = kind.value_type if pa.types.is_dictionary(kind) else kind
    if pa.types.is_string(text) or pa.types.is_large_string(text):
        return False
    if not _is_image(kind):
        raise ValueError(
            f"{title}; the {columns.medium} column {columns.image} holds {kind}, not paths or {columns.medium}s. "
            f"{'Set image_column to another.' if _item(kind) is kind else JOIN_FRAMES}"
        )
    return True


def _rows(cells: Iterable[Values | Fault], image: str, embedded: bool, refs: Iterable[ImageRef | None]) -> Rows:
    """Yield rows by number, embedded media as references."""
    for number, (values, ref) in enumerate(zip(cells, refs, strict=False)):
        # A cell that was read, since some are without bytes, and is one of these, stays a path
        if embedded and not isinstance(values, Fault) and (image not in values or (values[image] or {}).get("bytes")):
            values[image] = ref
        yield f"row {number}", values


def _dataset_table(dataset: Dataset, title: str, source: Source) -> Table:
    schema = dataset.features.arrow_schema
    columns = find_table_columns(schema, title, source.columns, lambda names: dataset.select_columns(names).take(1))
    image = str(columns.image)
    embeds = _holds_media(schema, columns, title)
    refs: Iterable[ImageRef | None] = itertools.repeat(None)
    if embeds:
        dataset = dataset.cast_column(image, FEATURES[columns.medium])
        stored = pc.struct_field(dataset.data.column(image), "bytes")
        embeds = stored.null_count < len(stored)
        refs = _stored_cells(dataset, image)
    is_mixed = embeds and stored.null_count > 0
    wanted = read_columns(columns, dataset.column_names, with_image=is_mixed or not embeds)
    read = dataset.select_columns(wanted).with_format("arrow")
    cells = (values for batch in read.iter(_ROWS_WITH_BYTES if is_mixed else _ROWS) for values in cells_of(batch))
    return columns, _rows(cells, image, embeds, refs)


def _stored_cells(dataset: Dataset, column: str) -> Iterator[CellImage]:
    """Yield where each row's cell lies in the Arrow files of a data set, which was loaded from them."""
    for path in (file["filename"] for file in dataset.cache_files):
        with pa.memory_map(path) as file:
            rows = pa.ipc.open_stream(file).read_all().num_rows
        yield from (CellImage(f"{path}, row {row}", path, row, column) for row in range(rows))
    # reached only where another row is asked for
    raise ValueError(f"the files of a data set hold fewer than its {len(dataset):,} rows. Save it anew.")


def read_columns(columns: Columns, names: list[str], with_image: bool) -> list[str]:
    """Return the columns to read: those beside the image and, where asked for, the image."""
    time = () if columns.medium == "image" else BESIDE_TIME
    wanted = (columns.caption, *columns.parts, columns.id, columns.group, columns.label, *BESIDE, *time)
    return [name for name in names if (with_image if name == columns.image else name in wanted or is_split(name))]


def read_sqlite(source: Source) -> Records:
    """Read the only table of a database, or the one that `config` names; its bytes stay in the records."""
    builder = RecordBuilder(source)
    path = os.path.abspath(source.path)
    try:
        # read only: a database that is not there is not made
        with closing(sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True)) as database:
            # by default, one text that is not UTF-8 ends the reading
            database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
            found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
            tables = [name for (name,) in found if not name.startswith("sqlite_")]  # of AUTOINCREMENT, ANALYZE
            if not tables:
                raise ValueError(
                    f"{source.title}; the database holds no table. Give one of paths or images and captions."
                )
            if source.config not in tables and (source.config or len(tables) != 1):
                raise ValueError(
                    f"{source.title}; its tables are {', '.join(tables)}. Name one of them, by config=NAME behind the path in --sources of prepare_data."
                )
            cells = database.execute('SELECT * FROM "{}"'.format((source.config or tables[0]).replace('"', '""')))
            names = [name for name, *_ in cells.description]
            columns = find_columns(names, source.title, source.columns)
            image = str(columns.image)

            def rows() -> Rows:
                for number, row in enumerate(cells):
                    values = dict(zip(names, row, strict=True))
                    if isinstance(cell := values.get(image), bytes):
                        values[image] = StoredImage(f"{path}, row {number}", cell, path)
                    yield f"row {number}", values

            yield from builder.records(columns, rows())
    except sqlite3.Error as error:
        raise ValueError(
            f"{source.title}; it cannot be read as SQLite ({one_line(error)}). Check the file."
        ) from error
