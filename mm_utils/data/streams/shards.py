"""A stream's shards: find them, count their rows, read runs of rows from any row on, damaged ones too.

A reader that starts at row r reads again the rows before r in their row group of Parquet, the headers before r of a tar, and
nothing of Arrow; from a server, tars and Arrow from the beginning. Images must be embedded.
"""

import hashlib
import json
import logging
import sys
import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
from datasets import Features, Image, Value
from datasets import Sequence as ListOf

from mm_utils.data.batches.order import OF_ANOTHER_SPLIT, SHOWN_IN_VALIDATION
from mm_utils.data.faults import Fault, is_hopeless
from mm_utils.data.images import raw_size
from mm_utils.data.parquet import ParquetRows, cells_of
from mm_utils.data.paths import files_of_pattern, shard_kind
from mm_utils.data.prepare.arguments import CheckArguments
from mm_utils.data.prepare.checks import check_captions
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import USUAL_NAMES, Columns, is_null, is_split
from mm_utils.data.rows.records import BadRow, BytesImage, Record, RecordBuilder
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.tables import find_table_columns, read_columns
from mm_utils.data.rows.tars import (
    KEY,
    MEDIUM,
    BoundedHeader,
    medium_of_samples,
    read_samples,
    row_of_sample,
    sample_columns,
)
from mm_utils.data.rows.text_files import Rows
from mm_utils.files import is_passing, read_json, regular_file, retry
from mm_utils.stored import key_of, stored
from mm_utils.text import one_line

logger = logging.getLogger(__name__)
Row = dict[str, Any] | str
"""A training row; or, of a row that cannot be used, the reason."""

FEATURES = Features({"id": Value("string"), "image": Image(decode=False), "captions": ListOf(Value("string"))})
"""Of a row."""
_BATCH = 64  # rows read at a time, with their images
_READ_AHEAD = 8 << 20
_BUFFER = 1 << 20  # bytes per request to a server; of a column of a local file
_SAMPLE = 1 << 16  # bytes that are hashed at both ends of a shard
_WHOLE = 10 << 30  # bytes of all shards on a disk that are hashed whole, once: seconds; of more, samples
_SAMPLES = 64
_SUMS = ("ETag", "etag", "md5Hash", "Content-MD5")  # what stores state of the content
_VERSION = 8  # of what is kept of a shard
_PAUSES = (1, 4, 16)  # seconds between attempts to reach a server, or a network file system in a bad moment
_UNREACHABLE = {"ConnectionError", "TimeoutError", "HTTPClientError", "ClientError"}  # of Python and of stores


@dataclass(frozen=True)
class Shard:
    """`rows` rows of a file, from `first` on; `content` hashes what it holds, and `state` that with its date and place."""

    url: str
    first: int
    rows: int
    content: str = field(default="", compare=False)
    state: str = field(default="", compare=False)

    @property
    def divisible(self) -> bool:
        """Whether a reader can begin in the middle at little cost."""
        return shard_kind(self.url) == "parquet" or (shard_kind(self.url) == "arrow" and "://" not in self.url)


def _may_pass(error: Exception) -> bool:
    return is_passing(error) or any(kind.__name__ in _UNREACHABLE for kind in type(error).__mro__)


def _ask(question: Callable[[str], Any], url: str, title: str = "shard {} cannot be opened") -> Any:
    """Return what a store answers about an address, tried again for 21 s; raise a ValueError, begun by `title`, if it does not."""
    try:
        return retry(lambda: question(url), _may_pass, _PAUSES)
    except Exception as error:  # every store has its own
        advice = "Check its address, the credentials and the connection." if "://" in url else "Check the path."
        raise ValueError(f"{title.format(url)} ({one_line(error)}). {advice}") from error


def expand(pattern: str) -> list[str]:
    """Return, sorted, all files that a path or address with `*`, `{0..9}` or `{a,b}` names; see `files_of_pattern`."""
    return sorted(_ask(files_of_pattern, pattern, "shards {} cannot be listed"))


def count_shards(urls: Sequence[str]) -> list[Shard]:
    """Return a shard for each file with rows; leave out damaged ones, with a warning, and raise ValueError if most are such."""
    with ThreadPoolExecutor(16) as pool:
        about = list(pool.map(info_of, urls))
        is_whole = sum(int(each.get("size") or 0) for each in about) <= _WHOLE
        found = list(pool.map(_counted, urls, about, [is_whole] * len(urls)))
    damaged = found.count(None)
    if is_hopeless(damaged, len(urls)):
        raise ValueError(f"{urls[0]}; {damaged} of {len(urls)} shards cannot be read. Write them anew.")
    return [shard for shard in found if shard and shard.rows]


