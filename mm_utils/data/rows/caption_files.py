"""Folders of media with their captions: files of the same names, or subtitles."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.folders import Unread, pass_by, split_of_path, walk
from mm_utils.data.rows.records import BadRow, Record, RecordBuilder
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.files import read_regular_file

CAPTION_SUFFIXES = (".txt", ".caption")
SUBTITLE_SUFFIXES = (".srt", ".vtt")
_LONGEST_CAPTION_FILE = 1 << 20  # bytes
_TIME = r"(?:(\d{1,9}):)?(\d{1,9}):(\d{1,9})[.,](\d{1,9})"  # bounded, so that the search is linear in the file
_CUE = re.compile(rf"{_TIME}[ \t]{{0,99}}-->[ \t]{{0,99}}{_TIME}[^\n]*(?:\n|$)((?:[^\n]*\S[^\n]*(?:\n|$))*)")
_MARKUP = re.compile(r"<[^<>]*>|\{\\[^{}]*\}")


def is_captioned(files: list[tuple[str, str]], medium: str) -> bool:
    """Return whether media of a folder have caption files; `files` are its first ones, each with its folder."""
    split = [(place, *os.path.splitext(name)) for place, name in files]
    found = {(place, stem) for place, stem, suffix in split if suffix.lower() in SUFFIXES[medium]}
    beside = CAPTION_SUFFIXES if medium == "image" else (*CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES)
    return bool(found & {(place, stem) for place, stem, suffix in split if suffix.lower() in beside})


def read_caption_files(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read images with a caption file beside each, one caption a line.

    Sounds and clips may have subtitles of the same name: their cues are moments and, without a caption file, their words
    the caption.
    """
    builder = RecordBuilder(source, safety, source.path)
    suffixes, is_timed = SUFFIXES[builder.medium], builder.medium != "image"
    jail = Jail(source.path, safety.allow_outside_root)
    unread = Unread()
    for place, names in walk(source.path, unread):
        pass_by(unread, builder, place, names, (*suffixes, *CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES))
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
            try:
                if file is None:
                    raise Fault("unmatched_image", f"there is no caption for {path}, in a .txt file beside it")
                captions = _lines(os.path.relpath(os.path.join(place, file), source.path), jail)
                yield builder.record(f"file {path}", builder.image(path), captions, split=split_of_path(path))
            except Fault as fault:
                yield builder.bad(f"file {path}", fault, path)
        for name in sorted(left):
            path = os.path.relpath(os.path.join(place, name), source.path)
            unmatched = Fault("unmatched_caption", f"there is no {builder.medium} of the name {path}")
            yield builder.bad(f"file {path}", unmatched)
    yield from unread.rows(builder)


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
            captions = _lines(file, jail)
        record = builder.record(
            where,
            builder.image(path),
            captions,
            split=split_of_path(path),
            moments=None if spoken is None else cues,
        )
    except Fault as fault:
        return builder.bad(where, fault, path)
    record.notes = ("caption_from_subtitles",) if file is None else ()
    return record


def _lines(file: str, jail: Jail) -> list[str]:
    lines = [line.strip() for line in _text_of(file, jail).splitlines()]
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
