"""Checkpoints: a folder `checkpoint-N` that is a loadable model and holds all that a resumed run needs.

A checkpoint is written beside its final name and renamed when it is complete, so a killed run never leaves half of one
under that name; old ones are removed only after the new one stands.
"""

import json
import os
import re
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

from accelerate import Accelerator
from transformers import TrainerState

STATE_FILE = "trainer_state.json"


def checkpoint_path(output_dir: str | Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return Path(output_dir) / f"checkpoint-{step}"


def checkpoint_folders(output_dir: Path) -> list[Path]:
    """Folders of a run that are named as a checkpoint, oldest step first."""
    found = [path for path in output_dir.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d+", path.name)]
    return sorted(found, key=lambda path: int(path.name.rpartition("-")[2]))


def list_checkpoints(output_dir: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    return [path for path in checkpoint_folders(output_dir) if (path / STATE_FILE).is_file()]


def find_checkpoint(name: str | None, output_dir: str | Path) -> Path | None:
    """The checkpoint to resume from: None, a folder, or `latest` for the newest in `output_dir`, if there is one.

    Raises:
        ValueError: if the folder is no checkpoint.
    """
    if name is None:
        return None
    if name == "latest":
        found = list_checkpoints(Path(output_dir))
        return found[-1] if found else None
    path = Path(name)
    if not (path / STATE_FILE).is_file():
        raise ValueError(f"--resume_from_checkpoint is {name}; it holds no {STATE_FILE}. Give a checkpoint-N folder.")
    return path


def save_checkpoint(
    accelerator: Accelerator, output_dir: Path, state: TrainerState, write_extras: Callable[[Path], None]
) -> Path:
    """Write `checkpoint-N` for the state's step; called on all ranks. `write_extras` runs on the main process."""
    final = checkpoint_path(output_dir, state.global_step)
    temporary = output_dir / f".{final.name}.tmp"
    if accelerator.is_main_process:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
    accelerator.wait_for_everyone()
    accelerator.save_state(str(temporary))
    if accelerator.is_main_process:
        write_extras(temporary)
        state.save_to_json(str(temporary / STATE_FILE))
        _sync_folder(temporary)
        shutil.rmtree(final, ignore_errors=True)
        temporary.rename(final)
        _sync(output_dir)
    accelerator.wait_for_everyone()
    return final


def load_checkpoint(accelerator: Accelerator, path: Path) -> TrainerState:
    """Restore model, optimizer and random states into what `accelerator` prepared, and return the trainer's state."""
    accelerator.load_state(str(path))
    return TrainerState.load_from_json(str(path / STATE_FILE))


def remove_old_checkpoints(output_dir: Path, limit: int | None, best: Collection[int]) -> None:
    """Keep the newest `limit` checkpoints, and those of the steps `best` besides."""
    if limit is None:
        return
    kept = {checkpoint_path(output_dir, step) for step in best}
    for path in list_checkpoints(output_dir)[:-limit]:
        if path not in kept:
            shutil.rmtree(path)


def truncate_log(path: Path, step: int) -> None:
    """Drop the lines of a metrics file that a resumed run is about to write again, and a torn last line."""
    if not path.is_file():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if row.get("step", 0) <= step:
            kept.append(line + "\n")
    path.write_text("".join(kept), encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    for path in folder.rglob("*"):
        _sync(path)
    _sync(folder)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
