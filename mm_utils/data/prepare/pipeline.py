"""Read, check and store raw sources on all cores, and only once.

The result is described in `mm_utils.data.prepare.on_disk`; every row or caption that was set aside is in
`quarantine.jsonl` with its source, place and reason.
"""

import itertools
import multiprocessing
import os
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from tqdm.auto import tqdm

from mm_utils.data.faults import REASONS, is_hopeless
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import ChunkResult, Storage, cut_into_chunks, ingest
from mm_utils.data.rows.detect import detect, read_source
from mm_utils.data.rows.records import BadRow, Record
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.text import one_line

_EARLY_ROWS = 1000  # of a source, after which a hopeless one is not read to its end


class _Here(Executor):
    """Computes each call at once, in this process: one worker needs no fork, and a fork beside threads may hang."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:
        """Compute a call; see `concurrent.futures.Executor`."""
        future: Future = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def local_pool(workers: int) -> Executor:
    """Return processes of this machine; forked ones need not import anything again, which would take longer than a small set."""
    if workers == 1:
        return _Here()
    context = multiprocessing.get_context("fork" if hasattr(os, "fork") else None)
    return ProcessPoolExecutor(workers, context, _set_up_worker, (os.getpid(),))


@dataclass(frozen=True)
class IngestPlan:
    """Settings of `ingest_sources`.

    Attributes:
        workers: processes.
        max_bad_fraction: a source with a larger share of bad rows is refused.
        max_rows: rows that are read of each source; None reads all.
        pool: makes the pool of the workers.
    """

    checks: CheckArguments
    storage: Storage
    workers: int
    max_bad_fraction: float
    max_rows: int | None = None
    pool: Callable[[int], Executor] = local_pool


@dataclass
class SourceTally:
    """Counts of the rows of one source that were read, and of those that were lost."""

    source: Source
    rows: int = 0
    bad: int = 0


@dataclass
class Ingested:
    """The outcome of all chunks.

    Attributes:
        sources: by name.
        parts: the files with the rows, in order.
        faults, notes: see `mm_utils.data.prepare.ingest.ChunkResult`.
    """

    sources: dict[str, SourceTally]
    parts: list[Path] = field(default_factory=list)
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def flush(folder: Path) -> None:
    """Write all files of `folder` through to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def ingest_sources(sources: list[Source], paths: PathArguments, plan: IngestPlan, work: Path) -> Ingested:
    """Read all sources; check and store their rows in `work`. Existing chunks are kept.

    Raises:
        ValueError: if a source cannot be read, or more than `plan.max_bad_fraction` of its rows are bad.
    """
    with _reading(*sources):
        sources = _named([replace(source, format=source.format or detect(source)) for source in sources])
    found = Ingested({source.name: SourceTally(source) for source in sources})
    given = (row for source in sources for row in itertools.islice(rows_of(source, paths), plan.max_rows))
    for part, result in ingest_rows(_of_one_kind(given, plan.storage), plan, work):
        found.parts.append(part)
        found.faults += result.faults
        found.notes.update(result.notes)
        for name, tally in found.sources.items():
            tally.rows += result.rows.get(name, 0)
            tally.bad += result.bad.get(name, 0)
            if tally.rows >= _EARLY_ROWS:
                _refuse_hopeless(tally, plan.max_bad_fraction, found.faults)
    none_left = all(tally.bad == tally.rows for tally in found.sources.values())
    for tally in found.sources.values():
        _refuse_hopeless(tally, plan.max_bad_fraction, found.faults, none_left)
    return found


def rows_of(source: Source, paths: PathArguments) -> Iterator[Record | BadRow]:
    """Yield the rows of a source.

    Raises:
        ValueError: also if a file of the source cannot be read.
    """
    with _reading(source):
        yield from read_source(source, paths)


@contextmanager
def _reading(*sources: Source) -> Iterator[None]:
    """Turn the system's refusal to read a file of a source into a ValueError that names it."""
    try:
        yield
    except OSError as error:
        named = error.filename or " ".join(source.path for source in sources)
        reason = error.strerror or one_line(error)
        raise ValueError(
            f"{sources[0].title}; {named} cannot be read: {reason}. Check the path and its permissions."
        ) from error


