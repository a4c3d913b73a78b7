"""Results that are made once, kept in the datasets cache, and true when they are read.

A result is a folder, `tandem_KIND/KEY`. Its key is a hash (`key_of`) of all that decides the result: the content, or the size
and date (`stamp`), of every file that is read, every setting, and the versions of the code and of the decoders (`version_of`).
One process at a time makes it, in a hidden folder that is renamed when it is complete. Checksums of its files lie in it and
are compared whenever it is opened, at a third of a second per GB: `datasets` notices no flipped bit, and a truncated file ends
in an error that names neither path nor remedy. A damaged result is made anew.
"""

import hashlib
import importlib.metadata
import json
import logging
import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import datasets
from filelock import FileLock

from mm_utils.files import atomic_folder, is_about, read_json

logger = logging.getLogger(__name__)

CHECKSUMS = ".checksums"
_BLOCK = 1 << 24  # bytes


def key_of(*parts: Any) -> str:
    """Return 32 hexadecimal digits, a hash of the representations of all `parts`."""
    return hashlib.blake2b(repr(parts).encode("utf-8", "backslashreplace"), digest_size=16).hexdigest()


def stamp(path: str | os.PathLike[str]) -> str:
    """Return the size and date of a file, or the kind of error where it cannot be looked at."""
    try:
        status = os.stat(path)
    except OSError as error:
        return type(error).__name__
    return f"{status.st_size} {status.st_mtime_ns}"


def version_of(module: str, package: str | None = None) -> str | None:
    """Return the version of an installed package, None if its module cannot be imported."""
    return importlib.metadata.version(package or module) if find_spec(module) else None


def place_of(kind: str, key: str, root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a result, below `root` or else the datasets cache."""
    return Path(root or datasets.config.HF_DATASETS_CACHE, f"tandem_{kind}", key)


def stored(kind: str, key: str, make: Callable[[Path], object], root: str | os.PathLike[str] | None = None) -> Path:
    """Return the folder of a result; `make` fills an empty one where there is none, or a damaged one.

    A process that finds another one at work waits for its result.

    Raises:
        ValueError: if the cache cannot be written.
    """
    folder = place_of(kind, key, root)
    if is_whole(folder):  # without a lock, so that a cache may be read-only
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_name(f".{key}.lock")):
            if not is_whole(folder):  # else another process has made it meanwhile
                discard(folder)
                with storing(folder) as work:
                    make(work)
    except OSError as error:
        if not is_about(error, folder.parent):
            raise
        raise ValueError(
            f"{error.filename or folder.parent} cannot be written: {error.strerror or error}. Free some space, or set "
            "HF_DATASETS_CACHE to another folder."
        ) from error
    return folder


@contextmanager
def storing(folder: Path) -> Iterator[Path]:
    """Yield a hidden folder that becomes the result `folder`, with checksums, when the block ends."""
    with atomic_folder(folder) as work:
        yield work
        files = sorted(path for path in work.rglob("*") if path.is_file())
        sums = {path.relative_to(work).as_posix(): _checksum(path) for path in files}
        (work / CHECKSUMS).write_text(json.dumps(sums), encoding="utf-8")


def is_whole(folder: Path) -> bool:
    """Return whether a result is there and as it was written."""
    try:
        known = _known(folder)
        return bool(known == {name: _checksum(folder / name) for name in known})
    except (OSError, ValueError, TypeError):
        return False


def discard(folder: Path) -> None:
    """Remove a damaged result; a process that has its files mapped can still read them."""
    if (folder / CHECKSUMS).exists():  # earlier versions wrote none
        logger.warning("%s is damaged; it is made anew. Check the disk.", folder)
    if folder.exists():
        shutil.rmtree(folder)


def open_rows(folder: Path) -> datasets.Dataset:
    """Return the rows of all Arrow files of a result, memory-mapped, in the order of their names."""
    # `datasets` keeps caches of its own beside them.
    names = [name for name in _known(folder) if name.endswith(".arrow")]
    return datasets.concatenate_datasets([datasets.Dataset.from_file(str(folder / name)) for name in names])


def _known(folder: Path) -> dict[str, int]:
    """Return the CRC-32 of each file of a result by its path inside `folder`, as it was written."""
    known: dict[str, int] = read_json(folder / CHECKSUMS)
    return known


def _checksum(path: Path) -> int:
    found = 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK):
            found = zlib.crc32(block, found)
    return found
