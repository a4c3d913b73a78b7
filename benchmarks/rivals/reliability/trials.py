"""What every contestant is asked to do, and the forked processes in which it does it.

The parent has imported everything once; a trial is forked from it in a few milliseconds, and may be killed.
"""

import hashlib
import logging
import multiprocessing
import os
import socket
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tell = Callable[..., None]
"""Called with the name of an event and its values; the parent reads them."""

STEPS, BATCH, SEED = 16, 4, 7
"""Passes of the loop in a trial of resuming, pairs per process in each, and the seed of everything."""

QUIET = {"ACCELERATE_USE_CPU": "true", "TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}


@dataclass(frozen=True)
class Case:
    """One way to train.

    Attributes:
        title: what a table calls it.
        ours: what stands for it in this project, where that is not the same.
        sampler: `seedable` or `random`, as `accelerate` calls them.
        stateful: the loader's own state is saved, by torchdata's StatefulDataLoader.
        set_epoch: the loop tells the loader which epoch it is.
        save: after how many passes of the loop a checkpoint is saved.
        accumulate: passes of the loop that make one optimizer step.
    """

    title: str
    ours: str = ""
    workers: int = 0
    rows: int = 64
    save: int = 5
    sampler: str = "seedable"
    stateful: bool = False
    set_epoch: bool = True
    dropout: float = 0.0
    augment: bool = False
    accumulate: int = 1


CASES = (
    Case("plain"),
    Case("2 workers", workers=2),
    Case("61 rows, no multiple of the batch", rows=61),
    Case("saved at the end of an epoch", save=8),
    Case("saved in epoch 2", save=12),
    Case("another order", "similar captions together", sampler="random"),
    Case("loader with a state", "streaming", stateful=True),
    Case("the same, another order", "streaming, other blocks", stateful=True, sampler="random"),
    Case("the same, saved in epoch 2", "streaming", stateful=True, save=12),
    Case("the same, 61 rows", "streaming", stateful=True, rows=61),
    Case("accumulation over 4, saved at a step", "batch in 4 parts", accumulate=4, save=4),
    Case("dropout 0.3", dropout=0.3),
    Case("augmentation", augment=True),
    Case("augmentation, 2 workers", augment=True, workers=2),
    Case("saved in epoch 2, set_epoch not called", "resumed twice", set_epoch=False, save=12),
    Case("another order, saved in epoch 2", "similar captions together", sampler="random", save=12),
    Case("loader with a state, 2 workers", "streaming", stateful=True, workers=2),
    Case("the same, another order", "streaming, other blocks", stateful=True, workers=2, sampler="random"),
    Case("the same, augmentation", "streaming", stateful=True, workers=2, augment=True),
    Case("loader with a state, saved at the end of an epoch", "streaming", stateful=True, save=8),
    Case("accumulation over 4, saved inside", "batch in 4 parts", accumulate=4),
)


@dataclass
class Run:
    """What a contestant is to do, on each of its processes.

    Attributes:
        folder: where its checkpoints go.
        steps: passes of the loop.
        saves: after which of them a checkpoint is saved.
        keep: how many checkpoints are kept.
        resume: go on from what the contestant itself takes for the newest checkpoint.
        parameters: about how many the model has at least, which decides the size of a checkpoint.
        nan_at: pass of the loop whose input is NaN; 0 = none.
        stop_on_sigterm: save and end when told to.
        digests: tell a digest of model and optimizer after each step.
        hold_after: pass of the loop after which it waits for a file `go` in the folder; 0 = none.
    """

    folder: str
    case: Case = CASES[0]
    steps: int = STEPS
    saves: Collection[int] = ()
    keep: int | None = None
    resume: bool = False
    parameters: int = 0
    nan_at: int = 0
    stop_on_sigterm: bool = False
    digests: bool = False
    hold_after: int = 0
    tell: Tell = field(default=lambda event, **values: None, repr=False)

    def loaded(self, step: int, model: torch.nn.Module, optimizer: Any) -> None:
        """Called once a checkpoint is loaded."""
        self.tell("loaded", step=step, digest=digest(model, optimizer))

    def stepped(self, step: int, model: torch.nn.Module, optimizer: Any) -> None:
        """Called after each pass of the loop, before a checkpoint is saved."""
        found = {"digest": digest(model, optimizer)} if self.digests else {}
        self.tell("stepped", step=step, at=time.monotonic(), **found)

    def went_on(self, step: int) -> None:
        """Called when the loop asks for the batch after `step`; its save is done or on its way."""
        self.tell("went_on", step=step, at=time.monotonic())
        deadline = time.monotonic() + 120
        while step == self.hold_after > 0 and not Path(self.folder, "go").exists() and time.monotonic() < deadline:
            time.sleep(0.002)

    def ended(self, step: int, model: torch.nn.Module) -> None:
        """Called when the run is over."""
        finite = all(bool(value.isfinite().all()) for value in model.state_dict().values())
        self.tell("ended", step=step, digest=digest(model), finite=finite)


def digest(model: torch.nn.Module, optimizer: Any = None) -> str:
    """SHA-256 of the model's values, and of the optimizer's."""
    found = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        _add(found, name.removeprefix("module."), value)
    if optimizer is not None:
        for number, state in sorted(optimizer.state_dict()["state"].items()):
            for name, value in sorted(state.items()):
                _add(found, f"{number} {name}", torch.as_tensor(value))
    return found.hexdigest()[:16]


def _add(found: Any, name: str, value: Tensor) -> None:
    found.update(name.encode())
    found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())


