"""From raw sources to a prepared pair data set: read, check, shrink, compare, write; on all cores, and only once.

What comes out is described in `mm_utils.data.prepare.prepared`; every row or caption that was set aside is in
`quarantine.jsonl` with its source, place and reason. All work is done in `<output_dir>.partial`, whose result takes the name
`output_dir` in one step at the end; a run that is interrupted leaves it, and the same command goes on there.
"""

import itertools
import logging
import multiprocessing
import os
import shutil
import signal
import warnings
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import OVERSIZE, Chunk, ChunkResult, Storage, cut_into_chunks, ingest
from mm_utils.data.raw.faults import REASONS
from mm_utils.data.raw.formats import Source, detect, read_source
from mm_utils.data.raw.paths import PathArguments
from mm_utils.data.raw.records import BadRow, Record

logger = logging.getLogger(__name__)

_EARLY_ROWS = 1000  # of a source, after which a hopeless one is not read to its end


@dataclass
class PrepareArguments:
    """What is read, where it goes, and in which form images are kept."""

    sources: list[str] = field(
        default_factory=list,
        metadata={
            "help": "One or more of PATH[,key=value...]: a file, folder, shard pattern or Hub repository, with format, "
            "name, split, weight, image_root, image_column, caption_column, id_column, language_column, language, "
            "captions, templates, classes or config where they are not found by themselves."
        },
    )
    output_dir: str = arg("", "The prepared data set goes here; --dataset_name of a training script reads it.")
    overwrite_output_dir: bool = arg(False, "Replace what --output_dir holds, and begin anew.")
    image_size: int = arg(224, "The vision tower's input in pixels; images are kept 1.15 times as large.")
    store: str = arg(
        "jpeg",
        "jpeg: quality 92; png: without loss; raw: pixels that need no decoding, for a data set that fits into memory.",
        choices=["jpeg", "png", "raw"],
    )
    keep_originals: bool = arg(False, "Keep the original bytes instead, whatever --image_size and --store say.")
    max_bad_fraction: float = arg(0.05, "Stop if more than this share of a source's rows is bad.")
    verify: str | None = arg(None, "Only compare a prepared data set with what was written.", metavar="DIR")
    max_rows: int | None = arg(None, "Read only the first N rows of every source, to try.")
    num_proc: int | None = arg(None, "Processes; default one per core.")

    def __post_init__(self) -> None:
        """Refuse what cannot be, with a ValueError of one line."""
        if self.verify:
            return
        if not self.sources:
            raise ValueError("--sources is empty; there is nothing to prepare. Give files, folders or repositories.")
        if not self.output_dir:
            raise ValueError("--output_dir is empty; the prepared data set needs a place. Give a folder.")
        if self.image_size < 16:
            raise ValueError(f"--image_size is {self.image_size}; that is in pixels. Give at least 16, usually 224.")
        if not 0 <= self.max_bad_fraction <= 1:
            raise ValueError(f"--max_bad_fraction is {self.max_bad_fraction}; give a share from 0 to 1.")
        for name in ("max_rows", "num_proc"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"--{name} is {value}; it counts from 1. Drop it to have no limit.")

    @property
    def workers(self) -> int:
        """Processes."""
        return self.num_proc or ranks.available_cores()

    @property
    def storage(self) -> Storage:
        """In which form images are kept."""
        return Storage(self.store, None if self.keep_originals else round(OVERSIZE * self.image_size))


@dataclass
class SourceTally:
    """Rows of one source that were read, and those that were lost."""

    source: Source
    rows: int = 0
    bad: int = 0


@dataclass
class Ingested:
    """What the chunks of all sources gave.

    Attributes:
        sources: by name.
        parts: the files with the rows, in order.
        faults: see `mm_utils.data.prepare.ingest.ChunkResult`.
        notes: counts.
    """

    sources: dict[str, SourceTally]
    parts: list[Path] = field(default_factory=list)
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)

    @property
    def weights(self) -> dict[str, float | None]:
        """Of all sources, by name."""
        return {name: tally.source.weight for name, tally in self.sources.items()}


@contextmanager
def workspace(args: PrepareArguments) -> Iterator[Path]:
    """The folder in which `args.output_dir` comes about; what it holds in `result` takes that name at the end.

    Raises:
        ValueError: if the output folder is taken or cannot be written, or another process is at work there.
    """
    output, work = Path(args.output_dir), Path(args.output_dir.rstrip("/") + ".partial")
    try:
        _refuse_taken(output, args)
        if args.overwrite_output_dir:
            shutil.rmtree(work, ignore_errors=True)
        work.mkdir(parents=True, exist_ok=True)
        with _only_here(work / "lock"):
            _refuse_taken(output, args)  # again, as who held the lock may be done
            shutil.rmtree(work / "result", ignore_errors=True)  # half of it, where a run was killed while writing
            yield work
            _flush(work / "result")
            old = work / "replaced"
            if output.exists():
                os.replace(output, old)
            os.replace(work / "result", output)
        shutil.rmtree(work)
    except OSError as error:
        raise ValueError(
            f"--output_dir is {output}; {error.filename or 'it'} cannot be written: {error.strerror}. Free some space or "
            "give another folder; the same command goes on where this stopped."
        ) from error


