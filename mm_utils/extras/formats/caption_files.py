"""Folders of media with their captions: files of the same names, subtitles, or the metadata of photos."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail, walk
from mm_utils.data.rows.columns import SPLIT_NAMES, SUFFIXES
from mm_utils.data.rows.folders import raw_photographs, unread_rows
from mm_utils.data.rows.records import IMAGE_SUFFIXES, BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.text_files import TEXT_SUFFIXES
from mm_utils.extras.formats.photo_captions import photo_caption
from mm_utils.files import read_regular_file

CAPTION_SUFFIXES = (".txt", ".caption")
SUBTITLE_SUFFIXES = (".srt", ".vtt")
_LONGEST_CAPTION_FILE = 1 << 20  # bytes
_PHOTOS_LOOKED_AT = 50  # in which a caption is looked for
_TIME = r"(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})[.,](\d{1,9})"  # bounded, so that the search is linear in the file
_CUE = re.compile(rf"{_TIME}[ \t]{{0,99}}-->[ \t]{{0,99}}{_TIME}[^\n]*(?:\n|$)((?:[^\n]*\S[^\n]*(?:\n|$))*)")
_MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")


class Caption(NamedTuple):
    """A caption, or the file of captions, one a line, and the folder that it may not leave."""

    where: str
    text: str | None
    file: str | None
    jail: Jail | None = None


def is_captioned(path: Path, files: list[tuple[str, str]], medium: str) -> bool:
    """Return whether media of a folder have caption files, or the images of one without tables captions in their metadata.

    Args:
        files: the first files below `path`, each with its folder.
    """
    split = [(place, *os.path.splitext(name)) for place, name in files]
    found = {(place, stem) for place, stem, suffix in split if suffix.lower() in SUFFIXES[medium]}
    beside = CAPTION_SUFFIXES if medium == "image" else (*CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES)
    if found & {(place, stem) for place, stem, suffix in split if suffix.lower() in beside}:
        return True
    places = {os.path.relpath(place, path).lower() for place, _ in found}
    tables = {suffix.lower() for _, _, suffix in split} & {*TEXT_SUFFIXES, ".parquet", ".arrow"}
    if tables or not places <= {".", *SPLIT_NAMES}:
        return False
    jail = Jail(str(path), False)
    for place, name in [each for each in files if each[1].lower().endswith(IMAGE_SUFFIXES)][:_PHOTOS_LOOKED_AT]:
        with suppress(Fault):
            if photo_caption(jail.resolve(os.path.relpath(os.path.join(place, name), path))) is not None:
                return True
    return False


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
        yield from raw_photographs(builder, place, names)
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
            caption = Caption("", None, os.path.relpath(os.path.join(place, file), source.path), jail)
            yield join_captions(builder, f"file {path}", path, [caption], _split_of_folder(path))
        for name in sorted(left):
            path = os.path.relpath(os.path.join(place, name), source.path)
            fault = Fault("unmatched_caption", f"there is no {builder.medium} of the name {path}")
            yield builder.bad(f"file {path}", fault)
    yield from unread_rows(builder, unread)


def join_captions(
    builder: RecordBuilder, where: str, path: str, captions: list[Caption], split: str | None = None
) -> Record | BadRow:
    """Return the record of an image with its captions."""
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
            captions = _texts(Caption("", None, file, jail))
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


def _texts(caption: Caption) -> list[str]:
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


def read_cues(text: str) -> list[dict[str, Any]]:
    """Return subtitles' cues, SubRip or WebVTT, as moments; those without text are left out."""
    found = []
    for cue in _CUE.finditer(text.replace("\r\n", "\n").replace("\r", "\n")):
        *times, words = cue.groups()
        phrase = " ".join(_MARKUP.sub("", words).split())
        if phrase:
            found.append({"span": [_seconds(times[:4]), _seconds(times[4:])], "phrase": phrase})
    return found


def _seconds(parts: Sequence[str | None]) -> float:
    hours, minutes, seconds, fraction = parts
    return int(hours or 0) * 3600 + int(minutes or 0) * 60 + float(f"{seconds}.{fraction}")


def _stem(name: str) -> str:
    return os.path.splitext(name)[0]


def _split_of_folder(path: str) -> str | None:
    first, separator, _ = path.partition(os.sep)
    return SPLIT_NAMES.get(first.lower()) if separator else None
