"""No run hangs: real processes that stop, hang and are slow; a slow rank is named, with the reason."""

import logging
import re
import signal
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mm_utils import distributed
from mm_utils.reliability import watchdog
from mm_utils.reliability.failures import Status
from mm_utils.reliability.watchdog import HangDetection, StragglerDetection, laggards
from tests.kit.ranks import run_on_ranks
from tests.kit.runs import (
    LONG,
    Ended,
    FakeTrainer,
    Script,
    after_step,
    endless,
    launch_together,
    steps,
    use_ranks,
)


@pytest.fixture(scope="module")
def stopped() -> list[list[Ended]]:
    """Two runs of three processes: in each, another one is stopped."""
    return launch_together([(3, endless, after_step(5, signal.SIGSTOP, rank)) for rank in range(2)])


@pytest.mark.parametrize("rank", [0, 1])
def test_a_stopped_process_is_named_and_ends_the_run(rank: int, stopped: list[list[Ended]]) -> None:
    endings = stopped[rank]
    left = [ended for other, ended in enumerate(endings) if other != rank]
    assert [ended.status for ended in left] == [1, 1]
    assert max(ended.seconds for ended in left) < 25
    for ended in left:
        assert "Traceback" not in ended.text
        assert f"process {rank} " in ended.lines[-1]
        assert "Stopped, because" in ended.lines[-1]
    if rank:
        assert any("No progress" in line and "has not answered for" in line for line in endings[0].lines)


def hangs_in_its_data() -> None:
    for step, phase, _ in steps(10**6, timeout=4.0, warn_after=1.5):
        if (step, phase, distributed.rank()) == (6, "data", 1):
            time.sleep(LONG)


def hangs_in_a_step() -> None:
    for step, phase, _ in steps(10**6, timeout=4.0, warn_after=1.5):
        if (step, phase, distributed.rank()) == (6, "step", 1):
            time.sleep(LONG)


def hangs_in_an_evaluation() -> None:
    watchdog.SLOW_PHASE_TIMEOUT = 6.0
    for step, phase, trainer in steps(10**6, timeout=3.0, warn_after=1.0):
        if (step, phase) == (6, "step"):
            trainer.event("on_evaluate_begin")
            time.sleep(LONG if distributed.rank() == 1 else 0)


def hangs_before_the_first_step() -> None:
    watchdog.SLOW_PHASE_TIMEOUT = 6.0
    for _ in steps(1, timeout=3.0, warn_after=1.0):
        time.sleep(LONG if distributed.rank() == 1 else 0)


def slow_for_a_while() -> None:
    for step, phase, _ in steps(8, timeout=30.0, warn_after=1.5):
        if (step, phase, distributed.rank()) == (5, "data", 1):
            time.sleep(4)


HANGS = {
    hangs_in_its_data: 3,
    hangs_in_a_step: 2,
    hangs_in_an_evaluation: 2,
    hangs_before_the_first_step: 2,
    slow_for_a_while: 2,
}
"""Number of processes, of which the second one hangs."""


@pytest.fixture(scope="module")
def hung() -> dict[Script, list[Ended]]:
    return dict(zip(HANGS, launch_together([(world, hang, None) for hang, world in HANGS.items()]), strict=True))


@pytest.mark.parametrize(("hang", "phase"), [(hangs_in_its_data, "data"), (hangs_in_a_step, "step")])
def test_a_hang_is_named_with_its_stack_and_ends_the_run(
    hang: Script, phase: str, hung: dict[Script, list[Ended]]
) -> None:
    """In a step both ranks of two are as far; the one outside of the collective hangs."""
    endings = hung[hang]
    assert [ended.status for ended in endings] == [1] * HANGS[hang]
    assert max(ended.seconds for ended in endings) < 25
    assert any("No progress: process 1 (host" in line for line in endings[0].lines)
    assert re.findall(r"Stack of process (\d)", endings[0].text) == ["1"]
    assert f"in {hang.__name__}\n      time.sleep(LONG)" in endings[0].text
    for ended in endings:
        assert re.search(rf"Stopped, because process 1 .* has been in '{phase}' of step 6 for \d+ s", ended.lines[-1])
        assert f"in {hang.__name__}; the others wait in" in ended.lines[-1]


@pytest.mark.parametrize(
    ("hang", "place"),
    [(hangs_in_an_evaluation, "'evaluation' of step 6"), (hangs_before_the_first_step, "'start' of step 0")],
)
def test_a_hang_in_a_slow_phase_ends_the_run_later(hang: Script, place: str, hung: dict[Script, list[Ended]]) -> None:
    assert [ended.status for ended in hung[hang]] == [1, 1]
    for ended in hung[hang]:
        assert re.search(rf"process 1 .* has been in {place} for [6-9] s.* give more than 6", ended.lines[-1])


