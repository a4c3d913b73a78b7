"""Signals at every place of a run, once, in storms and twice, to one process and to several."""

import signal
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from mm_utils.checkpointing.files import newest_checkpoint, step_of
from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import STEPS, Signalled, TinyRun, alone, digest, exiting, losses, train

PLACES = [("batch", 1), ("forward", 5), ("end", 6), ("evaluation", 4), ("evaluation", STEPS), ("saved", 6)]
PLACES += [("end", STEPS)]
CASES = [*((place, signal.SIGTERM) for place in PLACES), (PLACES[1], signal.SIGINT), (PLACES[3], signal.SIGUSR1)]
OTHERS = [case for case in product(PLACES, (signal.SIGINT, signal.SIGUSR1)) if case not in CASES]


@pytest.mark.parametrize(
    ("place", "number"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS)],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, tuple) else None,
)
def test_a_signal_loses_no_step(
    place: tuple[str, int], number: signal.Signals, straight: Path, tmp_path: Path
) -> None:
    run = TinyRun(tmp_path / "run", strike=Signalled(*place, number))
    status, _ = alone(exiting, run)
    path, damaged = newest_checkpoint(run.folder)
    assert not damaged
    assert path is not None
    assert step_of(path) >= place[1]
    assert status == 128 + number or (place[1] == STEPS and status == 0)
    status, (_, last, _) = alone(train, replace(run, strike=TinyRun(run.folder).strike))
    assert (status, last) == (0, STEPS)
    assert digest(run.folder) == digest(straight)
    assert losses(run.folder) == losses(straight)


def test_a_storm_of_signals_is_one(straight: Path, tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run", strike=Signalled("forward", 5, signal.SIGTERM, times=5))
    assert alone(exiting, run)[0] == 143
    assert newest_checkpoint(run.folder)[0] == run.folder / "checkpoint-5"


@pytest.mark.parametrize(
    ("place", "only"),
    [*((("forward", 5), only) for only in (0, 1, None)), (("evaluation", 4), 1),
     *(pytest.param(("evaluation", 4), only, marks=pytest.mark.slow) for only in (0, None))],
)  # fmt: skip
def test_all_processes_stop_after_the_same_step(place: tuple[str, int], only: int | None, tmp_path: Path) -> None:
    run = TinyRun(tmp_path / "run", dropout=0.0, strike=Signalled(*place, signal.SIGTERM, only=only))
    ended: list[Any] = run_on_ranks(2, train, run)
    assert [(number, step) for number, step, _ in ended] == [(signal.SIGTERM, place[1])] * 2
    assert newest_checkpoint(run.folder)[0] == run.folder / f"checkpoint-{place[1]}"
