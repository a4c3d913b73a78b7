"""List the media that an index should hold, of a folder or of pairs; and read them in data workers."""

import datetime
import io
import itertools
import logging
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from PIL import ExifTags, Image
from torch.utils.data import Dataset

from mm_utils.data.faults import REASONS, Fault, storable, unreadable_as_fault
from mm_utils.data.images import open_image, pixels, raw_size, shrink
from mm_utils.data.media import FEATURES
from mm_utils.data.media.medium import Medium, Sound
from mm_utils.data.media.pictures import picture
from mm_utils.data.media.riff import store_clip, write_wav
from mm_utils.data.paths import Jail, read_file
from mm_utils.data.prepare.arguments import CheckArguments
from mm_utils.data.prepare.checks import check_image
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, fingerprint
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.folders import Unread, walk
from mm_utils.files import changed_ns
from mm_utils.model.reading import (
    CLIP_FPS,
    MOST_BYTES,
    MOST_MEDIUM_BYTES,
    MOST_PIXELS,
    center_square,
    read_frames,
    read_header,
    read_sound,
)
from mm_utils.places import missing

logger = logging.getLogger(__name__)

Skip = dict[str, str]
_FEATURES = datasets.Features({"image": FEATURES["image"], "captions": datasets.List(datasets.Value("string"))})
THUMBNAIL = 256  # pixels of the shorter side, or the model's image size if that is more


@dataclass
class Listing:
    """The images, clips or sounds that an index should hold.

    Attributes:
        ids: their ids, each once.
        splits: that of each, if they are pairs.
        rows: their `image` and `captions`, as `mm_utils.data.pairs` has them.
        skipped: lines of `skipped.jsonl` for files that cannot be taken.
    """

    ids: list[str]
    rows: datasets.Dataset
    skipped: list[Skip] = field(default_factory=list)
    splits: list[str] | None = None

    def about(self, place: int) -> dict[str, str]:
        """Return id and split of the medium at a place."""
        return {"id": self.ids[place], "split": self.splits[place] if self.splits else ""}

    def stamps(self) -> Iterator[dict[str, Any]]:
        """Yield id, split, captions, path, and `mtime_ns` and `stamp`, which tell whether an image has changed; files are not read for it."""
        place = itertools.count()
        for block in self.rows.iter(1000):
            for image, captions in zip(block["image"], block["captions"], strict=True):
                yield {**self.about(next(place)), "captions": captions, **_stamp(image)}


def folder_listing(folder: str, allow_outside: bool = False, medium: str = "image") -> Listing:
    """List the media of a folder; their ids are the sorted relative paths.

    A file counts by its ending; hidden files and folders are passed over, and links to folders are not followed.

    Raises:
        ValueError: if there is no such folder, or no such medium in it.
    """
    if not Path(folder).is_dir():
        what = missing(folder, is_local=True) or f"that is no folder. Give a folder of {medium}s."
        raise ValueError(f"--images is {folder}; {what}")
    jail = Jail(folder, allow_outside)
    names: list[str] = []
    skipped: list[Skip] = []
    unread = Unread()
    for place, files in walk(folder, unread):
        for name in files:
            path = os.path.relpath(os.path.join(place, name), folder)
            if not name.lower().endswith(SUFFIXES[medium]):
                unread.add("not_read", path)
                continue
            try:
                jail.resolve(path)
                if storable(path) != path:
                    raise Fault("bad_path", f"{storable(path)} is not UTF-8")
                names.append(Path(path).as_posix())
            except Fault as fault:
                skipped.append(skip(path, fault))
    skipped += (skip(fault.detail.partition(": ")[0], fault) for fault in unread.faults)
    for reason in unread.passed:
        remedy = ". Unpack archives, and write other kinds as JPEG or PNG" if reason == "not_read" else ""
        logger.info("--images is %s; %s%s", folder, unread.says(reason), remedy)
    if not names:
        raise ValueError(
            f"--images is {folder}; it holds no {medium} that can be read ({', '.join(SUFFIXES[medium])}). Check the path; links to "
            "folders are not followed."
        )
    names.sort()
    media = [{"bytes": None, "path": os.path.join(os.path.abspath(folder), name)} for name in names]
    table = pa.Table.from_pydict({"image": media, "captions": [[]] * len(names)}, _FEATURES.arrow_schema)
    features = datasets.Features({**_FEATURES, "image": FEATURES[medium]})
    rows = datasets.Dataset(table.cast(features.arrow_schema))
    return Listing(names, rows, sorted(skipped, key=lambda line: line["id"]))


def pair_listing(splits: Mapping[str, datasets.Dataset]) -> Listing:
    """Return the images of all splits with their ids; an id that several splits have becomes `split/id`."""
    places = [(split, name) for split, rows in splits.items() for name in rows.select_columns(["id"])["id"]]
    times = Counter(name for _, name in places)
    ids = [name if times[name] == 1 else f"{split}/{name}" for split, name in places]
    rows = datasets.concatenate_datasets([each.select_columns(list(_FEATURES)) for each in splits.values()])
    return Listing(ids, rows, splits=[split for split, _ in places])


