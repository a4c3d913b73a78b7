"""Runs of the real trainer on a few gloo ranks, in which something happens at a chosen place, and what came of them.

The ranks are forked from a process that has imported everything, without a launcher that would end them, so how they end is
their own doing. A run of ten steps takes a second or two. Every rank writes down the rows of the steps that it completed and
the checkpoints that it announced, so whatever was lost or done twice is known even of a rank that was killed.
"""

import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from transformers import TrainerCallback

from mm_utils import distributed
from mm_utils.checkpointing.files import checkpoint_path, find_checkpoint, newest_checkpoint, step_of, verify
from mm_utils.reliability import failures
from mm_utils.run.start import run_script, set_up_logging
from mm_utils.training.trainer import Trainer
from tests.kit.ranks import forks
from tests.kit.tiny_run import TinyRun, build

LONGEST = 100.0  # seconds that a run may take, on a machine that does other things, too
SAVE_STEPS = 3  # between two checkpoints
Action = Callable[[Trainer, dict[str, Any]], None]
"""What a fault does, given the trainer and the newest batch of the rank."""


@dataclass
class Fault:
    """Something that happens to one rank.

    Attributes:
        action: a module's function, or one that can be pickled.
        place: "start", "batch" (while it is waited for), "taken" (when it is there), "forward", "tower", "backward", "optimizer", "end" of a step, "evaluation", "save",
            "writing" (in the thread of the main process), "log", "evaluated", "saved" (in callbacks), "last" (when the
            model is saved).
        step: that is being taken or was last taken there, from 1; 0 is any.
        rank: whom it happens to; None is everyone.
        times: how often, at most.
        delay: seconds from there, in a thread.
    """

    action: Action
    place: str
    step: int = 0
    rank: int | None = 0
    times: int = 1
    delay: float = 0.0


@dataclass
class Ended:
    """How a run ended.

    Attributes:
        statuses: exit status of every rank, -9 = killed; None where it had to be ended from here.
        texts: what every rank wrote to stderr.
        begun: number of this start of the run, from 0.
    """

    statuses: list[int | None]
    texts: list[str]
    begun: int

    @property
    def text(self) -> str:
        return "".join(self.texts)

    def errors(self, rank: int) -> list[str]:
        """The errors that a rank told, tracebacks not included."""
        return [line for line in self.texts[rank].splitlines() if re.search(r" ERROR ", line)]


# -- in the ranks -------------------------------------------------------------------------------------------------------


class Striker:
    """Lets faults happen where they are due, and writes down what this rank has done."""

    def __init__(self, faults: Sequence[Fault], notes: Path, begun: int):
        self.faults = [replace(fault) for fault in faults if fault.rank in (None, distributed.rank())]
        self.notes, self.begun, self.batch = notes, begun, {}  # type: ignore[var-annotated]
        self.trainer: Trainer | None = None

    def __call__(self, place: str, step: int) -> None:
        for fault in self.faults:
            if fault.place == place and fault.step in (0, step) and fault.times and self.trainer is not None:
                fault.times -= 1
                act = partial(fault.action, self.trainer, self.batch)
                threading.Timer(fault.delay, act).start() if fault.delay else act()

    def watch(self, trainer: Trainer) -> None:
        """Have this called at all places of a trainer."""
        self.trainer = trainer
        captured = trainer.captured
        run, capture, start = trainer.step.run, captured.capture, trainer.writer.start

        def step() -> int:
            return trainer.state.global_step

        def noted_run(batch: dict[str, Any], number: int) -> Any:
            batch["pixel_values"] = batch["pixel_values"].to(trainer.model.dtype)
            self.batch = batch
            self("taken", number + 1)
            report = run(batch, number)
            self._write("steps", {"step": number + 1, "rows": batch["rows"].tolist()})
            return report

        def striking_capture(*args: Any) -> Any:
            self("save", step())
            return capture(*args)

        def striking_start(number: int, snapshot: Any, keep: Any) -> None:
            write = snapshot.write

            def striking_write(folder: Path) -> None:
                write(folder)
                self("writing", number)

            snapshot.write = striking_write
            start(number, snapshot, keep)

        def before(function: Callable[..., Any], place: str, more: int) -> Callable[..., Any]:
            def struck(*args: Any, **kwargs: Any) -> Any:
                self(place, step() + more)
                return function(*args, **kwargs)

            return struck

        replaced: list[tuple[object, str, Callable[..., Any]]] = [
            (trainer.step, "run", noted_run),
            (captured, "capture", striking_capture),
            (trainer.writer, "start", striking_start),
            (captured, "save_model", before(captured.save_model, "last", 0)),
            (trainer.accelerator, "backward", before(trainer.accelerator.backward, "backward", 1)),
            (trainer.optimizer, "step", before(trainer.optimizer.step, "optimizer", 1)),
        ]
        for owner, name, function in replaced:
            setattr(owner, name, function)
        trainer.model.vision_model.register_forward_pre_hook(lambda *_: self("tower", step() + 1))
        trainer.callbacks.callbacks.append(_Events(self))

    def saved(self, step: int) -> None:
        """A checkpoint is acknowledged."""
        self._write("saved", {"step": step})

    def _write(self, what: str, values: dict[str, Any]) -> None:
        line = {"begun": self.begun, "rank": distributed.rank(), **values}
        with open(self.notes / f"{what}-{distributed.rank()}.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")


