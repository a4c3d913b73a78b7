"""The shards of a stream: finding them, counting their rows, and reading runs of rows, damaged files included.

Counts are kept in the datasets cache, under the file's address, size and date.
"""

import glob
import hashlib
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import aiohttp
import datasets
import fsspec

from mm_utils.data.raw.paths import is_passing
from mm_utils.data.stream.formats import DAMAGE, Record, count_rows, kind_of, one_line, read_rows

logger = logging.getLogger(__name__)
_Answer = TypeVar("_Answer")

_PAUSES = (1, 4, 16)  # seconds between attempts to reach a server, or a network file system in a bad moment


@dataclass(frozen=True)
class Shard:
    """`rows` rows of a file, from row `first` on."""

    url: str
    first: int
    rows: int

    @property
    def divisible(self) -> bool:
        """Whether a reader can begin in the middle at little cost."""
        return kind_of(self.url) != "tar"


def expand(pattern: str) -> list[str]:
    """All files that a path or address with `*`, `{000..063}` or `{a,b}` in it names, sorted; itself if it has neither."""
    names = _expand_braces(pattern)
    found: list[str] = []
    for name in names:
        if not any(sign in name for sign in "*["):
            found.append(name)
        elif "://" in name:
            files = fsspec.url_to_fs(name)[0]
            found += [files.unstrip_protocol(path) for path in files.glob(name)]
        else:
            found += glob.glob(name, recursive=True)
    return sorted(dict.fromkeys(found))


def _expand_braces(pattern: str) -> list[str]:
    match = re.search(r"\{([^{}]+)\}", pattern)
    if match is None:
        return [pattern]
    span = re.fullmatch(r"(\d+)\.\.(\d+)", match[1])
    if span is None:
        choices = match[1].split(",")
    else:
        choices = [str(number).zfill(len(span[1])) for number in range(int(span[1]), int(span[2]) + 1)]
    return [
        name
        for choice in choices
        for name in _expand_braces(pattern[: match.start()] + choice + pattern[match.end() :])
    ]


def count_shards(urls: Sequence[str]) -> list[Shard]:
    """One shard per file that holds rows. Damaged files are named in a warning and left out.

    Raises:
        ValueError: if a file does not exist or cannot be reached, or if more than half of them are damaged.
    """
    cache = Path(datasets.config.HF_DATASETS_CACHE, "tandem_shards")
    cache.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(16) as pool:
        counts = list(pool.map(lambda url: _cached_count(url, cache), urls))
    damaged = sum(count is None for count in counts)
    if 2 * damaged > len(urls):
        raise ValueError(f"{urls[0]}; {damaged} of {len(urls)} shards cannot be read. Write them anew.")
    return [Shard(url, 0, count) for url, count in zip(urls, counts, strict=True) if count]


def _cached_count(url: str, cache: Path) -> int | None:
    stamp = _stamp(url)
    kept = cache / hashlib.blake2b(stamp.encode(), digest_size=16).hexdigest()
    if kept.is_file():
        return int(kept.read_text())
    try:
        count = _patiently(count_rows, url)
    except DAMAGE as error:
        _stamp(url)  # raises if it is the connection that fails
        logger.warning("Shard %s cannot be read and is left out: %s", url, one_line(error))
        return None
    part = kept.with_suffix(f".{os.getpid()}")
    part.write_text(str(count))
    part.replace(kept)
    return count


def _stamp(url: str) -> str:
    """Address, size and date of a file, as far as the server says."""
    try:
        about = _patiently(_info, url)
    except DAMAGE as error:
        raise ValueError(
            f"shard {url} cannot be opened ({one_line(error)}). Check its address and the connection."
        ) from error
    dates = ("mtime", "ETag", "etag", "LastModified", "last_modified", "last_commit", "blob_id", "updated")
    return json.dumps([url, about.get("size"), *(str(about.get(date)) for date in dates)])


def _info(url: str) -> dict[str, Any]:
    files, path = fsspec.url_to_fs(url)
    return files.info(path)


def _patiently(ask: Callable[[str], _Answer], url: str) -> _Answer:
    """What `ask` says of a file, or the last of its errors, if they do not pass."""
    for pause in _PAUSES:
        try:
            return ask(url)
        except DAMAGE as error:
            if not _may_pass(error):
                raise
        time.sleep(pause)
    return ask(url)


def _may_pass(error: BaseException) -> bool:
    unreachable = isinstance(error, (aiohttp.ClientError, ConnectionError, TimeoutError))
    return is_passing(error) or (unreachable and not isinstance(error, FileNotFoundError))


def _has_neighbours(url: str) -> bool:
    """Whether the local folder of a file has other files; where a disk is gone, there are none."""
    return "://" not in url and any(Path(url).parent.glob("*"))


class ShardReader:
    """Reads runs of rows; one run after the other in a shard is read without opening it again.

    What a run gives depends on the shard alone, not on what was read before. Where a shard is damaged, the rest of the run
    is lost, of a tar also all behind it, and so is whatever follows in a damaged row group. A file that is no longer there,
    though others in its folder are, is lost as a whole. What may pass is tried again, 21 s long in all.

    Args:
        shards: of which rows are read.
        columns: to read.
    """

    def __init__(self, shards: Sequence[Shard], columns: Sequence[str]):
        self.shards, self.columns = shards, columns
        self._rows: Iterator[Record] = iter(())
        self._next: tuple[int, int] | None = None
        self._damaged: dict[int, str] = {}

    def read(self, shard: int, start: int, stop: int) -> list[Record]:
        """Rows `start` to `stop` of the shard of this number; those that are lost as the reason why.

        Raises:
            ValueError: if the server or the folder of the shard can no longer be reached.
        """
        url = self.shards[shard].url
        records: list[Record] = []
        if shard in self._damaged:
            return [self._damaged[shard]] * (stop - start)
        for pause in (*_PAUSES, None):
            try:
                self._extend(records, shard, start, stop)
                break
            except DAMAGE as error:
                self._next = None
                gone = isinstance(error, FileNotFoundError) and _has_neighbours(url)
                if pause is not None and not gone and ("://" in url or _may_pass(error)):
                    time.sleep(pause)
                    continue
                if not gone:
                    _stamp(url)  # raises if it is the connection that fails
                self._lose(records, shard, start, stop, error)
                break
        return records

    def _extend(self, records: list[Record], shard: int, start: int, stop: int) -> None:
        at = start + len(records)
        if self._next != (shard, at):
            source = self.shards[shard]
            self._rows = read_rows(source.url, source.first + at, self.columns)
        for row in range(at, stop):
            record = next(self._rows, None)
            if record is None:
                raise EOFError(f"it ends at row {self.shards[shard].first + row}")
            records.append(record)
        self._next = (shard, stop)

    def _lose(self, records: list[Record], shard: int, start: int, stop: int, error: BaseException) -> None:
        source = self.shards[shard]
        row = source.first + start + len(records)
        reason = f"shard {source.url} cannot be read from row {row} on: {one_line(error)}"
        logger.warning("%s", reason)
        records += [reason] * (stop - start - len(records))
        if not source.divisible or isinstance(error, FileNotFoundError):  # nor will it come back
            self._damaged[shard] = reason
