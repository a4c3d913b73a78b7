"""Starting more than once: one run per folder at a time, what restarts of a launcher go on from, and when they are no use.

Every start is an entry of `environment.json` in the output folder. A launcher that restarts its processes (`torchrun` and
`accelerate launch` with `--max_restarts`, or a changed number of nodes) is known by a folder that it makes once and names to
all of them, so a start finds the one before it without being told, and `outputs/<script>-N` too.
"""

import ctypes
import functools
import json
import os
import platform
import signal
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

from accelerate.utils import gather_object

from mm_utils import ranks
from mm_utils.checkpoints import checkpoint_folders
from mm_utils.preflight import settle

if sys.platform != "win32":
    import fcntl

STARTS_FILE = "environment.json"
LOCK_FILE = ".lock"
_LOCK_SECONDS = 10.0  # a run that is started again may meet the one before, which is being killed
_RESTARTS_WITHOUT_A_STEP = 2
_LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun"}
_LAUNCHER_MODULES = {"accelerate.commands.launch", "accelerate.commands.accelerate_cli", "torch.distributed.run"}
_PR_SET_PDEATHSIG = 1  # of linux/prctl.h
_libc = ctypes.CDLL(None) if sys.platform.startswith("linux") else None

_held: dict[tuple[int, Path], IO[str]] = {}  # the one folder that a process has locked; a forked one has none


# -- one run per folder -------------------------------------------------------------------------------------------------


def lock_folder(folder: Path, seconds: float = _LOCK_SECONDS) -> str | None:
    """Keep other processes' runs out of a folder, until this process ends or locks another; what is wrong, if another does.

    It is a POSIX record lock, which the kernel takes back however the process ends, and which data workers do not inherit.
    Where the file system has no locks, nothing is kept out.
    """
    path = folder.resolve() / LOCK_FILE
    place = os.getpid(), path
    if sys.platform == "win32" or (place in _held and path.exists()):
        return None  # closing a second handle would give the first one's lock back
    unlock()
    file, late = open(path, "a+", encoding="utf-8"), time.monotonic() + seconds  # noqa: SIM115  (open while it is held)
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except (BlockingIOError, PermissionError):
            if time.monotonic() >= late:
                file.seek(0)
                holder = file.read().strip() or "another process"
                file.close()
                return (
                    f"--output_dir is {folder}; a run is writing there: {holder}. Wait for it, end it, or give another "
                    "folder."
                )
            time.sleep(0.2)
        except OSError:
            file.close()
            return None
    file.truncate(0)
    now = datetime.now(timezone.utc).isoformat(timespec="seconds")
    file.write(f"process {os.getpid()} on {platform.node()}, since {now}\n")
    file.flush()
    _held[place] = file
    return None


def unlock() -> None:
    """Give the lock back before the process ends."""
    for file in _held.values():
        file.close()
    _held.clear()


# -- starts of one run --------------------------------------------------------------------------------------------------


def this_launch() -> list[str]:
    """Names of the launchers of all ranks, which stay the same when they restart their processes; called on all ranks."""
    return sorted({name for name in gather_object([_launcher_name()]) if name})


def _launcher_name() -> str | None:
    """`<host>:<folder>`: torchelastic's log folder, `<folder>/attempt_N/<local rank>/error.json`, is new in every launch."""
    run_id, error_file = (os.environ.get(f"TORCHELASTIC_{name}", "") for name in ("RUN_ID", "ERROR_FILE"))
    folders = Path(error_file).parents
    name = str(folders[2]) if len(folders) > 3 else run_id if run_id != "none" else ""
    return f"{platform.node()}:{name}" if run_id and name else None


