"""List the media that an index should hold, of a folder or of pairs; and read them in data workers."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
from PIL import Image
from torch.utils.data import Dataset

from mm_utils.data.faults import REASONS, Fault, storable, unreadable_as_fault
from mm_utils.data.images import encode, open_image, pixels, raw_size, shrink
from mm_utils.data.media import FEATURES
from mm_utils.data.media.medium import Medium, Sound
from mm_utils.data.media.pictures import picture
from mm_utils.data.media.riff import store_clip, write_wav
from mm_utils.data.paths import MEDIA_LIMITS, Jail, Limits, read_file
from mm_utils.data.prepare.checks import CheckArguments, check_image
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.folders import RAW_SUFFIXES, Unread, walk
from mm_utils.files import changed_ns
from mm_utils.model.reading import CLIP_FPS, MOST_PIXELS, UnreadableError, center_square, read_frames, read_sound
from mm_utils.search.index import STAMPS

logger = logging.getLogger(__name__)

Skip = dict[str, str]
_FEATURES = datasets.Features({"image": FEATURES["image"], "captions": datasets.List(datasets.Value("string"))})
_ROWS = 1000
THUMBNAIL = 256  # pixels of the shorter side, or the model's image size if that is more
_QUALITY = 85  # of the JPEG of a thumbnail: about 25 kB
_FRAMES = 8  # of a clip among images
_SECONDS = 60.0  # of it that are looked at


@dataclass
class Listing:
    """The images, clips or sounds that an index should hold.

    Attributes:
        ids: their ids, each once.
        rows: their `image` and `captions`, as `mm_utils.data.pairs` has them.
        skipped: lines of `skipped.jsonl` for files that cannot be taken.
    """

    ids: list[str]
    rows: datasets.Dataset
    skipped: list[Skip] = field(default_factory=list)


def list_folder(
    folder: str, allow_outside: bool = False, medium: str = "image", with_clips: bool = False
) -> tuple[list[str], list[Skip]]:
    """Return the sorted relative paths of a folder's media, and files not to be taken.

    A file counts by its ending; hidden files and folders are passed over, and links to folders are not followed.

    Args:
        with_clips: clips count among images, too.

    Raises:
        ValueError: if there is no such folder, or no such medium in it.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"--images is {folder}; there is no such folder. Give a folder of {medium}s.")
    suffixes = (*SUFFIXES[medium], *(SUFFIXES["clip"] if with_clips else ()))
    jail, found, unread = Jail(folder, allow_outside), [], Unread()
    skipped: list[Skip] = []
    for place, files in walk(folder, unread):
        for name in files:
            is_raw = medium == "image" and name.lower().endswith(RAW_SUFFIXES)
            if not (is_raw or name.lower().endswith(suffixes)):
                continue
            path = os.path.relpath(os.path.join(place, name), folder)
            try:
                if is_raw:
                    raise Fault("image_unknown_format", "a RAW photograph is not read")
                jail.resolve(path)
                if storable(path) != path:
                    raise Fault("bad_path", f"{storable(path)} is not UTF-8")
                found.append(Path(path).as_posix())
            except Fault as fault:
                skipped.append(skip(path, fault))
    skipped += (skip(fault.detail.partition(": ")[0], fault) for fault in unread.faults)
    if "hidden" in unread.passed:
        logger.info("--images is %s; %s", folder, unread.says("hidden"))
    if not found:
        raise ValueError(
            f"--images is {folder}; it holds no {medium} that can be read ({', '.join(suffixes)}). Check the path; links to "
            "folders are not followed."
        )
    return sorted(found), sorted(skipped, key=lambda line: line["id"])


def folder_listing(folder: str, names: list[str], skipped: list[Skip], medium: str = "image") -> Listing:
    """Return the media `names` of a folder; their ids are these paths."""
    root = os.path.abspath(folder)
    files = [{"bytes": None, "path": os.path.join(root, name)} for name in names]
    features = datasets.Features({**_FEATURES, "image": FEATURES[medium]})
    table = pa.Table.from_pydict({"image": files, "captions": [[]] * len(names)}, _FEATURES.arrow_schema)
    return Listing(names, datasets.Dataset(table.cast(features.arrow_schema)), skipped)


def pair_listing(splits: Mapping[str, datasets.Dataset]) -> Listing:
    """Return the images of all splits; their ids are `split/id`."""
    ids = [
        f"{split}/{name}" for split, rows in splits.items() for name in rows.with_format("arrow")[:]["id"].to_pylist()
    ]
    return Listing(
        ids, datasets.concatenate_datasets([each.select_columns(list(_FEATURES)) for each in splits.values()])
    )


def stamps(listing: Listing) -> pa.Table:
    """Return what tells a changed image, and is shown with it: the columns of `STAMPS`.

    The path of stored bytes is "", and their time 0. The hash of a file is "": files are not read here. A file that is gone
    has the size -1.
    """
    found: list[dict[str, Any]] = []
    for block in listing.rows.iter(_ROWS):
        found.extend(map(_stamp, block["image"], block["captions"]))
    table = pa.Table.from_pylist(found, pa.schema([each for each in STAMPS if each.name != "id"]))
    return table.add_column(0, STAMPS.field("id"), [pa.array(listing.ids, pa.string())])


def skip(name: str, fault: Fault) -> Skip:
    """Return the line of `skipped.jsonl` for an image that cannot be taken."""
    return {"id": storable(name), "reason": fault.reason, "detail": fault.detail, "remedy": REASONS[fault.reason]}


