"""A disk that is full when a checkpoint is saved: a small one in memory, for the trial."""

import re
import shutil
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from benchmarks.rivals.reliability.kills import Checkpoints, Work, wait_for_checkpoints
from benchmarks.rivals.reliability.trials import Ranks, Run, train

TOLD = re.compile(r"No space left|disk .*is full|quota", re.IGNORECASE)
"""What an error says that is understood."""


@contextmanager
def small_disk(folder: Path, size: int) -> Iterator[bool]:
    """A disk of `size` bytes at `folder`; False where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    mounted = shutil.which("mount") is not None and subprocess.run(command, capture_output=True).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)


class Neighbour(threading.Thread):
    """Another program that takes every byte it can get on a disk, until it is asked to end."""

    def __init__(self, folder: Path):
        super().__init__(daemon=True)
        self.path, self.ending = folder / "neighbour", threading.Event()

    def run(self) -> None:
        """Write, and go on trying."""
        with open(self.path, "wb", buffering=0) as file:
            while not self.ending.wait(0.0005):
                try:
                    while file.write(bytes(2**16)):
                        pass
                except OSError:
                    pass

    def end(self) -> None:
        """Stop and give the room back."""
        self.ending.set()
        self.join()
        self.path.unlink()


def fill(work: Work, run: Run, checkpoints: Checkpoints, size: int, neighbour: bool) -> str:
    """Save twice where the second checkpoint finds no room; what went wrong, empty if nothing.

    Right is: the first checkpoint is loaded by a restart, and the error said what the matter was.

    Args:
        size: bytes of a checkpoint.
        neighbour: one checkpoint is kept, the disk holds two and a half, and another program fills it before the second is
            saved; without, two are kept and it holds one and a half.
    """
    disk = Path(run.folder)
    with small_disk(disk, int(size * (2.5 if neighbour else 1.5))) as mounted:
        if not mounted:
            return "skipped: a small disk can be mounted by root alone"
        run = replace(run, folder=str(disk / "run"), steps=4, keep=1 if neighbour else 2)
        ranks = Ranks(work, replace(run, saves=(1, 3), digests=True, hold_after=2))
        ranks.wait_for("went_on", step=2)
        wait_for_checkpoints(checkpoints, run, ranks, 1)
        other = Neighbour(disk) if neighbour else None
        if other:
            other.start()
        Path(run.folder, "go").touch()
        [failed] = ranks.end()
        if other:
            other.end()
        states = {event["step"]: event["digest"] for event in failed.events if event["event"] == "stepped"}
        [again] = train(work, replace(run, resume=True, saves=()))
    loaded = again.last("loaded")
    if again.error and not loaded:
        return f"no restart: {again.error}"
    if loaded.get("step") != 1 or loaded["digest"] != states[1]:
        return f"a restart loads {loaded.get('step', 'nothing')}"
    return "" if TOLD.search(failed.said) else f"a restart is right, the error is not clear: {failed.said}"
