"""Claim a run's output folder: find or create it, lock it, refuse others' folders."""

import fcntl
import itertools
import logging
import os
import platform
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import IO, Any

import yaml

from mm_utils.checkpointing.files import LAST_CHECKPOINT, checkpoint_folders
from mm_utils.data.rows.columns import kind_of_value
from mm_utils.distributed import RunError
from mm_utils.files import SUMS_FILE, unwritable, write_a_file, write_atomic
from mm_utils.reliability.skipped import SKIPPED_FILE
from mm_utils.run.restarts import STARTS_FILE, earlier_starts, folder_of_launch
from mm_utils.text import without_secrets
from mm_utils.training.arguments import CONFIG_FILE, METRICS_FILE, NONFINITE_FILE, TrainingArguments

logger = logging.getLogger(__name__)

LOCK_FILE = ".lock"
_LOCK_SECONDS = 10.0  # a restarted run may meet its predecessor, which is being killed
_DATA = ("train_file", "validation_file", "test_file", "dataset_name", "image_root")
_OWN = (
    STARTS_FILE, METRICS_FILE, CONFIG_FILE, SUMS_FILE, "README.md", "config.json", "dual_encoder", "model*.safetensors*",
    "*processor_config.json", "tokenizer*", "vocab.*", "training.png", "retrieval.png", "results.json",
    SKIPPED_FILE, NONFINITE_FILE, "classes.csv", "reading.py",
)  # fmt: skip
"""What a run writes beside its checkpoints and others may have, as patterns of names."""
_NOT_SAVED = ("resume_from_checkpoint", "dry_run")  # true of one start only

_held: dict[tuple[int, Path], IO[str]] = {}  # the one folder that this process has locked; a forked process holds none


def claim_folder(
    name: str, args: TrainingArguments, config: Mapping[str, Any], launch: Sequence[str]
) -> tuple[Path, str | None]:
    """Find, create and lock the output folder of a start, on the main process; return it, and the checkpoint to resume from.

    `config` has all arguments by name. Without `--output_dir`, a new `outputs/<name>-N` is created, and a restart by one of the
    launchers gets that of its first start.

    Raises:
        RunError: if it cannot be used.
    """
    try:
        folder = Path(args.output_dir) if args.output_dir else folder_of_launch(name, launch)
        if folder is None and args.resume_from_checkpoint == "latest":
            raise RunError("--resume_from_checkpoint is latest; of which run, --output_dir says. Give it.")
        folder = folder or _new_folder(name)
        before = earlier_starts(folder, launch)
        resume_from = args.resume_from_checkpoint
        has_trained = any("resumed_from" in start for start in before) and bool(checkpoint_folders(folder))
        if before and (resume_from is None or has_trained):
            resume_from = "latest"  # of what this restarted run has saved
        is_restart = bool(before)
        problem = misplaced(folder, config) or occupied(folder, resume_from, is_restart)
        if not problem:
            write_a_file(folder)
            # Another run may have had the lock, and be done: what it has left is not replaced.
            problem = lock_folder(folder) or occupied(folder, resume_from, is_restart)
    except (OSError, ValueError) as error:  # a ValueError comes from a name that no file can have
        problem = unwritable("--output_dir", args.output_dir or Path("outputs").absolute(), error)
    if problem:
        raise RunError(problem)
    assert folder is not None
    return folder, resume_from


