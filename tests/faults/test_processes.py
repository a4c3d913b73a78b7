"""Processes that are killed, stopped, signalled, hang or fail, one of several, at every place of a run; and long runs."""

import os
import re
import resource
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import psutil
import pytest

from mm_utils.checkpointing.files import find_checkpoint, step_of
from mm_utils.reliability import watchdog
from mm_utils.training.trainer import Trainer
from tests.faults import rank_runs
from tests.faults.rank_runs import LONGEST, SAVE_STEPS, Fault, Raise, Sleep, freeze, kill, start, terminate
from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import STEPS, Signalled, TinyRun, alone, digest, exact_run, exiting, losses, slow, train

ROOT = Path(__file__).parents[2]
TOLERANCE = 1e-5  # where the number of processes differs
Straight = Callable[[int], Path]


@pytest.fixture(scope="module")
def on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Straight:
    """Uninterrupted runs with dropout, by the number of processes, to be met in every bit."""
    root = tmp_path_factory.mktemp("straight")

    def run(world: int) -> Path:
        folder = root / str(world)
        if not folder.exists():
            assert start(world, TinyRun(folder)).statuses == [0] * world
        return folder

    return run


def assert_ended(ended: rank_runs.Ended, rank: int, status: int | None, told: str) -> None:
    """One process struck, the others gone soon with one line each, and without a traceback."""
    assert ended.statuses[rank] == status, ended.text
    for other in {*range(len(ended.statuses))} - {rank}:
        assert ended.statuses[other] == 1, ended.texts[other]
        assert "Traceback" not in ended.texts[other]
        [line] = ended.errors(other)
        assert told in line


def goes_on(run: TinyRun, world: int, reference: Path, tolerance: float) -> None:
    """Start again on n processes: nothing is missing at the end but time."""
    assert not rank_runs.loses_checkpoint(run.folder)
    again = start(world, run)
    assert again.statuses == [0] * world, again.text
    # A checkpoint is written while the next steps are taken, and those are lost with it.
    assert rank_runs.steps_lost(run.folder) <= 2 * SAVE_STEPS
    assert rank_runs.rows_of(run.folder) == rank_runs.rows_of(reference)
    assert len(rank_runs.rows_of(run.folder)) == STEPS
    assert rank_runs.difference(run.folder, reference) <= tolerance


# -- killed and stopped -------------------------------------------------------------------------------------------------
QUICK = [(1, "start", 0), (0, "writing", 6)]
PLACES = [("start", 0), ("batch", 1), ("batch", 5), ("tower", 2), ("backward", 8), ("optimizer", 4), ("end", 7),
          ("evaluation", 4), ("evaluation", 8), ("evaluation", 10), ("saved", 0), ("last", 10)]  # fmt: skip
KILLS = [*QUICK, *(slow(rank, *place) for rank in range(3) for place in PLACES if (rank, *place) not in QUICK)]


@pytest.mark.parametrize(("rank", "place", "step"), KILLS)
def test_a_killed_process(exact: Path, on_ranks: Straight, tmp_path: Path, rank: int, place: str, step: int) -> None:
    """The others say so and end; what goes on from there ends as a run that nothing happened to."""
    same = (rank + step) % 2 == 0
    run = TinyRun(tmp_path / "run") if same else exact_run(tmp_path / "run")
    assert_ended(start(3, run, Fault(kill, place, step, rank)), rank, -9, "lost the connection to another one")
    goes_on(run, 3 if same else 2, on_ranks(3) if same else exact, 0.0 if same else TOLERANCE)


@pytest.mark.parametrize("number", [slow(number) for number in range(6)])
def test_a_process_killed_at_some_instant_of_a_step(on_ranks: Straight, tmp_path: Path, number: int) -> None:
    rank, step, delay = number % 2, 2 + number, 0.007 * number + 0.001
    run = TinyRun(tmp_path / "run")
    ended = start(2, run, Fault(kill, "taken", step, rank, delay=delay), Fault(Sleep(0.01), "tower", step, None, 9))
    assert_ended(ended, rank, -9, "lost the connection to another one")
    goes_on(run, 2, on_ranks(2), 0.0)


def be_quick(trainer: Trainer, batch: dict[str, Any]) -> None:
    """End a phase in which others may wait for long after six seconds."""
    watchdog.SLOW_PHASE_TIMEOUT, watchdog.WAITING_SECONDS = 6.0, 2.0


def test_a_stopped_process(exact: Path, tmp_path: Path) -> None:
    """Those that wait for it end with their stacks, and say that they wait."""
    run = exact_run(tmp_path / "run", ddp_timeout=3.0)
    ended = start(3, run, Fault(be_quick, "start", 0, None), Fault(freeze, "backward", 5, 1))
    assert_ended(ended, 1, None, "waiting for another process, which is stopped, or whose machine is lost")
    goes_on(run, 2, exact, TOLERANCE)


