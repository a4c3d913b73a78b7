"""One process of several is killed, stopped, slow, hangs, fails or computes nonsense, at every place of a run; and long runs."""

import copy
import math
import os
import re
import resource
import subprocess
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from mm_utils.distributed import RunError
from mm_utils.reliability import watchdog
from mm_utils.training.arguments import NONFINITE_FILE
from mm_utils.training.trainer import Trainer
from tests.faults import rank_runs
from tests.faults.rank_runs import LONGEST, SAVE_STEPS, Action, Fault, Raise, Sleep, freeze, kill, start, terminate
from tests.kit.jsonl import read_lines
from tests.kit.processes import PATIENCE, free_port, kill_family, on_loopback, wait_until
from tests.kit.tiny_run import STEPS, TinyRun, alone, exact_run, slow, train

TOLERANCE = 1e-5  # where the number of processes differs
STRUCK = 5  # the step that something happens in, if nothing else is said
LOST = "lost the connection to another one"
WAITS = "waiting for another process, which is stopped, or whose machine is lost"


@dataclass
class Case:
    """What happens to a run, and what becomes of it.

    Attributes:
        statuses: of the processes, as `rank_runs.Ended` has them.
        told: patterns of what they say, by rank; None is any.
        arguments: of the run.
        again: how many processes go on from there, to the weights of a run that nothing happened to; 0: it is over.
        exact: without dropout, so that their number may differ; otherwise every bit is met on as many.
    """

    faults: list[Fault]
    statuses: list[int | None]
    told: dict[int | None, str] = field(default_factory=dict)
    arguments: dict[str, Any] = field(default_factory=dict)
    again: int = 0
    exact: bool = True


# -- what may happen ----------------------------------------------------------------------------------------------------


def be_quick(trainer: Trainer, batch: dict[str, Any]) -> None:
    """End a phase in which others may wait for long after six seconds."""
    watchdog.SLOW_PHASE_TIMEOUT = 6.0
    watchdog.WAITING_SECONDS = 2.0


class Shorten:
    """Let the loader end early."""

    def __init__(self, stop: int):
        self.stop = stop

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        made = trainer.data.train_batches
        trainer.data.train_batches = lambda first, stop: made(first, self.stop)  # type: ignore[method-assign,assignment]


