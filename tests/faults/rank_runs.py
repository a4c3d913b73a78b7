"""Runs of the real trainer on a few gloo ranks, in which something happens at a chosen place, and what came of them.

The ranks are forked from a process that has imported everything, without a launcher that would end them, so how they end is
their own doing. A run of ten steps takes a second or two. Every rank writes down the rows of the steps that it completed and
the checkpoints that it announced, so whatever was lost or done twice is known even of a rank that was killed.

As a script, for a launcher that restarts its processes; every third step of a process lasts until a signal comes or FOLDER.hold is
gone: torchrun --max-restarts 3 -m tests.faults.rank_runs FOLDER
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.checkpointing.files import find_checkpoint, step_of
from mm_utils.run import script
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import run_script, set_up_logging, start_run
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.trainer import Trainer
from tests.kit.processes import forks, free_port
from tests.kit.tiny_run import STEPS, TinyRun, build, exact_run

LONGEST = 100.0  # seconds that a run may take, on a machine that does other things, too
SAVE_STEPS = 3  # between two checkpoints
Action = Callable[[Trainer, dict[str, Any]], None]
"""What a fault does, given the trainer and the newest batch of the rank."""


@dataclass
class Fault:
    """Something that happens to one rank.

    Attributes:
        action: a module's function, or one that can be pickled.
        place: "start", "batch" (while it is waited for), "taken" (when it is there), "forward", "tower", "backward",
            "optimizer", "end" of a step, "evaluation", "writing" (in the thread of the main process), "log", "saved" (in
            callbacks), "last" (when the model is saved).
        step: that is being taken or was last taken there, from 1; 0 is any.
        rank: whom it happens to; None is everyone.
        times: how often, at most.
    """

    action: Action
    place: str
    step: int = 0
    rank: int | None = 0
    times: int = 1


@dataclass
class Ended:
    """How a run ended: each rank's exit status, -9 = killed, None where it had to be ended from here; and what it wrote."""

    statuses: list[int | None]
    texts: list[str]

    @property
    def text(self) -> str:
        return "".join(self.texts)


# -- in the ranks -------------------------------------------------------------------------------------------------------


class Striker:
    """Lets faults happen where they are due, and writes down what this rank has done."""

    def __init__(self, faults: Sequence[Fault], folder: Path, begun: int):
        self.faults = [replace(fault) for fault in faults if fault.rank in (None, distributed.rank())]
        self.folder = folder
        self.begun = begun
        self.batch = {}
        self.trainer: Trainer | None = None

    def __call__(self, place: str, step: int) -> None:
        if place == "saved":
            self._note("saved", step=step)
        for fault in self.faults:
            if fault.place == place and fault.step in (0, step) and fault.times and self.trainer is not None:
                fault.times -= 1
                fault.action(self.trainer, self.batch)

    def watch(self, trainer: Trainer) -> None:
        """Have this called at all places of a trainer."""
        self.trainer = trainer
        run = trainer.step.run
        start = trainer.writer.start

        def noted_run(batch, number):
            batch["pixel_values"] = batch["pixel_values"].to(trainer.model.dtype)
            self.batch = batch
            self("taken", number + 1)
            report = run(batch, number)
            self._note("steps", step=number + 1, rows=batch["rows"].tolist())
            return report

        def striking_start(number, snapshot, keep):
            write = snapshot.write
            snapshot.write = lambda folder: (write(folder), self("writing", number))
            start(number, snapshot, keep)

        def before(owner, name, place, more=1):
            function = getattr(owner, name)

            def struck(*args, **kwargs):
                self(place, trainer.state.global_step + more)
                return function(*args, **kwargs)

            setattr(owner, name, struck)

        trainer.step.run = noted_run
        trainer.writer.start = striking_start  # type: ignore[method-assign]
        before(trainer.captured, "save_model", "last", 0)
        before(trainer, "log", "log", 0)
        before(trainer.accelerator, "backward", "backward")
        before(trainer.optimizer, "step", "optimizer")
        trainer.model.vision_model.register_forward_pre_hook(lambda *_: self("tower", trainer.state.global_step + 1))

    def _note(self, what: str, **values: Any) -> None:
        with open(notes_of(self.folder) / f"{what}-{distributed.rank()}.jsonl", "a", encoding="utf-8") as file:
            place = {"world": distributed.world_size(), "pid": os.getpid()}
            file.write(json.dumps({"begun": self.begun, **place, **values}) + "\n")


def work(run: TinyRun, faults: Sequence[Fault], begun: int, *callbacks: Any) -> None:
    """What a script does, on one rank."""
    striker = Striker(faults, run.folder, begun)
    trainer = build(replace(run, strike=striker), [])
    trainer.callbacks.callbacks.extend(callbacks)
    striker.watch(trainer)
    striker("start", 0)
    trainer.train(find_checkpoint(run.resume, run.folder))


