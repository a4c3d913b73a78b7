"""No run hangs, and what went wrong first is told once: real processes that fail, die, stop and are slow."""

import multiprocessing
import os
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from torch import nn

from mm_utils import failures, ranks, stragglers, watchdog
from mm_utils.failures import Answer
from mm_utils.run import run_script, set_up_logging
from mm_utils.stragglers import Stragglers
from mm_utils.watchdog import Watchdog, laggards
from tests.test_ranks import PRELOADED, run_on_ranks

CPU = torch.device("cpu")
LONG = 60.0  # seconds after which a test's process ends whatever happens
Script = Callable[[], None]


@dataclass
class Ended:
    """How a process ended: exit status (-9 = killed), what it wrote to stderr, seconds from when all had begun."""

    status: int | None
    text: str
    seconds: float

    @property
    def lines(self) -> list[str]:
        return [line for line in self.text.splitlines() if re.search(r"ERROR|WARNING", line)]


def launch(world: int, script: Script, disturb: Callable[[list[int], Path], None] | None = None) -> list[Ended]:
    """Run a script in `world` processes, without a launcher that would end them; `disturb` gets their pids, a folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "mm_utils.run"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        processes = [context.Process(target=_process, args=(rank, world, port, name, script)) for rank in range(world)]
        for process in processes:
            process.start()
        while not all((folder / f"{rank}.err").exists() for rank in range(world)):  # what forks them imports much
            time.sleep(0.05)
        start = time.monotonic()
        if disturb is not None:
            disturb([process.pid or 0 for process in processes], folder)
        ends: dict[int, float] = {}
        while len(ends) < world and time.monotonic() - start < LONG:
            time.sleep(0.05)
            stopped = [rank for rank, process in enumerate(processes) if _is_stopped(process.pid or 0)]
            for rank, process in enumerate(processes):
                if rank not in ends and (process.exitcode is not None or (rank in stopped and len(ends) == world - 1)):
                    ends[rank] = time.monotonic() - start
        for process in processes:
            if process.is_alive():
                process.kill()
            process.join()
        return [
            Ended(process.exitcode, (folder / f"{rank}.err").read_text(), ends.get(rank, LONG))
            for rank, process in enumerate(processes)
        ]


def _is_stopped(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_STOPPED
    except psutil.NoSuchProcess:
        return False


def _process(rank: int, world: int, port: int, folder: str, script: Script) -> None:
    errors = os.open(Path(folder, f"{rank}.err"), os.O_WRONLY | os.O_CREAT)
    os.dup2(errors, 2)
    os.chdir(folder)
    failures.POLL, failures.GRACE = 0.2, 0.5
    torch.set_num_threads(1)
    set_up_logging(main=rank == 0)
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", timedelta(seconds=LONG), world_size=world, rank=rank)
    run_script(script)


def steps(count: int, timeout: float = 30.0, patience: float = 10.0) -> Iterator[tuple[int, str, Watchdog]]:
    """A training loop of short steps that each end with a collective; the caller works in "data" and in "step"."""
    with Watchdog(timeout, CPU, patience) as watchdog:
        for step in range(count):
            for phase in ("data", "step"):
                watchdog.at(step, phase)
                yield step, phase, watchdog
            ranks.any_rank(False, CPU)
            Path(f"{ranks.rank()}.step").write_text(str(step))


def at_step(step: int, send: signal.Signals, rank: int) -> Callable[[list[int], Path], None]:
    """Send a process a signal once it has done a step."""

    def disturb(pids: list[int], folder: Path) -> None:
        until = time.monotonic() + LONG
        note = folder / f"{rank}.step"
        while time.monotonic() < until and not (note.exists() and int(note.read_text() or -1) >= step):
            time.sleep(0.05)
        time.sleep(2)  # in which they get to know each other
        os.kill(pids[rank], send)

    return disturb


def healthy() -> None:
    for step, phase, of_run in steps(20, timeout=3.0, patience=2.0):
        if (step, phase) == (10, "step"):
            for _ in range(12):  # an evaluation longer than is waited for, that shows signs of life
                of_run.at(step, "evaluation")
                time.sleep(0.75)
            of_run.at(step, "save")
            if ranks.rank() == 0:
                time.sleep(5)  # alone, longer than the timeout


@pytest.mark.faults
@pytest.mark.slow
def test_nothing_happens_in_a_healthy_run() -> None:
    for ended in launch(3, healthy):
        assert (ended.status, ended.text) == (0, "")


def fails_with_a_bug() -> None:
    for step, _, _ in steps(10**6):
        if step == 5 and ranks.rank() == 1:
            raise KeyError("a bug")


def test_a_failure_is_told_once_and_ends_all() -> None:
    endings = launch(3, fails_with_a_bug)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert max(ended.seconds for ended in endings) < 20
    assert sum(ended.text.count("Traceback") for ended in endings) == 1
    assert "Process 1 failed" in endings[1].text
    assert "KeyError: 'a bug'" in endings[1].text
    for rank in (0, 2):
        [line] = endings[rank].text.splitlines()
        assert line.endswith("Stopped, because process 1 failed: KeyError: 'a bug'")


def fails_while_others_wait_for_its_data() -> None:
    if ranks.rank() == 0:
        raise ValueError("--train_file is x.jsonl; there is no such file.\nGive one.")
    ranks.any_rank(False, CPU)


def test_a_mistake_of_process_0_before_training() -> None:
    """Process 0 keeps the board, so the others would hear of nothing if it left at once."""
    endings = launch(3, fails_while_others_wait_for_its_data)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert not any("Traceback" in ended.text for ended in endings)
    assert "ERROR --train_file is x.jsonl" in endings[0].text
    for ended in endings[1:]:
        [line] = ended.text.splitlines()
        assert line.endswith("process 0 failed: ValueError: --train_file is x.jsonl; there is no such file. Give one.")


def all_make_the_same_mistake() -> None:
    ranks.any_rank(False, CPU)
    raise ValueError("--seed is wrong.")


def test_what_all_fail_of_is_told_by_one() -> None:
    endings = launch(3, all_make_the_same_mistake)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert sum("ERROR --seed is wrong." in ended.text for ended in endings) == 1


def goes_on() -> None:
    for _ in steps(10**6, timeout=4.0, patience=1.5):
        pass


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_process_is_named(rank: int) -> None:
    endings = launch(3, goes_on, at_step(5, signal.SIGKILL, rank))
    left = [ended for other, ended in enumerate(endings) if other != rank]
    assert endings[rank].status == -9
    assert [ended.status for ended in left] == [1, 1]
    assert max(ended.seconds for ended in left) - endings[rank].seconds < 10
    for ended in left:
        [line] = ended.lines
        assert f"process {rank} " in line
        assert "gone without a word" in line
        assert "Traceback" not in ended.text


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_stopped_process_is_named_and_ends_the_run(rank: int) -> None:
    endings = launch(3, goes_on, at_step(5, signal.SIGSTOP, rank))
    left = [ended for other, ended in enumerate(endings) if other != rank]
    assert [ended.status for ended in left] == [1, 1]
    assert max(ended.seconds for ended in left) < 25
    for ended in left:
        assert "Traceback" not in ended.text
        assert f"process {rank} " in ended.lines[-1]
        assert "Stopped, because" in ended.lines[-1]
    if rank:
        assert any("No process moves" in line and "has not been heard of" in line for line in endings[0].lines)


def hangs_in_its_data() -> None:
    for step, phase, _ in steps(10**6, timeout=4.0, patience=1.5):
        if (step, phase, ranks.rank()) == (6, "data", 1):
            time.sleep(LONG)


def test_a_hang_is_named_with_its_stack_and_ends_the_run() -> None:
    endings = launch(3, hangs_in_its_data)
    assert [ended.status for ended in endings] == [1, 1, 1]
    assert max(ended.seconds for ended in endings) < 25
    assert any("No process moves: process 1 (host" in line for line in endings[0].lines)
    assert endings[1].text.count("What process 1 is doing") == 1
    assert "in hangs_in_its_data" in endings[1].text
    assert not any("is doing" in endings[rank].text for rank in (0, 2))
    for ended in endings:
        assert re.search(r"Stopped, because process 1 .* has been in 'data' of step 6 for \d+ s", ended.lines[-1])


def hangs_in_an_evaluation() -> None:
    watchdog.LONGEST_QUIET = 6.0
    for step, phase, of_run in steps(10**6, timeout=3.0, patience=1.0):
        if (step, phase) == (6, "step"):
            of_run.at(step, "evaluation")
            time.sleep(LONG if ranks.rank() == 1 else 0)


def test_a_hang_in_an_evaluation_ends_the_run_later() -> None:
    endings = launch(2, hangs_in_an_evaluation)
    assert [ended.status for ended in endings] == [1, 1]
    for ended in endings:
        assert re.search(
            r"process 1 .* has been in 'evaluation' of step 6 for [6-9] s.* give more than 6", ended.lines[-1]
        )


def slow_for_a_while() -> None:
    for step, phase, _ in steps(8, timeout=30.0, patience=1.5):
        if (step, phase, ranks.rank()) == (5, "data", 1):
            time.sleep(4)


def test_a_slow_process_is_named_and_the_run_goes_on() -> None:
    endings = launch(2, slow_for_a_while)
    assert [ended.status for ended in endings] == [0, 0]
    assert len(endings[0].lines) == 1
    assert "process 1 (host" in endings[0].lines[0]


def leaves_without_a_failure() -> None:
    for step, _, _ in steps(10):
        if step == 5:
            raise SystemExit(143)


def test_an_interrupted_run_is_no_failure() -> None:
    for ended in launch(2, leaves_without_a_failure):
        assert (ended.status, ended.text) == (143, "")


def two_watched_loops(folder: Path) -> tuple[int, bool]:
    os.chdir(folder)
    for _ in range(2):
        for _ in steps(3):
            assert failures.is_listening()
    return ranks.rank(), failures.is_listening()


def test_without_a_script_it_listens_by_itself(tmp_path: Path) -> None:
    assert run_on_ranks(2, two_watched_loops, tmp_path) == [(0, False), (1, False)]


def test_one_process_costs_nothing() -> None:
    with Watchdog(1.0, CPU, patience=0.1) as watchdog:
        watchdog.at(3, "step")
        assert not failures.is_listening()
    assert watchdog.position()["step"] == 3


def answer(moves: int, place: str = "ranks.py:9") -> Answer:
    return {"moves": moves, "place": place}


def test_who_is_behind() -> None:
    assert laggards([answer(5), answer(5), None]) == [2]
    assert laggards([answer(5), answer(4), answer(5)]) == [1]
    assert laggards([answer(5), {}, answer(5)]) == [1]
    assert laggards([answer(5), answer(5, "loaders.py:1"), answer(5)]) == [1]
    assert laggards([answer(5), answer(5, "loaders.py:1")]) == [1]
    assert laggards([answer(5, "trainer.py:1"), answer(5, "loaders.py:1")]) == []
    assert laggards([answer(5)] * 4) == []


class Tower(nn.Module):
    def forward(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def measured(slow: int, wait: float, computing: float) -> list[list[int]]:
    """Who is named in four checks of a run in which one process is slow."""
    tower = Tower()
    watched = Stragglers(CPU, [tower])
    named = []
    for check in range(4):
        for _ in range(3):
            own = ranks.rank() == slow and check > 0
            tower(0.05 + computing * own)
            watched.own(0.01 + wait * own)
            time.sleep(wait * own)
            ranks.any_rank(False, CPU)
        named.append(watched.check(check))
    return named


@pytest.mark.parametrize(("wait", "computing", "expected"), [(0.2, 0.0, [2]), (0.0, 0.2, [2]), (0.0, 0.0, [])])
def test_a_slow_process_is_named_once_after_two_checks(wait: float, computing: float, expected: list[int]) -> None:
    assert run_on_ranks(3, measured, 2, wait, computing) == [[[], [], expected, []]] * 3


def test_who_is_slow() -> None:
    assert stragglers.stragglers([[0.1, 0.2, 1.0], [0.1, 0.4, 1.0], [0.1, 0.2, 1.0]]) == {1}
    assert stragglers.stragglers([[0.1, 0.2, 1.0], [0.1, 0.28, 1.0], [0.1, 0.2, 1.0]]) == set()
    assert stragglers.stragglers([[0.0, 0.01, 1.0], [0.0, 0.03, 1.0]]) == set()  # little of a step
    assert stragglers.stragglers([[0.1, 0.2, 1.0], [0.4, 0.2, 1.0]]) == {1}