def _refuse_taken(output: Path, args: PrepareArguments) -> None:
    """Refuse to replace anything but a prepared data set, and one that a source is read from."""
    if not output.exists() or not any(output.iterdir()):
        return
    if not args.overwrite_output_dir:
        raise ValueError(
            f"--output_dir is {output}; it is not empty. Replace it with --overwrite_output_dir, or give another folder."
        )
    inside = [item for item in args.sources if Path(item.partition(",")[0]).resolve().is_relative_to(output.resolve())]
    if inside:
        raise ValueError(f"--output_dir is {output}; {inside[0]} is read from it. Give another folder.")
    if not (output / "report.json").is_file():
        raise ValueError(
            f"--output_dir is {output}; it holds something else than a prepared data set, which is not removed. Give "
            "another folder."
        )


@contextmanager
def _only_here(path: Path) -> Iterator[None]:
    """Hold the lock file `path`, unless another process does."""
    lock = FileLock(path)
    try:
        lock.acquire(blocking=False)
    except Timeout:
        raise ValueError(f"{path.parent} is in use by another run. Wait for it, or give another folder.") from None
    with lock:
        yield


def _flush(folder: Path) -> None:
    """Bring all files of `folder` to the disk, so that a name never stands for less than its content."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def ingest_sources(args: PrepareArguments, checks: CheckArguments, paths: PathArguments, work: Path) -> Ingested:
    """Read all sources, and check and store their rows, on all cores; chunks that are there already are kept.

    Raises:
        ValueError: if a source cannot be read, or more than `max_bad_fraction` of its rows are bad.
    """
    sources = _named([Source.parse(item) for item in args.sources])
    sources = [replace(source, format=source.format or detect(source)) for source in sources]
    found = Ingested({source.name: SourceTally(source) for source in sources})
    parts = work / "parts"
    parts.mkdir(exist_ok=True)
    workers = args.workers
    chunks = cut_into_chunks(_rows(sources, paths, args.max_rows))
    with (
        tqdm(desc="Checking and storing", unit=" rows", smoothing=0.05) as bar,
        # Forked processes need not import anything again, which would take longer than a small data set.
        ProcessPoolExecutor(
            workers, multiprocessing.get_context("fork" if hasattr(os, "fork") else None), _set_up_worker
        ) as pool,
    ):
        try:
            for number, result in _in_order(pool, chunks, (parts, checks, args.storage), 2 * workers):
                _count(found, result)
                found.parts.append(parts / f"part-{number:06d}.arrow")
                bar.update(sum(result.rows.values()))
                for tally in found.sources.values():
                    if tally.rows >= _EARLY_ROWS:
                        _refuse_hopeless(tally, args.max_bad_fraction, found.faults)
        except BrokenProcessPool as error:
            raise ValueError(
                "a process that decodes images was killed, likely for want of memory. Give fewer with --num_proc; the "
                "same command goes on where this stopped."
            ) from error
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
    for tally in found.sources.values():
        _refuse_hopeless(tally, args.max_bad_fraction, found.faults)
    return found


def _set_up_worker() -> None:
    """One thread, as there is a process a core. Pillow's own words on damaged files name neither file nor row; the quarantine does. Ctrl-C is for the main process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    warnings.simplefilter("ignore")


def _named(sources: list[Source]) -> list[Source]:
    """Sources whose paths end alike are told apart by the folder; a name given to two is refused."""
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


def _rows(sources: list[Source], paths: PathArguments, most: int | None) -> Iterator[Record | BadRow]:
    for source in sources:
        yield from itertools.islice(read_source(source, paths), most)


def _in_order(
    pool: ProcessPoolExecutor, chunks: Iterable[Chunk], arguments: tuple[Any, ...], ahead: int
) -> Iterator[tuple[int, ChunkResult]]:
    """Results in the order of the chunks, with at most `ahead` of them under way, so that memory stays flat."""
    under_way: deque[tuple[int, Future[ChunkResult]]] = deque()
    for chunk in chunks:
        under_way.append((chunk.number, pool.submit(ingest, chunk, *arguments)))
        while len(under_way) >= ahead:
            number, future = under_way.popleft()
            yield number, future.result()
    while under_way:
        number, future = under_way.popleft()
        yield number, future.result()


def _count(found: Ingested, result: ChunkResult) -> None:
    for name, count in result.rows.items():
        found.sources[name].rows += count
    for name, count in result.bad.items():
        found.sources[name].bad += count
    found.faults += result.faults
    found.notes.update(result.notes)


def _refuse_hopeless(tally: SourceTally, most: float, faults: list[dict[str, str]]) -> None:
    name = tally.source.name
    if tally.rows == 0:
        raise ValueError(f"--sources {tally.source.path} holds no rows. Give a source with images and captions.")
    if tally.bad <= most * tally.rows:
        return
    reasons = Counter(fault["reason"] for fault in faults if fault["source"] == name).most_common(3)
    first = next(fault for fault in faults if fault["source"] == name and fault["reason"] == reasons[0][0])
    raise ValueError(
        f"--sources {tally.source.path}: {tally.bad:,} of {tally.rows:,} rows are bad, more than --max_bad_fraction {most} "
        f"({', '.join(f'{reason}: {count:,}' for reason, count in reasons)}). The first is {first['where']}: "
        f"{first['detail']}. {REASONS[reasons[0][0]]}"
    )
