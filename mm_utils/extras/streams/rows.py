"""Read a shard's rows from any row on: Parquet, Arrow and tar, on disk or a server.

=========  ===============================================  =====================================================
format     rows are counted by                              a reader that starts at row r reads again
=========  ===============================================  =====================================================
Parquet    the footer                                       the rows before r in its row group
Arrow      the record batches' headers, memory-mapped       nothing
tar        walking the headers, once; on a remote server    on disk, the headers before r; from a server, the file
           that is one pass over the file                   from its beginning
=========  ===============================================  =====================================================

Remote files are read by ranges, through `fsspec`: `https://`, `hf://`, `s3://` and whatever else is installed. Nothing is
unpacked to disk. Columns, captions and archives follow the rules of `mm_utils.data.rows`, captions those of
`mm_utils.data.prepare.checks` too; images must be embedded. Sounds and clips must be as prepared sets keep them, WAV and AVI of
JPEG frames: training has no codec, and cuts nothing out at `start` and `end`.
"""

import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import datasets
import fsspec
import pyarrow.parquet as pq

from mm_utils.data import media
from mm_utils.data.faults import Fault
from mm_utils.data.images import UnreadableImageError
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.parquet import ParquetRows, cells_of
from mm_utils.data.paths import shard_kind
from mm_utils.data.prepare.checks import CheckArguments, check_captions
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import USUAL_NAMES, Columns, captions_of, find_column, id_of, is_null
from mm_utils.data.rows.records import BytesImage
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.tables import find_table_columns
from mm_utils.data.rows.webdataset import (
    BoundedHeader,
    Sample,
    captions_of_sample,
    medium_of_samples,
    read_samples,
)

Row = dict[str, Any] | str
"""A training row with `features_of` its kind; or, of a row that cannot be used, the reason."""

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "image": datasets.Image(decode=False),
        "captions": datasets.Sequence(datasets.Value("string")),
        "languages": datasets.Sequence(datasets.Value("string")),
    }
)
_Cells = tuple[Any, list[Any], list[str] | None, str | None]
"""Image, clip or sound, captions, languages and id, not checked."""

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
_BUFFER = 1 << 20  # bytes of a column of a local file; without, whole row groups are held


def features_of(medium: str) -> datasets.Features:
    """Return the columns of a medium's rows; clips and sounds have their `seconds`, too."""
    if medium not in _STORED:
        return FEATURES
    return datasets.Features({**FEATURES, "image": media.FEATURES[medium], "seconds": datasets.Value("float64")})


def open_shard(url: str) -> BinaryIO:
    """Open a file for reading with seeks; remote files by ranges of some megabytes."""
    files, path = fsspec.url_to_fs(url)
    if "file" in files.protocol:
        return open(path, "rb")
    ahead = "none" if shard_kind(url) == "parquet" else "readahead"  # pyarrow has its own buffers
    file: BinaryIO = files.open(path, "rb", block_size=_READ_AHEAD, cache_type=ahead)
    if not file.seekable():
        raise ValueError(f"shard {url} comes from a server that does not serve ranges. Download it first.")
    return file


def count_rows(url: str) -> int:
    """Count the rows of a file."""
    kind = shard_kind(url)
    if kind == "arrow":
        return len(datasets.Dataset.from_file(url))
    with open_shard(url) as file:
        if kind == "parquet":
            return int(pq.read_metadata(file).num_rows)
        with tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
            return sum(1 for _ in read_samples(archive, url, first=sys.maxsize))


def check_columns(url: str, source: Source) -> str:
    """Return the kind of the media of a file.

    Raises:
        ValueError: if a table has no column of media or captions, or no early row of a tar, or of clips or sounds, can be used.
    """
    if shard_kind(url) == "arrow":
        schema = datasets.Dataset.from_file(url).data.schema
        medium = find_table_columns(schema, source.title, source.columns).medium
    else:
        with open_shard(url) as file:
            if shard_kind(url) == "parquet":
                medium = find_table_columns(pq.read_schema(file), source.title, source.columns).medium
            else:
                with tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
                    medium = medium_of_samples(read_samples(archive, url), source)
    if shard_kind(url) == "tar" or medium in _STORED:
        rows = list(islice(read_rows(url, 0, replace(source, medium=medium)), _LOOKED_AT))
        if all(isinstance(row, str) for row in rows):
            raise ValueError(
                f"{source.title}; none of its first samples can be used ({rows[0]}). "
                + ("Check the shards." if medium == "image" else _PREPARE)
            )
    return medium


