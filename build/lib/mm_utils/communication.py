"""Meter what this process exchanges with others: bytes, and the seconds that it waits.

Bytes are those that a process receives, as a ring moves them, whatever the backend does: of an all-gather of b bytes a
process (W-1) b, of an all-reduce of b bytes 2 (W-1)/W b, W processes being in it. They are the bus bytes of nccl-tests
(doc/PERFORMANCE.md there), so bytes by seconds compare with what a link can do.

Seconds are those in which this process, on CUDA its current stream, does nothing but wait for the result: the exchange itself,
and before it the wait for the slowest process. What is exchanged beside computing costs none. Metering never waits for a GPU.
"""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def gathered_bytes(mine: int, ranks: int) -> float:
    """Return what a process receives of an all-gather of `mine` bytes of each of them."""
    return (ranks - 1) * mine


def reduced_bytes(size: int, ranks: int) -> float:
    """Return what a process receives of an all-reduce of `size` bytes."""
    return 2 * (ranks - 1) / ranks * size


class Meter:
    """Count the bytes and seconds of exchanges.

    On CUDA an exchange is timed by two events, which are read once both are over.

    Attributes:
        received: bytes so far.
    """

    def __init__(self) -> None:
        self.received = 0.0
        self._seconds = 0.0
        self._pending: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()

    @contextmanager
    def exchange(self, received: float, device: torch.device) -> Iterator[None]:
        """Count an exchange of tensors on `device`, which takes place inside."""
        self.received += received
        if device.type != "cuda":
            start = time.perf_counter()
            yield
            self._seconds += time.perf_counter() - start
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._pending.append((begin, end))
        self._read_events()

    @property
    def seconds(self) -> float:
        """Seconds so far, of the exchanges that are known to be over."""
        self._read_events()
        return self._seconds

    def _read_events(self) -> None:
        while self._pending and self._pending[0][1].query():
            begin, end = self._pending.popleft()
            self._seconds += begin.elapsed_time(end) / 1000


meter = Meter()
"""That of this process; `mm_utils.distributed` counts its collectives there."""