@dataclass
class Outcome:
    """What became of one process.

    Attributes:
        events: all that it told, in order.
        status: its exit status; negative if a signal ended it.
        hung: it had to be killed because it did not end.
    """

    events: list[dict[str, Any]]
    status: int | None
    hung: bool

    def last(self, event: str) -> dict[str, Any]:
        """The last event of a kind; empty if there is none."""
        return next((found for found in reversed(self.events) if found["event"] == event), {})

    @property
    def error(self) -> str:
        """The exception that ended it, if one did."""
        return str(self.last("error").get("text", ""))

    @property
    def said(self) -> str:
        """The exception and all warnings."""
        return "\n".join([*(found["text"] for found in self.events if found["event"] == "warning"), self.error])


class Ranks:
    """Processes that train together.

    Args:
        work: called with `Run` in each.
        run: its `tell` is set.
        world: how many.
        log: file that takes what they print.
    """

    def __init__(self, work: Callable[[Run], None], run: Run, world: int = 1, log: Path | None = None):
        context = multiprocessing.get_context("fork")
        with socket.socket() as free:
            free.bind(("localhost", 0))
            port = free.getsockname()[1]
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(world)]
        self.processes, self.pipes = [], []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            environment: dict[str, Any] = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": world,
                "LOCAL_WORLD_SIZE": world,
            }
            environment |= {"MASTER_ADDR": "localhost", "MASTER_PORT": port, **QUIET}
            process = context.Process(target=_child, args=(work, run, there, environment, log))
            process.start()
            there.close()
            self.processes.append(process)
            self.pipes.append(here)

    def wait_for(self, event: str, rank: int = 0, step: int = 0, seconds: float = 120) -> dict[str, Any] | None:
        """The next such event of a process, of at least that step; None if it ended or time was up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and (found := self._read(rank, deadline - time.monotonic())):
            if found["event"] == event and found["step"] >= step:
                return found
        return None

    def kill(self, number: int, rank: int) -> None:
        """Send a signal to one of them, if it still lives."""
        pid = self.processes[rank].pid
        if self.processes[rank].is_alive() and pid is not None:
            os.kill(pid, number)

    def end(self, seconds: float = 120) -> list[Outcome]:
        """What became of each, after at most so long; those that have not ended by then are killed."""
        deadline = time.monotonic() + seconds
        outcomes = []
        for rank, process in enumerate(self.processes):
            while self._read(rank, max(0.0, deadline - time.monotonic())):
                pass
            process.join(max(0.0, deadline - time.monotonic()) + 0.1)
            hung = process.exitcode is None
            outcomes.append((process, rank, hung))
        for process, _, hung in outcomes:
            if hung:
                process.kill()
                process.join()
        return [Outcome(self.events[rank], process.exitcode, hung) for process, rank, hung in outcomes]

    def _read(self, rank: int, seconds: float) -> dict[str, Any] | None:
        try:
            if self.pipes[rank].poll(seconds):
                self.events[rank].append(self.pipes[rank].recv())
                return self.events[rank][-1]
        except (EOFError, OSError):  # it has ended
            pass
        return None


def train(work: Callable[[Run], None], run: Run, world: int = 1, seconds: float = 120) -> list[Outcome]:
    """Train to the end."""
    return Ranks(work, run, world).end(seconds)


class _Warnings(logging.Handler):
    def __init__(self, tell: Tell):
        super().__init__(logging.WARNING)
        self.tell = tell

    def emit(self, record: logging.LogRecord) -> None:
        self.tell("warning", text=record.getMessage())


def _child(
    work: Callable[[Run], None], run: Run, pipe: Connection, environment: dict[str, Any], log: Path | None
) -> None:
    os.environ |= {name: str(value) for name, value in environment.items()}
    printed = os.open(log or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(printed, 1)
    os.dup2(printed, 2)
    torch.set_num_threads(1)
    run.tell = lambda event, **values: pipe.send({"event": event, **values})
    logging.getLogger().addHandler(_Warnings(run.tell))
    status = 0
    try:
        work(run)
    except SystemExit as leaving:
        run.tell("left", text=str(leaving), code=leaving.code)
        status = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException as error:
        run.tell("error", text=f"{type(error).__name__}: {error}")
        logging.getLogger(__name__).debug("It ended", exc_info=True)
        status = 1
    sys.stderr.flush()
    os._exit(status)  # an orderly end of gloo and of worker processes takes seconds
