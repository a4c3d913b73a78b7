"""Who holds up all the others: a run that does not move names the process, and ends.

A process that hangs (a dead network drive, a deadlock in a data worker, a stopped process) leaves the others waiting in the
next collective. Process 0 notices that it has not moved, calls the roll (`mm_utils.failures`), and names whoever is behind;
that process writes what it is doing. At the timeout all end with that line. Process 1 stands in where process 0 hangs, and the
timeout of the process group, a little longer, where both do.
"""

import logging
import threading
import time
from collections import Counter
from functools import partial
from types import TracebackType

import torch

from mm_utils import failures, ranks
from mm_utils.failures import Answer, is_listening, listen, within
from mm_utils.processes import place

logger = logging.getLogger(__name__)

SLOW = ("start", "evaluation", "save")  # phases in which the others wait for what one process does alone
SHORTEST_PATIENCE = 30.0
LONGEST_QUIET = 3600.0  # seconds without a sign of life in a slow phase; a longer timeout counts there too


class Watchdog:
    """Within its context, a run that does not move ends after `timeout` seconds in steps, an hour in evaluation and saving.

    Args:
        timeout: seconds without a move, in the data and the computing of a step, after which the run ends.
        device: of this process.
        patience: seconds without a move after which the process behind is named; half of the timeout by default, at least 30.

    Does nothing in one process.
    """

    def __init__(self, timeout: float, device: torch.device, patience: float | None = None):
        self.timeout, self.device = timeout, device
        self.patience = max(SHORTEST_PATIENCE, timeout / 2) if patience is None else patience
        self._step, self._phase, self._moves, self._since = 0, "start", 0, time.monotonic()
        self._several, self._named = ranks.world_size() > 1, -1
        self._over = threading.Event()

    def __enter__(self) -> "Watchdog":
        self._since = time.monotonic()
        if self._several:
            self._owns_listener = not is_listening()  # whoever runs a script has one, a notebook has none
            self._listener = listen()
            self._listener.position = self.position
            if ranks.rank() < 2:
                threading.Thread(target=self._watch, name="watchdog", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        if not self._several:
            return
        if error is None:
            ranks.set_timeout(ranks.PATIENCE)
        if self._owns_listener:
            if isinstance(error, Exception):
                self._listener.report(error)
            self._listener.finish()

    def at(self, step: int, phase: str) -> None:
        """This process is in this phase of this step: "data", "step", "evaluation" or "save".

        All processes pass the same phases in the same order; they wait for each other after evaluation and saving, where
        one may work alone. To say the same again is a sign of life.
        """
        if self._several and (phase in SLOW) != (self._phase in SLOW):
            self._change(phase)
        if (step, phase) != (self._step, self._phase):
            self._moves += 1
            self._step, self._phase = step, phase
        self._since = time.monotonic()

    def position(self) -> Answer:
        """Where this process is, for a roll call."""
        seconds = time.monotonic() - self._since
        return {"step": self._step, "phase": self._phase, "seconds": seconds, "moves": self._moves, "place": place()}

    def _change(self, phase: str) -> None:
        """The timeout is long while one process may be in a slow phase."""
        if phase in SLOW:
            ranks.set_timeout(ranks.PATIENCE)
        else:
            ranks.any_rank(False, self.device)  # nobody is
            ranks.set_timeout(self.timeout + 10 * failures.POLL)

    def _watch(self) -> None:
        first = ranks.rank() == 0
        while not self._over.wait(min(1.0, self.patience / 5)):
            slow = self._phase in SLOW
            limit = max(LONGEST_QUIET, self.timeout) if slow else self.timeout
            idle = time.monotonic() - self._since
            if idle > limit + (0 if first else 5 * failures.POLL):
                self._end(idle, limit)
            elif first and self._named != self._moves and idle > self.patience * (4 if slow else 1):
                self._named = self._moves
                self._warn(idle)

    def _warn(self, idle: float) -> None:
        answers = within(10 * failures.POLL, self._listener.roll_call)
        behind = laggards(answers) if answers else []
        if behind and not self._over.is_set():
            logger.warning("No process moves: %s", self._say(answers, behind, idle))
            within(failures.POLL, lambda: self._listener.ask_for_stacks(behind))

    def _end(self, idle: float, limit: float) -> None:
        answers = within(10 * failures.POLL, self._listener.roll_call)
        if answers is None:
            self._listener.stop(
                "process 0 or its launcher, which keeps the board of all processes, has not been heard of for "
                f"{idle:.0f} s (stopped? its machine lost?)"
            )
        reason = self._say(answers, laggards(answers), idle)
        reason += f". --ddp_timeout is {self.timeout:.0f} s; give more than {limit:.0f} if so long a wait is right"
        within(10 * failures.POLL, lambda: self._listener.announce(reason))
        self._over.wait(10 * failures.POLL)

    def _say(self, answers: list[Answer | None], behind: list[int], idle: float) -> str:
        ahead = max((answer for answer in answers if answer), key=lambda answer: answer.get("moves", 0), default={})
        waiting = f"the others wait in '{ahead.get('phase')}' of step {ahead.get('step')}"
        if not behind:
            return f"all processes have been in '{self._phase}' of step {self._step} for {idle:.0f} s, at {ahead.get('place')}"
        told = []
        for rank in behind[:3]:
            answer = answers[rank]
            name = within(failures.POLL, partial(self._listener.name, rank)) or f"process {rank}"
            if answer is None:
                told.append(f"{name} has not been heard of for {idle:.0f} s (stopped? its machine lost?)")
            elif "phase" not in answer:
                told.append(f"{name} is not in the training loop")
            else:
                told.append(
                    f"{name} has been in '{answer['phase']}' of step {answer['step']} for {answer['seconds']:.0f} s, at "
                    f"{answer['place']}"
                )
        more = f" and {len(behind) - 3} more" if len(behind) > 3 else ""
        return f"{'; '.join(told)}{more}; {waiting}"


def laggards(answers: list[Answer | None]) -> list[int]:
    """The processes that the others wait for: those without an answer, else those behind, else those in another place.

    Of those in one phase, whoever is in a collective waits. Empty where all are, or none, and half of them in no one place.
    """
    silent = [rank for rank, answer in enumerate(answers) if answer is None]
    if silent:
        return silent
    told = [answer for answer in answers if answer is not None]
    moves = [answer.get("moves", -1) for answer in told]
    if min(moves) < max(moves):
        return [rank for rank, count in enumerate(moves) if count == min(moves)]
    computing = [rank for rank, answer in enumerate(told) if not str(answer.get("place")).startswith("ranks.py:")]
    if 0 < len(computing) <= len(told) / 2:
        return computing
    places = Counter(answer.get("place") for answer in told)
    [(usual, count)] = places.most_common(1)
    if count * 2 <= len(told):
        return []
    return [rank for rank, answer in enumerate(told) if answer.get("place") != usual]
