"""Records of folders and lists: captions beside images, class folders, and parallel lists or folders joined by key.

What belongs together is found by key, never by position: a line that is missing on one side shifts nothing.
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from mm_utils.data.raw.columns import SPLIT_NAMES
from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.paths import PathArguments
from mm_utils.data.raw.records import BadRow, Record
from mm_utils.data.raw.specs import Maker, Source, storable
from mm_utils.data.raw.text_files import check_line, open_lines

IMAGE_SUFFIXES = (
    *(".jpg", ".jpeg", ".jfif", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff"),
    *(".ppm", ".pgm", ".avif", ".heic", ".jp2"),
)
CAPTION_SUFFIXES = (".txt", ".caption")
_WNID = re.compile(r"n\d{8}")
_LONGEST_CAPTION_FILE = 1 << 20  # bytes


class _Caption(NamedTuple):
    """A caption of a list, or the file that holds captions, one a line."""

    where: str
    text: str | None
    file: str | None


class _Image(NamedTuple):
    where: str
    key: str
    path: str
    split: str | None = None


def image_files(folder: str) -> Iterator[tuple[str, list[str]]]:
    """The folders below `folder`, itself first, in order, each with the sorted names of its files."""
    for place, inside, names in os.walk(folder):
        inside.sort()
        yield place, sorted(names)


def read_caption_files(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read images that each have a caption file of the same name beside them, one caption a line."""
    maker = Maker(source, safety, source.path)
    for place, names in image_files(source.path):
        beside = {os.path.splitext(name)[0]: name for name in reversed(names) if name.endswith(CAPTION_SUFFIXES)}
        left = set(beside.values())
        for name in names:
            if not name.lower().endswith(IMAGE_SUFFIXES):
                continue
            path = os.path.relpath(os.path.join(place, name), source.path)
            image = _Image(f"file {path}", "", path, _split_of_folder(path))
            file = beside.get(os.path.splitext(name)[0])
            captions = []
            if file is not None:
                left.discard(file)
                captions.append(_Caption(f"file {file}", None, os.path.join(place, file)))
            yield from _join(maker, image, captions)
        for name in sorted(left):
            path = os.path.relpath(os.path.join(place, name), source.path)
            yield maker.bad(f"file {path}", Fault("unmatched_caption", f"there is no image of the name {path}"))


