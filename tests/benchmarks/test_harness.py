"""Processes that take turns, and the bars."""

import multiprocessing
import os
import signal
import sys
import time
from pathlib import Path

import pytest

from benchmarks.harness import TurnTaker, cpu_seconds
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