def ingest_rows(rows: Iterable[Record | BadRow], plan: IngestPlan, work: Path) -> Iterator[tuple[Path, ChunkResult]]:
    """Check and store rows on all cores; yield the files of each chunk, in order. Existing ones are kept.

    Raises:
        ValueError: if a process was killed.
    """
    parts = work / "parts"
    parts.mkdir(exist_ok=True)
    with tqdm(desc="Checking", unit=" rows", smoothing=0.05) as bar, plan.pool(plan.workers) as pool:
        try:
            under_way: deque[tuple[int, Future[ChunkResult]]] = deque()
            chunks = iter(cut_into_chunks(rows))
            chunk = next(chunks, None)
            while under_way or chunk is not None:
                if chunk is not None:
                    under_way.append((chunk.number, pool.submit(ingest, chunk, parts, plan.checks, plan.storage)))
                    chunk = next(chunks, None)
                if chunk is None or len(under_way) >= 2 * plan.workers:
                    number, future = under_way.popleft()
                    result = future.result()
                    bar.update(sum(result.rows.values()))
                    yield parts / f"part-{number:06d}.arrow", result
        except BrokenProcessPool as error:
            raise ValueError(
                "a process that decodes images was killed, probably for lack of memory. Give fewer with --num_proc; the "
                "same command resumes where this stopped."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise


def _of_one_kind(rows: Iterable[Record | BadRow], storage: Storage) -> Iterator[Record | BadRow]:
    """Yield the rows; refuse a second kind of medium, and a store that the kind does not have."""
    first: Record | None = None
    for row in rows:
        if isinstance(row, Record):
            if first is None and row.medium != "image" and storage.store in ("png", "raw"):
                raise ValueError(f"--store is {storage.store}; clips are kept as JPEG frames, sounds as WAV. Drop it.")
            first = first or row
            if row.medium != first.medium:
                raise ValueError(
                    f"{row.source} holds {row.medium}s, and {first.source} {first.medium}s; a prepared data set is of one "
                    "kind. Prepare them apart, or name the kind with medium=."
                )
        yield row


def _set_up_worker(parent: int) -> None:
    """Prepare a process of the pool."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    torch.set_num_threads(1)
    threading.Thread(target=_end_with, args=(parent,), daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when its parent was killed: it would hold the parent's locks."""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


def _named(sources: list[Source]) -> list[Source]:
    """Add folders to equal names of sources; refuse a name that is given to two."""
    for tail in (2, 3):
        names = Counter(source.name for source in sources)
        sources = [
            replace(source, name="/".join(Path(source.path).parts[-tail:])) if names[source.name] > 1 else source
            for source in sources
        ]
    twice = [name for name, count in Counter(source.name for source in sources).items() if count > 1]
    if twice:
        raise ValueError(f"--sources has several items named {twice[0]}. Give each its own name=...")
    return sources


def _refuse_hopeless(tally: SourceTally, most: float, faults: list[dict[str, str]], none_left: bool = False) -> None:
    title = tally.source.title
    if tally.rows == 0:
        raise ValueError(f"{title}; it holds no rows. Give a source that has some.")
    hopeless = is_hopeless(tally.bad, tally.rows, most)
    if not hopeless and not none_left:
        return
    reasons = Counter(fault["reason"] for fault in faults if fault["source"] == tally.source.name).most_common(3)
    first = next(fault for fault in faults if (fault["source"], fault["reason"]) == (tally.source.name, reasons[0][0]))
    limit = "half" if most == 0.5 else f"--max_bad_fraction {most}"
    excess = f"more than {limit}" if hopeless else "and no row is left of any source"
    raise ValueError(
        f"{title}; {tally.bad:,} of {tally.rows:,} rows are bad, {excess} "
        f"({', '.join(f'{reason}: {count:,}' for reason, count in reasons)}). The first is {first['where']}: "
        f"{first['detail']}. {REASONS[reasons[0][0]]}"
    )
