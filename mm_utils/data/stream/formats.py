"""The formats that a stream reads, each from any row on: Parquet, Arrow and tar, on disk or on a server.

=========  ===============================================  =====================================================
format     rows are counted by                              a reader that starts at row r reads again
=========  ===============================================  =====================================================
Parquet    the footer                                       the rows before r in its row group
Arrow      the record batches' headers, memory-mapped       nothing
tar        walking the headers, once; on a remote server    on disk, the headers before r; from a server, the file
           that is one pass over the file                   from its beginning
=========  ===============================================  =====================================================

Remote files are read by ranges, through `fsspec`: `https://`, `hf://`, `s3://` and whatever else is installed. Nothing is
unpacked to disk, and nothing unpickled.

A tar holds samples as WebDataset writes them: consecutive members whose names agree up to the first dot of the last part.
"""

import json
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, BinaryIO

import aiohttp
import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Record = dict[str, Any] | str
"""Column -> value; or, of a row that cannot be read, why not."""

DAMAGE = (OSError, EOFError, ValueError, pa.ArrowException, tarfile.TarError, zlib.error, aiohttp.ClientError)
"""What a shard that is cut off, damaged or out of reach makes its libraries raise."""

SUFFIXES = {".parquet": "parquet", ".arrow": "arrow", ".tar": "tar", ".tgz": "tar", ".tar.gz": "tar"}
_IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff")
_LARGEST_MEMBER = 64 << 20  # bytes; a header may claim any size, and one sample must not take all memory
_ROWS_AT_ONCE = 64
_READ_AHEAD = 8 << 20  # bytes per request to a remote server
_BUFFER = 1 << 20  # bytes of a column of a local file; without, whole row groups are held


def kind_of(url: str) -> str | None:
    """`parquet`, `arrow` or `tar`, by the address; None if it is none of them."""
    name = url.split("?")[0].lower()
    return next((kind for suffix, kind in SUFFIXES.items() if name.endswith(suffix)), None)


def count_rows(url: str) -> int:
    """Rows of a file."""
    kind = kind_of(url)
    if kind == "arrow":
        return len(datasets.Dataset.from_file(url))
    with _open(url) as file:
        if kind == "parquet":
            return int(pq.read_metadata(file).num_rows)
        return sum(1 for _ in _tar_samples(file, sys.maxsize))


def _open(url: str) -> BinaryIO:
    """Open for reading with seeks; remote files by ranges of some megabytes."""
    files, path = fsspec.url_to_fs(url)
    if "file" in files.protocol:
        return open(path, "rb")
    ahead = (
        "none" if kind_of(url) == "parquet" else "readahead"
    )  # pyarrow reads columns in turn and has its own buffers
    file: BinaryIO = files.open(path, "rb", block_size=_READ_AHEAD, cache_type=ahead)
    if not file.seekable():
        raise ValueError(f"shard {url} comes from a server that gives no ranges. Download it first.")
    return file


def column_names(url: str) -> list[str]:
    """Columns of a shard; of a tar, those of its first samples."""
    kind = kind_of(url)
    if kind == "arrow":
        return datasets.Dataset.from_file(url).column_names
    if kind == "parquet":
        with _open(url) as file:
            return pq.read_schema(file).names
    first = (record for record, _ in zip(read_rows(url, 0), range(20), strict=False) if isinstance(record, dict))
    return list(dict.fromkeys(name for record in first for name in record))


def read_rows(url: str, first: int, columns: Sequence[str] | None = None) -> Iterator[Record]:
    """The rows of a file from `first` on, its `columns` (all, by default), a few at a time.

    A tar's samples have the columns `image`, `txt` and those of their JSON, whatever `columns` says.
    """
    return _READERS[str(kind_of(url))](url, first, columns)


def _parquet_rows(url: str, first: int, columns: Sequence[str] | None) -> Iterator[Record]:
    with _open(url) as file:
        table = pq.ParquetFile(file, buffer_size=_READ_AHEAD if "://" in url else _BUFFER, pre_buffer=False)
        sizes = [table.metadata.row_group(group).num_rows for group in range(table.num_row_groups)]
        stops = np.cumsum(sizes)
        # One row group after the other, so that its batches are the same wherever the reading began.
        for group in range(int(np.searchsorted(stops, first, side="right")), len(sizes)):
            skip = max(0, first - int(stops[group] - sizes[group]))
            for batch in table.iter_batches(_ROWS_AT_ONCE, [group], columns, use_threads=False):
                yield from batch.slice(min(skip, len(batch))).to_pylist()
                skip = max(0, skip - len(batch))


def _arrow_rows(url: str, first: int, columns: Sequence[str] | None) -> Iterator[Record]:
    table = datasets.Dataset.from_file(url).data
    table = table.select(list(columns)) if columns is not None else table
    for batch in table.slice(first).to_batches(_ROWS_AT_ONCE):
        yield from batch.to_pylist()


def _tar_rows(url: str, first: int, columns: Sequence[str] | None) -> Iterator[Record]:
    with _open(url) as file:
        for place, members in enumerate(_tar_samples(file, first)):
            if place >= first:
                record = _sample(members)
                yield record if isinstance(record, dict) else f"shard {url}, row {place}: {record}"


def _sample(members: dict[str, bytes]) -> Record:
    image = next((members[suffix] for suffix in _IMAGE_SUFFIXES if suffix in members), None)
    try:
        record: dict[str, Any] = json.loads(members.get("json", b"{}"))
        if "txt" in members:
            record["txt"] = members["txt"].decode()
        return {**record, "image": image}
    except (ValueError, TypeError, RecursionError) as error:
        return f"its text cannot be read, {one_line(error)}"


def _tar_samples(file: BinaryIO, first: int) -> Iterator[dict[str, bytes]]:
    """The samples of a tar, by suffix; those before the `first`-th without their contents.

    Raises:
        tarfile.TarError: if it is damaged or cut off, also where the library takes that for the end.
    """
    with tarfile.open(fileobj=file, mode="r:*") as tar:
        key, number, sample = None, -1, {}  # type: tuple[str, str] | None, int, dict[str, bytes]
        while (member := tar.next()) is not None:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep every header it has seen
            if not member.isfile():
                continue
            folder, _, name = member.name.rpartition("/")
            stem, _, suffix = name.partition(".")
            if (folder, stem) != key:
                if key is not None:
                    yield sample
                key, number, sample = (folder, stem), number + 1, {}
            if number >= first and member.size <= _LARGEST_MEMBER:
                content = tar.extractfile(member)
                sample[suffix.lower()] = content.read() if content is not None else b""
                if len(sample[suffix.lower()]) < member.size:
                    raise tarfile.ReadError("unexpected end of data")
        _check_end(tar)
        if key is not None:
            yield sample


def _check_end(tar: tarfile.TarFile) -> None:
    """A header that cannot be read ends the reading like the zeros of a true end; tell them apart."""
    stream: Any = tar.fileobj
    stream.seek(tar.offset)
    if stream.read(tarfile.BLOCKSIZE) != tarfile.NUL * tarfile.BLOCKSIZE:
        raise tarfile.ReadError(f"no readable header at byte {tar.offset}, and no end of the archive either")


_READERS: dict[str, Callable[[str, int, Sequence[str] | None], Iterator[Record]]] = {
    "parquet": _parquet_rows,
    "arrow": _arrow_rows,
    "tar": _tar_rows,
}


def one_line(error: BaseException) -> str:
    """Kind and first line of an error."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"
