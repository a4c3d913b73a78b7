"""Check and store raw records, a chunk at a time, in any process, and only once.

A finished chunk is two files: `part-N.arrow` with the rows (`PART_SCHEMA`, the images in the form in which they are kept)
and, renamed into place last, `part-N.json` with the faults. A chunk whose second file exists and was made of the same
records and files, with the same settings and decoders, is not done again, so an interrupted run resumes there.
"""

import hashlib
import json
import logging
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import PIL
import pyarrow as pa
import pyarrow.compute as pc

from mm_utils.data.faults import UNREAD, Fault, storable
from mm_utils.data.images import encode, shrink
from mm_utils.data.paths import Limits
from mm_utils.data.prepare.checks import CheckArguments, CheckedImage, check_captions, check_image
from mm_utils.data.prepare.grounding import STORED
from mm_utils.data.prepare.perceptual_hash import fingerprint
from mm_utils.data.prepare.timed import TimedArguments, store_medium
from mm_utils.data.rows.columns import NEGATIVES, is_null
from mm_utils.data.rows.records import NO_MEDIUM, BadRow, FileImage, FramesImage, ImageRef, Record
from mm_utils.files import write_atomic
from mm_utils.model.reading import MOST_PIXELS
from mm_utils.stored import stamp, version_of

OVERSIZE = 1.15  # stored short side over the model's image size: room for crops without enlarging them
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
        "stored_bytes": pa.int64(),
        "original_bytes": pa.int64(),
        "original_width": pa.int32(),
        "original_height": pa.int32(),
        "fingerprint": pa.binary(),
        "group": pa.string(),
        "answers": pa.list_(pa.string()),
    }
)
FIRST_CHUNK = 64  # rows
_VERSION = 7  # part of every key; raise it with every change of the rows that are written
BATCH_BYTES = 64 << 20  # an Arrow binary array holds at most 2 GiB
_METADATA = re.compile(rb"Exif\0\0|ns\.adobe\.com/xap|Photoshop 3\.0|eXIf|[tiz]TXt")  # where a camera was, its owner
_CHECKED_SIDE = 256  # pixels; images that are not shrunk are checked at no larger scale than they need


@dataclass(frozen=True)
class Storage:
    """The form in which images are kept.

    Attributes:
        store: "jpeg" (quality 92, or PNG bytes where those are smaller), "png", "raw", or "reference": files stay where
            they are and are named by their paths.
        short_side: larger images are shrunk to it, in pixels; None keeps the original bytes.
        timed: the form of clips and sounds.
        captioned: whether records have captions, which are checked; labelled ones have an answer, and at most one text.
    """

    store: str
    short_side: int | None
    timed: TimedArguments = field(default_factory=TimedArguments, compare=False)
    captioned: bool = field(default=True, compare=False)


IN_PLACE = Storage("reference", None)
_USUAL_SIDE = round(OVERSIZE * 224)  # pixels: of clips where images stay in place


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of the sources, and the chunk's place among all."""

    number: int
    items: tuple[Record | BadRow, ...]


@dataclass
class ChunkResult:
    """The outcome of a chunk.

    Attributes:
        rows, bad: rows read and rows lost, by source.
        faults: one dict a fault: source, where, reason, detail, raw. A row may have several, and a row with a good
            caption survives the faults of its others.
        notes: counts of the harmless conversions.
    """

    key: str
    rows: Counter[str] = field(default_factory=Counter)
    bad: Counter[str] = field(default_factory=Counter)
    faults: list[dict[str, str]] = field(default_factory=list)
    notes: Counter[str] = field(default_factory=Counter)


def key_of_rows(items: Iterable[Record | BadRow], *settings: Any) -> tuple[str, int]:
    """Return a hash of all that decides what becomes of rows, and their number.

    These are the rows, the size and date of every file that holds an image, the settings, the decoders and this code.
    """
    parts = (_VERSION, PIL.__version__, version_of("av"), settings)
    digest = hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16)
    archives: dict[str, str] = {}
    count = 0
    for item in items:
        row = f"{item!r}{_stamps(item.image, archives)}{item.beside}" if isinstance(item, Record) else repr(item)
        digest.update(f"{row}\n".encode("utf-8", "backslashreplace"))
        count += 1
    return digest.hexdigest(), count


def _stamps(image: ImageRef, archives: dict[str, str]) -> str:
    """Return the size and date of the files that hold an image; `archives` keeps those of archives."""
    if isinstance(image, FileImage):
        return stamp(image.name)
    if isinstance(image, FramesImage):
        return " ".join(_stamps(frame, archives) for frame in image.frames)
    path = getattr(image, "path", None)  # of an archive, a table or a database
    if path is None:
        return ""  # the reference is all there is
    if path not in archives:
        archives[path] = stamp(path)
    return archives[path]


def cut_into_chunks(items: Iterable[Record | BadRow]) -> Iterator[Chunk]:
    """Cut rows into chunks: small ones first, to fill all cores, then large ones."""
    number, held = 0, []
    for item in items:
        held.append(item)
        if len(held) == (FIRST_CHUNK if number < 256 else 2048):
            yield Chunk(number, tuple(held))
            number, held = number + 1, []
    if held:
        yield Chunk(number, tuple(held))


