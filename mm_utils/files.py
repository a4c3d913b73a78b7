"""Read regular files, write atomically, retry, and keep JSON-lines logs for resumed runs."""

import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import math
import os
import re
import resource
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

logger = logging.getLogger(__name__)

MAX_OPEN_FILES = 65_536  # the limit that a run asks for; data workers and shards use most of it
SUMS_FILE = "SHA256SUMS"  # of a checkpoint or a finished model; `sha256sum -c` reads it, too
_OF_MODEL = (".safetensors", ".json", ".model", ".py")
_WORDS = ("vocab.txt", "merges.txt")
_REPORTS = ("environment.json", "results.json", "metrics.json", "wise_ft.json")
_Result = TypeVar("_Result")
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)  # what only writing meets
_REMOTE = getattr(errno, "EREMOTEIO", errno.EIO)  # what stores make of 5xx
_PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET, errno.EAGAIN, errno.EBUSY, _REMOTE)
_UNFINISHED = ".unfinished"  # ends the names of folders that are being written
_YOUNG = 60.0  # seconds; a folder of another name may have been made, and not yet been locked
_failed: set[Path] = set()


def retry(action: Callable[[], _Result], passing: Callable[[Exception], bool], pauses: Iterable[float]) -> _Result:
    """Call `action` until it succeeds or raises an error that does not pass, with pauses in seconds between."""
    for pause in pauses:
        try:
            return action()
        except Exception as error:
            if not passing(error):
                raise
        time.sleep(pause)
    return action()


def is_passing(error: BaseException) -> bool:
    """Return whether a network file system raises such an error only for a moment."""
    return isinstance(error, OSError) and error.errno in _PASSING


def regular_file(path: str) -> BinaryIO:
    """Open a file for reading; raises an OSError, EINVAL if it is not a regular file.

    The file is judged once it is open, so that nothing can take its place between the check and the reading.
    """
    # O_NONBLOCK: else opening a pipe waits for its writer forever.
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", path)
    return file


def read_regular_file(path: str, max_bytes: int, offset: int = 0, size: int | None = None) -> bytes:
    """Read `size` bytes from `offset`, by default the whole file.

    Raises:
        OSError: errno EINVAL if it is not a regular file, EFBIG above `max_bytes`, ENODATA if it is empty, ERANGE if it
            ends too early; otherwise as the system says.
    """
    with regular_file(path) as file:
        length = os.fstat(file.fileno()).st_size
        wanted = length if size is None else size
        if wanted > max_bytes:
            raise OSError(errno.EFBIG, f"it has {wanted:,} bytes; {max_bytes:,} is the most", path)
        if wanted == 0:
            raise OSError(errno.ENODATA, "it has 0 bytes", path)
        file.seek(offset)
        content = file.read(wanted)
    if len(content) < wanted:
        raise OSError(errno.ERANGE, f"it ends after {len(content):,} of {wanted:,} bytes", path)
    return content


def changed_ns(status: os.stat_result) -> int:
    """Return when a file was changed, in nanoseconds of 64 bits; a broken clock may have written the year 10,000."""
    return min(max(status.st_mtime_ns, -(2**63)), 2**63 - 1)