def earlier_starts(folder: Path, launch: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """What `record_start` has written in this folder, oldest first; with `launch`, only of the same launch."""
    try:
        starts = json.loads((folder / STARTS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return []
    starts = [start for start in starts if isinstance(start, dict)] if isinstance(starts, list) else []
    return starts if launch is None else [start for start in starts if set(launch) & set(start.get("launch", ()))]


def folder_of_launch(name: str, launch: Sequence[str]) -> Path | None:
    """The `outputs/<name>-N` that an earlier start of this launch made."""
    return next((path for path in Path("outputs").glob(f"{name}-*") if earlier_starts(path, launch)), None)


def resume_name(given: str | None, folder: Path, launch: Sequence[str]) -> str | None:
    """What `--resume_from_checkpoint` means now: a restart goes on from what the starts before it have saved."""
    before = earlier_starts(folder, launch)
    if not before:
        return given
    went_on = any("resumed_from" in start for start in before)
    return "latest" if given is None or (went_on and checkpoint_folders(folder)) else given


def record_start(folder: Path, about: dict[str, Any], launch: Sequence[str]) -> None:
    """Append an entry to `environment.json`; called on the main process.

    Raises:
        OSError: if it cannot be written.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    _write(folder, [*earlier_starts(folder), {**about, "launch": list(launch), "restarts": restarts}])


def note_start(folder: Path, step: int) -> None:
    """Write down the step that this start goes on from, 0 for the beginning; called on all ranks.

    Raises:
        ValueError: on every rank, if a launcher has restarted the run and the two starts before gained no step.
    """
    settle(_note_start(folder, step) if ranks.rank() == 0 else None)


def _note_start(folder: Path, step: int) -> str | None:
    starts = earlier_starts(folder)
    if not starts:
        return None
    now = starts[-1]
    now["resumed_from"] = step
    try:
        _write(folder, starts)
    except OSError as error:
        return f"{folder / STARTS_FILE} cannot be written: {error.strerror}. Free some disk."
    before = earlier_starts(folder, now.get("launch", ()))[:-1][-_RESTARTS_WITHOUT_A_STEP:]
    idle = len(before) == _RESTARTS_WITHOUT_A_STEP and all(start.get("resumed_from", step) == step for start in before)
    if idle and now.get("restarts", 0) >= _RESTARTS_WITHOUT_A_STEP:
        return (
            f"--max_restarts has restarted the run, and no step was gained in {_RESTARTS_WITHOUT_A_STEP} restarts: each went "
            f"on from step {step}. Look for the first error in the log, or set a lower --save_steps."
        )
    return None


def _write(folder: Path, starts: list[dict[str, Any]]) -> None:
    temporary = folder / f".{STARTS_FILE}.tmp"
    temporary.write_text(json.dumps(starts, indent=2) + "\n", encoding="utf-8")
    temporary.replace(folder / STARTS_FILE)


# -- parents and children -------------------------------------------------------------------------------------------------


def end_with_launcher() -> None:
    """On Linux, where `accelerate launch` or `torchrun` started this process: get SIGTERM when that ends.

    `accelerate launch` of one process does not hand signals on: ended by SIGTERM, it would leave this process to train on,
    with the device that the next run asks for.

    Raises:
        ValueError: if it has ended already.
    """
    parent = os.getppid()
    if _libc is None:
        return
    launched = not {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ)
    if _is_launcher(parent):
        end_with(parent)
    elif launched and parent == 1 and not _is_python(1):
        raise ValueError("The launcher of this process has ended before it could begin. Start the run again.")


def end_with(parent: int) -> None:
    """On Linux, get SIGTERM when the parent process `parent` ends, or its thread that started this one."""
    if _libc is None:
        return
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:  # it ended before that
        os.kill(os.getpid(), signal.SIGTERM)


@functools.cache
def fork_without_tokenizer_threads() -> None:
    """Let forked processes, such as data workers, tokenise with one thread: they would wait for ever for their parent's.

    `tokenizers` sees to it by itself, but not where TOKENIZERS_PARALLELISM is true.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


def _is_launcher(process: int) -> bool:
    words = _command(process)[:4]
    return any(word in _LAUNCHER_MODULES or Path(word).name in _LAUNCHERS for word in words)


def _is_python(process: int) -> bool:
    """In a container, a launcher of another name may be the first process."""
    return Path(_command(process)[0]).name.startswith("python")


def _command(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return [""]
