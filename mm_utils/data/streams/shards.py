"""A stream's shards: find them, count their rows, read runs of rows, damaged ones too.

Counts are kept in the datasets cache, under the file's address, size and date.
"""

import errno
import hashlib
import json
import logging
import sys
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import pyarrow as pa

from mm_utils.data.faults import is_hopeless
from mm_utils.data.paths import shard_kind
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.tar_patterns import files_of_pattern
from mm_utils.data.streams.rows import Row, count_rows, read_rows, store_of
from mm_utils.files import is_passing, regular_file, retry
from mm_utils.stored import key_of, stored_value
from mm_utils.text import one_line

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

DAMAGE = (OSError, EOFError, ValueError, pa.ArrowException, tarfile.TarError, zlib.error, aiohttp.ClientError)
"""The errors of libraries on a shard that is cut off, damaged or out of reach; see `damage`."""
_OF_STORES = (
    *(("botocore.exceptions", name) for name in ("BotoCoreError", "ClientError")),
    ("gcsfs.retry", "HttpError"),
    ("azure.core.exceptions", "AzureError"),
)
_UNREACHABLE = (("botocore.exceptions", "ConnectionError"), ("botocore.exceptions", "HTTPClientError"))
_BUSY = (errno.EBUSY, errno.EIO, getattr(errno, "EREMOTEIO", errno.EIO))  # what an answer of 5xx becomes

_VERSION = 4  # of what is kept of a shard
_SAMPLE = 1 << 16  # bytes that are hashed at both ends of a shard
_PAUSES = (1, 4, 16)  # seconds between attempts to reach a server, or a network file system in a bad moment


@dataclass(frozen=True)
class Shard:
    """`rows` rows of a file, from `first` on; `content` hashes the file's size and ends."""

    url: str
    first: int
    rows: int
    content: str = field(default="", compare=False)

    @property
    def divisible(self) -> bool:
        """Whether a reader can begin in the middle at little cost."""
        return shard_kind(self.url) != "tar"


def damage(*more: type[BaseException]) -> tuple[type[BaseException], ...]:
    """Return `DAMAGE`, the own errors of those stores' libraries that are loaded, and `more`."""
    return (*DAMAGE, *_loaded(_OF_STORES), *more)


def _loaded(names: Iterable[tuple[str, str]]) -> tuple[type[BaseException], ...]:
    return tuple(getattr(sys.modules[module], name) for module, name in names if module in sys.modules)


def expand(pattern: str) -> list[str]:
    """Return, sorted, all files that a path or address with `*`, `{0..9}` or `{a,b}` names.

    Raises:
        ValueError: if its server cannot be reached.
    """
    if "://" in pattern:
        store_of(pattern)
    try:
        return sorted(patiently(files_of_pattern, pattern))
    except damage() as error:
        raise ValueError(
            f"shards {pattern} cannot be listed ({one_line(error)}). Check the address, the credentials and the connection."
        ) from error


def count_shards(urls: Sequence[str]) -> list[Shard]:
    """Return a shard for each file with rows; warn of damaged files and leave them out.

    Raises:
        ValueError: if a file does not exist or cannot be reached, or if more than half of them are damaged.
    """
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(_cached_count, urls))
    damaged = sum(found is None for found in counts)
    if is_hopeless(damaged, len(urls)):
        raise ValueError(f"{urls[0]}; {damaged} of {len(urls)} shards cannot be read. Write them anew.")
    return [Shard(url, 0, *found) for url, found in zip(urls, counts, strict=True) if found and found[0]]


def _cached_count(url: str) -> tuple[int, str] | None:
    """Return the number of rows, and a hash of the content; None for a damaged file."""
    key = key_of(_VERSION, pa.__version__, stamp_of(url))
    try:
        count, content = stored_value("shards", key, lambda: [patiently(count_rows, url), patiently(content_of, url)])
    except damage() as error:
        stamp_of(url)  # raises if it is the connection that fails
        logger.warning("Shard %s cannot be read and is left out: %s", url, one_line(error))
        return None
    return count, content


