"""The events of a training loop, and processes without a launcher that would end them."""

import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import psutil
import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.reliability import failures
from mm_utils.reliability.watchdog import HangDetection
from mm_utils.run.start import make_accelerator, run_script, set_up_logging
from tests.kit.ranks import forks, let_accelerate_find_ranks

LONG = 60.0  # seconds after which a test's process ends whatever happens
Script = Callable[[], None]
Disturb = Callable[[list[int], Path], None]


class FakeTrainer:
    """Call the events of callbacks as a trainer does.

    Args:
        callbacks: the callbacks under test.
        args: fields of the training arguments.
    """

    def __init__(self, *callbacks: TrainerCallback, **args: Any):
        self.callbacks, self.args, self.state = callbacks, SimpleNamespace(**args), TrainerState()
        self.model: Any = SimpleNamespace(device=torch.device("cpu"))

    def event(self, name: str, **values: Any) -> None:
        for callback in self.callbacks:
            if hasattr(callback, name):
                getattr(callback, name)(self.args, self.state, TrainerControl(), model=self.model, **values)

    def log(self, **logs: float) -> dict[str, float]:
        """Return a training row as the callbacks leave it."""
        logs = {"loss": 1.0, **logs}
        self.event("on_log", logs=logs)
        return logs


@dataclass
class Ended:
    """How a process ended.

    Attributes:
        status: exit status; -9 = killed.
        text: stderr.
        seconds: from the start of all processes.
    """

    status: int | None
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if re.search(r"ERROR|WARNING", line)]


def launch(world: int, script: Script, disturb: Disturb | None = None) -> list[Ended]:
    """Run a module's function in processes; `disturb` is called with their pids and folder."""
    return launch_together([(world, script, disturb)])[0]


def launch_together(runs: Sequence[tuple[int, Script, Disturb | None]]) -> list[list[Ended]]:
    """Call `launch` of all at the same time: most of theirs is spent waiting."""
    with tempfile.TemporaryDirectory() as name:
        started = [Run(Path(name, str(number)), *run) for number, run in enumerate(runs)]
        while not all(run.is_up() for run in started):  # the fork server imports a lot first
            time.sleep(0.05)
        start = time.monotonic()
        disturbing = [
            Thread(target=run.disturb, args=([p.pid or 0 for p in run.processes], run.folder)) for run in started
        ]
        for thread in disturbing:
            thread.start()
        while any(thread.is_alive() for thread in disturbing) or (
            not all(run.is_over() for run in started) and time.monotonic() - start < LONG
        ):
            time.sleep(0.05)
            for run in started:
                run.note_ends(time.monotonic() - start)
        return [run.end() for run in started]


class Run:
    """Processes without a launcher: started at once, watched by whoever asks."""

    def __init__(self, folder: Path, world: int, script: Script, disturb: Disturb | None):
        folder.mkdir()
        port = free_port()
        self.folder, self.disturb, self.ends = folder, disturb or (lambda *_: None), dict[int, float]()
        self.processes = [
            forks().Process(target=_process, args=(rank, world, port, str(folder), script)) for rank in range(world)
        ]
        for process in self.processes:
            process.start()

    def is_up(self) -> bool:
        return all((self.folder / f"{rank}.err").exists() for rank in range(len(self.processes)))

    def is_over(self) -> bool:
        return len(self.ends) == len(self.processes)

    def note_ends(self, now: float) -> None:
        """A process that is stopped has ended when all others have."""
        stopped = [rank for rank, process in enumerate(self.processes) if _is_stopped(process.pid or 0)]
        for rank, process in enumerate(self.processes):
            all_others_ended = len(self.ends) == len(self.processes) - 1
            if rank not in self.ends and (process.exitcode is not None or (rank in stopped and all_others_ended)):
                self.ends[rank] = now

    def end(self) -> list[Ended]:
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join()
        texts = [(self.folder / f"{rank}.err").read_text() for rank in range(len(self.processes))]
        return [
            Ended(process.exitcode, text, self.ends.get(rank, LONG))
            for rank, (process, text) in enumerate(zip(self.processes, texts, strict=True))
        ]


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _process(rank: int, world: int, port: int, folder: str, script: Script) -> None:
    errors = os.open(Path(folder, f"{rank}.err"), os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.chdir(folder)
    failures.POLL_SECONDS, failures.EXIT_GRACE_SECONDS = 0.2, 0.5
    torch.set_num_threads(1)
    set_up_logging(main=rank == 0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=LONG), world_size=world, rank=rank)
    run_script(script)


def steps(count: int, timeout: float = 30.0, warn_after: float = 10.0) -> Iterator[tuple[int, str, FakeTrainer]]:
    """Yield the phases "data" and "step" of steps that end with a collective, under hang detection."""
    with HangDetection(timeout, warn_after) as detection:
        trainer = FakeTrainer(detection)
        trainer.event("on_train_begin")
        for step in range(count):
            yield step, "data", trainer
            trainer.event("on_step_begin")
            yield step, "step", trainer
            distributed.any_rank(False, torch.device("cpu"))
            trainer.state.global_step += 1
            trainer.event("on_step_end")
            Path(f"{distributed.rank()}.step").write_text(str(step))


def endless() -> None:
    for _ in steps(10**6, timeout=4.0, warn_after=1.5):
        time.sleep(0.002)  # others want the core, too


def after_step(step: int, send: signal.Signals, rank: int) -> Disturb:
    """Send a signal to a process once it has done a step."""

    def disturb(pids: list[int], folder: Path) -> None:
        deadline = time.monotonic() + LONG
        note = folder / f"{rank}.step"
        while time.monotonic() < deadline and not (note.exists() and int(note.read_text() or -1) >= step):
            time.sleep(0.05)
        time.sleep(2)  # in which the processes find their neighbours
        os.kill(pids[rank], send)

    return disturb


def use_ranks() -> None:
    """Let accelerate find the process group of this test."""
    let_accelerate_find_ranks()
    make_accelerator()