def skip(name: str, fault: Fault) -> Skip:
    """Return the line of `skipped.jsonl` for an image that cannot be taken."""
    return {"id": storable(name), "reason": fault.reason, "detail": fault.detail, "remedy": REASONS[fault.reason]}


def _stamp(image: Mapping[str, Any]) -> dict[str, Any]:
    if image["bytes"]:
        return {"path": "", "mtime_ns": 0, "stamp": stored_hash(image["bytes"])}
    try:
        status = os.stat(image["path"] or "")
    except OSError:  # gone; reading it says so
        return {"path": image["path"] or "", "mtime_ns": 0, "stamp": "gone"}
    return {"path": image["path"], "mtime_ns": changed_ns(status), "stamp": str(status.st_size)}


# -- reading -----------------------------------------------------------------------------------------------------------


def jpeg(image: Image.Image) -> bytes:
    """Return a JPEG to look at; of a thumbnail of 256 pixels, about 25 kB."""
    stream = io.BytesIO()
    image.save(stream, "JPEG", quality=85)
    return stream.getvalue()


def day_taken(content: bytes) -> str:
    """Return the day on which a photograph was taken, such as 2024-05-31, by its EXIF; "" if that has none."""
    try:
        header = read_header(content)
        if header.format == "PNG" and "exif" not in header.info:  # Pillow would decode it to look behind the pixels
            return ""
        exif = header.getexif()
        inside = exif.get_ifd(ExifTags.IFD.Exif)
        taken = inside.get(ExifTags.Base.DateTimeOriginal) or inside.get(ExifTags.Base.DateTimeDigitized)
        taken = str(taken or exif.get(ExifTags.Base.DateTime))
        # '2024:05:31 10:00:00' -> '2024-05-31'
        return str(datetime.date.fromisoformat(taken[:10].replace(":", "-")))
    except Exception:
        # no image file but its pixels, no such date, or a garbled block, at which Pillow raises anything
        return ""


def stock_file(content: bytes, medium: Medium, codecs: bool = True) -> bytes:
    """Return a medium's file as prepared sets store it, for `Medium.read`; raise UnreadableError."""
    if isinstance(medium, Sound):
        rate = medium.rate
        return write_wav(read_sound(content, rate, codecs=codecs), rate)
    return store_clip(read_frames(content, CLIP_FPS), CLIP_FPS, THUMBNAIL)[0]


class Reader(Dataset):
    """Media of a listing at some places, read, checked and cut in data workers."""

    def __init__(self, listing: Listing, places: Sequence[int], medium: Medium):
        self.listing = listing
        self.places = places
        self.medium = medium
        self.side = getattr(medium, "image_size", 0)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row without embedding, with the `square` to embed; or a `skipped.jsonl` line."""
        place = self.places[number]
        row = self.listing.rows[place]
        # If it changes while it is read, the next run embeds it again.
        found = {**self.listing.about(place), "captions": row["captions"], **_stamp(row["image"])}
        changed = found["mtime_ns"] and str(datetime.date.fromtimestamp(found["mtime_ns"] // 10**9))
        try:
            with unreadable_as_fault():
                return {**found, "day": changed or "", **self._read(row["image"])}
        except Fault as fault:
            return dict(skip(found["id"], fault))

    def _read(self, image: dict[str, Any]) -> dict[str, Any]:
        path = image["path"] or ""
        content = image["bytes"] or read_file(path, MOST_MEDIUM_BYTES if self.medium.lasts else MOST_BYTES)
        if self.medium.lasts:  # the part that evaluations take, and a picture of it
            stored = {"bytes": image["bytes"] or stock_file(content, self.medium), "path": None}
            small = shrink(picture(stored, self.medium.kind, THUMBNAIL // 2), THUMBNAIL)
            return {
                "square": self.medium.read(stored)[0],
                "thumbnail": jpeg(small),
                "print": bytes(FINGERPRINT.itemsize),  # as of a flat image, which resembles none
                "content": stored["bytes"],
            }
        image = {"bytes": content, "path": path}
        if raw_size(image) is None:
            checked = check_image(content, CheckArguments(), self.side, MOST_PIXELS)
            shown = checked.image
            shorter = min(checked.width, checked.height)
        else:
            shown = Image.fromarray(pixels(image))
            shorter = min(shown.size)
        square = center_square(shown, self.side)
        side = max(THUMBNAIL, self.side)
        if min(shown.size) < min(side, shorter):  # decoded at a reduced scale
            shown = open_image(image, side)
        small = shrink(shown, side)
        return {
            "square": square,
            "thumbnail": jpeg(small),
            "print": fingerprint(small),
            "day": day_taken(content),
        }
