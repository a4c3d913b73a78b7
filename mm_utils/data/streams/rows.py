"""Read a shard's rows from any row on: Parquet, Arrow and tar, on disk or a server.

=========  ===============================================  =====================================================
format     rows are counted by                              a reader that starts at row r reads again
=========  ===============================================  =====================================================
Parquet    the footer                                       the rows before r in its row group
Arrow      the record batches' headers, memory-mapped       nothing; from a server, the rows before r in their batch
           or, on a server, fetched
tar        walking the headers, once; on a remote server    on disk, the headers before r; from a server, the file
           a file beside it (`noted_rows`), else one pass   from its beginning
           over the file
others     the extra's `COUNTS` (see its `door.py`)         as its row source, given `first`, does
=========  ===============================================  =====================================================

Remote files are read by ranges, through `fsspec`: `https://`, `hf://`, `s3://` and whatever else is installed. Nothing is
unpacked to disk. Columns, captions and archives follow the rules of `mm_utils.data.rows`, captions those of
`mm_utils.data.prepare.checks` too; images must be embedded. Sounds and clips must be as prepared sets keep them, WAV and AVI of
JPEG frames: training has no codec, and cuts nothing out at `start` and `end`.
"""

import json
import logging
import sys
import tarfile
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import islice
from typing import Any, BinaryIO

import datasets
import fsspec
import pyarrow as pa
import pyarrow.parquet as pq

from mm_utils.data import media
from mm_utils.data.faults import Fault
from mm_utils.data.images import UnreadableImageError
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.parquet import ParquetRows, cells_of
from mm_utils.data.paths import MEDIA_LIMITS, shard_kind
from mm_utils.data.prepare.checks import CheckArguments, check_captions
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import USUAL_NAMES, Columns, find_column, id_of, is_null
from mm_utils.data.rows.records import BadRow, BytesImage, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.sql import count_rows as count_sqlite_rows
from mm_utils.data.rows.sql import read_sqlite
from mm_utils.data.rows.tables import Table, find_table_columns, records_of
from mm_utils.data.rows.tars import (
    BoundedHeader,
    Sample,
    captions_of_sample,
    medium_of_samples,
    read_samples,
)
from mm_utils.data.rows.text_files import BadLine, Rows
from mm_utils.distributed import RunError
from mm_utils.files import regular_file
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

Row = dict[str, Any] | str
"""A training row with `features_of` its kind; or, of a row that cannot be used, the reason."""

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "image": datasets.Image(decode=False),
        "captions": datasets.Sequence(datasets.Value("string")),
    }
)
_STORED: dict[str, Callable[[bytes], tuple[Sized, float]]] = {"clip": read_avi, "sound": read_wav}
_CUT = ("start", "end")
_PREPARE = (
    "A stream reads sounds and clips as prepared sets keep them, without a codec. Run scripts/prepare_data.py, and stream its "
    "folder by --dataset_name."
)
_CHECKS = CheckArguments()
_BATCH = 64  # rows read at a time, with their images
_LOOKED_AT = 20  # rows that decide whether a tar, or sounds or clips, can be used
_READ_AHEAD = 8 << 20  # bytes per request to a remote server
_HEADER = 4096  # bytes of an Arrow file that are read at a time to find its batches
_MARKER, _RECORD_BATCH = -1, 3  # begins a message; the kind of its header
_BUFFER = 1 << 20  # bytes of a column of a local file; without, whole row groups are held


def features_of(medium: str) -> datasets.Features:
    """Return the columns of a medium's rows; clips and sounds have their `seconds`, too."""
    if medium not in _STORED:
        return FEATURES
    return datasets.Features({**FEATURES, "image": media.FEATURES[medium], "seconds": datasets.Value("float64")})


