"""Atomic, verifiable checkpoint folders.

A checkpoint is written beside its final name `checkpoint-N`, with the SHA-256 of its files in `SHA256SUMS`. Files, sums and
folder reach the disk before the folder is renamed, and older checkpoints are removed only after that. So a run that is killed at
any instant leaves no half checkpoint under that name. Later damage, on a disk or in a copy, shows against the sums: `latest` is
the newest checkpoint that verifies. A finished model has such sums, too.

To check a run: python scripts/verify_checkpoints.py --output_dir outputs/mine
"""

import logging
import os
import re
import shutil
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from mm_utils import distributed
from mm_utils.files import (
    SUMS_FILE,
    is_of_model,
    read_json,
    readable,
    replace_folder,
    restore_folder,
    sha256,
    write_atomic,
)

logger = logging.getLogger(__name__)

STATE_FILE = "trainer_state.json"
LAST_CHECKPOINT = "last-checkpoint"  # the newest one, in a repository on the Hub


def step_of(checkpoint: Path) -> int:
    """Return the step that a checkpoint states, whatever its folder is called; where it states none, that of its name."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return int(read_json(checkpoint / STATE_FILE)["global_step"])
    return int(checkpoint.name.rpartition("-")[2])


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Return the run's folders that are named like a checkpoint, oldest step first; of one stated step, by their names."""
    named = (path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name))
    folders = (path for path in named if path.is_dir() and not path.is_symlink())
    return sorted(folders, key=lambda path: (step_of(path), int(path.name.rpartition("-")[2])))


# -- writing ------------------------------------------------------------------------------------------------------------


def write_checkpoint(final: Path, write: Callable[[Path], None]) -> None:
    """Create the checkpoint folder `final` atomically.

    When this returns, the checkpoint is on the disk; when it raises, an earlier folder of that name is intact.

    Args:
        final: the folder, named `checkpoint-N`.
        write: writes the files into the folder that it is given.
    """
    temporary = final.with_name(f".{final.name}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    try:
        write(temporary)
        readable(temporary)
        paths = sorted(path for path in temporary.rglob("*") if path.is_file())
        # The state is last: sums that were cut do not name it
        _write_sums(temporary, sorted(paths, key=lambda path: path.name == STATE_FILE))
        for path in (*temporary.rglob("*"), temporary):
            _sync(path)
        # A second stage begins with a checkpoint of the step that the first ended with
        replace_folder(temporary, final)
        _sync(final.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        restore_folder(final)
        raise


def remove_unfinished(output_dir: Path) -> None:
    """Remove folders half written or half removed; restore one that was not replaced yet."""
    for path in output_dir.glob(".checkpoint-*.*"):
        # '.checkpoint-10.tmp' -> 'checkpoint-10', 'tmp'
        name, _, ending = path.name.removeprefix(".").rpartition(".")
        if ending == "replaced":
            restore_folder(output_dir / name)
        if ending in ("tmp", "replaced", "removed"):
            shutil.rmtree(path, ignore_errors=True)


def seal_model(folder: Path) -> None:
    """Write the SHA-256 of the files of a finished model, and of the stock one in `dual_encoder/`."""
    paths = (*folder.glob("*.*"), *folder.glob("dual_encoder/*.*"))
    _write_sums(folder, sorted(filter(is_of_model, paths)))


def _write_sums(folder: Path, paths: Iterable[Path]) -> None:
    # '<64 digits>  model.safetensors', as `sha256sum -c` reads it
    write_atomic(folder / SUMS_FILE, "".join(f"{sha256(path)}  {path.relative_to(folder)}\n" for path in paths))


# -- finding ------------------------------------------------------------------------------------------------------------


def verify(folder: Path) -> list[str]:
    """Compare every byte of a checkpoint or a finished model with its sums; return one line per damaged file."""
    try:
        lines = (folder / SUMS_FILE).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        return [f"{SUMS_FILE} cannot be read: {error}"]
    wrong = []
    for line in lines:
        digest, _, name = line.partition("  ")
        try:
            if sha256(folder / name) != digest:
                wrong.append(f"{name} is not what was written: its SHA-256 differs")
        except (OSError, ValueError) as error:
            wrong.append(f"{name} cannot be read: {error}")
    is_checkpoint = folder.name.startswith("checkpoint-") or (folder / STATE_FILE).is_file()
    if is_checkpoint and not (lines and lines[-1].endswith(f"  {STATE_FILE}")):
        wrong.append(f"{SUMS_FILE} was cut")
    return wrong


def find_checkpoint(name: str | None, output_dir: str | Path | None) -> Path | None:
    """Return the checkpoint to resume from, or None for a first start; called on all ranks.

    Args:
        name: a checkpoint folder of any name, or `latest` for the newest that verifies; None if nothing is to be resumed.
        output_dir: the run's output folder, where `latest` is searched.

    Raises:
        ValueError: if the folder is not a checkpoint or is damaged, or if all checkpoints are damaged.
    """
    if name is None or output_dir is None:
        return None
    if name == "latest":
        return distributed.on_first(lambda: _newest(Path(output_dir)))
    return distributed.on_first(lambda: _named(Path(name)))


def _newest(output_dir: Path) -> Path | None:
    folders = checkpoint_folders(output_dir)
    for path in reversed(folders):
        wrong = verify(path)
        if not wrong:
            return path
        logger.warning("%s is damaged and passed over: %s", path, "; ".join(wrong))
    if folders:
        raise ValueError(
            f"--resume_from_checkpoint is latest; none of the checkpoints in {output_dir} is whole. Restore one from a copy, "
            "or start anew in another folder."
        )
    logger.info("No checkpoint in %s: the run begins at step 0", output_dir)
    return None


def _named(path: Path) -> Path:
    name = f"--resume_from_checkpoint is {path}"
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"{name}; it is not a checkpoint folder with a {STATE_FILE}. Give one, or latest.")
    if wrong := verify(path.resolve()):
        raise ValueError(f"{name}; it is damaged: {'; '.join(wrong)}. Give an older one, or latest.")
    return path


def set_aside(output_dir: Path, after: int) -> None:
    """Rename checkpoints beyond `after`: a run resumed from there will write them again."""
    for path in checkpoint_folders(output_dir):
        if step_of(path) > after:
            aside = path.parent / f"{path.name}.superseded"
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
            logger.warning("%s is newer than the step that the run resumes from; renamed to %s", path, aside.name)


# -- small parts --------------------------------------------------------------------------------------------------------


def size_of(folder: Path) -> int:
    """Return the bytes of all files in a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)  # of a folder, it writes the names of its files
    finally:
        os.close(handle)
