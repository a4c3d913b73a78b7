"""What the processes compute in their steps: tokens for each real one, and how evenly it is shared; for the log."""

import time
from typing import Any

import torch

from mm_utils import distributed


class Workload:
    """The tokens of this process and the time that it takes to embed, since they were last asked for."""

    def __init__(self) -> None:
        self._computed = 0
        self._real = 0
        self._begin: Any = None
        self._spans: list[tuple[Any, Any]] = []

    def begin(self, device: torch.device) -> None:
        """Note that embedding begins; the host does not wait for its device."""
        self._begin = _mark(device)

    def end(self, device: torch.device, computed: int, real: int) -> None:
        """Note that all is embedded, and how many tokens that took and were there."""
        self._spans.append((self._begin, _mark(device)))
        self._computed += computed
        self._real += real

    def over_ranks(self, device: torch.device) -> dict[str, float]:
        """Return the figures of all ranks and begin anew; called on all ranks.

        tokens_per_real: tokens computed for each real one, where a text tower runs. slowest_rank: with several ranks, the time
        that the slowest takes to embed, divided by the mean of all; 1 is even.
        """
        seconds = sum(_seconds(*span) for span in self._spans)
        everyone = distributed.gather_on_hosts([self._computed, self._real, round(1e6 * seconds)], device)
        self._computed = 0
        self._real = 0
        self._spans.clear()
        computed, real, times = zip(*everyone, strict=True)
        found = {"tokens_per_real": sum(computed) / sum(real)} if sum(real) else {}
        if len(times) > 1 and sum(times):
            found["slowest_rank"] = max(times) * len(times) / sum(times)  # of 3 s and 1 s: 1.5
        return found


def _mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def _seconds(begin: Any, end: Any) -> float:
    if isinstance(end, float):
        return end - begin
    end.synchronize()
    return begin.elapsed_time(end) / 1000  # elapsed_time is in milliseconds
