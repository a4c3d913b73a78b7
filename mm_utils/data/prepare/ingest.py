"""Read, check and store raw sources on all cores, a chunk of rows at a time, and only once.

A finished chunk is two files: `part-N.arrow` with the rows (`PART_SCHEMA`, the images in the form in which they are kept)
and, renamed into place last, `part-N.json` with the faults. A chunk whose second file exists and was made of the same
records and files, with the same settings and decoders, is not done again, so an interrupted run resumes there.
"""

import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import re
import signal
import threading
import warnings
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc
import torch
from tqdm.auto import tqdm

from mm_utils.data.batches.workers import end_with_parent
from mm_utils.data.faults import REASONS, UNREAD, Fault, first_repeated, is_hopeless, storable
from mm_utils.data.images import encode, shrink
from mm_utils.data.prepare.arguments import OVERSIZE, CheckArguments, TimedArguments
from mm_utils.data.prepare.checks import CheckedImage, check_captions, check_image
from mm_utils.data.prepare.media_and_regions import store_medium, stored_moments, stored_regions
from mm_utils.data.prepare.perceptual_hash import fingerprint
from mm_utils.data.rows.columns import NEGATIVES, is_null, texts_of
from mm_utils.data.rows.detect import detect, read_rows
from mm_utils.data.rows.records import BadRow, FileImage, ImageRef, Record, Records
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.files import read_json, write_atomic
from mm_utils.model.reading import MOST_PIXELS
from mm_utils.stored import stamp, version_of
from mm_utils.text import one_line

PART_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "medium": pa.string(),
        "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
        "width": pa.int32(),
        "height": pa.int32(),
        "captions": pa.list_(pa.string()),
        "regions": pa.list_(pa.struct({"box": pa.list_(pa.float64()), "phrase": pa.string()})),
        NEGATIVES: pa.list_(pa.string()),
        "seconds": pa.float64(),
        "moments": pa.list_(pa.struct({"span": pa.list_(pa.float64()), "phrase": pa.string()})),
        "source": pa.string(),
        "where": pa.string(),
        "split": pa.string(),
        "image_hash": pa.string(),
        "file_hash": pa.string(),  # of clips and sounds: parts of one file have it in common
        "stored_hash": pa.string(),
        "original_width": pa.int32(),
        "original_height": pa.int32(),
        "fingerprint": pa.binary(),
        "group": pa.string(),
        "answers": pa.list_(pa.string()),
    }
)
_OWN = ("id", "medium", "source", "where", "split", "group", "answers")  # columns that records have
FIRST_CHUNK = 64  # rows
_FLAGS_OF_OTHERS = {
    "image": ("clip_fps", "sound_rate", "max_seconds"),
    "clip": ("sound_rate",),
    "sound": ("clip_fps",),
}
_VERSION = 13  # part of every key; raise it with every change of the rows that are written
BATCH_BYTES = 64 << 20  # an Arrow binary array holds at most 2 GiB
_METADATA = re.compile(rb"Exif\0\0|ns\.adobe\.com/xap|Photoshop 3\.0|eXIf|[tiz]TXt")  # where a camera was, its owner
_EARLY_ROWS = 1000  # of a source, after which a hopeless one is not read to its end
_CHECKED_SIDE = 256  # pixels; images that are not shrunk are checked at no larger scale than they need


@dataclass(frozen=True)
class Storage:
    """The form in which images are kept.

    Attributes:
        store: "jpeg" (quality 92, or PNG bytes where those are smaller), "png", "raw", or "reference": files stay where
            they are and are named by their paths.
        short_side: larger images are shrunk to it, in pixels; None keeps the original bytes.
        captioned: whether records have captions, which are checked; labelled ones have an answer, and at most one text.
    """

    store: str
    short_side: int | None
    timed: TimedArguments = field(default_factory=TimedArguments, compare=False)
    captioned: bool = field(default=True, compare=False)


IN_PLACE = Storage("reference", None)
_USUAL_SIDE = round(OVERSIZE * 224)  # pixels: of clips where images stay in place
Rows = Iterable[Record | BadRow]
Pool = Callable[[int], Executor]


