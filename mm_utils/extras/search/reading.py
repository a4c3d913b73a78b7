"""Read a listing's media in workers: what the model takes, what a person is shown."""

import os
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch.utils.data import Dataset

from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.faults import Fault
from mm_utils.data.images import MOST_PIXELS, UnreadableImageError, encode, open_image, pixels, raw_size, shrink
from mm_utils.data.media.augment import center_square
from mm_utils.data.media.clip_files import read_clip
from mm_utils.data.media.medium import Medium, Sound
from mm_utils.data.media.riff import write_avi, write_wav
from mm_utils.data.media.sound_files import read_sound
from mm_utils.data.paths import Limits, read_file
from mm_utils.data.prepare.checks import CheckArguments, check_image
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.extras.search.listing import Listing, limits_of, skip
from mm_utils.reports.pictures import picture

THUMBNAIL = 256  # pixels of the shorter side, or the model's image size if that is more
QUALITY = 85  # of the JPEG of a thumbnail: about 25 kB
FPS = 8.0  # frames a second that are kept of a video in a folder
_LARGE = 8_000_000  # pixels


def stock_file(content: bytes, medium: Medium) -> bytes:
    """Return a medium's file as prepared sets store it, for `Medium.read`, or raise Fault."""
    if isinstance(medium, Sound):
        rate = medium.log_mel.rate
        return write_wav(read_sound(content, rate)[0], rate)
    clip = read_clip(content, FPS, THUMBNAIL)
    return write_avi(clip.jpegs, FPS, clip.size)


def read_query(file: str | bytes, loaders: Loaders) -> torch.Tensor:
    """Return what evaluations take of a searched file, path or bytes: an image, or a WAV.

    Raises:
        UnreadableImageError: if it cannot be read, or the model is for clips.
    """
    medium = loaders.medium
    if medium.kind == "clip":
        raise UnreadableImageError("clips are found by texts and by clips of the index; write what the clip shows")
    value = {"bytes": None, "path": file} if isinstance(file, str) else {"bytes": file, "path": None}
    if isinstance(medium, Sound):
        name = file if isinstance(file, str) else "the file"
        try:
            content = read_file(file, Limits()) if isinstance(file, str) else file
            rate = medium.log_mel.rate
            stored = write_wav(read_sound(content, rate, codecs=False)[0], rate)  # strangers' files meet no codec
        except Fault as fault:
            raise UnreadableImageError(f"{name}: {fault.detail}") from fault
        return medium.read({"bytes": stored, "path": None})[0]
    side = medium.image_size
    image = open_image(value, side)
    if image.width * image.height > _LARGE:  # resizing it in one step would take twelve bytes a pixel more
        image = shrink(image, 2 * side)
    return center_square(image, side)


class Reader(Dataset):
    """Media of a listing, read, checked and cut in data workers."""

    def __init__(self, listing: Listing, places: Sequence[int], loaders: Loaders):
        self.listing, self.places = listing, places
        self.medium, self.side = loaders.medium, getattr(loaders.medium, "image_size", 0)
        self.limits, self.checks = limits_of(loaders.medium.kind), CheckArguments()

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """Return a row without embedding, with the `square` to embed; or a `skipped.jsonl` line."""
        place = self.places[number]
        name, row = self.listing.ids[place], self.listing.rows[place]
        try:
            return {"id": name, "captions": row["captions"], **self._read(row["image"])}
        except Fault as fault:
            return dict(skip(name, fault))

    def _read(self, image: dict[str, Any]) -> dict[str, Any]:
        path, content = image["path"] or "", image["bytes"]
        own = {"path": "", "size": len(content or b""), "mtime_ns": 0}
        if not content:
            try:
                status = os.stat(path)
                own = {"path": path, "size": status.st_size, "mtime_ns": status.st_mtime_ns}
            except OSError:
                pass  # `read_file` says what is wrong
            content = read_file(path, self.limits)
            image = {"bytes": content, "path": path}
        own["content_hash"] = stored_hash(content)
        if self.medium.lasts:
            stored = stock_file(content, self.medium) if own["path"] or self.listing.raw else content
            return own | self._show_timed({"bytes": stored, "path": None})
        square, thumbnail = self._show(image)
        return {**own, "square": square, "thumbnail": thumbnail}

    def _show_timed(self, stored: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a clip or a sound that evaluations take, its picture, and its file."""
        try:
            square, shown = self.medium.read(stored)[0], picture(stored, self.medium.kind, THUMBNAIL // 2)
        except UnreadableImageError as error:
            raise Fault("medium_unreadable", str(error)) from error
        thumbnail = encode(shrink(shown, THUMBNAIL), "jpeg", QUALITY)
        return {"square": square, "thumbnail": thumbnail, "content": stored["bytes"]}

    def _show(self, image: dict[str, Any]) -> tuple[torch.Tensor, bytes]:
        """Return the square, as evaluations cut it, and the thumbnail."""
        side = max(THUMBNAIL, self.side)
        try:
            if raw_size(image) is None:
                checked = check_image(image["bytes"], self.checks, image["path"] or "", self.side, MOST_PIXELS)
                shown, shorter = checked.image, min(checked.width, checked.height)
            else:
                shown = Image.fromarray(pixels(image))
                shorter = min(shown.size)
            square = center_square(shown, self.side)
            if min(shown.size) < min(side, shorter):  # decoded at a reduced scale
                shown = open_image(image, side)
        except UnreadableImageError as error:
            raise Fault("image_unreadable", str(error)) from error
        return square, encode(shrink(shown, side), "jpeg", QUALITY)