class Set:
    """What a callback asks for."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        setattr(trainer.callbacks.control, self.name, True)


def nan_pixels(trainer: Trainer, batch: dict[str, Any]) -> None:
    """As a broken decoder may give them."""
    batch["pixel_values"].fill_(math.nan)


def break_a_weight(trainer: Trainer, batch: dict[str, Any]) -> None:
    with torch.no_grad():
        trainer.model.text_projection.weight[0, 0] = math.nan


def no_rows(trainer: Trainer, batch: dict[str, Any]) -> None:
    """What is left of a batch of which no row, nor any in its place, can be read."""
    batch["skipped"] = [f"{row}: cannot be read" for row in batch["image_ids"]]
    batch["skipped_ids"] = batch["image_ids"]
    for name in ("pixel_values", "input_ids", "attention_mask", "ids", "rows", "lengths", "image_ids"):
        batch[name] = batch[name][:0]


FULL = Raise(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"))
MISTAKE = Raise(RunError("--x is 1;\nit is wrong, with token=abcdefghijkl."))
BUG = Raise(KeyError("a bug"))


# -- the table ----------------------------------------------------------------------------------------------------------


def killed(rank: int, place: str, step: int, world: int = 3) -> Case:
    statuses = [-9 if each == rank else 1 for each in range(world)]
    same = (rank + step) % 2 == 0
    told = {each: LOST for each in range(world) if each != rank}
    return Case([Fault(kill, place, step, rank)], statuses, told, again=world if same else world - 1, exact=not same)


def raised(error: Raise, place: str, step: int, rank: int) -> Case:
    told = {rank: "ERROR --x is 1;" if error is MISTAKE else "a bug", 1 - rank: LOST}
    return Case([Fault(error, place, step, rank)], [1, 1], told, again=1)


def hanging(place: str, step: int, phase: str, seconds: str) -> Case:
    said = rf"Stopped, because process 1 \(host .* in '{phase}' of step \d for {seconds} s[^~]*time\.sleep\(self\.seconds\)"
    arguments = {"ddp_timeout": 3.0, "save_steps": 0, "eval_steps": 4 if phase == "evaluation" else 100}
    faults = [Fault(be_quick, "start", 0, None), Fault(Sleep(LONGEST), place, step, 1)]
    return Case(faults, [1, 1], {0: LOST, 1: said}, arguments)


QUICK = {
    "killed at the start": killed(1, "start", 0),
    "killed while a checkpoint is written": killed(0, "writing", 6, world=2),
    "killed and resumed on three": killed(1, "batch", 5),  # in every bit
    "stopped": Case(
        [Fault(be_quick, "start", 0, None), Fault(freeze, "backward", STRUCK, 1)],
        [1, None],
        {0: WAITS},
        {"ddp_timeout": 3.0},
        1,
    ),
    "hangs in a step": hanging("tower", 8, "step", r"\d+"),
    "has a mistake": raised(MISTAKE, "batch", STRUCK, 0),
    "has a bug": raised(BUG, "evaluation", 8, 1),
    "cannot write a checkpoint": Case(
        [Fault(BUG, "writing", 6)], [0, 0], {0: "ERROR the checkpoint of step 6 could not be written"}
    ),
    "has data that end early": Case(  # it must not evaluate and save while the others wait for it in a step
        [Fault(Shorten(6), "start", 0, 1)], [1, 1], {None: f"ended after step 6 of {STEPS}"}, again=2
    ),
    "is asked to stop": Case([Fault(terminate, "backward", STRUCK, 0)], [143, 143], again=2, exact=False),
    "has a checkpoint that is not finite": Case(
        [Fault(break_a_weight, "end", 6, None)], [1, 1], {0: "the weights after step 6 are not finite"}, again=2
    ),
    "has a model that is not finite": Case(
        [Fault(break_a_weight, "optimizer", STEPS, None)],
        [1, 1],
        {0: "the weights after the last step are not finite"},
        {"save_steps": 0},
    ),
    "runs out of memory": Case(  # on both, one again: the step is taken again in smaller parts
        [Fault(FULL, "tower", STRUCK, 0), Fault(FULL, "backward", STRUCK, 1)],
        [0, 0],
        {None: "ran out of memory"},
        {"micro_batch_size": "auto"},
    ),
}
PLACES = [("batch", 1), ("batch", 5), ("tower", 2), ("backward", 8), ("optimizer", 4), ("end", 7), ("evaluation", 4),
          ("evaluation", 10), ("saved", 0), ("last", STEPS)]  # fmt: skip
SLOW = {
    **{f"killed {rank} {place} {step}": killed(rank, place, step) for rank in range(3) for place, step in PLACES},
    "hangs in an evaluation": hanging("evaluation", 4, "evaluation", r"(?:[6-9]|\d\d)"),
    "has a tenth step that is not finite": Case(
        [Fault(nan_pixels, "taken", step, 1) for step in range(4, 16)],
        [1, 1], {0: "10 steps had a loss or a gradient that is not finite"}, {"max_steps": 16},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", [*QUICK, *map(slow, SLOW)])
def test_one_process(name: str, exact: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """The others end soon with one line each, secrets stay secret, and what goes on from there misses nothing but time."""
    case = {**QUICK, **SLOW}[name]
    run = replace(exact_run(tmp_path / "run") if case.exact else TinyRun(tmp_path / "run"), arguments=case.arguments)
    ended = start(len(case.statuses), run, *case.faults)
    assert ended.statuses == case.statuses, ended.text
    for rank, words in case.told.items():
        assert re.search(words, ended.text if rank is None else ended.texts[rank]), ended.text
        assert rank is None or words != LOST or ended.texts[rank].count(" ERROR ") == 1, ended.texts[rank]
    assert ended.text.count("Traceback") == (BUG in [fault.action for fault in case.faults] and 1 in case.statuses)
    assert "abcdefghijkl" not in ended.text
    if 0 not in case.statuses:
        is_last = any(fault.place == "last" for fault in case.faults)  # the main process may have written it
        assert is_last or not (run.folder / "model.safetensors").exists()
        if not case.again:
            return
        assert not rank_runs.loses_checkpoint(run.folder)
        again = start(case.again, run)
        assert again.statuses == [0] * case.again, again.text
        # A checkpoint is written while the next steps are taken, and those are lost with it
        assert rank_runs.steps_lost(run.folder) <= (0 if 143 in case.statuses else 2 * SAVE_STEPS)
    reference = exact if case.exact else request.getfixturevalue("on_ranks")(case.again)
    assert rank_runs.rows_of(run.folder) == rank_runs.rows_of(reference)
    assert len(rank_runs.rows_of(run.folder)) == STEPS
    assert rank_runs.difference(run.folder, reference) <= (TOLERANCE if case.exact else 0)


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run, on one process, of what does not depend on their number."""
    folder = tmp_path_factory.mktemp("exact") / "run"
    assert start(1, exact_run(folder)).statuses == [0]
    return folder


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """Uninterrupted runs with dropout, by the number of processes, to be met in every bit."""
    root = tmp_path_factory.mktemp("straight")

    def run(world):
        folder = root / str(world)
        if not folder.exists():
            assert start(world, TinyRun(folder)).statuses == [0] * world
        return folder

    return run


