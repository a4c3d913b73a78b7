"""Raw records become checked, stored rows: a chunk at a time, in any process, and only once.

A finished chunk is two files: `part-N.arrow` with the rows (`PART_SCHEMA`, the image already in the form in which it is
kept) and, renamed into place last, `part-N.json` with what was set aside and why. A chunk whose second file is there and
was made of the same records with the same settings is not done again; so an interrupted run goes on where it stopped.
"""

import hashlib
import json
import math
import os
import pickle
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from PIL import Image

from mm_utils.data.images import decode, encode, open_image, psnr, read_header, shrink
from mm_utils.data.prepare.checks import CheckArguments, CheckedImage, check_caption, check_image
from mm_utils.data.prepare.duplicates import fingerprint
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import Limits
from mm_utils.data.raw.records import BadRow, ImageRef, Record

IMAGE_TYPE = pa.struct({"bytes": pa.binary(), "path": pa.string()})
REGIONS_TYPE = pa.list_(pa.struct({"box": pa.list_(pa.float32()), "phrase": pa.string()}))
PART_SCHEMA = pa.schema(
    {
        "id": pa.string(),
        "image": IMAGE_TYPE,
        "width": pa.int32(),
        "height": pa.int32(),
        "captions": pa.list_(pa.string()),
        "languages": pa.list_(pa.string()),
        "regions": REGIONS_TYPE,
        "source": pa.string(),
        "where": pa.string(),
        "split": pa.string(),
        "image_hash": pa.string(),
        "stored_hash": pa.string(),
        "stored_bytes": pa.int64(),
        "original_bytes": pa.int64(),
        "original_width": pa.int32(),
        "original_height": pa.int32(),
        "fingerprint": pa.binary(),
        "psnr": pa.float32(),
    }
)
OVERSIZE = 1.15  # stored short side over the model's image size: room for crops without enlarging them
PSNR_EVERY = 100  # rows of which one is decoded again to measure what storing cost
_METADATA = re.compile(rb"Exif\0\0|ns\.adobe\.com/xap|Photoshop 3\.0|eXIf|[tiz]TXt")  # where a camera was, who held it
BATCH_BYTES = 64 << 20  # an Arrow binary array holds at most 2 GiB


@dataclass(frozen=True)
class Storage:
    """In which form images are kept.

    Attributes:
        store: "jpeg" (quality 92, or PNG bytes as they are where those are smaller), "png" or "raw".
        short_side: in pixels, never enlarged; None keeps the original bytes.
    """

    store: str
    short_side: int | None


@dataclass(frozen=True)
class Chunk:
    """Consecutive rows of the sources, and the chunk's place among all."""

    number: int
    items: tuple[Record | BadRow, ...]

    def key(self, settings: str) -> str:
        """What the result depends on, as a hash."""
        return hashlib.blake2b(pickle.dumps((self.items, settings)), digest_size=16).hexdigest()


@dataclass
class ChunkResult:
    """What became of a chunk.

    Attributes:
        rows, bad: rows read and rows lost, by source.
        faults: one dict a fault: source, where, reason, detail, raw. A row may have several, and a row with a good
            caption survives the faults of its others.
        notes: how often each harmless conversion was needed.
    """

    key: str
    rows: dict[str, int]
    bad: dict[str, int]
    faults: list[dict[str, str]]
    notes: dict[str, int]


def cut_into_chunks(items: Iterator[Record | BadRow]) -> Iterator[Chunk]:
    """Small chunks first, so that few rows fill all cores; larger ones later, so that many rows need few files."""
    number, held = 0, []
    for item in items:
        held.append(item)
        if len(held) == (64 if number < 256 else 2048):
            yield Chunk(number, tuple(held))
            number, held = number + 1, []
    if held:
        yield Chunk(number, tuple(held))


