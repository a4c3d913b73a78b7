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
unpacked to disk. Columns, captions and archives follow the rules of `mm_utils.data.sources`, captions those of
`mm_utils.data.prepare.checks` too; images must be embedded.
"""

import sys
import tarfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any, BinaryIO

import datasets
import fsspec
import pyarrow.parquet as pq

from mm_utils.data.faults import Fault
from mm_utils.data.parquet import ParquetRows
from mm_utils.data.prepare.checks import CheckArguments, check_captions
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.sources.columns import USUAL_NAMES, Columns, captions_of, find_column, id_of
from mm_utils.data.sources.records import BytesImage
from mm_utils.data.sources.source import Source
from mm_utils.data.sources.tables import find_table_columns
from mm_utils.data.sources.webdataset import BoundedHeader, Sample, captions_of_sample, read_samples

Row = dict[str, Any] | str
"""A training row with `FEATURES`; or, of a row that cannot be used, the reason."""

FEATURES = datasets.Features(
    {
        "id": datasets.Value("string"),
        "image": datasets.Image(decode=False),
        "captions": datasets.Sequence(datasets.Value("string")),
        "languages": datasets.Sequence(datasets.Value("string")),
    }
)
SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "tar", ".tgz": "tar", ".tar.gz": "tar"}
_Cells = tuple[Any, list[Any], list[str] | None, str | None]
"""Image, captions, languages and id, not checked."""

_CHECKS = CheckArguments()
_BATCH = 64  # rows read at a time, with their images
_LOOKED_AT = 20  # samples of a tar that decide whether it can be used
_READ_AHEAD = 8 << 20  # bytes per request to a remote server
_BUFFER = 1 << 20  # bytes of a column of a local file; without, whole row groups are held


def shard_kind(url: str) -> str | None:
    """Return `parquet`, `arrow` or `tar` by the address, or None."""
    name = url.split("?")[0].lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def open_shard(url: str) -> BinaryIO:
    """Open a file for reading with seeks; remote files by ranges of some megabytes."""
    files, path = fsspec.url_to_fs(url)
    if "file" in files.protocol:
        return open(path, "rb")
    ahead = "none" if shard_kind(url) == "parquet" else "readahead"  # pyarrow has its own buffers
    file: BinaryIO = files.open(path, "rb", block_size=_READ_AHEAD, cache_type=ahead)
    if not file.seekable():
        raise ValueError(f"shard {url} comes from a server that gives no ranges. Download it first.")
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


def check_columns(url: str, source: Source) -> None:
    """Raise ValueError if a table has no images or captions, or a tar no early sample.

    Clips and sounds are refused, too: only images stream.
    """
    medium = source.medium
    if shard_kind(url) == "arrow":
        medium = find_table_columns(datasets.Dataset.from_file(url).data.schema, source.title, source.columns).medium
    elif shard_kind(url) == "parquet":
        with open_shard(url) as file:
            medium = find_table_columns(pq.read_schema(file), source.title, source.columns).medium
    if medium in ("clip", "sound"):
        raise ValueError(f"{source.title}; these are {medium}s, and only images can be streamed. Drop --streaming.")
    if shard_kind(url) == "tar":
        rows = list(islice(read_rows(url, 0, source), _LOOKED_AT))
        if all(isinstance(row, str) for row in rows):
            raise ValueError(f"{source.title}; none of its first samples can be used ({rows[0]}). Check the shards.")


def read_rows(url: str, first: int, source: Source) -> Iterator[Row]:
    """Read the rows of a file from `first` on, a few at a time; `source` names the columns."""
    for number, read in enumerate(_READERS[str(shard_kind(url))](url, first, source), first):
        try:
            yield _training_row(*read())
        except Fault as fault:
            yield f"shard {url}, row {number}: {fault.reason}: {fault.detail}"


def _parquet_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    with open_shard(url) as file:
        table = ParquetRows(file, url, _READ_AHEAD if "://" in url else _BUFFER)
        columns = find_table_columns(table.file.schema_arrow, source.title, source.columns)
        for _, _, values in table.cells(_names(columns), _BATCH, first):
            yield partial(_table_cells, values, columns)


def _arrow_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    table = datasets.Dataset.from_file(url).data
    columns = find_table_columns(table.schema, source.title, source.columns)
    for batch in table.select(_names(columns)).slice(first).to_batches(_BATCH):
        for values in batch.to_pylist():
            yield partial(_table_cells, values, columns)


def _tar_rows(url: str, first: int, source: Source) -> Iterator[Callable[[], _Cells]]:
    with open_shard(url) as file, tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
        for number, sample in enumerate(read_samples(archive, url, first=first)):
            if number >= first:
                yield partial(_sample_cells, sample, source)


_READERS: dict[str, Callable[[str, int, Source], Iterator[Callable[[], _Cells]]]] = {
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "tar": _tar_rows,
}


def _names(columns: Columns) -> list[str]:
    named = (columns.image, columns.caption, columns.id, columns.language)
    return list(dict.fromkeys(name for name in named if name is not None))


def _table_cells(values: Mapping[str, Any], columns: Columns) -> _Cells:
    return values[str(columns.image)], *captions_of(values, columns), id_of(values, columns)


def _sample_cells(sample: Sample, source: Source) -> _Cells:
    """Read the members of a sample. Its id comes from .json: two keys may have the same image."""
    values = sample.values()
    captions, languages = captions_of_sample(sample, values, source, {})
    column = source.id_column or find_column("--id_column", list(values), source.title, None, USUAL_NAMES["id"])
    image = sample.image.data if isinstance(sample.image, BytesImage) else None
    return image, captions, languages, id_of(values, Columns(id=column))


def _training_row(image: Any, captions: list[Any], languages: list[str] | None, key: str | None) -> dict[str, Any]:
    cell = image if isinstance(image, dict) else {"bytes": image}
    content = cell.get("bytes")
    if not isinstance(content, bytes) or not content:
        raise Fault("image_missing", "the image is not in the shard")
    good, faults, _ = check_captions(captions, languages, _CHECKS)
    if not good:
        raise faults[-1]
    return {
        "id": key or stored_hash(content),
        "image": {"bytes": content, "path": cell.get("path")},  # raw pixels have their size there
        "captions": list(good),
        "languages": list(good.values()),
    }
