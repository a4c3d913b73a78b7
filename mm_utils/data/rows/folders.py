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
from mm_utils.data.paths import Jail, walk
from mm_utils.data.photo_captions import photo_caption
from mm_utils.data.rows.columns import SPLIT_NAMES, SUFFIXES
from mm_utils.data.rows.records import IMAGE_SUFFIXES, BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import WORDNET_ID, PathArguments, Source, class_names, readable
from mm_utils.data.rows.text_files import read_cues
from mm_utils.files import read_regular_file

CAPTION_SUFFIXES = (".txt", ".caption")
RAW_SUFFIXES = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".raw", ".rw2", ".srw")
SUBTITLE_SUFFIXES = (".srt", ".vtt")
_LONGEST_CAPTION_FILE = 1 << 20  # bytes


class _Caption(NamedTuple):
    """A caption, or the file of captions, one a line, and the folder that it may not leave."""

    where: str
    text: str | None
    file: str | None
    jail: Jail | None = None


def unread_rows(builder: RecordBuilder, unread: list[Fault]) -> Iterator[BadRow]:
    """Return the bad rows of the folders that `walk` did not enter."""
    return (builder.bad(f"folder {fault.detail}", fault) for fault in unread)


def _raw_photographs(builder: RecordBuilder, place: str, names: list[str]) -> Iterator[BadRow]:
    """Name the files of a folder that only a camera's maker decodes, which lie beside JPEG files or alone."""
    found = [name for name in names if name.lower().endswith(RAW_SUFFIXES)]
    if found and builder.medium == "image":
        detail = f"{len(found):,} RAW photographs, such as {found[0]}, are not read"
        where = os.path.relpath(place, builder.source.path)
        yield builder.bad(f"folder {where}", Fault("image_unknown_format", detail))


