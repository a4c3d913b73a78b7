"""A process that holds up the others, though it does not hang: which, how much, and with what.

In a step all processes wait for the slowest, so the time of a step tells nothing. Measured is what each needs by itself: the
wait for its data, and the forward passes of the towers, in which processes do not meet. (Under FSDP they do, to collect the
weights, so there only the data tell.)
"""

import logging
import platform
import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mm_utils import ranks

logger = logging.getLogger(__name__)

EXCESS = 0.3  # of the median, from which on a process is slow
SHARE = 0.1  # of a step, which the excess has to be, or nobody waits long for it
Mark = float | torch.cuda.Event


class Stragglers:
    """Names a process that is slow in two successive checks; once each.

    Args:
        device: of this process.
        towers: the modules whose passes are timed, on CUDA without waiting for them.

    One process measures nothing.
    """

    def __init__(self, device: torch.device, towers: Iterable[nn.Module]):
        self.device, self._several = device, ranks.world_size() > 1
        self._begun: list[Mark] = []
        self._passes: list[tuple[Mark, Mark]] = []
        self._suspects: set[int] = set()
        self._named: set[int] = set()
        if self._several:
            for tower in towers:
                tower.register_forward_pre_hook(self._begin)
                tower.register_forward_hook(self._end)
        self.restart()

    def restart(self) -> None:
        """Begin to measure anew, with the next step."""
        self._wait, self._steps, self._start = 0.0, 0, time.perf_counter()
        self._begun.clear()  # where a pass failed, for memory
        self._passes.clear()

    def own(self, wait: float) -> None:
        """Count a step, for whose data this process waited so many seconds."""
        self._wait += wait
        self._steps += 1

    def check(self, step: int) -> list[int]:
        """Compare the processes, of which each calls this, and measure anew. Returns who has just been named.

        Evaluation and saving since the last check are not to be measured: `restart` after them.
        """
        if not self._several or not self._steps:
            return []
        seconds = (time.perf_counter() - self._start) / self._steps
        mine = torch.tensor([[self._wait / self._steps, self._computing() / self._steps, seconds]], device=self.device)
        table = ranks.gather(mine.float(), [1] * ranks.world_size()).tolist()
        self.restart()
        slow = stragglers(table)
        new = sorted((slow & self._suspects) - self._named)
        self._suspects = slow
        if new:
            self._named |= set(new)
            hosts = _hosts(self.device)
            for rank in new:
                if ranks.rank() == 0:
                    logger.warning("Step %d: %s", step, _describe(rank, hosts[rank], table))
        return new

    def _computing(self) -> float:
        """Seconds of the passes, which are waited for here."""
        seconds = 0.0
        for begin, end in self._passes:
            if isinstance(begin, torch.cuda.Event):
                assert isinstance(end, torch.cuda.Event)
                end.synchronize()
                seconds += begin.elapsed_time(end) / 1000
            else:
                assert isinstance(end, float)
                seconds += end - begin
        return seconds

    def _begin(self, tower: nn.Module, inputs: Any) -> None:
        self._begun.append(self._now())

    def _end(self, tower: nn.Module, inputs: Any, output: Any) -> None:
        self._passes.append((self._begun.pop(), self._now()))

    def _now(self) -> Mark:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def stragglers(table: list[list[float]]) -> set[int]:
    """The slow ones among rows of seconds per step: waiting for data, computing, the whole step."""
    own = [wait + computing for wait, computing, _ in table]
    middle, step = statistics.median_low(own), max(row[2] for row in table)
    return {rank for rank, value in enumerate(own) if value > (1 + EXCESS) * middle and value - middle > SHARE * step}


def _hosts(device: torch.device) -> list[str]:
    """The names of all processes' machines."""
    name = torch.tensor([list(platform.node().encode())], dtype=torch.uint8, device=device)
    names = ranks.gather_ragged(name, [1] * ranks.world_size()).cpu()
    return [bytes(row.tolist()).rstrip(b"\0").decode() for row in names]


def _describe(rank: int, host: str, table: list[list[float]]) -> str:
    wait, computing, _ = table[rank]
    middle = statistics.median_low([row[0] + row[1] for row in table])
    usual = [statistics.median_low([row[column] for row in table]) for column in (0, 1)]
    reason = (
        "its data, so look at that machine's drive, and at --dataloader_num_workers"
        if wait - usual[0] > computing - usual[1]
        else "computing, so look at that machine for other programs, or a hot or broken device"
    )
    return (
        f"process {rank} (host {host}) holds up the others: by itself it needs {wait + computing:.2g} s a step, of which "
        f"{wait:.2g} s wait for data, where the median is {middle:.2g} s. It is {reason}."
    )
