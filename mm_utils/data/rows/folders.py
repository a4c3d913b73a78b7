"""The one walk of folders, for every reader: what is never data, which split a path names, and what nobody read."""

import logging
import os
from collections.abc import Iterator
from dataclasses import dataclass, field

from mm_utils.data.faults import Fault
from mm_utils.data.paths import check_own_file, file_fault
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.data.rows.records import BadRow, RecordBuilder

logger = logging.getLogger(__name__)

_SERVICE = {  # of NAS, archivers and systems
    *("@eadir", "@recycle", "#recycle", "__macosx", "__pycache__", "$recycle.bin", "lost+found", "thumbs.db"),
    *("system volume information", "desktop.ini"),
}
_MEDIA = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)
_PASSED = {
    "hidden": "{:,} hidden folders and files, or those of a program, such as {}, are not read",
    "not_read": "{:,} files, such as {}, are not read",
    "clips": "{:,} videos, such as {}, are left out; --with_clips takes them",
}


def is_service(name: str) -> bool:
    """Return whether a file or folder is hidden, or a system, a NAS or an archiver put it beside the data."""
    return (name.startswith(".") and name not in (".", "..")) or name.lower() in _SERVICE


@dataclass
class Unread:
    """What readers of a folder pass by: faults of folders, and by reason how many files there are and the first of them."""

    faults: list[Fault] = field(default_factory=list)
    passed: dict[str, tuple[int, str]] = field(default_factory=dict)

    def add(self, reason: str, path: str) -> None:
        """Count a file, or a hidden folder."""
        count, first = self.passed.get(reason, (0, path))
        self.passed[reason] = count + 1, first

    def says(self, reason: str) -> str:
        """Return how many files were passed by for a reason, as the end of a sentence."""
        return _PASSED[reason].format(*self.passed[reason])

    def pass_by(self, folder: str, place: str, names: list[str], read: tuple[str, ...]) -> None:
        """Count the files in a place of `folder` that end in none of `read`."""
        for name in names:
            if not name.lower().endswith(read):
                self.add("not_read", os.path.relpath(os.path.join(place, name), folder))

    def rows(self, builder: RecordBuilder) -> Iterator[BadRow]:
        """Yield a bad row for every folder that was not entered, and one for all files of a reason."""
        yield from (builder.bad(f"folder {fault.detail}", fault) for fault in self.faults)
        for reason in self.passed:
            logger.info("%s; %s", builder.source.title, self.says(reason))
            yield builder.bad("folder .", Fault(reason, self.says(reason)))


def walk(folder: str, unread: Unread | None = None) -> Iterator[tuple[str, list[str]]]:
    """Walk the folders below `folder` in order; yield each with the sorted names of its files.

    What `is_service` is left out, and counted if it is a folder or a medium. Faults of folders that are links or cannot be listed are
    added to `unread`.
    """
    unread = unread or Unread()
    failed: list[OSError] = []

    def note_failures() -> None:
        unread.faults += (file_fault(error, os.path.relpath(str(error.filename), folder)) for error in failed)
        failed.clear()

    for place, inside, names in os.walk(folder, onerror=failed.append):
        note_failures()
        for name in sorted(inside):
            path = os.path.relpath(os.path.join(place, name), folder)
            if is_service(name):
                unread.add("hidden", path)
            elif os.path.islink(os.path.join(place, name)):
                unread.faults.append(Fault("linked_folder", path))
        inside[:] = sorted(name for name in inside if not is_service(name))
        for name in sorted(names):
            if is_service(name) and name.lower().endswith(_MEDIA):
                unread.add("hidden", os.path.relpath(os.path.join(place, name), folder))
        yield place, sorted(name for name in names if not is_service(name))
    note_failures()


def own_files(folder: str, suffixes: tuple[str, ...], allow_outside: bool, title: str, unread: Unread) -> list[str]:
    """Return the files of these suffixes by their paths in the folder, sorted; ValueError if a link leads out of it."""
    found = [os.path.join(place, name) for place, names in walk(folder, unread) for name in names]
    found = sorted(os.path.relpath(path, folder) for path in found if path.lower().endswith(suffixes))
    for name in found:
        check_own_file(os.path.join(folder, name), folder, allow_outside, title)
    return found