def ingest(chunk: Chunk, folder: Path, checks: CheckArguments, storage: Storage) -> ChunkResult:
    """Check and store the rows of a chunk in `folder`; at once if that was done before."""
    key = chunk.key(repr((checks, storage)))
    done = folder / f"part-{chunk.number:06d}.json"
    if done.is_file():
        result = ChunkResult(**json.loads(done.read_text(encoding="utf-8")))
        if result.key == key:
            return result
    worker = _Worker(checks, storage, key)
    with (
        _replacing(done.with_suffix(".arrow")) as scratch,
        pa.OSFile(str(scratch), "wb") as file,
        pa.ipc.new_stream(file, PART_SCHEMA) as writer,
    ):
        for batch in _batches(worker.rows(chunk.items)):
            writer.write_batch(batch)
    with _replacing(done) as scratch:
        scratch.write_text(json.dumps(asdict(worker.result)), encoding="utf-8")
    return worker.result


def read_part(path: Path, columns: Sequence[str]) -> pa.Table:
    """Some columns of a part; the file is mapped, so only what is looked at is read."""
    with pa.memory_map(str(path)) as file:
        return pa.ipc.open_stream(file).read_all().select(columns)


def stored_hash(content: bytes) -> str:
    """BLAKE2b-128 of the stored bytes of an image, hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


class _replacing:
    """Write to `scratch`; the file takes its name when all of it is on the disk."""

    def __init__(self, path: Path):
        self.path, self.scratch = path, path.with_name(path.name + ".tmp")

    def __enter__(self) -> Path:
        return self.scratch

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            with self.scratch.open("rb") as file:
                os.fsync(file.fileno())
            os.replace(self.scratch, self.path)


def _batches(rows: Iterator[dict[str, Any]]) -> Iterator[pa.RecordBatch]:
    held: list[dict[str, Any]] = []
    size = 0
    for row in rows:
        held.append(row)
        size += len(row["image"]["bytes"])
        if size >= BATCH_BYTES:
            yield pa.RecordBatch.from_pylist(held, PART_SCHEMA)
            held, size = [], 0
    if held:
        yield pa.RecordBatch.from_pylist(held, PART_SCHEMA)


class _Worker:
    """Goes through one chunk; consecutive rows of the same image decode it once."""

    def __init__(self, checks: CheckArguments, storage: Storage, key: str):
        self.checks, self.storage = checks, storage
        self.limits = Limits(max_bytes=checks.max_image_bytes)
        self.result = ChunkResult(key, {}, {}, [], {})
        self.last: tuple[ImageRef, dict[str, Any]] | None = None

    def rows(self, items: Sequence[Record | BadRow]) -> Iterator[dict[str, Any]]:
        notes: Counter[str] = Counter()
        rows: Counter[str] = Counter()
        bad: Counter[str] = Counter()
        for place, item in enumerate(items):
            rows[item.source] += 1
            try:
                if isinstance(item, BadRow):
                    raise item.fault
                captions, languages = self._captions(item, notes)
                yield {
                    **self._image(item, measured=place % PSNR_EVERY == 0, notes=notes),
                    "id": item.id,
                    "captions": captions,
                    "languages": languages,
                    "regions": self._regions(item),
                    "source": item.source,
                    "where": item.where,
                    "split": item.split,
                }
            except Fault as fault:
                bad[item.source] += 1
                self._set_aside(item, fault)
        self.result.rows, self.result.bad, self.result.notes = dict(rows), dict(bad), dict(notes)

    def _set_aside(self, item: Record | BadRow, fault: Fault) -> None:
        raw = item.raw if isinstance(item, BadRow) else item.image.name
        place = {"source": item.source, "where": item.where}
        self.result.faults.append({**place, "reason": fault.reason, "detail": fault.detail, "raw": raw})

    def _captions(self, record: Record, notes: Counter[str]) -> tuple[list[str], list[str] | None]:
        """The good captions, each once; a fault of one is recorded, and raised if it is the last's."""
        languages = record.languages or [""] * len(record.captions)
        if len(languages) != len(record.captions):
            raise Fault("languages_mismatch", f"{len(record.captions)} captions, {len(languages)} languages")
        good: dict[str, str] = {}
        fault = Fault("no_caption_left", "it has no captions")
        faults = []
        for value, language in zip(record.captions, languages, strict=True):
            try:
                text, found = check_caption(value, self.checks)
            except Fault as error:
                faults.append(fault := error)
                continue
            notes.update(found)
            notes["caption_repeated"] += text in good
            good.setdefault(text, language)
        for earlier in faults[: None if good else -1]:
            self._set_aside(record, earlier)
        if not good:
            raise fault
        return list(good), None if record.languages is None else list(good.values())

    def _image(self, record: Record, measured: bool, notes: Counter[str]) -> dict[str, Any]:
        if self.last is not None and self.last[0] == record.image:
            return self.last[1]
        data = record.image.read(self.limits)
        checked = check_image(data, self.checks, record.image.name, self.storage.short_side)
        notes.update(checked.notes)
        stored, path, size = self._store(data, checked)
        image = {
            "image": {"bytes": stored, "path": path},
            "width": size[0],
            "height": size[1],
            "image_hash": hashlib.sha256(data).hexdigest(),
            "stored_hash": stored_hash(stored),
            "stored_bytes": len(stored),
            "original_bytes": len(data),
            "original_width": checked.width,
            "original_height": checked.height,
            "fingerprint": fingerprint(checked.image),
            "psnr": self._loss(data, stored, path, size) if measured else None,
        }
        self.last = record.image, image
        return image

    def _store(self, data: bytes, checked: CheckedImage) -> tuple[bytes, str | None, tuple[int, int]]:
        """The bytes that are kept, their path field, and the size of the image in them.

        What needs no change, carries no metadata and is no larger is kept as it is: a JPEG is not compressed twice.
        """
        store, short_side = self.storage.store, self.storage.short_side
        if short_side is None:
            return data, None, (checked.width, checked.height)
        image = shrink(checked.image, short_side)
        encoded = encode(image, store)
        if store == "raw":
            return encoded, f"raw:{image.width}x{image.height}", image.size
        untouched = image.size == (checked.width, checked.height) and not set(checked.notes) - {"wrong_extension"}
        lossless = checked.format == "PNG" or (checked.format == "JPEG" and store == "jpeg")
        kept = untouched and lossless and len(data) <= len(encoded) and not _METADATA.search(data)
        return data if kept else encoded, None, image.size

    def _loss(self, data: bytes, stored: bytes, path: str | None, size: tuple[int, int]) -> float | None:
        """PSNR in dB of what is stored against the whole original, decoded and reduced to that size; None if equal."""
        if data is stored:
            return None
        original = decode(read_header(data), data)[0].resize(size, Image.Resampling.BICUBIC)
        loss = psnr(original, open_image({"bytes": stored, "path": path}))
        return loss if math.isfinite(loss) else None

    def _regions(self, record: Record) -> list[dict[str, Any]] | None:
        """Boxes as x, y, width, height in pixels of the stored image, each with its phrase."""
        if record.regions is None:
            return None
        assert self.last is not None
        image = self.last[1]
        across = image["width"] / image["original_width"]
        down = image["height"] / image["original_height"]
        try:
            return [
                {
                    "box": [x * across, y * down, w * across, h * down],
                    "phrase": check_caption(region["phrase"], self.checks)[0],
                }
                for region in record.regions
                for x, y, w, h in [_inside(region["box"], image["original_width"], image["original_height"])]
            ]
        except (TypeError, ValueError, KeyError) as error:
            if isinstance(error, Fault):
                raise
            raise Fault("bad_regions", f"not a list of box (x, y, width, height) and phrase: {error!r}") from error


def _inside(box: Sequence[Any], width: int, height: int) -> tuple[float, float, float, float]:
    """A box that lies in its image, but for a pixel of rounding; raises a ValueError."""
    x, y, w, h = map(float, box)
    if not (w > 0 and h > 0 and min(x, y) >= -1 and x + w <= width + 1 and y + h <= height + 1):
        raise ValueError(f"box {[x, y, w, h]} of an image of {width} x {height} pixels")
    return x, y, w, h
