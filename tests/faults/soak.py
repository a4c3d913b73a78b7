"""A run under random faults, started again and again with other numbers of processes, that must end as if there were none."""

import errno
import multiprocessing
import os
import random
import signal
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from mm_utils.checkpointing.files import checkpoint_folders, verify
from mm_utils.training.trainer import Trainer
from tests.faults import rank_runs
from tests.faults.rank_runs import Fault, Sleep, start
from tests.kit.tiny_run import TinyRun

LENGTH = 40  # steps
KINDS = ("SIGKILL", "SIGTERM", "SIGSTOP and SIGCONT")
STARTS = 60  # at most; a run that gains nothing is stuck


@dataclass
class Soaked:
    """What was done to a run.

    Attributes:
        faults: kinds, in order.
        steps_lost: by every start but the last.
        bytes_lost: acknowledged ones, but for those of checkpoints that were cut from outside.
        worlds: numbers of processes.
        since: the first start after a checkpoint was cut, from which on what was acknowledged must be there.
    """

    faults: list[str] = field(default_factory=list)
    steps_lost: list[int] = field(default_factory=list)
    bytes_lost: int = 0
    worlds: list[int] = field(default_factory=list)
    since: int = 0


def soak(folder: Path, seconds: float, seed: int) -> Soaked:
    """Bring a run of 40 steps to its end while, for n seconds, something happens every one to three seconds.

    Raises:
        AssertionError: if a start ends otherwise than it should.
    """
    chance, soaked = random.Random(seed), Soaked()
    late = time.monotonic() + seconds
    for _ in range(STARTS):
        done = _start(folder, chance, soaked, late)
        if done:
            soaked.steps_lost = [rank_runs.steps_lost(folder, begun) for begun in range(len(soaked.worlds) - 1)]
            return soaked
    raise AssertionError(f"the run did not end in {STARTS} starts: {soaked}")


def _start(folder: Path, chance: random.Random, soaked: Soaked, late: float) -> bool:
    """One start; returns whether the run has come to its end."""
    world = chance.choice((1, 2, 3))
    soaked.worlds.append(world)
    arguments = {"max_steps": LENGTH, "eval_steps": 7, "ddp_timeout": 30.0}
    run = TinyRun(folder, dropout=0.0, exact=True, arguments=arguments)
    faults = [Fault(Sleep(0.3), "batch", 0, None, times=LENGTH)]  # or it would be over before anything happens
    if time.monotonic() < late and chance.random() < 0.5:
        soaked.faults.append("a full disk")
        faults.append(Fault(_full, "writing", 0, 0))
    over = threading.Event()

    def disturb(processes: list[multiprocessing.process.BaseProcess]) -> None:
        args = (processes, folder, over, chance, soaked, late)
        threading.Thread(target=_disturb, args=args, daemon=True).start()

    try:
        ended = start(world, run, *faults, workers=1, disturb=disturb)
    finally:
        over.set()
    if set(ended.statuses) == {0}:
        return True
    assert None not in ended.statuses, ended.text
    assert "Traceback" not in ended.text, ended.text
    soaked.bytes_lost += rank_runs.bytes_lost(folder, soaked.since)
    if time.monotonic() < late and chance.random() < 0.3:
        _cut(folder, chance, soaked)
    return False


def _full(trainer: Trainer, batch: dict[str, Any]) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _disturb(
    processes: list[multiprocessing.process.BaseProcess],
    folder: Path,
    over: threading.Event,
    chance: random.Random,
    soaked: Soaked,
    late: float,
) -> None:
    begun = len(soaked.worlds) - 1
    while sum(note["begun"] == begun for note in rank_runs.notes_in(folder, "steps")) < len(processes):
        if over.wait(0.1):  # before they have met, it is for their launcher to end them
            return
    while not over.wait(chance.uniform(1, 3)) and time.monotonic() < late:
        kind, pid = chance.choice(KINDS), chance.choice(processes).pid or 0
        try:
            _strike(kind, pid, over)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
        soaked.faults.append(kind)


def _strike(kind: str, pid: int, over: threading.Event) -> None:
    if kind == "SIGSTOP and SIGCONT":
        os.kill(pid, signal.SIGSTOP)
        over.wait(1)
        os.kill(pid, signal.SIGCONT)
    else:
        os.kill(pid, signal.Signals[kind])


def _cut(folder: Path, chance: random.Random, soaked: Soaked) -> None:
    """Damage the newest checkpoint, if it is not the only one that is whole."""
    whole = [path for path in checkpoint_folders(folder) if not verify(path)]
    if len(whole) > 1:
        files = sorted(path for path in whole[-1].rglob("*") if path.is_file() and path.stat().st_size > 1)
        file = chance.choice(files)
        os.truncate(file, file.stat().st_size // 2)
        soaked.faults.append("a cut checkpoint")
        soaked.since = len(soaked.worlds)