def save_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write `config.yaml`, which `--config` reads back, without secrets."""
    saved = {key: value for key, value in config.items() if key not in _NOT_SAVED}
    shown = without_secrets(saved)
    for key in (key for key in saved if shown[key] != saved[key]):
        logger.warning("--%s holds a secret, which config.yaml leaves out; give it again when the run is resumed", key)
    write_atomic(folder / CONFIG_FILE, yaml.safe_dump(shown, sort_keys=False))


def misplaced(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Return why a folder cannot be the output folder: a disk's root, a home, the data; else None."""
    place = folder.resolve()
    reason = None
    if place in (Path(place.anchor), Path(os.path.expanduser("~")).resolve()):
        reason = "it is your home folder, or the root of a disk"
    for name in _DATA:
        value = config.get(name)
        if not isinstance(value, str) or "://" in value:
            continue
        source = Path(value).resolve()
        if name.endswith("_file"):
            # a folder inside that of the file may be used
            is_among = place in (source, source.parent)
        else:
            is_among = source.is_dir() and source in (place, *place.parents)
        reason = f"--{name} is {value}, and the run's files would lie among its own" if is_among else reason
    return f"--output_dir is {folder}; {reason}. Give a folder of its own, e.g. outputs/mine." if reason else None


def occupied(folder: Path, resume_from: str | None, is_restart: bool = False) -> str | None:
    """Return the problem of a folder with a run that is not gone on with, or with others' media, or files of names that a run writes.

    A run is gone on with by its launcher, from a checkpoint in its folder, or from step 0 if it has neither saved nor finished.
    """
    paths = list(folder.iterdir()) if folder.is_dir() else []
    names = {path.name for path in paths}
    has_checkpoints = bool(checkpoint_folders(folder))
    is_finished = "model.safetensors" in names
    was_pushed = LAST_CHECKPOINT in names
    goes_on = is_restart
    remedy = "Continue it with --resume_from_checkpoint latest, or give another folder"
    if resume_from == "latest":
        goes_on |= has_checkpoints or not (is_finished or was_pushed)
    elif resume_from is not None:
        goes_on |= Path(resume_from).resolve().parent == folder.resolve()
    if is_finished and not has_checkpoints:
        remedy = "It has no checkpoint-N to continue from: give another folder"
    if was_pushed and not has_checkpoints:
        remedy = f"Continue it with --resume_from_checkpoint {folder / LAST_CHECKPOINT} and another --output_dir"
    if not goes_on and (has_checkpoints or is_finished or was_pushed or METRICS_FILE in names):
        return f"--output_dir is {folder}; it already holds a run. {remedy}."
    others = [path.name for path in paths if kind_of_value(path) is not None or any(map(path.match, _OWN))]
    if others and not (has_checkpoints or METRICS_FILE in names or earlier_starts(folder)):
        return (
            f"--output_dir is {folder}; it holds {min(others)}, which no run of this project wrote, and the run's files "
            "would replace it or lie beside it. Give a folder of its own, e.g. outputs/mine."
        )
    return None


def lock_folder(folder: Path, seconds: float = _LOCK_SECONDS) -> str | None:
    """Lock a folder until this process ends or locks another; return who has it, if any.

    A POSIX record lock is released by the kernel however the process ends, and data workers do not inherit it, as they
    would inherit the lock of the package filelock. On a file system without locks, nothing is kept out.
    """
    path = folder.resolve() / LOCK_FILE
    place = os.getpid(), path
    if place in _held and path.exists():
        return None  # closing a second handle would release the first one's lock
    unlock()
    # a+, as the line of who holds the lock must stay until it is ours
    file = open(path, "a+", encoding="utf-8")  # noqa: SIM115  (open while it is held)
    late = time.monotonic() + seconds
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
    """Release the lock before the process ends."""
    for file in _held.values():
        file.close()
    _held.clear()


def _new_folder(name: str) -> Path:
    """Create the first free `outputs/<name>-N`, at once, so that no other run takes it; that of a failed start is free again."""
    for number in itertools.count(1):
        folder = Path("outputs", f"{name}-{number}")
        with suppress(FileExistsError):
            folder.mkdir(parents=True)
            break
        # a start was recorded there, and nothing trained; without locks (`_held` is empty) it may still run
        names = {path.name for path in folder.iterdir()}
        if STARTS_FILE in names <= {STARTS_FILE, CONFIG_FILE, LOCK_FILE} and not lock_folder(folder, 0) and _held:
            break
    return folder