def local_pool(workers: int) -> Executor:
    """Return processes of this machine; forked ones need not import anything again, which would take longer than a small set."""
    if workers == 1:  # a fork beside threads may hang
        # torch's own threads only spin, as the images are small.
        return ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(1,))
    context = multiprocessing.get_context("fork")
    return ProcessPoolExecutor(workers, context, _set_up_worker)


def _set_up_worker() -> None:
    """Prepare a process of the pool, which ends when its parent is killed: it would hold the parent's locks."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()


@dataclass(frozen=True)
class IngestPlan:
    """Settings of `ingest_sources`: a source with a larger share of bad rows is refused; `max_rows` are read of each."""

    checks: CheckArguments
    storage: Storage
    workers: int
    max_bad_fraction: float
    max_rows: int | None = None
    pool: Pool = local_pool


@dataclass
class ChunkResult:
    """The outcome of a chunk.

    Attributes:
        rows, bad: rows read and rows lost, by source.
        faults: one dict a fault: source, where, reason, detail, raw. A row may have several, and a row with a good
            caption survives the faults of its others.
        notes: counts of the harmless conversions.
    """

    key: str = ""
    rows: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


@dataclass
class Ingested(ChunkResult):
    """The outcome of all chunks together: the sources by name, and the files with the rows, in order."""

    sources: dict[str, Source] = field(default_factory=dict)
    parts: list[Path] = field(default_factory=list)


def ingest_sources(sources: list[Source], plan: IngestPlan, work: Path) -> Ingested:
    """Read all sources; check and store their rows in `work`. Existing chunks are kept.

    Raises:
        ValueError: if a source cannot be read, or more than `plan.max_bad_fraction` of its rows are bad.
    """
    with _reading(*sources):
        sources = _named([replace(source, format=source.format or detect(source)) for source in sources])
    root = sources[0].paths.image_root
    if root and all(source.format == "webdataset" for source in sources):
        raise ValueError(f"--image_root is {root}; tar shards hold their files. Leave it out.")
    found = Ingested(sources={source.name: source for source in sources})
    given = (row for source in sources for row in itertools.islice(rows_of(source), plan.max_rows))
    for part, result in ingest_rows(_of_one_kind(given, plan.storage.timed), plan, work):
        found.parts.append(part)
        found.faults += result.faults
        for mine, more in ((found.rows, result.rows), (found.bad, result.bad), (found.notes, result.notes)):
            mine.update(more)
        for name, rows in found.rows.items():
            if rows >= _EARLY_ROWS:
                refuse_hopeless(found, name, plan.max_bad_fraction)
    for name in found.sources:
        refuse_hopeless(found, name, plan.max_bad_fraction, none_left=found.bad == found.rows)
    return found


def rows_of(source: Source, paths: PathArguments | None = None) -> Records:
    """Yield the rows of a source, by its own flags of paths or by these; raises a ValueError also if a file of it cannot be read."""
    source = replace(source, paths=paths or source.paths)
    with _reading(source):
        yield from read_rows(source)


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


def ingest_rows(rows: Rows, plan: IngestPlan, work: Path) -> Iterator[tuple[Path, ChunkResult]]:
    """Check and store rows on all cores; yield the file of each chunk, in order. Existing ones are kept."""
    parts = work / "parts"
    parts.mkdir(exist_ok=True)
    others = set(multiprocessing.active_children())
    with tqdm(desc="Checking", unit=" rows", smoothing=0.05) as bar, plan.pool(plan.workers) as pool:
        try:
            under_way: deque[Future[ChunkResult]] = deque()
            chunks = enumerate(cut_into_chunks(rows))
            count = 0
            while True:
                # two chunks a worker: one under way, and one that waits
                for number, chunk in itertools.islice(chunks, 2 * plan.workers - len(under_way)):
                    under_way.append(pool.submit(ingest, number, chunk, parts, plan.checks, plan.storage))
                if not under_way:
                    return
                result = under_way.popleft().result()
                bar.update(sum(result.rows.values()))
                yield parts / f"part-{count:06d}.arrow", result
                count += 1
        except BrokenProcessPool as error:
            raise ValueError(
                "a process that decodes images was killed, probably for lack of memory. Give fewer with --num_proc; the "
                "same command resumes where this stopped."
            ) from error
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for child in set(multiprocessing.active_children()) - others:  # a chunk of clips takes minutes
                child.kill()
            raise


def _of_one_kind(rows: Rows, timed: TimedArguments) -> Records:
    """Yield the rows; refuse a second kind of medium, and flags of another one."""
    first: Record | None = None
    for row in rows:
        if isinstance(row, Record):
            for name in _FLAGS_OF_OTHERS[row.medium] if first is None else ():
                if (value := getattr(timed, name)) != getattr(TimedArguments, name):
                    raise ValueError(
                        f"--{name} is {value}; {row.source} holds {row.medium}s, which do not read it. Leave it out."
                    )
            first = first or row
            if row.medium != first.medium:
                raise ValueError(
                    f"{row.source} holds {row.medium}s, and {first.source} {first.medium}s; a prepared data set is of one "
                    "kind. Prepare them apart, or name the kind with medium=."
                )
        yield row


def _named(sources: list[Source]) -> list[Source]:
    """Add the folder to equal names of sources; refuse a name that is given to two."""
    names = Counter(source.name for source in sources)
    sources = [
        # '/data/a/pairs.csv' -> 'a/pairs.csv'
        replace(source, name="/".join(Path(source.path).parts[-2:])) if names[source.name] > 1 else source
        for source in sources
    ]
    if twice := first_repeated(source.name for source in sources):
        raise ValueError(f"--sources has several items named {twice}. Give each its own name=...")
    return sources


def refuse_hopeless(found: Ingested, name: str, most: float, none_left: bool = False) -> None:
    """Raise ValueError if too many rows of a source are bad."""
    title = found.sources[name].title
    bad = found.bad[name]
    rows = found.rows[name]
    if rows == 0:
        raise ValueError(f"{title}; it holds no rows. Give a source that has some.")
    hopeless = is_hopeless(bad, rows, most)
    if not hopeless and not none_left:
        return
    faults = [fault for fault in found.faults if fault["source"] == name]
    reasons = Counter(fault["reason"] for fault in faults).most_common()
    first = next(fault for fault in faults if fault["reason"] == reasons[0][0])
    limit = "half" if most == 0.5 else f"--max_bad_fraction {most}"
    excess = f"more than {limit}" if hopeless else "and no row is left of any source"
    remedy = "raise --max_bad_fraction"
    if not title.startswith("--sources"):
        remedy = "run prepare_data.py with --max_bad_fraction 1, and give its folder as --dataset_name"
    raise ValueError(
        f"{title}; {bad:,} of {rows:,} rows are bad, {excess} "
        f"({', '.join(f'{reason}: {count:,}' for reason, count in reasons)}). The first is {first['where']}: "
        f"{first['detail']}. {REASONS[reasons[0][0]]}"
        + f" So many may mean that the source is read wrongly. If not, and they shall be left out, {remedy}."
        * (bad < rows)  # not where all are bad
    )


def key_of_rows(items: Rows, *settings: Any) -> tuple[str, int]:
    """Return a hash of all that decides what becomes of rows, and their number.

    These are the rows, the size and date of every file that holds an image, the settings, the decoders and this code.
    """
    parts = (_VERSION, PIL.__version__, version_of("av"), settings)
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16)
    count = 0
    for item in items:
        image = item.image if isinstance(item, Record) else None
        path = image.name if isinstance(image, FileImage) else getattr(image, "path", None)  # of an archive, a table
        row = f"{item!r}{'' if path is None else stamp(path)}"
        digest.update(f"{row}\n".encode("utf-8", "backslashreplace"))
        count += 1
    return digest.hexdigest(), count


def cut_into_chunks(items: Rows) -> Iterator[tuple[Record | BadRow, ...]]:
    """Cut rows into chunks: small ones first, to fill all cores, then large ones."""
    waiting = iter(items)
    for number in itertools.count():
        # 16,384 rows in chunks of 64, then chunks of 2,048
        chunk = tuple(itertools.islice(waiting, FIRST_CHUNK if number < 256 else 2048))
        if not chunk:
            return
        yield chunk


def ingest(
    number: int, items: Sequence[Record | BadRow], folder: Path, checks: CheckArguments, storage: Storage
) -> ChunkResult:
    """Check and store rows, chunk `number` of all, in `folder`, or return its earlier result."""
    key, _ = key_of_rows(items, checks, storage)
    done = folder / f"part-{number:06d}.json"
    if done.is_file():
        result = ChunkResult(**read_json(done))
        if result.key == key:
            return result
    worker = Worker(checks, storage, key)
    scratch = done.with_suffix(".arrow.tmp")
    # The decoders' messages on damaged files name neither file nor row; the quarantine does.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    with warnings.catch_warnings(), pa.ipc.new_stream(str(scratch), PART_SCHEMA) as writer:
        warnings.simplefilter("ignore")
        held = list[dict[str, Any]]()
        size = 0
        for row in worker.rows(items):
            held.append(row)
            size += len(row["image"]["bytes"] or b"")
            if size >= BATCH_BYTES:
                writer.write_batch(pa.RecordBatch.from_pylist(held, PART_SCHEMA))
                held = []
                size = 0
        if held:
            writer.write_batch(pa.RecordBatch.from_pylist(held, PART_SCHEMA))
    os.replace(scratch, done.with_suffix(".arrow"))
    write_atomic(done, json.dumps(vars(worker.result)))
    return worker.result


def read_part(path: Path, columns: Sequence[str]) -> pa.Table:
    """Read some columns of a part; the file is mapped, so only those are loaded."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().select(columns)


