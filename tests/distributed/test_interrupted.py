"""Five interruptions, each resumed on another number of processes, against a run without any."""

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import Signalled, TinyRun, alone, losses, train

STEPS = 18
INTERRUPTED = {1: 3, 2: 5, 3: 9, 4: 11, 5: 14}  # start: the step after which it is interrupted
PROCESSES = (1, 2, 1, 3, 2, 1)


def run_on(world: int, run: TinyRun) -> list[tuple[int, int, list[list[int]]]]:
    if world > 1:
        return run_on_ranks(world, train, run)
    status, returned = alone(train, run)
    assert status == 0
    return [returned]


def rows_of_steps(ended: list[tuple[int, int, list[list[int]]]], taken: int) -> list[list[int]]:
    shares = [seen[:taken] for _, _, seen in ended]
    return [[row for share in step for row in share] for step in zip(*shares, strict=True)]


@pytest.mark.slow
def test_five_interruptions_with_other_numbers_of_processes_change_nothing(tmp_path: Path) -> None:
    arguments: dict[str, Any] = {"max_steps": STEPS, "save_steps": 4}
    straight = TinyRun(tmp_path / "straight", dropout=0.0, exact=True, arguments=arguments)
    [(_, _, right)] = run_on(1, straight)
    rows: list[list[int]] = []
    for start, world in enumerate(PROCESSES, 1):
        strike = Signalled("forward", INTERRUPTED.get(start, -1), signal.SIGTERM, only=world - 1)
        run = TinyRun(tmp_path / "run", strike=strike, dropout=0.0, exact=True, arguments=arguments)
        ended = run_on(world, run)
        until = INTERRUPTED.get(start, STEPS)
        assert {(number, step) for number, step, _ in ended} == {
            (signal.SIGTERM if start in INTERRUPTED else 0, until)
        }
        rows += rows_of_steps(ended, until - len(rows))
    assert rows == right
    found = losses(tmp_path / "run")
    assert found.keys() == set(range(1, STEPS + 1))
    assert found == pytest.approx(losses(straight.folder), rel=1e-5)