class _Events(TrainerCallback):
    def __init__(self, striker: Striker):
        self.striker = striker

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.striker("log", state.global_step)

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.striker("evaluated", state.global_step)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.striker.saved(step_of(kwargs["checkpoint"]))


def work(run: TinyRun, faults: Sequence[Fault], begun: int) -> None:
    """What a script does, on one rank."""
    striker = Striker(faults, notes_of(run.folder), begun)
    run = replace(run, strike=striker)
    trainer = build(run, [])
    striker.watch(trainer)
    striker("start", 0)
    trainer.train(find_checkpoint(run.resume, run.folder))


def _process(rank: int, world: int, port: int, begun: int, run: TinyRun, faults: Sequence[Fault]) -> None:
    errors = os.open(notes_of(run.folder) / f"{begun}-{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(errors, 2)
    failures.POLL_SECONDS, failures.EXIT_GRACE_SECONDS = 0.2, 0.5
    torch.set_num_threads(1)
    set_up_logging(main=rank == 0)
    if world > 1:
        limit = timedelta(seconds=LONGEST)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", limit, world_size=world, rank=rank)
    run_script(partial(work, run, faults, begun))


# -- outside ------------------------------------------------------------------------------------------------------------


def start(world: int, run: TinyRun, *faults: Fault) -> Ended:
    """Start a run, or start it again, and wait for its end."""
    notes = notes_of(run.folder)
    notes.mkdir(parents=True, exist_ok=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    begun = len(list(notes.glob("*-0.err")))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    processes = [
        forks().Process(target=_process, args=(rank, world, port, begun, run, faults)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    files = [notes / f"{begun}-{rank}.err" for rank in range(world)]
    try:
        _wait(processes)
    finally:
        statuses = [process.exitcode for process in processes]
        for process in processes:
            _end(process.pid or 0)
            process.join()
    texts = [file.read_text(errors="replace") if file.exists() else "" for file in files]
    return Ended(statuses, texts, begun)


def _wait(processes: Sequence[Any]) -> None:
    """Wait until all processes but stopped ones have ended, or for too long."""
    late = time.monotonic() + LONGEST
    while time.monotonic() < late:
        time.sleep(0.02)
        left = [process for process in processes if process.exitcode is None]
        if all(_is_stopped(process.pid) for process in left) and len(left) < len(processes):
            return


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False  # it has just ended


def _end(pid: int) -> None:
    """A process of ours and all that it has started."""
    try:
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            each.kill()
    except psutil.NoSuchProcess:
        pass


def notes_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.notes")


def notes_in(folder: Path, what: str) -> list[dict[str, Any]]:
    """What all ranks have written down, in all starts of a run; a line that a kill has cut is left out."""
    found = []
    for path in notes_of(folder).glob(f"{what}-*.jsonl"):
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                found.append(json.loads(line))
            except ValueError:
                continue
    return found


def rows_of(folder: Path) -> dict[int, list[int]]:
    """The rows of every step, of all ranks together; a step that was done again with other rows is an error."""
    steps: dict[tuple[int, int], list[int]] = {}
    for note in notes_in(folder, "steps"):
        steps.setdefault((note["step"], note["begun"]), []).extend(note["rows"])
    most = max((len(rows) for rows in steps.values()), default=0)
    found: dict[int, list[int]] = {}
    for (step, begun), rows in sorted(steps.items()):
        if len(rows) == most:  # of a start that was ended in the step, not all ranks have written
            assert found.setdefault(step, sorted(rows)) == sorted(rows), f"step {step} of start {begun} has other rows"
    return found


def steps_lost(folder: Path, begun: int) -> int:
    """Steps that the next start had to do again after the one numbered `begun`."""
    notes = notes_in(folder, "steps")
    done = max((note["step"] for note in notes if note["begun"] <= begun), default=0)
    first = min((note["step"] for note in notes if note["begun"] == begun + 1), default=done + 1)
    return done + 1 - first


def bytes_lost(folder: Path, since: int = 0) -> int:
    """Checkpoints that callbacks were called with, in starts from `since` on: where none as new as the newest is whole."""
    newest = max((note["step"] for note in notes_in(folder, "saved") if note["begun"] >= since), default=0)
    path = checkpoint_path(folder, newest)
    whole, _ = newest_checkpoint(folder)
    if not newest or (whole is not None and step_of(whole) >= newest and not (path.exists() and verify(path))):
        return 0
    return max(1, sum(file.stat().st_size for file in path.rglob("*") if file.is_file()))


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    """The final weights."""
    return load_file(folder / "model.safetensors")


def difference(one: Path, other: Path) -> float:
    """The largest between the final weights of two runs, relative to the largest weight of a tensor; 0 = every bit."""
    left, right = weights_of(one), weights_of(other)
    assert left.keys() == right.keys()
    return max(
        0.0 if torch.equal(left[name], right[name]) else _relative(left[name].double(), right[name].double())
        for name in left
    )


def _relative(left: torch.Tensor, right: torch.Tensor) -> float:
    distance = float((left - right).abs().max() / right.abs().max().clamp(min=1e-3))
    return distance if distance == distance else float("inf")  # NaN


# -- what may happen ----------------------------------------------------------------------------------------------------


def kill(trainer: Trainer, batch: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(trainer: Trainer, batch: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@dataclass
class Raise:
    """Raise an error."""

    error: BaseException = field(default_factory=lambda: RuntimeError("a bug"))

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        raise self.error


@dataclass
class Sleep:
    """Be slow."""

    seconds: float

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        time.sleep(self.seconds)