def sha256(path: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits: 0.3 to 1.5 GB/s."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_of_model(path: Path) -> bool:
    """Return whether a file of a run's folder is part of its model; its reports, and logs that somebody keeps there, are not."""
    return path.name in _WORDS or (path.suffix in _OF_MODEL and path.name not in _REPORTS)


def changed_since_sums(folder: Path) -> list[str]:
    """Return the names of a model's files that differ from the sums beside them, or are missing; none where there are no sums.

    Only files that were touched after the sums were written are read. Of a copy, that is all of them; if they agree, its sums are dated anew.
    """
    file = folder / SUMS_FILE
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
        summed = _touched(file)
    except (OSError, ValueError):
        return []
    parts = [line.partition("  ") for line in lines]
    sums = {folder / name: digest for digest, _, name in parts}
    files = [path for path in sorted(folder.glob("*.*")) if path in sums and is_of_model(path)]
    # one of the same moment is read, too: clocks have steps
    touched = [path for path in files if _touched(path) >= summed]
    changed = [path.name for path in touched if sha256(path) != sums[path]]
    changed += [path.name for path in sums if path.parent == folder and is_of_model(path) and not path.exists()]
    if touched and not changed:
        with suppress(OSError):  # somebody else's
            os.utime(file)
    return changed


def _touched(path: Path) -> int:
    """Return when a file was last written, replaced or moved here, in nanoseconds."""
    status = path.stat()
    return max(status.st_mtime_ns, status.st_ctime_ns)


def write_atomic(path: Path, content: str | bytes) -> None:
    """Write a file and rename it: readers see the old content or the new, never a part; raises an OSError."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        temporary.chmod(0o666 & ~_umask())  # mkstemp lets the owner alone read it
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_json(path: Path, content: Any) -> None:
    """Write JSON for people and programs, by `write_atomic`."""
    write_atomic(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path) -> Any:
    """Read what a JSON file holds."""
    return json.loads(path.read_text(encoding="utf-8"))


def is_about(error: OSError, *folders: Path) -> bool:
    """Return whether an error is that of a full or read-only disk, or names something in one of `folders`."""
    named = f"{error.filename or ''} {error.filename2 or ''} {error}"
    return error.errno in FULL or any(str(folder) in named for folder in folders)


def flush(folder: Path) -> None:
    """Write all files of a folder through to the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fsync(file.fileno())


def replace_folder(new: Path, final: Path) -> None:
    """Put the folder `new` in the place of `final`, and remove what was there; both lie on one file system.

    Where Linux cannot exchange two folders, as on NFS, and on macOS, `final` is missing for a moment; after a crash in that moment
    `restore_folder` brings the old one back.
    """
    if final.exists() and _exchange(new, final):
        shutil.rmtree(new, ignore_errors=True)
        return
    aside = _aside(final)
    if final.exists():
        shutil.rmtree(aside, ignore_errors=True)
        final.rename(aside)
    new.rename(final)
    shutil.rmtree(aside, ignore_errors=True)


def restore_folder(final: Path) -> None:
    """Bring back a folder whose `replace_folder` was killed between two renames."""
    if not final.exists() and _aside(final).is_dir():
        _aside(final).rename(final)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two folders in one step; return False where the system cannot (renameat2(2), RENAME_EXCHANGE)."""
    if sys.platform != "linux":
        return False
    here = -100  # AT_FDCWD: relative paths are those of the current folder
    exchange = 2  # RENAME_EXCHANGE
    call = ctypes.CDLL(None).renameat2
    return bool(call(here, os.fsencode(one), here, os.fsencode(other), ctypes.c_uint(exchange)) == 0)


def _aside(final: Path) -> Path:
    return final.with_name(f".{final.name}.replaced")


def writable_folder(path: str, flag: str) -> None:
    """Create the folder that a flag names; raises ValueError, in one line, if it cannot be written."""
    try:
        write_a_file(Path(path))
    except (OSError, ValueError) as error:
        raise ValueError(unwritable(flag, path, error)) from error


def write_a_file(folder: Path) -> None:
    """Create a folder, and a file in it that is removed at once; raises OSError, or ValueError for a name that no file can have."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(prefix=".", dir=folder):
        pass


def unwritable(flag: str, path: str | Path, error: OSError | ValueError) -> str:
    """Return what to say where the folder that a flag names cannot be written."""
    why = getattr(error, "strerror", None) or str(error)
    if isinstance(error, (FileExistsError, NotADirectoryError)):
        why = "it, or what it lies in, is a file"
    return f"{flag} is {path}; it cannot be written: {why}. Give a folder that can."


@contextmanager
def atomic_folder(final: Path, flag: str | None = None) -> Iterator[Path]:
    """Yield a hidden folder; rename it to `final` at the end, remove it if the block fails.

    If another process has made `final` meanwhile, that one stays. What killed processes left in its parent is removed first.

    Raises:
        ValueError: if another process has made `final`, and it is the folder that a `flag` names: then each has other content.
    """
    final.parent.mkdir(parents=True, exist_ok=True)
    for left in final.parent.glob(f".*{_UNFINISHED}"):
        with suppress(OSError), folder_lock(left) as is_left:
            is_old = left.name.startswith(f".{final.name}-") or time.time() - left.stat().st_mtime > _YOUNG
            if is_left and is_old:
                shutil.rmtree(left, ignore_errors=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{final.name}-", suffix=_UNFINISHED, dir=final.parent))
    try:
        temporary.chmod(0o777 & ~_umask())
        with folder_lock(temporary):
            yield temporary
            try:
                temporary.rename(final)
            except OSError as error:
                if not final.is_dir():
                    raise
                if flag is not None:
                    raise ValueError(
                        f"{flag} is {final}; another run has written it meanwhile. Give a new folder."
                    ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def folder_lock(folder: Path) -> Iterator[bool | None]:
    """Lock a folder while the block runs or this process lives; yield whether it could be locked, None where nothing can."""
    descriptor = os.open(folder, os.O_RDONLY)
    is_locked = None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        is_locked = True
    except BlockingIOError:
        is_locked = False
    except OSError:  # a file system without locks
        pass
    try:
        yield is_locked
    finally:
        os.close(descriptor)


def errno_of(error: BaseException | None) -> int:
    """Return the operating system's number of an error or of what it came from, also as libraries in Rust state it; else 0."""
    while error is not None:
        # safetensors: 'No space left on device (os error 28)'
        stated = re.search(r"\(os error (\d+)\)", str(error))
        if number := getattr(error, "errno", None) or (stated and int(stated[1])):
            return int(number)
        error = error.__cause__
    return 0


@contextmanager
def optional_file(path: Path) -> Iterator[None]:
    """Log a file that cannot be written, such as a picture of a finished run, which stands without it."""
    try:
        yield
    except OSError as error:
        logger.warning("%s cannot be written: %s. The rest is complete; make room", path, error.strerror or error)


def readable(folder: Path) -> None:
    """Set the usual permissions of the files of a folder: safetensors writes for the owner alone."""
    for path in folder.rglob("*.safetensors"):
        path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)  # it can only be read by setting it
    os.umask(mask)
    return mask


def append_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Append JSON lines; a disk that refuses them costs lines, not the run, and one error."""
    try:
        with open(path, "a", encoding="utf-8") as file:
            file.write("".join(json.dumps(row) + "\n" for row in rows))
    except OSError as error:
        if path not in _failed:
            _failed.add(path)
            logger.error("%s cannot be written: %s. Training goes on without it; make room", path, error.strerror)


def truncate_rows(path: Path, step: int) -> None:
    """Remove the lines of steps after `step`, which a resumed run writes again, and torn lines."""
    if not path.is_file():
        return
    lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    write_atomic(path, "".join(line + "\n" for line in lines if _step_of(line) <= step))


def _step_of(line: str) -> float:
    """Return the step of a line, infinity if it is torn, or names what was saved, which is chosen again."""
    try:
        row = json.loads(line)
        return math.inf if "saved_step" in row else float(row["step"])
    except (ValueError, KeyError, TypeError):
        return math.inf


def allow_open_files() -> None:
    """Raise this process's limit of open files, of which data workers and shards need many."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS allows fewer than it says
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