def content_of(url: str) -> str:
    """Hash a file's size, first and last 64 KiB: pairs there, and others' lengths in a footer."""
    size = int(_info(url).get("size") or 0)
    digest = hashlib.blake2b(f"{size} ".encode(), digest_size=8)
    files, path = store_of(url)
    is_remote = "file" not in files.protocol
    with files.open(path, "rb", cache_type="none") if is_remote else regular_file(path) as file:  # not megabytes ahead
        digest.update(file.read(_SAMPLE))
        if size > 2 * _SAMPLE:
            file.seek(size - _SAMPLE)
        digest.update(file.read(_SAMPLE))
    return digest.hexdigest()


def stamp_of(url: str) -> str:
    """Return address, size and date of a file as JSON, as far as the server states them.

    Raises:
        ValueError: if the server cannot be reached, or does not have the file.
    """
    try:
        about = patiently(_info, url)
    except damage() as error:
        raise ValueError(
            f"shard {url} cannot be opened ({one_line(error)}). Check its address, the credentials and the connection."
        ) from error
    dates = ("mtime", "ETag", "etag", "LastModified", "last_modified", "last_commit", "blob_id", "updated")
    return json.dumps([url, about.get("size"), *(str(about.get(date)) for date in dates)])


def _info(url: str) -> dict[str, Any]:
    files, path = store_of(url)
    return files.info(path)


def patiently(ask: Callable[[str], _Answer], url: str) -> _Answer:
    """Return what a store answers about an address; errors that may pass are tried again for 21 s."""
    return retry(lambda: ask(url), _may_pass, _PAUSES)


def _may_pass(error: BaseException) -> bool:
    unreachable = isinstance(error, (aiohttp.ClientError, ConnectionError, TimeoutError, *_loaded(_UNREACHABLE)))
    is_busy = isinstance(error, OSError) and error.errno in _BUSY
    return is_passing(error) or ((unreachable or is_busy) and not isinstance(error, FileNotFoundError))


class ShardReader:
    """Read runs of rows; one run after the other in a shard is read without opening it again.

    A run's rows depend on the shard alone, not on what was read before. Where a shard is damaged, the rest of the run is
    lost, of a tar also all rows behind it, and so are the further rows of a damaged row group. A file that is no longer
    there, though others in its folder are, is lost as a whole. Errors that may pass are retried for 21 s.

    Args:
        shards: the shards to read.
        source: names the columns to read.
    """

    def __init__(self, shards: Sequence[Shard], source: Source):
        self.shards, self.source = shards, source
        self._rows: Iterator[Row] = iter(())
        self._next: tuple[int, int] | None = None
        self._damaged: dict[int, str] = {}

    def read(self, shard: int, start: int, stop: int) -> list[Row]:
        """Read rows `start` to `stop` of the shard of this number; the reason stands for a lost row.

        Raises:
            ValueError: if the server or the folder of the shard can no longer be reached.
        """
        rows: list[Row] = []
        if shard in self._damaged:
            return [self._damaged[shard]] * (stop - start)
        url = self.shards[shard].url

        def passing(error: BaseException) -> bool:
            return isinstance(error, damage()) and not _is_gone(url, error) and ("://" in url or _may_pass(error))

        try:
            retry(lambda: self._extend(rows, shard, start, stop), passing, _PAUSES)
        except damage() as error:
            if not _is_gone(url, error):
                stamp_of(url)  # raises if it is the connection that fails
            self._lose(rows, shard, start, stop, error)
        return rows

    def _extend(self, rows: list[Row], shard: int, start: int, stop: int) -> None:
        """Read the rows that are still missing."""
        at, source = start + len(rows), self.shards[shard]
        if self._next != (shard, at):
            self._rows = read_rows(source.url, source.first + at, self.source)
        self._next = None  # until all are read
        for number in range(at, stop):
            row = next(self._rows, None)
            if row is None:
                raise EOFError(f"it ends at row {source.first + number}")
            rows.append(row)
        self._next = (shard, stop)

    def _lose(self, rows: list[Row], shard: int, start: int, stop: int, error: BaseException) -> None:
        source = self.shards[shard]
        reason = f"shard {source.url} cannot be read from row {source.first + start + len(rows)} on: {one_line(error)}"
        logger.warning("%s", reason)
        rows += [reason] * (stop - start - len(rows))
        if not source.divisible or isinstance(error, FileNotFoundError):  # nor will it come back
            self._damaged[shard] = reason


def _is_gone(url: str, error: BaseException) -> bool:
    """Return whether a local file was removed; of a lost disk, the folder is empty as well."""
    return isinstance(error, FileNotFoundError) and "://" not in url and any(Path(url).parent.glob("*"))
