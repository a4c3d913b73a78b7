"""Records of folders and lists: caption files, class folders, and parallel lists.

Images and captions are joined by key, never by position: a missing line on one side shifts nothing.
"""

import errno
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail
from mm_utils.data.photo_captions import photo_caption
from mm_utils.data.sources.columns import SPLIT_NAMES
from mm_utils.data.sources.records import IMAGE_SUFFIXES, BadRow, Record, RecordBuilder
from mm_utils.data.sources.source import WORDNET_ID, PathArguments, Source, class_names, readable
from mm_utils.files import read_regular_file

CAPTION_SUFFIXES = (".txt", ".caption")
_LONGEST_CAPTION_FILE = 1 << 20  # bytes


class _Caption(NamedTuple):
    """A caption of a list, or the file that holds captions, one a line, and the folder that it may not leave."""

    where: str
    text: str | None
    file: str | None
    jail: Jail | None = None


def image_files(folder: str) -> Iterator[tuple[str, list[str]]]:
    """Walk the folders below `folder` in order; give each with the sorted names of its files."""
    for place, inside, names in os.walk(folder):
        inside.sort()
        yield place, sorted(names)


def read_caption_files(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read images with a caption file of the same name beside them, one caption a line, else in their own metadata."""
    builder = RecordBuilder(source, safety, source.path)
    jail = Jail(source.path, safety.allow_outside_root)
    for place, names in image_files(source.path):
        beside = {os.path.splitext(name)[0]: name for name in reversed(names) if name.endswith(CAPTION_SUFFIXES)}
        left = set(beside.values())
        for name in names:
            if not name.lower().endswith(IMAGE_SUFFIXES):
                continue
            path = os.path.relpath(os.path.join(place, name), source.path)
            file = beside.get(os.path.splitext(name)[0])
            left.discard(file or "")
            if file is None:
                yield _with_own_caption(builder, path)
                continue
            caption = _Caption("", None, os.path.relpath(os.path.join(place, file), source.path), jail)
            yield _join(builder, f"file {path}", path, [caption], _split_of_folder(path))
        for name in sorted(left):
            path = os.path.relpath(os.path.join(place, name), source.path)
            yield builder.bad(f"file {path}", Fault("unmatched_caption", f"there is no image of the name {path}"))


def read_classes(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``<class>/<image>`` or ``<split>/<class>/<image>``; templates make the captions."""
    builder = RecordBuilder(source, safety, source.path)
    names = class_names(source)
    with os.scandir(source.path) as entries:
        folders = [entry.name for entry in entries if entry.is_dir()]
    divided = bool(folders) and all(name.lower() in SPLIT_NAMES for name in folders)
    for place, files in image_files(source.path):
        parts = os.path.relpath(place, source.path).split(os.sep)
        split = SPLIT_NAMES[parts.pop(0).lower()] if divided and parts[0] != "." else None
        images = [name for name in files if name.lower().endswith(IMAGE_SUFFIXES)]
        if not images:
            continue
        if not parts or parts == ["."]:
            fault = Fault("unmatched_image", f"{len(images):,} images lie in no class's folder, such as {images[0]}")
            yield builder.bad(f"folder {place}", fault)
            continue
        captions = [template.replace("{}", _class_name(parts[0], names, source)) for template in source.templates]
        for name in images:
            path = os.path.relpath(os.path.join(place, name), source.path)
            try:
                yield builder.record(f"file {path}", builder.image(path), list(captions), split=split)
            except Fault as fault:
                yield builder.bad(f"file {path}", fault, path)


def read_parallel(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Join two lists or folders by key: the images of `path`, the captions of `captions`.

    A line of a list is ``key<TAB>value``; a line of an image list may be a path alone, whose key is its file name.
    The key of a file in a folder is its path in it. A key counts without the suffix of an image or caption file. The
    captions are held in memory.
    """
    images, captions_at = _both_places(source)
    builder = RecordBuilder(source, safety, images if images.is_dir() else images.parent)
    captions: defaultdict[str, list[_Caption]] = defaultdict(list)
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
            yield _join(builder, where, path, captions.get(key, []))
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


def _join(
    builder: RecordBuilder, where: str, path: str, captions: list[_Caption], split: str | None = None
) -> Record | BadRow:
    try:
        if not captions:
            raise Fault("unmatched_image", f"there is no caption for {path}")
        texts = [text for caption in captions for text in _texts(caption)]
        return builder.record(where, builder.image(path), texts, split=split)
    except Fault as fault:
        return builder.bad(where, fault, path)


def _with_own_caption(builder: RecordBuilder, path: str) -> Record | BadRow:
    """Give an image without a caption file the caption of its metadata."""
    where = f"file {path}"
    try:
        image = builder.image(path)
        found = photo_caption(image[0].name)
        if found is None:
            raise Fault("unmatched_image", f"there is no caption for {path}, beside it or in its metadata")
    except Fault as fault:
        return builder.bad(where, fault, path)
    record = builder.record(where, image, [found.text], split=_split_of_folder(path))
    record.notes = (found.note,)
    return record


def _texts(caption: _Caption) -> list[str]:
    if caption.file is None or caption.jail is None:
        return [caption.text or ""]
    try:
        content = read_regular_file(caption.jail.resolve(caption.file), _LONGEST_CAPTION_FILE)
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise Fault("bad_encoding", f"{caption.file} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        if error.errno == errno.ENODATA:
            return [""]
        raise Fault("read_error", f"{caption.file}: {error.strerror}") from error
    return [line for line in lines if line] or [""]


def _image_list(place: Path, builder: RecordBuilder) -> Iterator[tuple[str, str, str] | BadRow]:
    """Give the place, key and path of each image."""
    if place.is_dir():
        yield from ((f"file {path}", _without_suffix(path), path) for path in _files(place, IMAGE_SUFFIXES))
        return
    for where, line in builder.lines(place, "images line"):
        if isinstance(line, BadRow):
            yield line
            continue
        key, tab, path = line.partition("\t")
        path = path.strip() if tab else key.strip()
        yield where, _without_suffix(key.strip() if tab else os.path.basename(path)), path


def _caption_list(place: Path, builder: RecordBuilder) -> Iterator[tuple[str, _Caption] | BadRow]:
    """Give each caption with its key."""
    if place.is_dir():
        jail = Jail(str(place), builder.safety.allow_outside_root)
        for path in _files(place, CAPTION_SUFFIXES):
            yield _without_suffix(path), _Caption(f"file {path}", None, path, jail)
        return
    for where, line in builder.lines(place, "captions line"):
        if isinstance(line, BadRow):
            yield line
            continue
        key, tab, text = line.partition("\t")
        if tab:
            yield _without_suffix(key.strip()), _Caption(where, text, None)
        else:
            detail = "a line without a tab; a list of captions has lines of key, tab, caption, and no header"
            yield builder.bad(where, Fault("malformed_row", detail), line)


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for place, names in image_files(str(folder)):
        for name in names:
            if name.lower().endswith(suffixes):
                yield os.path.relpath(os.path.join(place, name), folder)


def _without_suffix(name: str) -> str:
    """Return a key without the suffix of an image or a caption file; other dots are part of it."""
    stem, suffix = os.path.splitext(name)
    return (stem if suffix.lower() in IMAGE_SUFFIXES + CAPTION_SUFFIXES else name).replace(os.sep, "/")


def _split_of_folder(path: str) -> str | None:
    first, separator, _ = path.partition(os.sep)
    return SPLIT_NAMES.get(first.lower()) if separator else None


def _class_name(folder: str, names: dict[str, str], source: Source) -> str:
    if folder in names:
        return names[folder]
    if WORDNET_ID.fullmatch(folder):
        raise ValueError(
            f"{source.title}; the folder {folder} is named by a WordNet id, which is no caption. Set classes= to a "
            "file of lines 'id name'."
        )
    return readable(folder)
