"""Processes that are killed, stopped, slow or fail, one of several, at every place of a run."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mm_utils.reliability import watchdog
from mm_utils.training.trainer import Trainer
from tests.faults import rank_runs
from tests.faults.rank_runs import LONGEST, SAVE_STEPS, Fault, Raise, Sleep, freeze, kill, start
from tests.kit.tiny_run import STEPS, TinyRun, exact_run, slow

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5  # where the number of processes differs
Straight = Callable[[int], Path]


@pytest.fixture(scope="module")
def straight(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Uninterrupted runs with dropout, by the number of processes, to be met in every bit."""
    root = tmp_path_factory.mktemp("straight")

    def run(world: int) -> Path:
        folder = root / str(world)
        if not folder.exists():
            assert start(world, TinyRun(folder)).statuses == [0] * world
        return folder

    return run


QUICK = [(1, "start", 0), (0, "writing", 6)]
PLACES = [("start", 0), ("batch", 1), ("batch", 5), ("tower", 2), ("backward", 8), ("optimizer", 4), ("end", 7),
          ("save", 6), ("evaluation", 4), ("evaluation", 8), ("evaluation", 10), ("saved", 0), ("last", 10)]  # fmt: skip
KILLS = [*QUICK, *(slow(rank, *place) for rank in range(3) for place in PLACES if (rank, *place) not in QUICK)]


@pytest.mark.parametrize(("rank", "place", "step"), KILLS)
def test_a_killed_process(exact: Path, straight: Straight, tmp_path: Path, rank: int, place: str, step: int) -> None:
    """The others say so and end; what goes on from there ends as a run that nothing happened to."""
    same = (rank + step) % 2 == 0
    run = TinyRun(tmp_path / "run") if same else exact_run(tmp_path / "run")
    ended = start(3, run, Fault(kill, place, step, rank))
    assert_ended(ended, rank, -9)
    goes_on(run, ended, 3 if same else 2, straight(3) if same else exact, 0.0 if same else TOLERANCE)


@pytest.mark.parametrize("number", [slow(number) for number in range(6)])
def test_a_process_killed_at_some_instant_of_a_step(straight: Straight, tmp_path: Path, number: int) -> None:
    rank, step, delay = number % 2, 2 + number, 0.007 * number + 0.001
    run = TinyRun(tmp_path / "run")
    ended = start(2, run, Fault(kill, "taken", step, rank, delay=delay), Fault(Sleep(0.01), "tower", step, None, 9))
    assert_ended(ended, rank, -9)
    goes_on(run, ended, 2, straight(2), 0.0)


def assert_ended(ended: rank_runs.Ended, rank: int, status: int | None) -> None:
    """One process struck, the others gone soon, with one line each that names it."""
    assert ended.statuses[rank] == status, ended.text
    assert "Traceback" not in ended.text
    for other in {*range(len(ended.statuses))} - {rank}:
        assert ended.statuses[other] == 1, ended.texts[other]
        assert len(ended.errors(other)) == 1, ended.texts[other]
        assert f"process {rank} " in ended.errors(other)[0], ended.texts[other]


def goes_on(run: TinyRun, ended: rank_runs.Ended, world: int, reference: Path, tolerance: float) -> None:
    """Start again on n processes: nothing is missing at the end but time."""
    assert rank_runs.bytes_lost(run.folder) == 0
    again = start(world, run)
    assert again.statuses == [0] * world, again.text
    # A checkpoint is written while the next steps are taken, and those are lost with it.
    assert rank_runs.steps_lost(run.folder, ended.begun) <= 2 * SAVE_STEPS
    assert rank_runs.rows_of(run.folder) == rank_runs.rows_of(reference)
    assert len(rank_runs.rows_of(run.folder)) == STEPS
    assert rank_runs.difference(run.folder, reference) <= tolerance


@pytest.mark.parametrize("rank", [slow(0), 1, slow(2)])
def test_a_stopped_process(exact: Path, tmp_path: Path, rank: int) -> None:
    run = exact_run(tmp_path / "run", ddp_timeout=3.0)
    ended = start(3, run, Fault(freeze, "backward", 5, rank))
    assert_ended(ended, rank, None)
    assert "has not answered for" in ended.text
    goes_on(run, ended, 2, exact, TOLERANCE)