def pieces(table: pa.Table, rows: np.ndarray) -> Iterator[pa.RecordBatch]:
    """Yield ascending rows of a table, batch by batch; `Table.take` would first join all batches of text in memory."""
    begin = 0
    for batch in table.to_batches():
        low, high = np.searchsorted(rows, [begin, begin + len(batch)])
        if high > low:
            yield batch.take(pa.array(rows[low:high] - begin))
        begin += len(batch)


def read_facts(parts: Sequence[Path], own_ids: bool) -> pa.Table:
    """Read all columns of the parts but the images, and add `name`, the row's id, with `own_ids` as the source gives it."""
    names = [name for name in PART_SCHEMA.names if name != "image"]
    facts = pa.concat_tables([read_part(part, names) for part in parts])
    # 128 of 256 bits
    hashes = facts["stored_hash"] if own_ids else pc.utf8_slice_codeunits(facts["image_hash"], 0, 32)
    ids = pc.coalesce(facts["id"], hashes)
    several = not own_ids and len(facts["source"].unique()) > 1
    return facts.append_column("name", pc.binary_join_element_wise(facts["source"], ids, "/") if several else ids)


def stored_hash(content: bytes) -> str:
    """Return the BLAKE2b-128 of the stored bytes of an image, hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Worker:
    """Checks and stores the rows of a chunk; consecutive rows of an image decode it once."""

    def __init__(self, checks: CheckArguments, storage: Storage, key: str):
        self.checks = checks
        self.storage = storage
        self.result = ChunkResult(key)
        self.last: tuple[tuple[ImageRef, Any], dict[str, Any]] | None = None

    def rows(self, items: Sequence[Record | BadRow]) -> Iterator[dict[str, Any]]:
        """Yield the columns of a part of every good record; set the others aside."""
        for item in items:
            is_row = not (isinstance(item, BadRow) and item.fault.reason in UNREAD)
            self.result.rows[item.source] += is_row
            try:
                if isinstance(item, BadRow):
                    raise item.fault
                captions = self._captions(item) if self.storage.captioned else _labelled_text(item)
                image = self._image(item)
                yield {name: getattr(item, name) for name in _OWN} | {
                    **image,
                    "captions": captions,
                    "regions": self._kept(item, stored_regions, image) if item.regions is not None else None,
                    NEGATIVES: self._kept(item, _negatives) if item.negatives else None,
                    "moments": self._kept(item, stored_moments, image) if item.moments is not None else None,
                }
            except Fault as fault:
                self.result.bad[item.source] += is_row
                self._set_aside(item, fault)

    def _set_aside(self, item: Record | BadRow, *faults: Fault) -> None:
        raw = item.raw if isinstance(item, BadRow) else item.image.name
        for fault in faults:
            place = {"source": item.source, "where": item.where}
            self.result.faults.append({**place, "reason": fault.reason, "detail": fault.detail, "raw": raw})

    def _captions(self, record: Record) -> list[str]:
        """Return the good captions, each once; raise the last fault if none is good."""
        good, faults, found = check_captions(record.captions, self.checks)
        self.result.notes.update(found)
        # the last one is raised, and set aside where it is caught
        self._set_aside(record, *faults[: None if good else -1])
        if not good:
            raise faults[-1]
        return good

    def _kept(self, record: Record, check: Callable[..., Any], *given: Any) -> Any:
        """Return what is good of boxes, moments or negatives, None if nothing is; bad ones are set aside alone, and the row stays."""
        try:
            good, faults, notes = check(record, *given, self.checks)
        except Fault as fault:  # of all of them
            good = None
            faults = [fault]
            notes = []
        self.result.notes.update(notes)
        self._set_aside(record, *faults)
        return good or None

    def _image(self, record: Record) -> dict[str, Any]:
        """Return the columns of a record's image, clip or sound; raises a `Fault`."""
        key = record.image, record.cut
        if self.last is None or self.last[0] != key:
            said: list[str] = []
            if record.medium == "image":
                found = self._read(record.image, said)
            else:
                side = _USUAL_SIDE if self.storage == IN_PLACE else self.storage.short_side
                found = store_medium(record, self.checks, self.storage.timed, side, said)
            self.result.notes.update(set(said))
            self.last = key, found
        return self.last[1]

    def _read(self, ref: ImageRef, notes: list[str]) -> dict[str, Any]:
        data = ref.read(self.checks.max_image_bytes)
        in_place = self.storage == IN_PLACE
        scale = (_CHECKED_SIDE, MOST_PIXELS) if in_place else (self.storage.short_side, None)
        checked = check_image(data, self.checks, *scale)
        notes += checked.notes
        stored, path, size = self._store(data, checked, ref)
        return {
            "image": {"bytes": stored, "path": path},
            "width": size[0],
            "height": size[1],
            "image_hash": hashlib.sha256(data).hexdigest(),
            "stored_hash": stored_hash(data if stored is None else stored),
            "original_width": checked.width,
            "original_height": checked.height,
            "fingerprint": fingerprint(checked.image),
        }

    def _store(
        self, data: bytes, checked: CheckedImage, ref: ImageRef
    ) -> tuple[bytes | None, str | None, tuple[int, int]]:
        """Return the bytes that are kept, the path field, and the size of the stored image.

        Bytes that need no change, carry no metadata and are not larger are kept: a JPEG is not compressed twice.
        """
        store = self.storage.store
        short_side = self.storage.short_side
        if short_side is None:
            in_place = store == "reference" and isinstance(ref, FileImage) and ref.name == storable(ref.name)
            return None if in_place else data, ref.name if in_place else None, (checked.width, checked.height)
        image = shrink(checked.image, short_side)
        encoded = encode(image, store)
        if store == "raw":
            return encoded, f"raw:{image.width}x{image.height}", image.size
        untouched = image.size == (checked.width, checked.height) and not checked.notes
        lossless = checked.format == "PNG" or (checked.format == "JPEG" and store == "jpeg")
        kept = untouched and lossless and len(data) <= len(encoded) and not _METADATA.search(data)
        return data if kept else encoded, None, image.size


def _negatives(record: Record, checks: CheckArguments) -> tuple[list[str], list[Fault], list[str]]:
    """Return the good captions that are wrong for the image, once each, and the faults of the others."""
    return (*check_captions(texts_of(record.negatives), checks)[:2], [])


def _labelled_text(record: Record) -> list[str]:
    """Return the text of a labelled row, none where it has a list of captions; raises a `Fault`."""
    if not record.answers:
        raise Fault("bad_label", "it has no label")
    texts = record.captions
    if len(texts) > 1:
        return []
    if texts and (not isinstance(texts[0], str) or is_null(texts[0])):
        raise Fault("caption_not_text", "its text is empty or no text")
    return texts