def _stamp(image: Mapping[str, Any], captions: list[str]) -> dict[str, Any]:
    content, path = image["bytes"], image["path"] or ""
    if content:
        own = {"path": "", "size": len(content), "mtime_ns": 0, "content_hash": stored_hash(content)}
        return {**own, "captions": captions}
    try:
        status = os.stat(path)
        size, changed = status.st_size, changed_ns(status)
    except OSError:
        size, changed = -1, 0
    return {"path": path, "size": size, "mtime_ns": changed, "content_hash": "", "captions": captions}


# -- reading -----------------------------------------------------------------------------------------------------------


def is_clip_among_images(path: str, medium: Medium) -> bool:
    """Return whether a file is a clip, where the model embeds images."""
    name = path.lower()
    return medium.kind == "image" and name.endswith(SUFFIXES["clip"]) and not name.endswith(SUFFIXES["image"])


def moments_of(content: bytes, side: int) -> list[Image.Image]:
    """Return eight moments, evenly spread over the first minute of a clip."""
    try:
        clip = store_clip(read_frames(content, CLIP_FPS), CLIP_FPS, side)
    except UnreadableError as error:
        if error.reason != "too_long":
            raise
        clip = store_clip(read_frames(content, CLIP_FPS, end=_SECONDS), CLIP_FPS, side)
    shown: list[bytes] = []
    for jpeg in clip.jpegs:  # one that is empty is as the one before
        shown.append(jpeg or shown[-1])
    places = [int((at + 0.5) / _FRAMES * len(shown)) for at in range(_FRAMES)]
    return [open_image({"bytes": shown[place], "path": None}) for place in places]


def stock_file(content: bytes, medium: Medium) -> bytes:
    """Return a medium's file as prepared sets store it, for `Medium.read`; raise UnreadableError."""
    if isinstance(medium, Sound):
        rate = medium.log_mel.rate
        return write_wav(read_sound(content, rate), rate)
    return store_clip(read_frames(content, CLIP_FPS), CLIP_FPS, THUMBNAIL).content


class Reader(Dataset):
    """Media of a listing, read, checked and cut in data workers."""

    def __init__(self, listing: Listing, places: Sequence[int], medium: Medium):
        self.listing, self.places = listing, places
        self.medium, self.side = medium, getattr(medium, "image_size", 0)
        self.limits, self.checks = Limits() if medium.kind == "image" else MEDIA_LIMITS, CheckArguments()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row without embedding, with the `square`, or squares, to embed; or a `skipped.jsonl` line."""
        place = self.places[number]
        name, row = self.listing.ids[place], self.listing.rows[place]
        try:
            with unreadable_as_fault():
                return {"id": name, "captions": row["captions"], **self._read(row["image"])}
        except Fault as fault:
            return dict(skip(name, fault))

    def _read(self, image: dict[str, Any]) -> dict[str, Any]:
        path, content = image["path"] or "", image["bytes"]
        own = {"path": "", "size": len(content or b""), "mtime_ns": 0}
        if not content:
            try:
                status = os.stat(path)
                own = {"path": path, "size": status.st_size, "mtime_ns": changed_ns(status)}
            except OSError:
                pass  # `read_file` says what is wrong
            content = read_file(path, MEDIA_LIMITS if is_clip_among_images(path, self.medium) else self.limits)
            image = {"bytes": content, "path": path}
        own["content_hash"] = stored_hash(content)
        if self.medium.lasts:
            stored = stock_file(content, self.medium) if own["path"] else content
            return own | self._show_timed({"bytes": stored, "path": None})
        if own["path"] and is_clip_among_images(path, self.medium):
            return own | self._show_frames(content)
        square, thumbnail = self._show(image)
        return {**own, "square": square, "thumbnail": thumbnail}

    def _show_timed(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a clip or a sound that evaluations take, its picture, and its file."""
        square, shown = self.medium.read(stored)[0], picture(stored, self.medium.kind, THUMBNAIL // 2)
        thumbnail = encode(shrink(shown, THUMBNAIL), "jpeg", _QUALITY)
        return {"square": square, "thumbnail": thumbnail, "content": stored["bytes"]}

    def _show_frames(self, content: bytes) -> dict[str, Any]:
        """Return the squares of a clip's moments, and the middle one as its picture."""
        side = max(THUMBNAIL, self.side)
        frames = moments_of(content, side)
        squares = torch.stack([center_square(frame, self.side) for frame in frames])
        return {"square": squares, "thumbnail": encode(shrink(frames[_FRAMES // 2], side), "jpeg", _QUALITY)}

    def _show(self, image: dict[str, Any]) -> tuple[torch.Tensor, bytes]:
        """Return the square, as evaluations cut it, and the thumbnail."""
        side = max(THUMBNAIL, self.side)
        if raw_size(image) is None:
            checked = check_image(image["bytes"], self.checks, image["path"] or "", self.side, MOST_PIXELS)
            shown, shorter = checked.image, min(checked.width, checked.height)
        else:
            shown = Image.fromarray(pixels(image))
            shorter = min(shown.size)
        square = center_square(shown, self.side)
        if min(shown.size) < min(side, shorter):  # decoded at a reduced scale
            shown = open_image(image, side)
        return square, encode(shrink(shown, side), "jpeg", _QUALITY)