def store_of(url: str) -> tuple[Any, str]:
    """Return the file system of an address, and the path in it.

    Raises:
        RunError: if it needs a package that is not installed.
    """
    try:
        return fsspec.url_to_fs(url)
    except ImportError as error:
        name = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}.get(
            url.partition("://")[0]
        )
        raise RunError(
            f"shard {url}; its store needs a package that is not installed ({one_line(error)}). "
            f"{f'pip install {name}' if name else 'Install it'}, or download the shards first."
        ) from error


def open_shard(url: str) -> BinaryIO:
    """Open a file for reading with seeks; remote files by ranges of some megabytes."""
    files, path = store_of(url)
    if "file" in files.protocol:
        return regular_file(path)
    ahead = "readahead" if shard_kind(url) == "tar" else "none"  # pyarrow reads whole buffers
    file: BinaryIO = files.open(path, "rb", block_size=_READ_AHEAD, cache_type=ahead)
    if not file.seekable():
        raise ValueError(f"shard {url} comes from a server that does not serve ranges. Download it first.")
    return file


def noted_rows(url: str) -> int | None:
    """Return the number of samples of a remote tar as a file beside it states it; None without one.

    Read are `NAME_stats.json` (img2dataset), `sizes.json` (OpenCLIP) and `index.json` (wids).
    """
    folder, _, name = url.rpartition("/")
    for file, find in (
        (f"{name.removesuffix('.tar')}_stats.json", lambda found: found["successes"]),
        ("sizes.json", lambda found: found[name]),
        (
            "index.json",
            lambda found: {each["url"].rpartition("/")[2]: each["nsamples"] for each in found["shardlist"]}[name],
        ),
    ):
        content = _beside(f"{folder}/{file}")
        try:
            if content is not None:
                return int(find(json.loads(content)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            logger.warning("%s/%s does not state the samples of %s (%s)", folder, file, name, one_line(error))
    return None


@lru_cache(maxsize=64)
def _beside(url: str) -> bytes | None:
    """Return a file of a server, which may state the samples of many shards; None if it is not there."""
    files, path = store_of(url)
    try:
        return files.cat_file(path)
    except (FileNotFoundError, PermissionError):  # of a key that does not exist, to whom may not list
        return None


def count_rows(url: str) -> int:
    """Count the rows of a file; those of a remote tar by the file that states them, if there is one."""
    kind = shard_kind(url)
    if kind == "tar" and "://" in url and "?" not in url and (noted := noted_rows(url)) is not None:
        return noted
    if kind == "sqlite":
        return count_sqlite_rows(Source(url))
    if kind == "arrow" and "://" not in url:
        return len(datasets.Dataset.from_file(url))
    with open_shard(url) as file:
        if kind == "arrow":
            return sum(rows for rows, _ in _record_batches(file))
        if kind == "parquet":
            return int(pq.read_metadata(file).num_rows)
        with tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
            return sum(1 for _ in read_samples(archive, url, first=sys.maxsize))


def check_columns(url: str, source: Source) -> str:
    """Return the kind of the media of a file.

    Raises:
        ValueError: if a table has no column of media or captions, or no early row of a tar, or of clips or sounds, can be used.
    """
    if shard_kind(url) == "sqlite":
        records = (item for item in _open_rows(url, 0, source) if isinstance(item, Record))
        medium = next((record.medium for record in records), "image")
    elif shard_kind(url) == "arrow":
        medium = _medium_of_table(_open_arrow(url, 0)[0], source)
    else:
        with open_shard(url) as file:
            if shard_kind(url) == "parquet":
                medium = _medium_of_table(pq.read_schema(file), source)
            else:
                with tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
                    medium = medium_of_samples(read_samples(archive, url), source)
    if shard_kind(url) not in ("parquet", "arrow") or medium in _STORED:
        rows = list(islice(read_rows(url, 0, replace(source, medium=medium)), _LOOKED_AT))
        if all(isinstance(row, str) for row in rows):
            raise ValueError(
                f"{source.title}; none of its first samples can be used ({rows[0]}). "
                + ("Check the shards." if medium == "image" else _PREPARE)
            )
    return medium


def _medium_of_table(schema: Any, source: Source) -> str:
    if "split" in schema.names:
        logger.warning(
            "%s; its column split is not read, so rows of all splits are trained on. Write a file for each split, or prepare the set",
            source.title,
        )
    return find_table_columns(schema, source.title, source.columns).medium


def _open_rows(url: str, first: int, source: Source) -> Iterator[Record | BadRow]:
    kind = str(shard_kind(url))
    if kind in _READERS:
        return _READERS[kind](url, first, source)
    return read_sqlite(replace(source, path=url, format=kind), PathArguments(), first)


def read_rows(url: str, first: int, source: Source) -> Iterator[Row]:
    """Read the rows of a file from `first` on, a few at a time; `source` names the columns."""
    for number, item in enumerate(_open_rows(url, first, source), first):
        try:
            if isinstance(item, BadRow):
                raise item.fault
            yield _training_row(item, source.medium)
        except Fault as fault:
            yield f"shard {url}, row {number}: {fault.reason}: {fault.detail}"


def _parquet_rows(url: str, first: int, source: Source) -> Iterator[Record | BadRow]:
    with open_shard(url) as file:
        table = ParquetRows(file, url, _READ_AHEAD if "://" in url else _BUFFER)
        columns = find_table_columns(table.file.schema_arrow, source.title, source.columns)
        cells = table.cells(_names(columns, table.file.schema_arrow.names), _BATCH, first)
        yield from _records((values for _, _, values in cells), columns, source)


def _arrow_rows(url: str, first: int, source: Source) -> Iterator[Record | BadRow]:
    schema, batches = _open_arrow(url, first)
    columns = find_table_columns(schema, source.title, source.columns)
    named = (batch.select(_names(columns, schema.names)) for batch in batches)
    parts = (batch.slice(start, _BATCH) for batch in named for start in range(0, len(batch), _BATCH))
    yield from _records((values for part in parts for values in cells_of(part)), columns, source)


def _open_arrow(url: str, first: int) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Return the schema of a file, and its rows from `first` on: memory-mapped, or from a server a batch at a time."""
    if "://" not in url:
        table = datasets.Dataset.from_file(url).data.table
        return table.schema, iter(table.slice(first).to_batches())
    with open_shard(url) as file:
        schema = pa.ipc.read_schema(pa.PythonFile(file, "r"))

    def batches() -> Iterator[pa.RecordBatch]:
        begin = 0
        with open_shard(url) as file:
            for rows, place in _record_batches(file):
                if begin + rows > first:
                    file.seek(place)
                    batch = pa.ipc.read_record_batch(pa.ipc.read_message(pa.PythonFile(file, "r")), schema)
                    yield batch.slice(max(0, first - begin))
                begin += rows

    return schema, batches()


def _record_batches(file: BinaryIO) -> Iterator[tuple[int, int]]:
    """Yield rows and place of each record batch of an Arrow stream, from the headers alone (Arrow's `Message.fbs`)."""

    def number(place: int, size: int = 4) -> int:
        return int.from_bytes(head[place : place + size], "little", signed=size > 2)

    def field(table: int, field: int) -> int:
        """Return the place of a field of a FlatBuffers table; of one that is left out, that of the 0 behind all."""
        types, at = table - number(table), 4 + 2 * field
        offset = number(types + at, 2) if at < number(types, 2) else 0
        return table + offset if offset else len(head) - 8

    begin = 0
    while True:
        file.seek(begin)
        head = file.read(_HEADER)
        size = number(4)
        if size == 0:
            return
        head += file.read(max(0, 8 + size - len(head))) + bytes(8)
        root = 8 + number(8)
        content, length = field(root, 2), number(field(root, 3), 8)
        if number(0) != _MARKER or min(size, length) < 0:
            raise ValueError(f"byte {begin:,} does not begin a message of an Arrow stream")
        if number(field(root, 1), 1) == _RECORD_BATCH:
            yield number(field(content + number(content), 0), 8), begin
        begin += 8 + size + length


def _tar_rows(url: str, first: int, source: Source) -> Iterator[Record | BadRow]:
    builder, kinds = _builder(source), (source.medium,) if source.medium in _STORED else ("image",)
    with open_shard(url) as file, tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
        for number, sample in enumerate(read_samples(archive, url, kinds=kinds, first=first)):
            try:
                if number >= first:
                    yield _sample_record(builder, sample)
            except Fault as fault:
                yield builder.bad(sample.key, fault)


_READERS: dict[str, Callable[[str, int, Source], Iterator[Record | BadRow]]] = {
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "tar": _tar_rows,
}


@dataclass(frozen=True, slots=True)
class _Cell(BytesImage):
    """An embedded medium with its path, where raw pixels have their size."""

    path: str | None


def _builder(source: Source) -> RecordBuilder:
    return RecordBuilder(source, PathArguments(), ".")


def _names(columns: Columns, known: Sequence[str]) -> list[str]:
    cut = _CUT if columns.medium in _STORED else ()
    named = (columns.image, columns.caption, columns.id, *cut)
    return list(dict.fromkeys(name for name in named if name in known))


def _records(cells: Iterable[dict[str, Any] | Fault], columns: Columns, source: Source) -> Iterator[Record | BadRow]:
    """Return the records of a table's rows, whose media are in their cells."""
    builder, image = _builder(source), str(columns.image)

    def rows() -> Rows:
        for number, values in enumerate(cells):
            if isinstance(values, Fault):
                yield number, BadLine(values, "")
                continue
            cell = values[image] if isinstance(values[image], dict) else {"bytes": values[image]}
            yield number, {**values, image: _Cell("", cell.get("bytes"), cell.get("path"))}

    return records_of(Table("row", columns, rows(), builder.jail), builder)


def _sample_record(builder: RecordBuilder, sample: Sample) -> Record:
    """Return the record of a sample. Its id comes from .json: two keys may have the same image."""
    values, source = sample.values(), builder.source
    captions = captions_of_sample(sample, values, source, {})
    column = source.id_column or find_column("--id_column", list(values), source.title, None, USUAL_NAMES["id"])
    member = next(iter(sample.media.values()), None)
    image = _Cell("", member.data if isinstance(member, BytesImage) else None, None)
    begin, end = (None if is_null(values.get(name)) else values[name] for name in _CUT)
    key = id_of(values, Columns(id=column))
    return builder.record(sample.key, (image, key), captions, cut=(begin, end))


def _training_row(record: Record, medium: str) -> dict[str, Any]:
    """Return a row that can be trained on; raises the fault of one that cannot, such as a part of a clip."""
    image = record.image
    if record.cut != (None, None):
        raise Fault("span_outside", f"it is a part of its {medium}, by start and end, and not cut out")
    content = image.data if isinstance(image, BytesImage) else image.read(MEDIA_LIMITS)
    if not isinstance(content, bytes) or not content:
        raise Fault("image_missing", f"the {medium if medium in _STORED else 'image'} is not in the shard")
    good, faults, _ = check_captions(record.captions, _CHECKS)
    if not good:
        raise faults[-1]
    row = {
        "id": record.id or stored_hash(content),
        "image": {"bytes": content, "path": image.path if isinstance(image, _Cell) else None},
        "captions": good,
    }
    return {**row, "seconds": _seconds(content, medium)} if medium in _STORED else row


def _seconds(content: bytes, medium: str) -> float:
    """Return a medium's length; raise medium_unknown_format if no prepared set keeps it so."""
    try:
        shown, rate = _STORED[medium](content)
    except UnreadableImageError as error:
        raise Fault("medium_unknown_format", str(error)) from error
    return len(shown) / rate
