"""Which rank the others wait for; `tests/faults/test_processes.py` lets real ones hang."""

import logging
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from mm_utils import distributed
from mm_utils.reliability.failures import Status
from mm_utils.reliability.watchdog import HangDetection, StragglerDetection, laggards
from mm_utils.run.start import make_accelerator
from tests.kit.processes import FakeTrainer
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks


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
    thread.join(60)
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
    let_accelerate_find_ranks()
    make_accelerator()
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