@pytest.mark.parametrize(
    ("place", "step", "phase"), [("batch", 8, "data"), ("tower", 8, "step"), ("evaluation", 4, "evaluation")]
)
def test_a_process_that_hangs(tmp_path: Path, place: str, step: int, phase: str) -> None:
    """It names itself with its stack, and ends the run; in an evaluation later, as others may wait there."""
    run = exact_run(tmp_path / "run", ddp_timeout=3.0, save_steps=0, eval_steps=4 if place == "evaluation" else 100)
    ended = start(2, run, Fault(be_quick, "start", 0, None), Fault(Sleep(LONGEST), place, step, 1))
    assert_ended(ended, 1, 1, "lost the connection to another one")
    found = re.search(rf"Stopped, because process 1 \(host .* in '{phase}' of step \d for (\d+) s", ended.texts[1])
    assert found, ended.texts[1]
    assert int(found[1]) >= (6 if phase == "evaluation" else 3)
    assert "time.sleep(self.seconds)" in ended.texts[1]


def test_a_process_that_is_slow_for_a_while(tmp_path: Path) -> None:
    run = exact_run(tmp_path / "run", save_steps=0, eval_steps=100)
    assert start(2, run, Fault(Sleep(3), "batch", 8, 1)).statuses == [0, 0]


# -- errors -------------------------------------------------------------------------------------------------------------
ERRORS: dict[str, BaseException] = {
    "ValueError": ValueError("--x is 1;\nit is wrong, with token=abcdefghijkl."),
    "KeyError": KeyError("a bug"),
}
BREAKS = {"start": 0, "batch": 5, "forward": 5, "backward": 5, "optimizer": 5, "end": 5, "log": 5, "evaluation": 8,
          "last": STEPS}  # fmt: skip
QUICK_ERRORS = [("ValueError", "batch", 0), ("KeyError", "evaluation", 1)]
CASES = [case for case in product(ERRORS, BREAKS, (0, 1)) if case not in QUICK_ERRORS]


@pytest.mark.parametrize(("error", "place", "rank"), [*QUICK_ERRORS, *(slow(*case) for case in CASES)])
def test_an_error_in_one_process(exact: Path, tmp_path: Path, error: str, place: str, rank: int) -> None:
    """It is told by the one that it happened to, without secrets, and the others are gone soon."""
    run = exact_run(tmp_path / "run")
    ended = start(2, run, Fault(Raise(ERRORS[error]), place, BREAKS[place], rank))
    assert_ended(ended, rank, 1, "lost the connection to another one")
    assert ended.text.count("Traceback") == (error != "ValueError"), ended.text
    assert ("a bug" if error == "KeyError" else "ERROR --x is 1;") in ended.texts[rank]
    assert "abcdefghijkl" not in ended.text
    goes_on(run, 1, exact, TOLERANCE)


def test_an_error_while_a_checkpoint_is_written(exact: Path, tmp_path: Path) -> None:
    """It costs the checkpoint, and not the run."""
    ended = start(2, exact_run(tmp_path / "run"), Fault(Raise(KeyError("a bug")), "writing", 6))
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


@pytest.mark.parametrize(("rank", "stop"), [(1, 6), slow(None, 6), slow(0, 4), slow(1, 9)])
def test_data_that_end_early(exact: Path, tmp_path: Path, rank: int | None, stop: int) -> None:
    """It is an error; whoever has fewer batches must not evaluate and save while the others wait for it in a step."""
    run = exact_run(tmp_path / "run")
    ended = start(2, run, Fault(Shorten(stop), "start", 0, rank))
    assert ended.statuses == [1, 1], ended.text
    assert f"ended after step {stop} of {STEPS}" in ended.text
    assert "Traceback" not in ended.text
    assert not (run.folder / "model.safetensors").exists()
    goes_on(run, 2, exact, TOLERANCE)