def read_caption_files(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read images with a caption file beside each, one caption a line, else their metadata.

    Sounds and clips may have subtitles of the same name: their cues are moments and, without a caption file, their words
    the caption.
    """
    builder = RecordBuilder(source, safety, source.path)
    suffixes, is_timed = SUFFIXES[builder.medium], builder.medium != "image"
    jail = Jail(source.path, safety.allow_outside_root)
    unread: list[Fault] = []
    for place, names in walk(source.path, unread):
        yield from _raw_photographs(builder, place, names)
        beside = {_stem(name): name for name in reversed(names) if name.lower().endswith(CAPTION_SUFFIXES)}
        subtitles = {_stem(name): name for name in names if name.lower().endswith(SUBTITLE_SUFFIXES)}
        left = set(beside.values()) | (set(subtitles.values()) if is_timed else set())
        for name in names:
            if not name.lower().endswith(suffixes):
                continue
            path = os.path.relpath(os.path.join(place, name), source.path)
            file = beside.get(_stem(name))
            left.discard(file or "")
            if is_timed:
                spoken = subtitles.get(_stem(name))
                left.discard(spoken or "")
                text, cues = (
                    each and os.path.relpath(os.path.join(place, each), source.path) for each in (file, spoken)
                )
                yield _with_subtitles(builder, path, text, cues, jail)
                continue
            if file is None:
                yield _with_own_caption(builder, path)
                continue
            caption = _Caption("", None, os.path.relpath(os.path.join(place, file), source.path), jail)
            yield _join(builder, f"file {path}", path, [caption], _split_of_folder(path))
        for name in sorted(left):
            path = os.path.relpath(os.path.join(place, name), source.path)
            fault = Fault("unmatched_caption", f"there is no {builder.medium} of the name {path}")
            yield builder.bad(f"file {path}", fault)
    yield from unread_rows(builder, unread)


def read_classes(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read ``<class>/<image>`` or ``<split>/<class>/<image>``; templates make the captions."""
    builder = RecordBuilder(source, safety, source.path)
    names = class_names(source)
    with os.scandir(source.path) as entries:
        folders = [entry.name for entry in entries if entry.is_dir()]
    divided = bool(folders) and all(name.lower() in SPLIT_NAMES for name in folders)
    unread: list[Fault] = []
    for place, files in walk(source.path, unread):
        yield from _raw_photographs(builder, place, files)
        parts = os.path.relpath(place, source.path).split(os.sep)
        split = SPLIT_NAMES[parts.pop(0).lower()] if divided and parts[0] != "." else None
        images = [name for name in files if name.lower().endswith(SUFFIXES[builder.medium])]
        if not images:
            continue
        if not parts or parts == ["."]:
            detail = f"{len(images):,} {builder.medium}s lie in no class's folder, such as {images[0]}"
            fault = Fault("unmatched_image", detail)
            yield builder.bad(f"folder {place}", fault)
            continue
        name = _class_name(parts[0], names, source)
        if not name:
            yield builder.bad(f"folder {place}", Fault("caption_empty", f"the folder {parts[0]} names no class"))
            continue
        captions = source.captions_of_class(name, builder.medium)
        for name in images:
            path = os.path.relpath(os.path.join(place, name), source.path)
            try:
                yield builder.record(f"file {path}", builder.image(path), list(captions), split=split)
            except Fault as fault:
                yield builder.bad(f"file {path}", fault, path)
    yield from unread_rows(builder, unread)


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
    """Use the caption of its metadata for an image without a caption file."""
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


def _with_subtitles(
    builder: RecordBuilder, path: str, file: str | None, spoken: str | None, jail: Jail
) -> Record | BadRow:
    """Add to a sound or clip the captions of a file beside it, and the moments of its subtitles."""
    where = f"file {path}"
    try:
        if file is None and spoken is None:
            raise Fault("unmatched_image", f"there is no caption for {path}, in a .txt, .srt or .vtt file beside it")
        cues = [] if spoken is None else read_cues(_text_of(spoken, jail))
        if file is None:
            captions = [" ".join(cue["phrase"] for cue in cues)]
        else:
            captions = _texts(_Caption("", None, file, jail))
        record = builder.record(
            where,
            builder.image(path),
            captions,
            split=_split_of_folder(path),
            moments=None if spoken is None else cues,
        )
    except Fault as fault:
        return builder.bad(where, fault, path)
    record.notes = ("caption_from_subtitles",) if file is None else ()
    return record


def _texts(caption: _Caption) -> list[str]:
    if caption.file is None or caption.jail is None:
        return [caption.text or ""]
    lines = [line.strip() for line in _text_of(caption.file, caption.jail).splitlines()]
    return [line for line in lines if line] or [""]


def _text_of(file: str, jail: Jail) -> str:
    """Read a caption file or subtitles; raises bad_encoding or read_error."""
    try:
        return read_regular_file(jail.resolve(file), _LONGEST_CAPTION_FILE).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Fault("bad_encoding", f"{file} is not UTF-8 text ({error.reason})") from error
    except OSError as error:
        if error.errno == errno.ENODATA:
            return ""
        raise Fault("read_error", f"{file}: {error.strerror}") from error


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


def _caption_list(place: Path, builder: RecordBuilder) -> Iterator[tuple[str, _Caption] | BadRow]:
    """Yield each caption with its key."""
    if place.is_dir():
        jail = Jail(str(place), builder.safety.allow_outside_root)
        unread: list[Fault] = []
        for path in files_below(place, CAPTION_SUFFIXES, unread):
            yield _without_suffix(path), _Caption(f"file {path}", None, path, jail)
        yield from unread_rows(builder, unread)
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


def files_below(folder: Path, suffixes: tuple[str, ...], unread: list[Fault]) -> Iterator[str]:
    """Yield the files of these suffixes by their paths in the folder; see `walk`."""
    for place, names in walk(str(folder), unread):
        for name in names:
            if name.lower().endswith(suffixes):
                yield os.path.relpath(os.path.join(place, name), folder)


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _without_suffix(name: str) -> str:
    """Return a key without the suffix of an image or a caption file; other dots are part of it."""
    stem, suffix = os.path.splitext(name)
    known = (*IMAGE_SUFFIXES, *SUFFIXES["clip"], *SUFFIXES["sound"], *CAPTION_SUFFIXES)
    return (stem if suffix.lower() in known else name).replace(os.sep, "/")


def _split_of_folder(path: str) -> str | None:
    first, separator, _ = path.partition(os.sep)
    return SPLIT_NAMES.get(first.lower()) if separator else None


def _class_name(folder: str, names: dict[str, str], source: Source) -> str:
    if folder in names:
        return names[folder]
    if WORDNET_ID.fullmatch(folder):
        raise ValueError(
            f"{source.title}; the folder {folder} is named by a WordNet id, which is not a caption. Set classes= to a "
            "file of lines 'id name'."
        )
    return readable(folder)
