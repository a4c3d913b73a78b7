"""Name the rank that hangs and that others wait for, and end the run.

A process that hangs (a dead network drive, a deadlock in a data worker, a stopped process) leaves the others waiting in the next
collective. Rank 0 notices that it makes no progress, queries the status of all ranks (`mm_utils.reliability.failures`) and logs
which ranks are behind; at the timeout it ends all processes with that message. Rank 1 does so a little later, if rank 0 itself
hangs. The timeout of the process group, later still, is the last resort.
"""

import logging
import os
import sys
import threading
import time
import traceback
from collections import Counter
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.reliability import failures
from mm_utils.reliability.failures import Status, call_with_timeout

logger = logging.getLogger(__name__)

SLOW_PHASES = ("start", "evaluation", "save", "end")  # in these, the others may wait for what one process does alone
SLOW_PHASE_TIMEOUT = 3600.0  # seconds; a longer timeout of the steps holds here, too
MIN_WARN_SECONDS = 30.0
_LIBRARIES = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))


def _entering(phase: str) -> Any:
    """Return a handler of `TrainerCallback` that records this phase."""

    def handle(
        self: "HangDetection", args: Any, state: TrainerState, control: TrainerControl, model: Any, **kwargs: Any
    ) -> None:
        self._enter_phase(phase, state.global_step, model.device)

    return handle


