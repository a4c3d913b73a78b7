"""Paths that data name, and a jail that no path leaves unnoticed."""

import errno
import glob
import itertools
import os
import re
import stat
import unicodedata
from collections.abc import Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from urllib.parse import unquote

from mm_utils.data.faults import REASONS, Fault
from mm_utils.files import is_passing, read_regular_file, retry

MOST_FILES = 1_000_000  # that a pattern stands for
LONGEST_PATH = 1024  # of macOS; Linux has 4,096
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://|(pipe|data):")
_PAUSES = (0.1, 0.2)  # seconds between attempts to read a file
_MOST_HINTS = 10  # missing files whose folder is searched for a similar name: a long listing takes a second
_LONGEST_LISTING = 100_000
_MOST_FOLDERS = 10_000
_REASONS = {
    **dict.fromkeys((errno.ENOENT, errno.ENOTDIR), "image_missing"),
    **dict.fromkeys((errno.EISDIR, errno.EINVAL), "not_a_file"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "permission_denied"),
    **{errno.ELOOP: "bad_path", errno.EFBIG: "too_many_bytes", errno.ENODATA: "image_empty"},
}


SQLITE_SUFFIXES = (".sqlite", ".sqlite3", ".db")
SHARDS = {".parquet": "parquet", ".arrow": "arrow", ".tar": "tar", ".tgz": "tar", ".tar.gz": "tar"}


def is_url(name: str) -> bool:
    """Return whether `name` is an address of any scheme, such as ``https://`` or ``pipe:``."""
    return _URL.match(name) is not None


def shard_kind(url: str) -> str | None:
    """Return `parquet`, `arrow` or `tar` by the path or address of a shard, or None."""
    name = url.split("?")[0].lower()
    return next((kind for suffix, kind in SHARDS.items() if name.endswith(suffix)), None)


def expand_braces(pattern: str) -> list[str]:
    """Return the names that ``{000..063}`` and ``{a,b}`` in a pattern stand for; ValueError if they are more than `MOST_FILES`."""
    # one more tells that they are too many
    names = list(itertools.islice(_expanded(pattern), MOST_FILES + 1))
    if len(names) > MOST_FILES:
        raise ValueError(f"{pattern} stands for more than {MOST_FILES:,} files. Shorten its ranges.")
    return names


def _expanded(pattern: str) -> Iterator[str]:
    found = re.search(r"\{([^{}]+)\}", pattern)  # an innermost one
    if found is None:
        yield pattern
        return
    options: Iterable[str] = found[1].split(",")
    if span := re.fullmatch(r"(\d{1,18})\.\.(\d{1,18})", found[1]):
        numbers = range(int(span[1]), int(span[2]) + 1)
        # '{000..002}' -> '000', '001', '002'
        options = (str(number).zfill(len(span[1])) for number in numbers)
    for option in options:
        yield from _expanded(pattern[: found.start()] + option + pattern[found.end() :])


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
            import fsspec

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


class Jail:
    """Makes the paths of a data file absolute; they are relative to `root` and stay below it.

    A link counts as its target. With `allow_outside` a file may lie anywhere; `also` names further folders to stay in.
    """

    def __init__(self, root: str, allow_outside: bool = False, also: Iterable[str] = ()) -> None:
        self.root = os.path.abspath(root)
        self.allow_outside = allow_outside
        # ends in a slash: /data2 is not in /data
        self._real_roots = [os.path.realpath(folder).rstrip(os.sep) + os.sep for folder in (root, *also)]
        self._real_folder = lru_cache(_MOST_FOLDERS)(os.path.realpath)
        self._hints = 0

    def resolve(self, name: str) -> str:
        """Return the absolute path of `name`, normalised, links unchanged.

        Raises a `Fault`: bad_path (NUL, text that no file name can be, a loop of links), path_too_long, outside_root,
        image_missing, not_a_file (a folder, a pipe, a device) or permission_denied.
        """
        _check_name(name)
        path = os.path.normpath(os.path.join(self.root, name))
        folder, leaf = os.path.split(path)
        try:
            real = os.path.realpath(path) if os.path.islink(path) else os.path.join(self._real_folder(folder), leaf)
            if not self.allow_outside and not any(f"{real}{os.sep}".startswith(root) for root in self._real_roots):
                leads = "is" if name == real else f"leads to {real},"
                hint = ""
                if name.startswith(("/data/upload/", "/data/local-files/")):
                    hint = "; that is an address in Label Studio: download the files, and write their paths"
                raise Fault("outside_root", f"{name} {leads} outside {self.root}{hint}")
            mode = os.stat(path).st_mode
        except OSError as error:
            hint = self._similar_name(name) if isinstance(error, FileNotFoundError) else ""
            raise file_fault(error, path, hint) from error
        if not stat.S_ISREG(mode):
            raise Fault("not_a_file", f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}")
        return path

    def _similar_name(self, written: str) -> str:
        """Return a hint at a file or folder whose name differs only in case, Unicode form, blanks, %20, or the slashes of Windows."""
        folder, name = os.path.split(os.path.normpath(os.path.join(self.root, written.replace("\\", "/"))))
        self._hints += 1
        while not os.path.isdir(folder) and len(folder) > len(self.root):
            folder, name = os.path.split(folder)
        if self._hints > _MOST_HINTS or not os.path.isdir(folder):
            return ""
        wanted = {_folded(name), _folded(unquote(name))}
        with os.scandir(folder) as entries:
            for entry in itertools.islice(entries, _LONGEST_LISTING):
                if _folded(entry.name) in wanted and (entry.name != name or "\\" in written):
                    return f"; there is {entry.name}, which differs in case, Unicode form (NFC, NFD), blanks, %-escapes or slashes"
        return ""


def check_own_file(path: str | Path, folder: str | Path, allow_outside: bool, title: str) -> None:
    """Raise ValueError, begun by `title`, if a file found in `folder` is no regular file there, or a link that leads out."""
    try:
        Jail(str(folder), allow_outside).resolve(os.path.abspath(path))
    except Fault as fault:
        raise ValueError(f"{title}; {fault.detail}. {REASONS[fault.reason]}") from fault


def read_file(path: str, most: int, offset: int = 0, size: int | None = None) -> bytes:
    """Read `size` bytes of a regular file from `offset`, by default all of it, at most `most`; raises a `Fault`."""
    try:
        return retry(lambda: read_regular_file(path, most, offset, size), is_passing, _PAUSES)
    except OSError as error:
        raise file_fault(error, path) from error


def file_fault(error: OSError, path: str, hint: str = "") -> Fault:
    """Return the fault of an error of opening or reading a file."""
    if error.errno == errno.ENAMETOOLONG:
        return Fault("path_too_long", f"{path[:80]}... has {len(os.fsencode(path))} bytes")
    reason = _REASONS.get(error.errno or 0, "read_error")
    detail = path + hint if reason in ("image_missing", "permission_denied") else f"{path}: {error.strerror}"
    return Fault(reason, detail)


def _check_name(name: str) -> None:
    if "\0" in name:
        raise Fault("bad_path", f"{name!r} holds a NUL character")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise Fault("bad_path", f"{name!r} is not valid Unicode") from error
    if len(encoded) > LONGEST_PATH:  # before any other reason: a picture as base64 may begin with a slash
        raise Fault("path_too_long", f"{name[:80]}... has {len(encoded):,} bytes; {LONGEST_PATH:,} are the most")


def _folded(name: str) -> str:
    # casefolding may take a letter and its accents apart, so they are composed once more
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold()).strip()
