"""Parallel lists or folders of images and captions.

Images and captions are joined by key, never by position: a missing line on one side shifts nothing.
"""

import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.folders import files_below, unread_rows
from mm_utils.data.rows.records import BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.extras.formats.caption_files import CAPTION_SUFFIXES, Caption, join_captions


def read_parallel(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Join two lists or folders by key: the images of `path`, the captions of `captions`.

    A line of a list is ``key<TAB>value``; a line of an image list may be a path alone, whose key is its file name.
    The key of a file in a folder is its path in it. A key counts without the suffix of an image or caption file. The
    captions are held in memory.
    """
    images, captions_at = _both_places(source)
    builder = RecordBuilder(source, safety, images if images.is_dir() else images.parent)
    captions: defaultdict[str, list[Caption]] = defaultdict(list)
    for item in _caption_list(captions_at, builder):
        if isinstance(item, BadRow):
            yield item
        else:
            captions[item[0]].append(item[1])
    used: dict[str, str] = {}
    for image in _image_list(images, builder):
        if isinstance(image, BadRow):
            yield image
            continue
        where, key, path = image
        if key in used:
            yield builder.bad(where, Fault("duplicate_id", f"{used[key]} has the key {key}, too"), path)
        else:
            used[key] = where
            yield join_captions(builder, where, path, captions.get(key, []))
    for key, caption in ((key, caption) for key, left in captions.items() if key not in used for caption in left):
        fault = Fault("unmatched_caption", f"there is no image of the key {key}")
        yield builder.bad(caption.where, fault, caption.text or "")


def _both_places(source: Source) -> tuple[Path, Path]:
    """Return the places of the images and of the captions."""
    path = Path(source.path)
    if source.captions is None and not ((path / "images").is_dir() and (path / "captions").is_dir()):
        raise ValueError(f"{source.title}, format=parallel; where are its captions? Set captions= to their list.")
    places = (path / "images", path / "captions") if source.captions is None else (path, Path(source.captions))
    for place in places:
        if not place.exists():
            raise ValueError(f"{source.title}; there is no file or folder {place}. Check the path.")
    return places


def _image_list(place: Path, builder: RecordBuilder) -> Iterator[tuple[str, str, str] | BadRow]:
    """Yield the place, key and path of each image."""
    if place.is_dir():
        unread: list[Fault] = []
        files = files_below(place, SUFFIXES[builder.medium], unread)
        yield from ((f"file {path}", _without_suffix(path), path) for path in files)
        yield from unread_rows(builder, unread)
        return
    for where, line in builder.lines(place, "images line"):
        if isinstance(line, BadRow):
            yield line
            continue
        key, tab, path = line.partition("\t")
        path = path.strip() if tab else key.strip()
        yield where, _without_suffix(key.strip() if tab else os.path.basename(path)), path


def _caption_list(place: Path, builder: RecordBuilder) -> Iterator[tuple[str, Caption] | BadRow]:
    """Yield each caption with its key."""
    if place.is_dir():
        jail = Jail(str(place), builder.safety.allow_outside_root)
        unread: list[Fault] = []
        for path in files_below(place, CAPTION_SUFFIXES, unread):
            yield _without_suffix(path), Caption(f"file {path}", None, path, jail)
        yield from unread_rows(builder, unread)
        return
    for where, line in builder.lines(place, "captions line"):
        if isinstance(line, BadRow):
            yield line
            continue
        key, tab, text = line.partition("\t")
        if tab:
            yield _without_suffix(key.strip()), Caption(where, text, None)
        else:
            detail = "a line without a tab; a list of captions has lines of key, tab, caption, and no header"
            yield builder.bad(where, Fault("malformed_row", detail), line)


def _without_suffix(name: str) -> str:
    """Return a key without the suffix of an image or a caption file; other dots are part of it."""
    stem, suffix = os.path.splitext(name)
    known = (*SUFFIXES["image"], *SUFFIXES["clip"], *SUFFIXES["sound"], *CAPTION_SUFFIXES)
    return (stem if suffix.lower() in known else name).replace(os.sep, "/")