class HangDetection(TrainerCallback):
    """End a run that makes no progress, and name the process that the others wait for.

    It watches while it is entered as a context manager, and does nothing in a run of one process. The thread that built it is
    the one that trains: under Ray, not the main thread. The phases of a run are "start", "data", "step", "evaluation", "save"
    and "end".

    Args:
        timeout: seconds without progress after which the run ends; an hour in slow phases.
        warn_after: seconds without progress after which the process behind is named; four times as long in slow phases.
            The default is half of the timeout, at least 30.
    """

    def __init__(self, timeout: float, warn_after: float | None = None):
        self.timeout = timeout
        self.warn_after = max(MIN_WARN_SECONDS, timeout / 2) if warn_after is None else warn_after
        self._step, self._phase, self._moves, self._since = 0, "start", 0, time.monotonic()
        self._is_active = False  # entered, in a run of several processes
        self._warned_at_move = -1
        self._thread = threading.get_ident()
        self._over = threading.Event()

    def __enter__(self) -> "HangDetection":
        self._since, self._over = time.monotonic(), threading.Event()
        self._is_active = distributed.world_size() > 1
        if self._is_active:
            self._owns_monitor = not failures.is_monitoring()  # scripts have one (`run_script`), notebooks have none
            self._monitor = failures.start_monitor()
            self._monitor.status = self.status
            if distributed.rank() < 2:
                threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._over.set()
        if not self._is_active:
            return
        if error is None:
            distributed.set_timeout(distributed.COLLECTIVE_TIMEOUT)
        if self._owns_monitor:
            if isinstance(error, Exception):
                self._monitor.report(error)
            self._monitor.finish()

    # -- progress of the run --------------------------------------------------------------------------------------------

    on_step_begin = _entering("step")
    on_step_end = _entering("data")  # the wait for the next batch
    on_evaluate_begin = on_prediction_step = _entering("evaluation")
    on_save_begin = _entering("save")
    on_train_end = _entering("end")

    def _enter_phase(self, phase: str, step: int, device: torch.device) -> None:
        """Record progress; all ranks enter the same phases in the same order."""
        was_slow, is_slow = self._phase in SLOW_PHASES, phase in SLOW_PHASES
        if self._is_active and is_slow and not was_slow:
            distributed.set_timeout(distributed.COLLECTIVE_TIMEOUT)
        elif self._is_active and was_slow and not is_slow:
            distributed.any_rank(False, device)  # the short timeout must not start while a rank is in the slow phase
            distributed.set_timeout(self.timeout + 10 * failures.POLL_SECONDS)
        if (step, phase) != (self._step, self._phase):
            self._moves += 1
            self._step, self._phase = step, phase
        self._since = time.monotonic()

    def status(self) -> Status:
        """Return where this process is, and since when."""
        stack = traceback.extract_stack(sys._current_frames()[self._thread])
        frame = ([frame for frame in stack if not frame.filename.startswith(_LIBRARIES)] or stack)[-1]
        return {
            "step": self._step,
            "phase": self._phase,
            "seconds": time.monotonic() - self._since,
            "moves": self._moves,
            "place": f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}",
            "in_collective": any(frame.filename == distributed.__file__ for frame in stack),
            "stack": "".join(traceback.format_list(stack[-12:])).rstrip(),
        }

    # -- in the watching thread -----------------------------------------------------------------------------------------

    def _watch(self) -> None:
        is_first = distributed.rank() == 0
        while not self._over.wait(min(1.0, self.warn_after / 5)):
            is_slow = self._phase in SLOW_PHASES
            limit = max(SLOW_PHASE_TIMEOUT, self.timeout) if is_slow else self.timeout
            idle = time.monotonic() - self._since
            if idle > limit + (0 if is_first else 5 * failures.POLL_SECONDS):
                self._end(idle, limit)
            elif is_first and self._warned_at_move != self._moves and idle > self.warn_after * (4 if is_slow else 1):
                self._warned_at_move = self._moves
                self._warn(idle)

    def _warn(self, idle: float) -> None:
        found = call_with_timeout(10 * failures.POLL_SECONDS, lambda: self._diagnose(idle))
        behind, text, stacks = found or ([], "", "")
        if behind and not self._over.is_set():
            logger.warning("No progress: %s%s", text, stacks)

    def _end(self, idle: float, limit: float) -> None:
        found = call_with_timeout(10 * failures.POLL_SECONDS, lambda: self._diagnose(idle))
        if found is None:
            why = f"has not answered for {idle:.0f} s (stopped? its machine lost?)"
            self._monitor.stop(f"process 0 or its launcher, which holds the store of all processes, {why}")
        remedy = f"--ddp_timeout is {self.timeout:.0f} s; give more than {limit:.0f} if so long a wait is right"
        call_with_timeout(10 * failures.POLL_SECONDS, lambda: self._monitor.announce(f"{found[1]}. {remedy}"))
        self._over.wait(10 * failures.POLL_SECONDS)

    def _diagnose(self, idle: float) -> tuple[list[int], str, str]:
        """Return the ranks that the others wait for, what they do, and their stacks."""
        answers = self._monitor.query_status()
        behind = laggards(answers)
        ahead = max((answer for answer in answers if answer), key=lambda answer: answer.get("moves", 0), default={})
        if not behind:
            where = f"'{self._phase}' of step {self._step} for {idle:.0f} s, at {ahead.get('place')}"
            return [], f"all processes have been in {where}", ""
        reports, stacks = [], ""
        for rank in behind[:3]:
            name, answer = self._monitor.describe(rank), answers[rank]
            if answer is None:
                reports.append(f"{name} has not answered for {idle:.0f} s (stopped? its machine lost?)")
            elif "phase" not in answer:
                reports.append(f"{name} is not in the training loop")
            else:
                where = (
                    f"'{answer['phase']}' of step {answer['step']} for {answer['seconds']:.0f} s, at {answer['place']}"
                )
                reports.append(f"{name} has been in {where}")
                stacks += f"\nStack of process {rank}, most recent call last:\n{answer['stack']}"
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        waiting = f"the others wait in '{ahead.get('phase')}' of step {ahead.get('step')}"
        return behind, f"{'; '.join(reports)}{more}; {waiting}", stacks


def laggards(answers: list[Status | None]) -> list[int]:
    """Return the ranks that the others wait for.

    These are the ranks without an answer; else those behind in steps and phases; else those outside of the collective that the
    others wait in; else those in another place than most. The list is empty if no rank stands out.
    """
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if silent:
        return silent
    known = [answer for answer in answers if answer is not None]
    moves = [answer.get("moves", -1) for answer in known]
    if min(moves) < max(moves):
        return [rank for rank, count in enumerate(moves) if count == min(moves)]
    computing = [rank for rank, answer in enumerate(known) if not answer.get("in_collective")]
    if 0 < len(computing) <= len(known) / 2:
        return computing
    [(usual, count)] = Counter(answer.get("place") for answer in known).most_common(1)
    if count * 2 <= len(known):
        return []
    return [rank for rank, answer in enumerate(known) if answer.get("place") != usual]
