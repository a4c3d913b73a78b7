"""The events of a training loop, and processes without a launcher that would end them."""

import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
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
from tests.test_distributed import PRELOADED

LONG = 60.0  # seconds after which a test's process ends whatever happens
Script = Callable[[], None]


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


def launch(world: int, script: Script, disturb: Callable[[list[int], Path], None] | None = None) -> list[Ended]:
    """Run a module's function in processes; `disturb` is called with their pids and folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "mm_utils.run.start"])
    port = free_port()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=_process, args=(rank, world, port, name, script)) for rank in range(world)]
        for process in processes:
            process.start()
        while not all(
            (folder / f"{rank}.err").exists() for rank in range(world)
        ):  # the fork server imports a lot first
            time.sleep(0.05)
        start = time.monotonic()
        if disturb is not None:
            disturb([process.pid or 0 for process in processes], folder)
        ends: dict[int, float] = {}
        while len(ends) < world and time.monotonic() - start < LONG:
            time.sleep(0.05)
            stopped = [rank for rank, process in enumerate(processes) if _is_stopped(process.pid or 0)]
            for rank, process in enumerate(processes):
                if rank not in ends and (process.exitcode is not None or (rank in stopped and len(ends) == world - 1)):
                    ends[rank] = time.monotonic() - start
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [
            Ended(process.exitcode, (folder / f"{rank}.err").read_text(), ends.get(rank, LONG))
            for rank, process in enumerate(processes)
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
        pass


def after_step(step: int, send: signal.Signals, rank: int) -> Callable[[list[int], Path], None]:
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
    rank, world = str(distributed.rank()), str(distributed.world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "ACCELERATE_USE_CPU": "true"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
    make_accelerator()