def be_quick(trainer: Trainer, batch: dict[str, Any]) -> None:
    """Warn after a second, and end a phase in which others may wait for long after ten."""
    watchdog.SLOW_PHASE_TIMEOUT = 10.0
    for each in trainer.callbacks.callbacks:
        if isinstance(each, watchdog.HangDetection):
            each.warn_after = 1.0


@pytest.mark.parametrize(
    ("place", "step", "phase"), [("batch", 8, "data"), ("tower", 8, "step"), ("evaluation", 4, "evaluation")]
)
def test_a_process_that_hangs(tmp_path: Path, place: str, step: int, phase: str) -> None:
    """It is named with its stack, and ends the run; in an evaluation later, as others may wait there."""
    run = exact_run(tmp_path / "run", ddp_timeout=5.0, save_steps=0, eval_steps=4 if place == "evaluation" else 100)
    ended = start(2, run, Fault(be_quick, "start", 0, None), Fault(Sleep(LONGEST), place, step, 1))
    assert ended.statuses == [1, 1], ended.text
    assert "No progress: process 1 (host" in ended.texts[0]
    assert "Stack of process 1" in ended.texts[0]
    assert "time.sleep(self.seconds)" in ended.texts[0]
    for rank in range(2):
        found = re.search(
            rf"Stopped, because process 1 .* in '{phase}' of step \d for (\d+) s", ended.errors(rank)[-1]
        )
        assert found, ended.texts[rank]
        assert int(found[1]) >= (10 if phase == "evaluation" else 5)


def test_a_process_that_is_slow_for_a_while(tmp_path: Path) -> None:
    run = exact_run(tmp_path / "run", save_steps=0, eval_steps=100)
    ended = start(2, run, Fault(be_quick, "start", 0, None), Fault(Sleep(3), "batch", 8, 1))
    assert ended.statuses == [0, 0], ended.text
    assert "No progress: process 1 (host" in ended.texts[0]


def test_what_others_are_told_of_an_error_holds_no_secret(tmp_path: Path) -> None:
    wrong = ValueError("--train_file is x.jsonl; there is no such file.\nGive one with token=abcdefghijkl.")
    ended = start(2, exact_run(tmp_path / "run"), Fault(Raise(wrong), "start", 0, 0))
    assert ended.statuses == [1, 1]
    assert (
        "process 0 failed: ValueError: --train_file is x.jsonl; there is no such file. Give one with" in ended.texts[1]
    )
    assert "abcdefghijkl" not in ended.texts[1]


def test_an_error_of_all_processes_is_reported_by_one(tmp_path: Path) -> None:
    wrong = ValueError("--seed is wrong.")
    ended = start(2, exact_run(tmp_path / "run"), Fault(Raise(wrong), "backward", 4, None))
    assert ended.statuses == [1, 1]
    assert ended.text.count("ERROR --seed is wrong.") == 1


ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("--x is 1; it is wrong."),
    "RuntimeError": RuntimeError("a bug"),
    "KeyError": KeyError("a bug"),
}
BREAKS = [
    "start",
    "batch",
    "forward",
    "backward",
    "optimizer",
    "end",
    "log",
    "evaluation",
    "evaluated",
    "save",
    "last",
]
QUICK_ERRORS = [("ValueError", "batch", 0), ("KeyError", "evaluation", 1)]
CASES = [(error, place, rank) for rank in (0, 1) for place in BREAKS for error in ERRORS]


@pytest.mark.parametrize(
    ("error", "place", "rank"), [*QUICK_ERRORS, *(slow(*c) for c in CASES if c not in QUICK_ERRORS)]
)
def test_an_error_in_one_process(exact: Path, tmp_path: Path, error: str, place: str, rank: int) -> None:
    """It is logged once, by the one that it happened to, and the others are gone soon."""
    run = exact_run(tmp_path / "run")
    step = {"start": 0, "evaluation": 8, "evaluated": 8, "save": 6, "last": STEPS}.get(place, 5)
    ended = start(2, run, Fault(Raise(ERRORS[error]), place, step, rank))
    assert ended.statuses == [1, 1], ended.text
    assert ended.text.count("Traceback") == (error != "ValueError"), ended.text
    assert len(ended.errors(rank)) == 1, ended.text
    assert str(ERRORS[error]) in ended.texts[rank]
    [line] = ended.errors(1 - rank)
    assert f"process {rank} failed: {error}: {ERRORS[error]}" in line
    goes_on(run, ended, 1, exact, TOLERANCE)