def read_rows(url: str, first: int, source: Source) -> Iterator[Row]:
    """Read the rows of a file from `first` on, a few at a time; `source` names the columns."""
    for number, read in enumerate(_READERS[str(shard_kind(url))](url, first, source), first):
        try:
            yield _training_row(*read(), source.medium)
        except Fault as fault:
            yield f"shard {url}, row {number}: {fault.reason}: {fault.detail}"


def _parquet_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    with open_shard(url) as file:
        table = ParquetRows(file, url, _READ_AHEAD if "://" in url else _BUFFER)
        columns = find_table_columns(table.file.schema_arrow, source.title, source.columns)
        for _, _, values in table.cells(_names(columns, table.file.schema_arrow.names), _BATCH, first):
            yield partial(_table_cells, values, columns)


def _arrow_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    table = datasets.Dataset.from_file(url).data
    columns = find_table_columns(table.schema, source.title, source.columns)
    for batch in table.select(_names(columns, table.column_names)).slice(first).to_batches(_BATCH):
        for values in cells_of(batch):
            yield partial(_table_cells, values, columns)


def _tar_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    with open_shard(url) as file, tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
        kinds = (source.medium,) if source.medium in _STORED else ("image",)
        for number, sample in enumerate(read_samples(archive, url, kinds=kinds, first=first)):
            if number >= first:
                yield partial(_sample_cells, sample, source)


_READERS: dict[str, Callable[[str, int, Source], Iterator[Callable[[], _Cells]]]] = {
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "tar": _tar_rows,
}


def _names(columns: Columns, known: Sequence[str]) -> list[str]:
    cut = _CUT if columns.medium in _STORED else ()
    named = (columns.image, columns.caption, columns.id, columns.language, *cut)
    return list(dict.fromkeys(name for name in named if name in known))


def _table_cells(values: Mapping[str, Any] | Fault, columns: Columns) -> _Cells:
    if isinstance(values, Fault):
        raise values
    _refuse_part(values, columns.medium)
    return values[str(columns.image)], *captions_of(values, columns), id_of(values, columns)


def _sample_cells(sample: Sample, source: Source) -> _Cells:
    """Read the members of a sample. Its id comes from .json: two keys may have the same image."""
    values = sample.values()
    _refuse_part(values, source.medium)
    captions, languages = captions_of_sample(sample, values, source, {})
    column = source.id_column or find_column("--id_column", list(values), source.title, None, USUAL_NAMES["id"])
    member = next(iter(sample.media.values()), None)
    content = member.data if isinstance(member, BytesImage) else None
    return content, captions, languages, id_of(values, Columns(id=column))


def _refuse_part(values: Mapping[str, Any], medium: str) -> None:
    """Raise span_outside for a clip or sound that is a part of its file."""
    if medium in _STORED and not all(is_null(values.get(name)) for name in _CUT):
        raise Fault("span_outside", f"it is a part of its {medium}, by start and end, and not cut out")


def _training_row(
    image: Any, captions: list[Any], languages: list[str] | None, key: str | None, medium: str
) -> dict[str, Any]:
    cell = image if isinstance(image, dict) else {"bytes": image}
    content = cell.get("bytes")
    if not isinstance(content, bytes) or not content:
        raise Fault("image_missing", f"the {medium if medium in _STORED else 'image'} is not in the shard")
    good, faults, _ = check_captions(captions, languages, _CHECKS)
    if not good:
        raise faults[-1]
    row = {
        "id": key or stored_hash(content),
        "image": {"bytes": content, "path": cell.get("path")},  # raw pixels have their size there
        "captions": list(good),
        "languages": list(good.values()),
    }
    return {**row, "seconds": _seconds(content, medium)} if medium in _STORED else row


def _seconds(content: bytes, medium: str) -> float:
    """Return a medium's length; raise medium_unknown_format if no prepared set keeps it so."""
    try:
        shown, rate = _STORED[medium](content)
    except UnreadableImageError as error:
        raise Fault("medium_unknown_format", str(error)) from error
    return len(shown) / rate
