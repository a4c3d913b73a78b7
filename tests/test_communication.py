"""The meter adds up bytes and seconds, and never waits for a GPU."""

import time
from typing import Any

import pytest
import torch

from mm_utils import communication
from mm_utils.communication import Meter, gathered_bytes, reduced_bytes

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_bytes_are_those_of_a_ring() -> None:
    assert [gathered_bytes(100, ranks) for ranks in (1, 2, 5)] == [0, 100, 400]
    assert [reduced_bytes(100, ranks) for ranks in (1, 2, 4)] == [0, 100, 150]


def test_an_exchange_is_counted_with_its_wait() -> None:
    meter = Meter()
    for _ in range(2):
        with meter.exchange(30.0, CPU):
            time.sleep(0.02)
    time.sleep(0.02)
    assert meter.received == 60
    assert 0.04 <= meter.seconds < 0.5


def test_an_error_passes_through() -> None:
    with pytest.raises(RuntimeError, match="by peer"), Meter().exchange(1.0, CPU):
        raise RuntimeError("Connection reset by peer")


class Stream:
    """A GPU that is as far behind as the test says; an event is over once the GPU has come so far."""

    now = done = 0

    def event(self, **given: Any) -> Any:
        stream = self

        class Event:
            def record(self) -> None:
                stream.now += 1
                self.at = stream.now

            def query(self) -> bool:
                return self.at <= stream.done

            def elapsed_time(self, end: Any) -> float:
                assert end.query(), "this would raise on a GPU"
                return 1000.0 * (end.at - self.at)

        return Event()


def test_events_are_read_when_they_are_over_and_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    stream, meter = Stream(), Meter()
    monkeypatch.setattr(communication.torch.cuda, "Event", stream.event)
    for _ in range(3):
        with meter.exchange(10.0, CUDA):
            pass
    assert (meter.received, meter.seconds) == (30, 0)
    stream.done = 3  # the second exchange has begun
    assert meter.seconds == 1
    stream.done = 6
    assert meter.seconds == meter.seconds == 3
    assert not meter._pending
