"""Processes that take turns, and the bars."""

import json
import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.harness import TurnTaker, cpu_seconds, draw_bars
from tests.kit.processes import fork, is_alive, read_report, wait_until

COUNTING = """
import multiprocessing, time
from benchmarks.harness import serve

def count(counter):
    while True:
        counter.value += 1
        time.sleep(0.001)

counter = multiprocessing.Value("l", 0)
multiprocessing.Process(target=count, args=(counter,), daemon=True).start()

def answer(question):
    if "fail" in question:
        raise ValueError("it was asked to")
    print("this is not an answer")
    time.sleep(question.get("seconds", 0))
    return {"count": counter.value, "pid": multiprocessing.active_children()[0].pid}

serve(answer)
"""


@pytest.fixture
def counting(tmp_path: Path):
    program = tmp_path / "counting.py"
    program.write_text(COUNTING)
    process = TurnTaker(program)
    yield process
    process.end()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_turn_taker_and_its_workers_stand_still_between_turns_and_say_why_they_are_out(counting):
    first = counting.ask({"seconds": 0.1})
    time.sleep(0.3)
    second = counting.ask({})
    assert 10 < first["count"] <= second["count"] < first["count"] + 50  # 300, had it gone on
    assert counting.ask({"seconds": 0.2})["count"] > second["count"] + 20
    assert counting.ask({"fail": True}) == {}
    assert counting.error == "ValueError: it was asked to"
    assert counting.ask({}) == {}
    counting.end()
    assert wait_until(lambda: not is_alive(first["pid"]))


def test_a_turn_taker_may_die(tmp_path):
    program = tmp_path / "dies.py"
    program.write_text("raise SystemExit(3)")
    process = TurnTaker(program)
    assert process.ask({"anything": json.dumps("at all")}) == {}
    assert process.error
    process.end()


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of Linux ends a process with its parent")
def test_a_turn_taker_ends_with_its_parent_before_it_serves(tmp_path, children):
    (tmp_path / "slow.py").write_text("import time\ntime.sleep(600)")

    def body(report):
        report(str(TurnTaker(tmp_path / "slow.py").process.pid))
        os.kill(os.getpid(), signal.SIGKILL)

    _, reading = fork(children, body)
    pid = int(read_report(reading))
    children.append(pid)
    assert wait_until(lambda: not is_alive(pid))


def test_a_program_begins_only_while_the_launcher_lives(tmp_path, monkeypatch):
    (tmp_path / "none.py").touch()
    monkeypatch.setattr("mm_utils.run.checks.os.getppid", lambda: 1)
    monkeypatch.setattr("mm_utils.run.checks._command", lambda process: ["init"])
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    with pytest.raises(ValueError, match="The launcher of this process has ended before it could begin"):
        TurnTaker(tmp_path / "none.py")


def _work(seconds: float, done, stay) -> None:
    while time.process_time() < seconds:
        pass
    done.set()
    stay.wait()


def test_time_of_children_counts_once_while_they_live_and_after():
    fork = multiprocessing.get_context("fork")
    done, stay = fork.Event(), fork.Event()
    before = cpu_seconds()
    child = fork.Process(target=_work, args=(0.3, done, stay))
    child.start()
    assert done.wait(60)
    living = cpu_seconds() - before
    stay.set()
    child.join()
    ended = cpu_seconds() - before
    assert 0.3 <= living <= ended + 0.02  # a child's time is kept in units of up to 10 ms
    assert ended < 0.6


def test_bars(tmp_path):
    draw_bars({"ours_fast": 1234.5, "other": 100.0}, "images", "ours", tmp_path / "bars.png")
    with Image.open(tmp_path / "bars.png") as image:
        blue = np.asarray(image.convert("RGB").resize((200, 40), Image.Resampling.NEAREST)) == (37, 99, 235)
    assert 0.1 < blue.all(-1).mean() < 0.6  # the long bar is ours
