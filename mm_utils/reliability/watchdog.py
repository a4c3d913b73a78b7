"""End a process that makes no progress, with the stack of the place where it hangs.

A process that hangs (a dead network drive, a deadlock in a data worker) leaves the others waiting in the next collective. Each
process watches itself: the one that hangs ends at the timeout, and its launcher, or the lost connection, ends the others. Those
that wait in a collective end a little later by themselves, if the one that they wait for is stopped or its machine is lost.
"""

import logging
import multiprocessing
import os
import platform
import sys
import threading
import time
import traceback
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed

logger = logging.getLogger(__name__)

SLOW_PHASES = ("start", "evaluation", "save", "end")  # in these, the others may wait for what one process does alone
SLOW_PHASE_TIMEOUT = 3600.0  # seconds; a longer timeout of the steps holds here, too
WAITING_SECONDS = 5.0  # longer does a process wait in a collective, for the one that hangs to end first
_COLLECTIVES = (
    distributed.__file__,
    *(os.path.join(os.path.dirname(torch.__file__), name) for name in ("distributed", "autograd")),
)


def _entering(phase: str) -> Any:
    """Return a handler of `TrainerCallback` that records this phase."""

    def handle(
        self: "HangDetection", args: Any, state: TrainerState, control: TrainerControl, model: Any, **kwargs: Any
    ) -> None:
        self._enter_phase(phase, state.global_step, model.device)

    return handle


class HangDetection(TrainerCallback):
    """End this process when it makes no progress.

    It watches while it is entered as a context manager, and does nothing in a run of one process. The thread that built it is
    the one that trains: under Ray, not the main thread. The phases of a run are "start", "data", "step", "evaluation", "save"
    and "end".

    Args:
        timeout: seconds without progress after which the process ends; an hour in slow phases.
    """

    def __init__(self, timeout: float):
        self.timeout = timeout
        self._step = 0
        self._phase = "start"
        self._since = time.monotonic()
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> "HangDetection":
        self._since = time.monotonic()
        self._over = threading.Event()
        if distributed.world_size() > 1:
            threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()

    on_step_begin = _entering("step")
    on_step_end = _entering("data")  # the wait for the next batch
    on_evaluate_begin = on_prediction_step = _entering("evaluation")
    on_save_begin = _entering("save")
    on_train_end = _entering("end")

    def _enter_phase(self, phase: str, step: int, device: torch.device) -> None:
        """Record progress; all ranks enter the same phases in the same order."""
        if self._phase in SLOW_PHASES and phase not in SLOW_PHASES:
            distributed.any_rank(False, device)  # the short timeout must not start while a rank is in the slow phase
        self._step = step
        self._phase = phase
        self._since = time.monotonic()

    # -- in the watching thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while not self._over.wait(min(1.0, self.timeout / 5)):  # five looks in a short timeout
            limit = max(SLOW_PHASE_TIMEOUT, self.timeout) if self._phase in SLOW_PHASES else self.timeout
            idle = time.monotonic() - self._since
            if idle > limit:
                stack = traceback.extract_stack(sys._current_frames()[self._thread])
                waits = any(frame.filename.startswith(_COLLECTIVES) for frame in stack)
                if not waits or idle > limit + WAITING_SECONDS:
                    self._end(idle, limit, stack, waits)

    def _end(self, idle: float, limit: float, stack: traceback.StackSummary, waits: bool) -> None:
        logger.error(
            "Stopped, because process %d (host %s, pid %d) has been in '%s' of step %d for %.0f s%s. "
            "--ddp_timeout is %.0f s; give more than %.0f if so long a wait is right. The stack, most recent call last:\n%s",
            distributed.rank(),
            platform.node(),
            os.getpid(),
            self._phase,
            self._step,
            idle,
            ", waiting for another process, which is stopped, or whose machine is lost" if waits else "",
            self.timeout,
            limit,
            "".join(traceback.format_list(stack[-12:])).rstrip(),
        )
        # `os._exit` leaves them running
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)