def read_classes(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``<class>/<image>`` or ``<split>/<class>/<image>``; each template makes a caption of the class's name."""
    maker = Maker(source, safety, source.path)
    names = class_names(source)
    splits = _folders(source.path)
    divided = bool(splits) and all(name.lower() in SPLIT_NAMES for name in splits)
    for place, files in image_files(source.path):
        parts = os.path.relpath(place, source.path).split(os.sep)
        split = SPLIT_NAMES[parts.pop(0).lower()] if divided and parts[0] != "." else None
        images = [name for name in files if name.lower().endswith(IMAGE_SUFFIXES)]
        if not images:
            continue
        if not parts or parts == ["."]:
            fault = Fault("unmatched_image", f"{len(images):,} images lie in no class's folder, such as {images[0]}")
            yield maker.bad(f"folder {place}", fault)
            continue
        captions = [template.replace("{}", _class_name(parts[0], names, source)) for template in source.templates]
        for name in images:
            path = os.path.relpath(os.path.join(place, name), source.path)
            try:
                yield maker.record(f"file {path}", maker.image(path), list(captions), split=split)
            except Fault as fault:
                yield maker.bad(f"file {path}", fault, path)


def class_names(source: Source) -> dict[str, str]:
    """Read the file `classes`: by WordNet id or folder name, and by index where it has no ids.

    It is a JSON object ``{id: name}`` or ``{index: [id, name]}``, lines ``id name`` or ``id<TAB>name``, or one name a
    line. Of several names, as WordNet gives them, the first counts.
    """
    if source.classes is None:
        return {}
    path = Path(source.classes)
    title = f"{source.title}, classes={path}"
    if not path.is_file():
        raise ValueError(f"{title}; there is no such file. Check the path.")
    try:
        text = path.read_text(encoding="utf-8-sig")
        if text.lstrip().startswith("{"):
            pairs = [
                (name, *(value if isinstance(value, list) else [value])) for name, value in json.loads(text).items()
            ]
            found = {str(key): str(pair[-1]) for pair in pairs for key in pair[:-1]}
        else:
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            found = {}
            for index, line in enumerate(lines):
                key, _, name = line.partition("\t") if "\t" in line else line.partition(" ")
                known = "\t" in line or _WNID.fullmatch(key) is not None
                found[key if known else str(index)] = name if known else line
    except (ValueError, AttributeError) as error:
        raise ValueError(f"{title}; it cannot be read ({error}). Write lines of 'id name', or JSON.") from error
    return {key: _readable(name.split(",")[0]) for key, name in found.items()}


def read_parallel(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Join two lists or folders by key: the images of `path`, the captions of `captions`.

    A line of a list is ``key<TAB>value``; a line of an image list may be a path alone, whose key is its file name.
    The key of a file in a folder is its path in it. A key counts without the suffix of an image or caption file. The
    captions are held in memory.
    """
    images, captions_at = _sides(source)
    maker = Maker(source, safety, images if images.is_dir() else images.parent)
    captions: defaultdict[str, list[_Caption]] = defaultdict(list)
    for item in _caption_list(captions_at, maker):
        if isinstance(item, BadRow):
            yield item
        else:
            captions[item[0]].append(item[1])
    used: dict[str, str] = {}
    for image in _image_list(images, maker):
        if isinstance(image, BadRow):
            yield image
        elif image.key in used:
            fault = Fault("duplicate_id", f"{used[image.key]} has the key {storable(image.key)}, too")
            yield maker.bad(image.where, fault, image.path)
        else:
            used[image.key] = image.where
            yield from _join(maker, image, captions.get(image.key, []))
    for key, caption in ((key, caption) for key, left in captions.items() if key not in used for caption in left):
        fault = Fault("unmatched_caption", f"there is no image of the key {storable(key)}")
        yield maker.bad(caption.where, fault, caption.text or "")


def _sides(source: Source) -> tuple[Path, Path]:
    """The places of the images and of the captions."""
    path = Path(source.path)
    if source.captions is None and not ((path / "images").is_dir() and (path / "captions").is_dir()):
        raise ValueError(f"{source.title}, format=parallel; where are its captions? Set captions= to their list.")
    sides = (path / "images", path / "captions") if source.captions is None else (path, Path(source.captions))
    for place in sides:
        if not place.exists():
            raise ValueError(f"{source.title}; there is no file or folder {place}. Check the path.")
    return sides


def _join(maker: Maker, image: _Image, captions: list[_Caption]) -> Iterator[Record | BadRow]:
    try:
        if not captions:
            raise Fault("unmatched_image", f"there is no caption for {storable(image.path)}")
        texts = [text for caption in captions for text in _texts(caption)]
        yield maker.record(image.where, maker.image(image.path), texts, split=image.split)
    except Fault as fault:
        yield maker.bad(image.where, fault, image.path)


def _texts(caption: _Caption) -> list[str]:
    if caption.file is None:
        return [caption.text or ""]
    try:
        with open(caption.file, "rb") as file:
            content = file.read(_LONGEST_CAPTION_FILE)
        lines = [line.strip() for line in content.decode("utf-8-sig").splitlines()]
    except UnicodeDecodeError as error:
        raise Fault("bad_encoding", f"{storable(caption.file)} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        raise Fault("read_error", f"{storable(caption.file)}: {error.strerror}") from error
    return [line for line in lines if line] or [""]


def _image_list(place: Path, maker: Maker) -> Iterator[_Image | BadRow]:
    if place.is_dir():
        for path in _files(place, IMAGE_SUFFIXES):
            yield _Image(f"file {path}", _bare(path), path)
        return
    with open_lines(place) as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                check_line(line)
            except Fault as fault:
                yield maker.bad(f"images line {number}", fault, line)
                continue
            key, tab, path = line.strip("\r\n").partition("\t")
            path = path.strip() if tab else key.strip()
            yield _Image(f"images line {number}", _bare(key.strip() if tab else os.path.basename(path)), path)


def _caption_list(place: Path, maker: Maker) -> Iterator[tuple[str, _Caption] | BadRow]:
    if place.is_dir():
        for path in _files(place, CAPTION_SUFFIXES):
            yield _bare(path), _Caption(f"file {path}", None, str(place / path))
        return
    with open_lines(place) as file:
        for number, line in enumerate(file, start=1):
            where = f"captions line {number}"
            if not line.strip():
                continue
            try:
                check_line(line)
                key, tab, text = line.strip("\r\n").partition("\t")
                if not tab:
                    raise Fault("malformed_row", "there is no tab between key and caption")
            except Fault as fault:
                yield maker.bad(where, fault, line)
                continue
            yield _bare(key.strip()), _Caption(where, text, None)


def _files(folder: Path, suffixes: tuple[str, ...]) -> Iterator[str]:
    for place, names in image_files(str(folder)):
        for name in names:
            if name.lower().endswith(suffixes):
                yield os.path.relpath(os.path.join(place, name), folder)


def _bare(name: str) -> str:
    """A key without the suffix of an image or a caption file; other dots are part of it."""
    stem, suffix = os.path.splitext(name)
    return (stem if suffix.lower() in IMAGE_SUFFIXES + CAPTION_SUFFIXES else name).replace(os.sep, "/")


def _folders(folder: str) -> list[str]:
    with os.scandir(folder) as entries:
        return sorted(entry.name for entry in entries if entry.is_dir())


def _split_of_folder(path: str) -> str | None:
    first, separator, _ = path.partition(os.sep)
    return SPLIT_NAMES.get(first.lower()) if separator else None


def _class_name(folder: str, names: dict[str, str], source: Source) -> str:
    if folder in names:
        return names[folder]
    if _WNID.fullmatch(folder):
        raise ValueError(
            f"{source.title}; the folder {folder} is named by a WordNet id, which is no caption. Set classes= to a "
            "file of lines 'id name'."
        )
    return _readable(storable(folder))


def _readable(name: str) -> str:
    return " ".join(name.replace("_", " ").split())
