"""What the readers of folders share: files by their suffixes, folders and photographs that are not read."""

import os
from collections.abc import Iterator
from pathlib import Path

from mm_utils.data.faults import Fault
from mm_utils.data.paths import walk
from mm_utils.data.rows.records import BadRow, RecordBuilder

RAW_SUFFIXES = (".arw", ".cr2", ".cr3", ".dng", ".nef", ".orf", ".pef", ".raf", ".raw", ".rw2", ".srw")


def unread_rows(builder: RecordBuilder, unread: list[Fault]) -> Iterator[BadRow]:
    """Return the bad rows of the folders that `walk` did not enter."""
    return (builder.bad(f"folder {fault.detail}", fault) for fault in unread)


def raw_photographs(builder: RecordBuilder, place: str, names: list[str]) -> Iterator[BadRow]:
    """Name the files of a folder that only a camera's maker decodes, which lie beside JPEG files or alone."""
    found = [name for name in names if name.lower().endswith(RAW_SUFFIXES)]
    if found and builder.medium == "image":
        detail = f"{len(found):,} RAW photographs, such as {found[0]}, are not read"
        where = os.path.relpath(place, builder.source.path)
        yield builder.bad(f"folder {where}", Fault("image_unknown_format", detail))


def files_below(folder: Path, suffixes: tuple[str, ...], unread: list[Fault]) -> Iterator[str]:
    """Yield the files of these suffixes by their paths in the folder; see `walk`."""
    for place, names in walk(str(folder), unread):
        for name in names:
            if name.lower().endswith(suffixes):
                yield os.path.relpath(os.path.join(place, name), folder)