def test_a_slow_process_is_named_and_the_run_continues(hung: dict[Script, list[Ended]]) -> None:
    endings = hung[slow_for_a_while]
    assert [ended.status for ended in endings] == [0, 0]
    assert len(endings[0].lines) == 1
    assert "process 1 (host" in endings[0].lines[0]


def test_the_place_is_that_of_the_thread_that_trains() -> None:
    """Under Ray it is not the main thread."""
    built, over, made = threading.Event(), threading.Event(), list[HangDetection]()

    def trains_here() -> None:
        made.append(HangDetection(60.0))
        built.set()
        over.wait(60)

    thread = threading.Thread(target=trains_here)
    thread.start()
    built.wait(60)
    found = made[0].status()
    over.set()
    thread.join()
    assert found["place"].endswith("in trains_here")


def status(moves: int, place: str = "") -> Status:
    return {"moves": moves, "place": place or "distributed.py:9", "in_collective": not place}


@pytest.mark.parametrize(
    ("answers", "behind"),
    [
        ([status(5), status(5), None], [2]),
        ([status(5), status(4), status(5)], [1]),
        ([status(5), {}, status(5)], [1]),
        ([status(5), status(5, "loaders.py:1"), status(5)], [1]),
        ([status(5), status(5, "loaders.py:1")], [1]),
        ([status(5, "trainer.py:1"), status(5, "loaders.py:1")], []),
        ([status(5, "step.py:1"), status(5, "step.py:1"), status(5, "loaders.py:1")], [2]),
        ([status(5)] * 4, []),
    ],
)
def test_laggards_are_the_ranks_that_the_others_wait_for(answers: list[Status | None], behind: list[int]) -> None:
    assert laggards(answers) == behind


# -- stragglers ---------------------------------------------------------------------------------------------------------
class Tower(nn.Module):
    def forward(self, seconds: float) -> float:
        time.sleep(seconds)
        return seconds


def warnings_of_a_run(slow: int, wait: float, computing: float, evaluating: float = 0.0) -> list[list[str]]:
    """Return the warnings of four log rows; one rank is slow after the first row."""
    use_ranks()
    records: list[logging.LogRecord] = []
    logger = logging.getLogger("mm_utils.reliability.watchdog")
    logger.addFilter(lambda record: records.append(record) or False)  # type: ignore[func-returns-value]
    tower = Tower()
    trainer = FakeTrainer(StragglerDetection())
    trainer.model = SimpleNamespace(device=torch.device("cpu"), vision_model=tower, text_model=nn.Identity())
    trainer.event("on_train_begin")
    warned = []
    for row in range(4):
        is_slow = distributed.rank() == slow and row > 0
        for _ in range(3):
            trainer.event("on_step_begin")
            tower(0.05 + computing * is_slow)
            distributed.any_rank(False, torch.device("cpu"))
            trainer.event("on_step_end", data_wait=0.01 + wait * is_slow)
        tower(evaluating * is_slow)
        trainer.event("on_log", logs={"eval_loss": 1.0})
        trainer.log()
        warned.append([record.getMessage() for record in records])
        records.clear()
    return warned


@pytest.mark.parametrize(
    ("wait", "computing", "reason"), [(0.2, 0.0, "Look at that machine's drive"), (0.0, 0.2, "a hot or broken device")]
)
def test_a_slow_rank_is_named_once_after_two_log_rows(wait: float, computing: float, reason: str) -> None:
    warned, *others = run_on_ranks(3, warnings_of_a_run, 2, wait, computing)
    assert [len(each) for each in warned] == [0, 0, 1, 0]
    assert "process 2 (host" in warned[2][0]
    assert reason in warned[2][0]
    assert others == [[[]] * 4] * 2


def test_a_compiled_tower_is_measured_from_outside_of_its_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hooks would be traced: a break of the graph and a new one in every step."""
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    towers = [nn.Sequential(nn.Linear(4, 4), nn.GELU()) for _ in range(2)]
    for tower in towers:
        tower.compile(backend="eager", dynamic=True)
    model = SimpleNamespace(vision_model=towers[0], text_model=towers[1], device=torch.device("cpu"))
    detection = StragglerDetection()
    nothing = SimpleNamespace()
    detection.on_train_begin(nothing, nothing, nothing, model=model)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    for rows in range(2, 12):
        detection.on_step_begin(nothing, nothing, nothing)
        for tower in towers:
            tower(torch.ones(rows, 4)).sum().backward()
        detection.on_step_end(nothing, nothing, nothing, data_wait=0.0)
    assert len(detection._passes) == 20
    assert sum(counters["graph_break"].values()) == 0
    assert counters["stats"]["unique_graphs"] <= 2
