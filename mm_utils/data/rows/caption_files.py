"""Folders of media with their captions: files of the same names, or subtitles."""

import errno
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Jail
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.folders import Unread, split_of_path, walk
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
    builder = RecordBuilder(source, safety)
    suffixes, kinds = SUFFIXES[builder.medium], [CAPTION_SUFFIXES]
    if builder.medium != "image":
        kinds.append(SUBTITLE_SUFFIXES)
    advice = f"in a {', '.join(('.txt', *SUBTITLE_SUFFIXES) if len(kinds) > 1 else ('.txt',))} file beside it"
    jail, unread = Jail(source.path, safety.allow_outside_root), Unread()
    for place, names in walk(source.path, unread):
        read = (*suffixes, *CAPTION_SUFFIXES, *SUBTITLE_SUFFIXES)
        unread.pass_by(source.path, place, names, read, builder.medium)
        paths = [os.path.relpath(os.path.join(place, name), source.path) for name in names]
        texts = [{_stem(path): path for path in reversed(paths) if path.lower().endswith(each)} for each in kinds]
        left = {path for of_kind in texts for path in of_kind.values()}
        for path in paths:
            if not path.lower().endswith(suffixes):
                continue
            file, spoken = (*(of_kind.get(_stem(path)) for of_kind in texts), None)[:2]
            left -= {file, spoken}
            try:
                if file is None and spoken is None:
                    raise Fault("unmatched_image", f"there is no caption for {path}, {advice}")
                moments = None if spoken is None else read_cues(_text_of(spoken, jail))
                if file is None:
                    captions = [" ".join(cue["phrase"] for cue in moments or ())]
                else:
                    captions = list(filter(None, map(str.strip, _text_of(file, jail).splitlines()))) or [""]
                image, split = builder.image(path), split_of_path(path)
                record = builder.record(f"file {path}", image, captions, split=split, moments=moments)
                record.notes = ("caption_from_subtitles",) if file is None else ()
                yield record
            except Fault as fault:
                yield builder.bad(f"file {path}", fault, path)
        for path in sorted(left):
            unmatched = Fault("unmatched_caption", f"there is no {builder.medium} of the name {path}")
            yield builder.bad(f"file {path}", unmatched)
    yield from unread.rows(builder)


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
