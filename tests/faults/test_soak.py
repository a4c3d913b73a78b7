"""Long runs keep their memory, handles, threads and processes; see `test_processes.py` for long runs under random faults."""

import os
import resource
import threading
from pathlib import Path

import psutil
import pytest

from tests.kit.tiny_run import TinyRun, alone, train

STEPS, EVERY = 2000, 100
EARLY = 5  # of the measurements, after which nothing may grow


class Measure:
    """Note what the process holds, every n steps."""

    def __init__(self, file: Path):
        self.file = file

    def __call__(self, place: str, step: int) -> None:
        if place == "end" and step % EVERY == 0:
            process = psutil.Process()
            held = (
                process.memory_info().rss >> 10,
                process.num_fds(),
                threading.active_count(),
                len(process.children()),
            )
            with self.file.open("a") as file:
                file.write(" ".join(map(str, held)) + "\n")


@pytest.mark.slow
def test_two_thousand_steps_hold_no_more_than_five_hundred(tmp_path: Path) -> None:
    """With evaluation, logging and checkpoints all the time."""
    arguments = {"max_steps": STEPS, "save_steps": 20, "eval_steps": 25, "logging_steps": 5, "save_total_limit": 2}
    run = TinyRun(tmp_path / "run", strike=Measure(tmp_path / "held"), arguments=arguments)
    assert alone(train, run)[0] == 0
    held = [[int(value) for value in line.split()] for line in (tmp_path / "held").read_text().splitlines()]
    assert len(held) == STEPS // EVERY
    early = [max(values) for values in zip(*held[:EARLY], strict=True)]
    last = [min(values) for values in zip(*held[-EARLY:], strict=True)]
    assert last[0] < early[0] + 30_000, held  # KiB; the log of 2,000 steps is kept in memory
    assert all(now <= before for now, before in zip(last[1:], early[1:], strict=True)), held


def few_files(run: TinyRun) -> object:
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 24,) * 2)
    return train(run)


def test_few_handles_are_enough(tmp_path: Path) -> None:
    """Files are closed: with room for 24 more, a run with a checkpoint a step reaches its end."""
    status, (_, last, _) = alone(few_files, TinyRun(tmp_path / "run", arguments={"save_steps": 1}))
    assert (status, last) == (0, 10)