def _process(rank: int, world: int, port: int, begun: int, run: TinyRun, faults: Sequence[Fault]) -> None:
    os.dup2(os.open(notes_of(run.folder) / f"{begun}-{rank}.err", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    script.GRACE_SECONDS = 0.3
    torch.set_num_threads(1)
    set_up_logging(main=rank == 0)
    if world > 1:
        limit = timedelta(seconds=LONGEST)
        dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", limit, world_size=world, rank=rank)
    run_script(partial(work, run, faults, begun))


def main() -> None:
    """A tiny run under a launcher."""
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    args = TrainingArguments(output_dir=str(folder))
    started = start_run("tiny", Parsed([args]))
    begun = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    notes_of(folder).mkdir(exist_ok=True)
    held = folder.with_name(f"{folder.name}.hold")
    faults = [
        Fault(Sleep(0.1), "end", 0, None, times=STEPS),  # for checkpoints to be complete a step later
        Fault(Hold(held), "end", 0, None, times=STEPS),
    ]
    work(exact_run(folder), faults, begun, RestartRecord())
    started.accelerator.end_training()  # as the scripts do: else threads of gloo may be torn down while they run


# -- outside ------------------------------------------------------------------------------------------------------------


def start(world: int, run: TinyRun, *faults: Fault) -> Ended:
    """Start a run, or start it again, and wait until all processes but stopped ones have ended, or for too long."""
    notes_of(run.folder).mkdir(parents=True, exist_ok=True)
    run.folder.mkdir(parents=True, exist_ok=True)
    begun = len(list(notes_of(run.folder).glob("*-0.err")))
    port = free_port()
    processes = [
        forks().Process(target=_process, args=(rank, world, port, begun, run, faults)) for rank in range(world)
    ]
    for process in processes:
        process.start()
    late = time.monotonic() + LONGEST
    while time.monotonic() < late:
        time.sleep(0.02)
        left = [process for process in processes if process.exitcode is None]
        if len(left) < world and all(_is_stopped(process.pid) for process in left):
            break
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
        process.join()
    files = [notes_of(run.folder) / f"{begun}-{rank}.err" for rank in range(world)]
    return Ended(statuses, [file.read_text(errors="replace") if file.exists() else "" for file in files])


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False  # it has just ended


def notes_of(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.notes")


def notes_in(folder: Path, what: str) -> list[dict[str, Any]]:
    """What all ranks have written down, in all starts of a run; a line that a kill has cut is left out."""
    lines = [line for path in notes_of(folder).glob(f"{what}-*.jsonl") for line in path.read_text().splitlines()]
    return [json.loads(line) for line in lines if line.endswith("}")]


def rows_of(folder: Path) -> dict[int, list[int]]:
    """The rows of every step, of all ranks together; a step that was done again with other rows is an error."""
    steps = {}
    for note in notes_in(folder, "steps"):
        steps.setdefault((note["step"], note["begun"]), []).extend(note["rows"])
    most = max((len(rows) for rows in steps.values()), default=0)
    found = {}
    for (step, begun), rows in sorted(steps.items()):
        if len(rows) == most:  # of a start that was ended in the step, not all ranks have written
            assert found.setdefault(step, sorted(rows)) == sorted(rows), f"step {step} of start {begun} has other rows"
    return found


def steps_lost(folder: Path) -> int:
    """Steps that the second start had to do again."""
    notes = notes_in(folder, "steps")
    done = max((note["step"] for note in notes if not note["begun"]), default=0)
    return done + 1 - min((note["step"] for note in notes if note["begun"]), default=done + 1)


def loses_checkpoint(folder: Path) -> bool:
    """Whether none is whole that is as new as the newest that callbacks were called with."""
    newest = max((note["step"] for note in notes_in(folder, "saved")), default=0)
    whole = find_checkpoint("latest", folder)
    return newest > (0 if whole is None else step_of(whole))


def difference(one: Path, other: Path) -> float:
    """The largest between the final weights of two runs, relative to the largest weight of a tensor; 0 = every bit."""
    left, right = (load_file(folder / "model.safetensors") for folder in (one, other))
    assert left.keys() == right.keys()
    off = [
        (left[name].double() - value.double()).abs().max() / value.abs().max().clamp(min=1e-3)
        for name, value in right.items()
    ]
    return float(torch.stack(off).nan_to_num(nan=float("inf")).max())


# -- what may happen ----------------------------------------------------------------------------------------------------


def kill(trainer: Trainer, batch: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def freeze(trainer: Trainer, batch: dict[str, Any]) -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def terminate(trainer: Trainer, batch: dict[str, Any]) -> None:
    signal.raise_signal(signal.SIGTERM)


@dataclass
class Raise:
    """Raise an error."""

    error: BaseException

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        raise self.error


@dataclass
class Sleep:
    """Be slow."""

    seconds: float

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        time.sleep(self.seconds)


class Hold:
    """Let the third step of a process last until a signal comes or a file is gone."""

    def __init__(self, file: Path):
        self.file = file
        self.steps = 0

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        self.steps += 1
        while self.steps == 3 and self.file.exists() and not trainer.signals.number:
            time.sleep(0.05)


if __name__ == "__main__":
    run_script(main)
