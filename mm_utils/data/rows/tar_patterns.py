"""The files that a pattern of shards stands for."""

import glob
import itertools
import math
import os
import re

import fsspec

from mm_utils.data.paths import MOST_FILES


def expand_braces(pattern: str) -> list[str]:
    """Return the names that ``{000..063}`` and ``{a,b}`` in a pattern stand for; ValueError if they are more than `MOST_FILES`."""
    parts = [part.split(",") if at % 2 else [part] for at, part in enumerate(re.split(r"\{([^{}]+)\}", pattern))]
    counts = [1]
    for at, [first, *more] in enumerate(parts):
        span = None if more or at % 2 == 0 else re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", first)
        numbers = range(int(span[1]), int(span[2]) + 1) if span else range(len(parts[at]))
        counts.append(len(numbers))
        if math.prod(counts) > MOST_FILES:
            raise ValueError(f"{pattern} stands for more than {MOST_FILES:,} files. Shorten its ranges.")
        if span:
            parts[at] = [str(number).zfill(len(span[1])) for number in numbers]
    names = map("".join, itertools.product(*parts))
    if len(counts) == 2:
        return list(names)
    return [found for name in names for found in expand_braces(name)]  # braces may lie in braces


def files_of_pattern(pattern: str) -> list[str]:
    """Return the files that a path with ``*``, ``[..]``, ``{000..063}`` or ``{a,b}`` stands for, on disk or a server.

    A part of it that finds no file is returned as it is written, so that whoever opens it names it. Raises OSError if a folder
    on its way cannot be listed, whose files would be left out.
    """
    found: list[str] = []
    for name in expand_braces(pattern):
        if not any(sign in name for sign in "*[") or os.path.isfile(name):
            found.append(name)
        elif "://" in name:
            files = fsspec.url_to_fs(name)[0]
            found += sorted(files.unstrip_protocol(path) for path in files.glob(name)) or [name]
        else:
            parts = name.split(os.sep)
            first = next(at for at, part in enumerate(parts) if {"*", "["} & {*part})
            for at in range(max(first, 1), len(parts)):
                for folder in glob.iglob(os.path.join(os.sep.join(parts[:at]), ""), recursive=True):
                    os.scandir(folder).close()  # `glob` leaves out in silence what it cannot list
            found += sorted(glob.glob(name, recursive=True)) or [name]
    return list(dict.fromkeys(found))
