"""The one walk of folders, for every reader: what is never data, which split a path names, and what nobody read."""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from mm_utils.data.faults import REASONS, Fault
from mm_utils.data.paths import SQLITE_SUFFIXES, check_own_file, file_fault
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.records import BadRow, RecordBuilder

logger = logging.getLogger(__name__)

_SERVICE = {  # of NAS, archivers and systems
    *("@eadir", "@recycle", "#recycle", "__macosx", "__pycache__", "$recycle.bin", "lost+found", "thumbs.db"),
    *("system volume information", "desktop.ini", ".ds_store"),
}
# README.zh.md, LICENSE, data.sha256, img2dataset's 00000_stats.json
_HARMLESS = re.compile(  # what people and programs write about data
    r"(readme|licen[cs]e|copying|notice|citation|changelog|authors|checksums?|(md5|sha\d*)sums?)"
    r"((\.[\w-]+)?\.(md|txt|rst|html|cff))?|.*(\.(md5|sha1|sha256|sha512)|_stats\.json)|dataset_infos?\.json|_success",
    re.IGNORECASE,
)
CAPTION_SUFFIXES = (".txt", ".caption")
TABLES = (".parquet", ".jsonl", ".csv", ".tsv")  # that are read in a folder
MEDIA_SUFFIXES = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_PACKED = (".gz", ".bz2", ".xz", ".zst")
_REASONS = {
    **dict.fromkeys((*TABLES, *SQLITE_SUFFIXES), "table_not_read"),
    **dict.fromkeys((".json", ".ndjson", ".arrow", ".feather", ".xlsx", ".xls", ".ods"), "table_not_read"),
    **dict.fromkeys((".tar", ".tgz", ".zip", ".7z", ".rar", *_PACKED), "archive_not_read"),
    **dict.fromkeys(CAPTION_SUFFIXES, "text_not_read"),
}
_MOST_KINDS = 8  # that a sentence names


def is_service(name: str) -> bool:
    """Return whether a file or folder is hidden, or a system, a NAS or an archiver put it beside the data."""
    return (name.startswith(".") and name not in (".", "..")) or is_of_program(name)


def is_of_program(name: str) -> bool:
    """Return whether a system, a NAS or an archiver writes files or folders of this name."""
    return name.lower() in _SERVICE


def is_harmless(name: str) -> bool:
    """Return whether a file is about data, such as README.md, a license or checksums, and needs no word where it is not read."""
    return _HARMLESS.fullmatch(name) is not None


def ending(name: str) -> str:
    """Return the suffix of a file in small letters, both of one that is packed: `.jsonl.gz`."""
    stem, suffix = os.path.splitext(name.lower())
    return os.path.splitext(stem)[1] + suffix if suffix in _PACKED else suffix


@dataclass
class Unread:
    """What readers of a folder pass by: faults of folders; by reason and ending, how many files there are and the first of them."""

    faults: list[Fault] = field(default_factory=list)
    passed: dict[str, dict[str, tuple[int, str]]] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        """Count a file, or a hidden folder."""
        kinds = self.passed.setdefault(reason, {})
        kind = "" if reason == "hidden" else ending(path)
        count, first = kinds.get(kind, (0, path))
        kinds[kind] = count + 1, first

    def says(self, reason: str) -> str:
        """Say how many files of each kind were passed by for a reason."""
        kinds = sorted(self.passed[reason].items(), key=lambda item: -item[1][0])
        if reason == "hidden":
            count, first = kinds[0][1]
            return f"{count:,} hidden folders and files, or those of a program, such as {first}, are not read"
        named = [
            first if count == 1 else f"{count:,} {f'{kind} files'.strip()}, such as {first}"
            for kind, (count, first) in kinds[:_MOST_KINDS]
        ]
        more = sum(count for _, (count, _) in kinds[_MOST_KINDS:])
        named += [f"{more:,} files of other kinds"] if more else []
        return f"not read: {'; '.join(named)}"

    def pass_by(self, folder: str, place: str, names: list[str], read: tuple[str, ...]) -> None:
        """Count the files in a place of `folder` that end in none of `read`; those about data are no fault."""
        inside = os.path.relpath(place, folder)
        for name in names:
            if not name.lower().endswith(read) and not is_harmless(name):
                reason = _REASONS.get(os.path.splitext(name)[1].lower(), "not_read")
                self.add(reason, name if inside == "." else os.path.join(inside, name))

    def rows(self, builder: RecordBuilder) -> Iterator[BadRow]:
        """Yield a bad row for every folder that was not entered, and one for all files of a reason."""
        yield from (builder.bad(f"folder {fault.detail}", fault) for fault in self.faults)
        for reason in self.passed:
            logger.info("%s; %s. %s", builder.source.title, self.says(reason), REASONS[reason])
            yield builder.bad("folder .", Fault(reason, self.says(reason)))


def walk(folder: str, unread: Unread | None = None) -> Iterator[tuple[str, list[str]]]:
    """Walk the folders below `folder` in order; yield each with the sorted names of its files.

    What `is_service` is left out, and counted if it is a folder or a medium. Faults of folders that are links or cannot be listed are
    added to `unread`.
    """
    unread = unread or Unread()
    failed: list[OSError] = []
    for place, inside, names in os.walk(folder, onerror=failed.append):
        for name in sorted([*inside, *names]):
            path = os.path.relpath(os.path.join(place, name), folder)
            if is_service(name) and (name in inside or name.lower().endswith(MEDIA_SUFFIXES)):
                unread.add("hidden", path)
            elif name in inside and os.path.islink(os.path.join(place, name)):
                unread.faults.append(Fault("linked_folder", path))
        # in place: `os.walk` enters the folders that are left in this list
        inside[:] = sorted(name for name in inside if not is_service(name))
        yield place, sorted(name for name in names if not is_service(name))
    unread.faults += (file_fault(error, os.path.relpath(str(error.filename), folder)) for error in failed)


def own_files(folder: str, suffixes: tuple[str, ...], allow_outside: bool, title: str, unread: Unread) -> list[str]:
    """Return the files of these suffixes by their paths in the folder, sorted, and count the others; ValueError if a link leads out of it."""
    found = list[str]()
    for place, names in walk(folder, unread):
        unread.pass_by(folder, place, names, suffixes)
        paths = (os.path.join(place, name) for name in names if name.lower().endswith(suffixes))
        found += (os.path.relpath(path, folder) for path in paths)
    found.sort()
    for name in found:
        check_own_file(os.path.join(folder, name), folder, allow_outside, title)
    return found