def _counted(url: str, about: dict[str, Any], is_whole: bool) -> Shard | None:
    """Return a whole file, None for a damaged one.

    Its `content` hashes all of a file on disk or, of larger sets, the size, both ends (pairs, a footer) and 64 samples; of a file at
    a store, the size, both ends and the sum that the store states.
    """

    def look() -> tuple[int, str]:
        rows = count_rows(url)
        files, path = fsspec.url_to_fs(url)
        is_local = "file" in files.protocol
        if is_local and is_whole:
            content: Any
            with regular_file(path) as content:
                return rows, hashlib.file_digest(content, "blake2b").hexdigest()
        size = int(about.get("size") or 0)
        stated = next((about[name] for name in _SUMS if about.get(name)), None)
        starts = {0, max(0, size - _SAMPLE)}
        if is_local:
            # with both ends, some 4 MiB of a file
            starts.update(size * at // _SAMPLES for at in range(_SAMPLES))
        # By names: the second argument of s3fs is a version.
        blocks = (files.cat_file(path, start=start, end=min(size, start + _SAMPLE)) for start in sorted(starts))
        return rows, key_of(size, stated, *blocks)

    def make(folder: Path) -> None:
        (folder / "rows.json").write_text(json.dumps(retry(look, _may_pass, _PAUSES)), encoding="utf-8")

    try:
        kept = stored("shards", key := key_of(_VERSION, pa.__version__, url, about, is_whole), make)
        rows, content = read_json(kept / "rows.json")
        return Shard(url, 0, rows, content, key)
    except Exception as error:
        info_of(url)  # raises if it is the connection that fails
        logger.warning("Shard %s cannot be read and is left out: %s", url, one_line(error))
        return None


def info_of(url: str) -> dict[str, Any]:
    """Return what a server states of a file, such as size and date; raise a ValueError if there is none, or no server."""
    return _ask(lambda url: fsspec.url_to_fs(url)[0].info(fsspec.url_to_fs(url)[1]), url)


@contextmanager
def _opened(url: str) -> Iterator[ParquetRows | pa.RecordBatchStreamReader | tarfile.TarFile]:
    """Open a file; remote ones are read by ranges of some megabytes."""
    (files, path) = fsspec.url_to_fs(url)
    kind = shard_kind(url)
    is_local = "file" in files.protocol
    ahead = "none" if kind == "parquet" else "readahead"  # pyarrow reads whole buffers of Parquet
    with regular_file(path) if is_local else files.open(path, "rb", block_size=_READ_AHEAD, cache_type=ahead) as file:
        if not file.seekable():
            raise ValueError(f"shard {url} comes from a server that does not serve ranges. Download it first.")
        if kind == "parquet":
            yield ParquetRows(file, url, _BUFFER if is_local else _READ_AHEAD)
        elif kind == "arrow":
            yield pa.ipc.open_stream(pa.memory_map(path) if is_local else pa.PythonFile(file, "r"))
        else:
            with tarfile.open(fileobj=file, mode="r:*", tarinfo=BoundedHeader) as archive:
                yield archive


def count_rows(url: str) -> int:
    """Count the rows of a file; of a tar on a server, img2dataset's `NAME_stats.json` beside it is believed."""
    if shard_kind(url) == "tar" and "://" in url and "?" not in url:
        files, path = fsspec.url_to_fs(f"{url.removesuffix('.tar')}_stats.json")
        with suppress(FileNotFoundError, PermissionError, ValueError, KeyError, TypeError):
            # {"count": 10000, "successes": 9512, ...}
            return int(json.loads(files.cat_file(path))["successes"])
    with _opened(url) as shard:
        if isinstance(shard, tarfile.TarFile):
            # `first` behind all: headers alone are read
            return sum(1 for _ in read_samples(shard, url, first=sys.maxsize))
        return int(shard.file.metadata.num_rows) if isinstance(shard, ParquetRows) else sum(map(len, shard))


def check_columns(url: str, source: Source) -> None:
    """Raise a ValueError if a file holds no images, or a table has no column of them or of captions."""
    with _opened(url) as shard:
        if isinstance(shard, tarfile.TarFile):
            medium = medium_of_samples(read_samples(shard, url), source)
        else:
            if any(map(is_split, shard.schema.names)):
                text = "%s; rows whose column split says another one than %s are passed over"
                logger.warning(text, source.title, source.file_split)

            def read(names: list[str]) -> Iterator[dict[str, Any] | Fault]:
                return shard.cells(names, 1) if isinstance(shard, ParquetRows) else _arrow_cells(shard, names, 0)

            medium = find_table_columns(shard.schema, source.title, source.columns, read).medium
    if medium != "image":
        raise ValueError(f"{source.title}; it holds {medium}s, and images alone are streamed. Drop --streaming.")


def rows_from(url: str, first: int, source: Source, held_out: Collection[str] = ()) -> Iterator[Row]:
    """Read the rows of a file from `first` on; `held_out` are ids and hashed bytes of images that are not trained on."""
    builder = RecordBuilder(source, ".")
    with _opened(url) as shard:
        if isinstance(shard, tarfile.TarFile):
            columns = sample_columns(source, "image")
            rows = _tar_rows(shard, url, first, source)
        else:
            columns = find_table_columns(shard.schema, source.title, source.columns)
            rows = _table_rows(shard, first, columns)
        for number, record in enumerate(builder.records(columns, rows), first):
            try:
                good = _training_row(record)
                shown = held_out and (good["id"] in held_out or stored_hash(good["image"]["bytes"]) in held_out)
                row: Row = good
                if source.file_split is not None and record.split not in (None, source.file_split):
                    row = f"shard {url}, row {number}: {OF_ANOTHER_SPLIT}"
                elif shown:
                    row = f"shard {url}, row {number}: {SHOWN_IN_VALIDATION}"
            except Fault as fault:
                row = f"shard {url}, row {number}: {fault.reason}: {fault.detail}"
            yield row


def _tar_rows(shard: tarfile.TarFile, url: str, first: int, source: Source) -> Rows:
    for sample in islice(read_samples(shard, url, kinds=("image",), first=first), first, None):
        row = row_of_sample(sample, source, "image")
        if isinstance(row, dict):
            # By .json alone: two keys may have the same image.
            stated = (row[name] for name in USUAL_NAMES["id"] if not is_null(row.get(name)))
            row[KEY] = next(stated, None) or stored_hash(row[MEDIUM].data)
        yield sample.key, row


def _table_rows(shard: ParquetRows | pa.RecordBatchStreamReader, first: int, columns: Columns) -> Rows:
    image = str(columns.image)
    names = read_columns(columns, shard.schema.names, with_image=True)
    is_parquet = isinstance(shard, ParquetRows)
    for values in shard.cells(names, _BATCH, first) if is_parquet else _arrow_cells(shard, names, first):
        if isinstance(values, dict):
            cell = values[image] if isinstance(values[image], dict) else {"bytes": values[image]}
            values[image] = BytesImage(cell.get("path") or "", cell.get("bytes"))
        yield "row", values


def _arrow_cells(
    batches: pa.RecordBatchStreamReader, names: list[str], first: int
) -> Iterator[dict[str, Any] | Fault]:
    for batch in batches:
        for start in range(first, len(batch), _BATCH):
            yield from cells_of(batch.select(names).slice(start, _BATCH))
        first = max(0, first - len(batch))


def _training_row(record: Record | BadRow) -> dict[str, Any]:
    """Return a row that can be trained on; raises the fault of one that cannot."""
    if isinstance(record, BadRow):
        raise record.fault
    content = record.image.data if isinstance(record.image, BytesImage) else None
    if not isinstance(content, bytes) or not content:
        raise Fault("image_missing", "the image is not in the shard")
    captions, faults, _ = check_captions(record.captions, CheckArguments())
    if not captions:
        raise faults[-1]
    image: dict[str, Any] = {"bytes": content, "path": record.image.name}
    if not raw_size(image):
        image["path"] = None  # it is of use where it says the size of raw pixels
    return {"id": record.id or stored_hash(content), "image": image, "captions": captions}


class ShardReader:
    """Read runs of rows; one run after the other in a shard is read without opening it again, and the last one is kept.

    Where a shard is damaged, the rest of the run is lost, and of a tar all rows behind it, whatever was read before.
    """

    def __init__(self, shards: Sequence[Shard], source: Source, held_out: Collection[str] = ()):
        self.shards = shards
        self.source = source
        self.held_out = held_out
        self._rows: Iterator[Row] = iter(())
        self._next: tuple[int, int] | None = None
        self._last: tuple[tuple[int, int, int], list[Row]] = (-1, -1, -1), []
        self._damaged: dict[int, str] = {}

    def read(self, shard: int, start: int, stop: int) -> list[Row]:
        """Read rows `start` to `stop` of a shard; the reason stands for a lost row. Raises ValueError if the shard is gone."""
        if self._last[0] == (shard, start, stop):
            return self._last[1]
        if shard in self._damaged:
            return [self._damaged[shard]] * (stop - start)
        rows: list[Row] = []
        self._last = (-1, -1, -1), []  # given up before the next run is read
        url = self.shards[shard].url
        first = self.shards[shard].first

        def read_on() -> None:
            at = start + len(rows)
            if self._next != (shard, at):
                self._rows = rows_from(url, first + at, self.source, self.held_out)
            self._next = None  # until all are read
            for row in islice(self._rows, stop - at):
                rows.append(row)
            if len(rows) < stop - start:
                raise EOFError(f"it ends at row {first + start + len(rows)}")
            self._next = (shard, stop)

        try:
            retry(read_on, lambda error: "://" in url or _may_pass(error), _PAUSES)
        except Exception as error:
            info_of(url)  # raises if it is the connection that fails
            reason = f"shard {url} cannot be read from row {first + start + len(rows)} on: {one_line(error)}"
            logger.warning("%s", reason)
            rows += [reason] * (stop - start - len(rows))
            if not self.shards[shard].divisible:  # nor will what is behind it come back
                self._damaged[shard] = reason
        self._last = (shard, start, stop), rows
        return rows