class Set:
    """What a callback asks for."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, trainer: Trainer, batch: dict[str, Any]) -> None:
        setattr(trainer.callbacks.control, self.name, True)


@pytest.mark.parametrize(
    ("wish", "place"),
    [("should_log", "end"), ("should_training_stop", "log"), slow("should_training_stop", "saved"),
     slow("should_evaluate", "end"), slow("should_save", "log")],
)  # fmt: skip
def test_a_callback_that_wants_something_on_one_process(tmp_path: Path, wish: str, place: str) -> None:
    """As those do that look at a clock, or only act on the main process: all do it together."""
    run = exact_run(tmp_path / "run", logging_steps=5)
    ended = start(2, run, Fault(Set(wish), place, {"saved": 0, "end": 7}.get(place, 5), 1))
    assert ended.statuses == [0, 0], ended.text
    done = {note["step"] for note in rank_runs.notes_in(run.folder, "steps")}
    assert len(done) < STEPS if wish == "should_training_stop" else len(done) == STEPS


# -- signals ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("rank", [0, slow(1)])
def test_one_process_is_asked_to_stop(on_ranks: Straight, tmp_path: Path, rank: int) -> None:
    """All finish the step, save and leave; not a step is lost."""
    run = TinyRun(tmp_path / "run")
    ended = start(2, run, Fault(terminate, "backward", 5, rank))
    assert ended.statuses == [143, 143], ended.text
    goes_on(run, 2, on_ranks(2), 0.0)
    assert rank_runs.steps_lost(run.folder) == 0


AT = [("batch", 1), ("forward", 5), ("end", 6), ("evaluation", 4), ("evaluation", STEPS), ("saved", 6), ("end", STEPS)]
SIGNALLED = [*((place, signal.SIGTERM) for place in AT), (AT[1], signal.SIGINT), (AT[3], signal.SIGUSR1)]
OTHERS = [case for case in product(AT, (signal.SIGINT, signal.SIGUSR1)) if case not in SIGNALLED]


@pytest.mark.parametrize(("place", "number"), [*SIGNALLED, *(slow(*case) for case in OTHERS)])
def test_a_signal_loses_no_step(
    place: tuple[str, int], number: signal.Signals, straight: Path, tmp_path: Path
) -> None:
    """A storm of signals is one."""
    run = TinyRun(tmp_path / "run", strike=Signalled(*place, number, times=3))
    status, _ = alone(exiting, run)
    path = find_checkpoint("latest", run.folder)
    assert path is not None
    assert step_of(path) >= place[1]
    assert status == 128 + number or (place[1] == STEPS and status == 0)
    status, (_, last, _) = alone(train, replace(run, strike=TinyRun(run.folder).strike))
    assert (status, last) == (0, STEPS)
    assert digest(run.folder) == digest(straight)
    assert losses(run.folder) == losses(straight)


@pytest.mark.parametrize(
    ("place", "only"), [(AT[1], 1), (AT[1], None), (AT[3], 1), *(slow(AT[3], only) for only in (0, None))]
)
def test_all_processes_stop_after_the_same_step(place: tuple[str, int], only: int | None, tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run", dropout=0.0, strike=Signalled(*place, signal.SIGTERM, only=only))
    ended: list[Any] = run_on_ranks(2, train, run)
    assert [(number, step) for number, step, _ in ended] == [(signal.SIGTERM, place[1])] * 2
    assert find_checkpoint("latest", run.folder) == run.folder / f"checkpoint-{place[1]}"


# -- restarts and long runs ---------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize(("seed", "kills"), [(1, 1), (2, 3), (3, 3)])
def test_a_launcher_that_restarts_its_processes(on_ranks: Straight, tmp_path: Path, seed: int, kills: int) -> None:
    """Nobody does anything, and the run comes to the same end."""
    folder = tmp_path / "run"
    config = str(ROOT / "accelerate_configs" / "two_processes.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--max_restarts", "3"]
    command += ["--main_process_port", "0", "-m", "tests.faults.rank_runs", str(folder), str(seed), str(kills)]
    environment = {**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert all(rank_runs.steps_lost(folder, begun) <= 2 * SAVE_STEPS for begun in range(kills))
    assert not rank_runs.loses_checkpoint(folder)
    assert max(note["begun"] for note in rank_runs.notes_in(folder, "steps")) == kills
    assert rank_runs.rows_of(folder) == rank_runs.rows_of(on_ranks(2))
    assert rank_runs.difference(folder, on_ranks(2)) == 0


LONG, EVERY = 2000, 100


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
    early, last = (
        [max(each) for each in zip(*held[:5], strict=True)],
        [min(each) for each in zip(*held[-5:], strict=True)],
    )
    assert last[0] < early[0] + 30_000, held  # the log of 2,000 steps is kept in memory
    assert all(now <= before for now, before in zip(last[1:], early[1:], strict=True)), held


def few_files(run: TinyRun) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24,) * 2)
    return train(run)


def test_few_handles_are_enough(tmp_path: Path) -> None:
    """Files are closed: with room for 24 more, a run with a checkpoint a step reaches its end."""
    status, (_, last, _) = alone(few_files, TinyRun(tmp_path / "run", arguments={"save_steps": 1}))
    assert (status, last) == (0, STEPS)
