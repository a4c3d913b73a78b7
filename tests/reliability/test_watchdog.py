"""Which rank the others wait for; `tests/faults/test_processes.py` lets real ones hang."""

import threading

import pytest

from mm_utils.reliability.failures import Status
from mm_utils.reliability.watchdog import HangDetection, laggards


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