def ingest(chunk: Chunk, folder: Path, checks: CheckArguments, storage: Storage) -> ChunkResult:
    """Check and store the rows of a chunk in `folder`, or return its earlier result."""
    key, _ = key_of_rows(chunk.items, checks, storage)
    done = folder / f"part-{chunk.number:06d}.json"
    if done.is_file():
        result = ChunkResult(**json.loads(done.read_text(encoding="utf-8")))
        if result.key == key:
            return result
    worker = Worker(checks, storage, key)
    scratch = done.with_suffix(".arrow.tmp")
    # The decoders' messages on damaged files name neither file nor row; the quarantine does.
    logging.getLogger("PIL").setLevel(logging.CRITICAL)
    with (
        warnings.catch_warnings(),
        pa.OSFile(str(scratch), "wb") as file,
        pa.ipc.new_stream(file, PART_SCHEMA) as writer,
    ):
        warnings.simplefilter("ignore")
        held, size = list[dict[str, Any]](), 0
        for row in worker.rows(chunk.items):
            held.append(row)
            size += len(row["image"]["bytes"] or b"")
            if size >= BATCH_BYTES:
                writer.write_batch(pa.RecordBatch.from_pylist(held, PART_SCHEMA))
                held, size = [], 0
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
    """Read all columns of the parts but the images, and add `name`, the row's id.

    Args:
        own_ids: ids stay as the sources give them; add `path` too, the file of an image that stays in place.
    """
    names = [name for name in PART_SCHEMA.names if name != "image"]
    facts = pa.concat_tables([read_part(part, names) for part in parts])
    if own_ids:
        paths = [pc.struct_field(read_part(part, ["image"])["image"], "path") for part in parts]
        facts = facts.append_column("path", pa.chunked_array([chunk for path in paths for chunk in path.chunks]))
        return facts.append_column("name", pc.coalesce(facts["id"], facts["stored_hash"]))
    ids = pc.coalesce(facts["id"], pc.utf8_slice_codeunits(facts["image_hash"], 0, 32))
    several = len(facts["source"].unique()) > 1
    return facts.append_column("name", pc.binary_join_element_wise(facts["source"], ids, "/") if several else ids)


def stored_hash(content: bytes) -> str:
    """Return the BLAKE2b-128 of the stored bytes of an image, hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class Worker:
    """Checks and stores the rows of a chunk; consecutive rows of an image decode it once."""

    def __init__(self, checks: CheckArguments, storage: Storage, key: str):
        self.checks, self.storage, self.result = checks, storage, ChunkResult(key)
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
                yield {
                    **image,
                    "id": item.id,
                    "medium": item.medium,
                    "captions": captions,
                    "regions": self._part("regions", item, image),
                    NEGATIVES: self._negatives(item),
                    "moments": self._part("moments", item, image),
                    "source": item.source,
                    "where": item.where,
                    "split": item.split,
                    "group": item.group,
                    "answers": item.answers,
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
        self.result.notes.update([*found, *(record.notes if good else ())])
        self._set_aside(record, *faults[: None if good else -1])
        if not good:
            raise faults[-1]
        return good

    def _negatives(self, record: Record) -> list[str] | None:
        """Return the good captions that are wrong for the image, once each; set others aside."""
        if not record.negatives:
            return None
        given = record.negatives if isinstance(record.negatives, list) else [record.negatives]
        good, faults, _ = check_captions(given, self.checks)
        self._set_aside(record, *faults)
        return good

    def _part(self, name: str, record: Record, image: dict[str, Any]) -> Any:
        """Return boxes or moments as they lie in what is stored; bad moments are set aside alone."""
        if getattr(record, name) is None:
            return None
        good, faults, found = STORED[name](record, image, self.checks)
        self.result.notes.update(found)
        self._set_aside(record, *faults)
        return good

    def _image(self, record: Record) -> dict[str, Any]:
        """Return the columns of a record's image, clip or sound; raises a `Fault`."""
        if record.image == NO_MEDIUM:
            return {"image": {"bytes": None, "path": None}}
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
        data = ref.read(Limits(max_bytes=self.checks.max_image_bytes))
        in_place = self.storage == IN_PLACE
        scale = (_CHECKED_SIDE, MOST_PIXELS) if in_place else (self.storage.short_side, None)
        checked = check_image(data, self.checks, ref.name, *scale)
        notes += checked.notes
        stored, path, size = self._store(data, checked, ref)
        return {
            "image": {"bytes": stored, "path": path},
            "width": size[0],
            "height": size[1],
            "image_hash": hashlib.sha256(data).hexdigest(),
            "stored_hash": stored_hash(data if stored is None else stored),
            "stored_bytes": len(stored or b""),
            "original_bytes": len(data),
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
        store, short_side = self.storage.store, self.storage.short_side
        if short_side is None:
            in_place = store == "reference" and isinstance(ref, FileImage) and ref.name == storable(ref.name)
            return None if in_place else data, ref.name if in_place else None, (checked.width, checked.height)
        image = shrink(checked.image, short_side)
        encoded = encode(image, store)
        if store == "raw":
            return encoded, f"raw:{image.width}x{image.height}", image.size
        untouched = image.size == (checked.width, checked.height) and not set(checked.notes) - {"wrong_extension"}
        lossless = checked.format == "PNG" or (checked.format == "JPEG" and store == "jpeg")
        kept = untouched and lossless and len(data) <= len(encoded) and not _METADATA.search(data)
        return data if kept else encoded, None, image.size


def _labelled_text(record: Record) -> list[str]:
    """Return the text of a labelled row, none where a medium has a list of captions; raises a `Fault`."""
    if not record.answers:
        raise Fault("bad_label", "it has no label")
    texts = record.captions
    if len(texts) > 1 and record.image != NO_MEDIUM:
        return []
    if texts and (len(texts) > 1 or not isinstance(texts[0], str) or is_null(texts[0])):
        raise Fault("caption_not_text", "its text is empty or no text")
    return texts
