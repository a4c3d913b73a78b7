"""Where image files may lie: flags, limits, and a jail that no path of a data file leaves unnoticed."""

import errno
import os
import re
import stat
import time
import unicodedata
from dataclasses import dataclass
from itertools import islice

from mm_utils.arguments import arg
from mm_utils.data.raw.faults import Fault

LONGEST_NAME = 255  # bytes of one file name, on every usual file system
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.\-]+://|(pipe|data):")
_MOST_HINTS = 10  # missing files whose folder is searched for a twin: a long listing takes a second
_LONGEST_LISTING = 100_000
_MOST_FOLDERS = 10_000
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN)


@dataclass
class PathArguments:
    """What the paths and addresses in a data file may reach."""

    image_root: str | None = arg(None, "Folder that image paths are relative to; default the data file's folder.")
    allow_outside_root: bool = arg(False, "Accept image paths that leave --image_root: absolute, by '..', by a link.")
    allow_download: bool = arg(False, "Fetch images given as http(s) addresses; private networks stay out of reach.")

    def __post_init__(self) -> None:
        """Refuse a folder that does not exist."""
        if self.image_root is not None and not os.path.isdir(self.image_root):
            raise ValueError(
                f"--image_root is {self.image_root}; there is no such folder. Give the folder of the images."
            )


@dataclass(frozen=True)
class Limits:
    """How much is read for one image: bytes, seconds and redirects of a download, attempts where it may recover."""

    max_bytes: int = 64 << 20
    seconds: float = 30.0
    redirects: int = 3
    attempts: int = 3


def is_url(name: str) -> bool:
    """Whether `name` is an address of any scheme, such as ``https://``, ``file://`` or ``pipe:``, and no path."""
    return _URL.match(name) is not None


class Jail:
    """Makes the paths of one data file absolute; they are relative to `root` and must lie below it.

    A link counts as the place that it leads to. With `allow_outside` a file may lie anywhere.
    """

    def __init__(self, root: str, allow_outside: bool = False) -> None:
        self.root = os.path.abspath(root)
        self.allow_outside = allow_outside
        self._real_root = os.path.realpath(root)
        self._real_folders: dict[str, str] = {}
        self._hints = 0

    def resolve(self, name: str) -> str:
        """Give the absolute path of `name`, normalised, links unchanged.

        Raises a `Fault`: bad_path (NUL, text that no file name can be, a loop of links), path_too_long, outside_root,
        image_missing, not_a_file (a folder, a pipe, a device) or permission_denied.
        """
        _check_name(name)
        path = os.path.normpath(os.path.join(self.root, name))
        try:
            self._check_place(path, name, follow=False)
            mode = os.lstat(path).st_mode
            if stat.S_ISLNK(mode):
                self._check_place(path, name, follow=True)
                mode = os.stat(path).st_mode
        except OSError as error:
            fault = _fault(error, path + (self._twin(path) if isinstance(error, FileNotFoundError) else ""))
            raise fault from error
        if not stat.S_ISREG(mode):
            raise Fault("not_a_file", f"{path} is {'a folder' if stat.S_ISDIR(mode) else 'a pipe, socket or device'}")
        return path

    def _check_place(self, path: str, name: str, follow: bool) -> None:
        """Raise outside_root if the folder of `path`, or with `follow` the file it leads to, is not below the root."""
        if self.allow_outside:
            return
        if follow:
            real = os.path.realpath(path)
        else:
            folder, leaf = os.path.split(path)
            if folder not in self._real_folders:
                if len(self._real_folders) == _MOST_FOLDERS:
                    self._real_folders.clear()
                self._real_folders[folder] = os.path.realpath(folder)
            real = os.path.join(self._real_folders[folder], leaf)
        if real != self._real_root and not real.startswith(self._real_root.rstrip(os.sep) + os.sep):
            raise Fault(
                "outside_root", f"{name} leads to {real}, outside {self.root}; --allow_outside_root accepts it"
            )

    def _twin(self, path: str) -> str:
        """Hint at the file that differs in case or in Unicode form alone, as copies between systems leave them."""
        folder, name = os.path.split(path)
        self._hints += 1
        if self._hints > _MOST_HINTS or not os.path.isdir(folder):
            return ""
        with os.scandir(folder) as entries:
            twin = next((e.name for e in islice(entries, _LONGEST_LISTING) if _folded(e.name) == _folded(name)), None)
        if twin is None:
            return ""
        return (
            f"; there is {twin}, which differs in {'case' if _nfc(twin) != _nfc(name) else 'Unicode form (NFC, NFD)'}"
        )


def read_file(path: str, limits: Limits, offset: int = 0, size: int | None = None) -> bytes:
    """Give `size` bytes of a regular file from `offset`, by default all of it.

    The file is judged once it is open, so nothing can be put in its place between the check and the reading. Errors
    of network file systems (`is_passing`) are tried `limits.attempts` times. Raises a `Fault`.
    """
    for attempt in range(limits.attempts):
        try:
            return _read_once(path, limits, offset, size)
        except OSError as error:
            if not is_passing(error) or attempt + 1 == limits.attempts:
                raise _fault(error, path) from error
        time.sleep(0.1 * 2**attempt)
    raise ValueError(f"attempts is {limits.attempts}; a file is read at least once. Give 1 or more.")


def is_passing(error: BaseException) -> bool:
    """Whether it is what a network file system says in a bad moment, so that another attempt may succeed."""
    return isinstance(error, OSError) and error.errno in _PASSING


def _read_once(path: str, limits: Limits, offset: int, size: int | None) -> bytes:
    # O_NONBLOCK: else opening a pipe waits for its writer for ever.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    with open(descriptor, "rb") as file:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise Fault("not_a_file", path)
        wanted = status.st_size if size is None else size
        if wanted > limits.max_bytes:
            raise Fault("too_many_bytes", f"{path} has {wanted:,} bytes; {limits.max_bytes:,} is the most")
        if wanted == 0:
            raise Fault("image_empty", f"{path} has 0 bytes")
        file.seek(offset)
        content = file.read(wanted)
    if len(content) < wanted:
        raise Fault("read_error", f"{path} ends after {len(content):,} of {wanted:,} bytes")
    return content


def _fault(error: OSError, path: str) -> Fault:
    if error.errno in (errno.ENOENT, errno.ENOTDIR):
        return Fault("image_missing", path)
    if error.errno == errno.ENAMETOOLONG:
        return Fault("path_too_long", f"{path[:80]}... has {len(os.fsencode(path))} bytes")
    if error.errno == errno.EISDIR:
        return Fault("not_a_file", f"{path} is a folder")
    if error.errno in (errno.EACCES, errno.EPERM):
        return Fault("permission_denied", path)
    if error.errno == errno.ELOOP:
        return Fault("bad_path", f"{path} is a loop of links")
    return Fault("read_error", f"{path}: {error.strerror}")


def _check_name(name: str) -> None:
    if "\0" in name:
        raise Fault("bad_path", f"{name!r} holds a NUL character")
    try:
        encoded = os.fsencode(name)
    except UnicodeEncodeError as error:
        raise Fault("bad_path", f"{name!r} is not valid Unicode") from error
    longest = max(map(len, encoded.split(os.fsencode(os.sep))))
    if longest > LONGEST_NAME:
        raise Fault("path_too_long", f"{name[:80]}... has a name of {longest} bytes; {LONGEST_NAME} is the most")


def _nfc(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _folded(name: str) -> str:
    return _nfc(_nfc(name).casefold())