@pytest.mark.parametrize("error", ["KeyError", slow("ValueError")])
def test_an_error_while_a_checkpoint_is_written(exact: Path, tmp_path: Path, error: str) -> None:
    """It costs the checkpoint, and not the run."""
    ended = start(2, exact_run(tmp_path / "run"), Fault(Raise(ERRORS[error]), "writing", 6))
    assert ended.statuses == [0, 0], ended.text
    assert "the checkpoint of step 6 could not be written" in ended.errors(0)[0]
    assert sorted(path.name for path in (tmp_path / "run").glob("checkpoint-*")) == ["checkpoint-10", "checkpoint-9"]
    assert rank_runs.difference(tmp_path / "run", exact) <= TOLERANCE


class Shorten:
    """Let the loader end early."""

    def __init__(self, stop: int):
        self.stop = stop

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        made = trainer.data.train_batches
        trainer.data.train_batches = lambda first, stop: made(first, self.stop)  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize(("rank", "stop"), [(1, 6), slow(None, 6), slow(0, 6), slow(0, 4), slow(None, 9), slow(1, 9)])
def test_data_that_end_early(exact: Path, tmp_path: Path, rank: int | None, stop: int) -> None:
    """It is an error; whoever has fewer batches must not evaluate and save while the others wait for it in a step."""
    run = exact_run(tmp_path / "run")
    ended = start(2, run, Fault(Shorten(stop), "start", 0, rank))
    assert ended.statuses == [1, 1], ended.text
    assert f"ended after step {stop} of {STEPS}" in ended.text
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()
    goes_on(run, ended, 2, exact, TOLERANCE)


class Set:
    """What a callback asks for."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        setattr(trainer.callbacks.control, self.name, True)


WISHES = [("should_log", "end"), ("should_training_stop", "log"), ("should_training_stop", "evaluated"),
          ("should_training_stop", "saved"), ("should_evaluate", "end"), ("should_save", "end"),
          ("should_save", "evaluated"), ("should_save", "log"), ("should_evaluate", "log")]  # fmt: skip


@pytest.mark.parametrize(("wish", "place"), [WISHES[0], WISHES[1], *(slow(*each) for each in WISHES[2:])])
def test_a_callback_that_wants_something_on_one_process(tmp_path: Path, wish: str, place: str) -> None:
    """As those do that look at a clock, or only act on the main process: all do it together."""
    step = {"evaluated": 4, "end": 7}.get(place, 5)
    run = exact_run(tmp_path / "run", logging_steps=5, ddp_timeout=10.0)
    ended = start(2, run, Fault(Set(wish), place, 0 if place == "saved" else step, 1))
    assert ended.statuses == [0, 0], ended.text
    done = {note["step"] for note in rank_runs.notes_in(run.folder, "steps")}
    assert len(done) < STEPS if wish == "should_training_stop" else len(done) == STEPS


@pytest.mark.parametrize("rank", [0, slow(1)])
def test_one_process_is_asked_to_stop(straight: Straight, tmp_path: Path, rank: int) -> None:
    """All finish the step, save and leave; not a step is lost."""
    run = TinyRun(tmp_path / "run")
    ended = start(2, run, Fault(terminate, "backward", 5, rank))
    assert ended.statuses == [143, 143], ended.text
    goes_on(run, ended, 2, straight(2), 0.0)
    assert rank_runs.steps_lost(run.folder, ended.begun) == 0


def terminate(trainer: Trainer, batch: dict[str, Any]) -> None:
    signal.raise_signal(signal.SIGTERM)


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(1, 1), (2, 3), (3, 3)])
def test_a_launcher_that_restarts_its_processes(straight: Straight, tmp_path: Path, seed: int, kills: int) -> None:
    """Nobody does anything, and the run comes to the same end."""
    folder = tmp_path / "run"
    config = str(ROOT / "accelerate_configs" / "two_processes.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--max_restarts", "3"]
    command += ["--main_process_port", "0", "-m", "tests.faults.restarted", str(folder), str(seed), str(kills)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(rank_runs.steps_lost(folder, begun) <= 2 * SAVE_STEPS for begun in range(kills))
    assert rank_runs.bytes_lost(folder) == 0
    assert max(note["begun"] for note in rank_runs.notes_in(folder, "steps")) == kills
    assert rank_runs.rows_of(folder) == rank_runs.rows_of(straight(2))
    assert rank_runs.difference(folder, straight(2)) == 0