# -- steps that teach nothing -------------------------------------------------------------------------------------------
_state = {}


def _remember(trainer: Trainer, batch: dict[str, Any]) -> None:
    state = {"model": trainer.model, "optimizer": trainer.optimizer}
    _state.update({name: copy.deepcopy(each.state_dict()) for name, each in state.items()})


def _go_back(trainer: Trainer, batch: dict[str, Any]) -> None:
    trainer.model.load_state_dict(_state["model"])
    trainer.optimizer.load_state_dict(_state["optimizer"])


@pytest.fixture(scope="module")
def without_a_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that is put back to where it was before one of its steps."""
    folder = tmp_path_factory.mktemp("without") / "run"
    faults = (Fault(_remember, "taken", STRUCK), Fault(_go_back, "log", STRUCK))
    assert start(1, exact_run(folder), *faults).statuses == [0]
    return folder


@pytest.mark.parametrize(
    ("action", "rank", "parts"),
    [(nan_pixels, 1, None), (no_rows, None, None), slow(nan_pixels, None, "2"), slow(no_rows, None, "2")],
)
def test_a_step_without_a_row_or_a_finite_gradient(
    without_a_step: Path, tmp_path: Path, action: Action, rank: int | None, parts: str | None
) -> None:
    """It changes nothing, on no process; its images are written down, and the run goes on."""
    run = exact_run(tmp_path / "run", micro_batch_size=parts, max_corrupt_share=1.0)
    ended = start(2, run, Fault(action, "taken", STRUCK, rank))
    assert ended.statuses == [0, 0], ended.text
    if action is not no_rows:
        assert f"Step {STRUCK} was skipped" in ended.texts[0]
        [line] = (run.folder / NONFINITE_FILE).read_text().splitlines()
        assert f'"step": {STRUCK},' in line
        assert all(f'"{row}"' in line for row in rank_runs.rows_of(run.folder)[STRUCK])
    assert rank_runs.difference(run.folder, without_a_step) < TOLERANCE


@pytest.mark.parametrize(
    ("wish", "place"),
    [("should_training_stop", "log"), slow("should_log", "end"), slow("should_training_stop", "saved"),
     slow("should_evaluate", "end"), slow("should_save", "log")],
)  # fmt: skip
def test_a_callback_that_wants_something_on_one_process(tmp_path: Path, wish: str, place: str) -> None:
    """As those do that look at a clock, or only act on the main process: all do it together."""
    run = exact_run(tmp_path / "run", logging_steps=5)
    ended = start(2, run, Fault(Set(wish), place, {"saved": 0, "end": 7}.get(place, 5), 1))
    assert ended.statuses == [0, 0], ended.text
    done = {note["step"] for note in rank_runs.notes_in(run.folder, "steps")}
    assert len(done) < STEPS if wish == "should_training_stop" else len(done) == STEPS


# -- restarts and long runs ---------------------------------------------------------------------------------------------


def torchrun(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=3", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    words = [*command, "-m", "tests.faults.rank_runs", str(folder / "run")]
    variables = on_loopback() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(words, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_a_machine_joins_and_is_killed(exact: Path, tmp_path: Path) -> None:
    """Machines are two agents on the loopback interface; where one joins, no step is lost."""

    def history():
        path = tmp_path / "run.notes/steps-0.jsonl"
        return read_lines(path) if path.exists() else []

    (hold := tmp_path / "run.hold").touch()
    port = free_port()
    agents = []
    try:
        for number, name in enumerate(("first", "second"), 1):
            agents.append(torchrun(tmp_path, port, name))
            assert wait_until(lambda: len(history()) == 3 * number), (tmp_path / "first.log").read_text()  # noqa: B023
        kill_family(agents[1].pid)
        hold.unlink()
        assert agents[0].wait(PATIENCE) == 0, (tmp_path / "first.log").read_text()
    finally:
        for agent in agents:
            kill_family(agent.pid)
    steps = {pid: [(note["step"], note["world"]) for note in history() if note["pid"] == pid]
             for pid in dict.fromkeys(note["pid"] for note in history())}  # fmt: skip
    before, together, after = steps.values()
    assert before == [(1, 1), (2, 1), (3, 1)]
    assert together == [(4, 2), (5, 2), (6, 2)]
    assert after in ([(step, 1) for step in range(begin, STEPS + 1)] for begin in (4, 7))
    assert rank_runs.difference(tmp_path / "run", exact) <= TOLERANCE


LONG = 2000
EVERY = 100


class Measure:
    """Note what the process holds, every n steps: KiB, files, threads, children."""

    def __init__(self, file: Path):
        self.file = file

    def __call__(self, place: str, step: int) -> None:
        if place == "end" and step % EVERY == 0:
            own = psutil.Process()
            held = (own.memory_info().rss >> 10, own.num_fds(), threading.active_count(), len(own.children()))
            with self.file.open("a") as file:
                file.write(" ".join(map(str, held)) + "\n")


@pytest.mark.slow
def test_two_thousand_steps_hold_no_more_than_five_hundred(tmp_path: Path) -> None:
    """With evaluation, logging and checkpoints all the time."""
    arguments = {"max_steps": LONG, "save_steps": 20, "eval_steps": 25, "logging_steps": 5, "save_total_limit": 2}
    run = TinyRun(tmp_path / "run", strike=Measure(tmp_path / "held"), arguments=arguments)
    assert alone(train, run)[0] == 0
    held = [[int(value) for value in line.split()] for line in (tmp_path / "held").read_text().splitlines()]
    assert len(held) == LONG // EVERY
    early = [max(each) for each in zip(*held[:5], strict=True)]
    last = [min(each) for each in zip(*held[-5:], strict=True)]
    assert last[0] < early[0] + 30_000, held  # the log of 2,000 steps is kept in memory
    assert all(now <= before for now, before in zip(last[1:], early[1:], strict=True)), held


def few_files(run: TinyRun) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24,) * 2)
    return train(run)


def test_few_handles_are_enough(tmp_path: Path) -> None:
    """Files are closed: with room for 24 more, a run with a checkpoint a step reaches its end."""
    status, (_, last, _) = alone(few_files, TinyRun(tmp_path / "run", arguments={"save_steps": 1}))
    assert (status, last) == (0, STEPS)
