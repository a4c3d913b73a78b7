"""The first failure of any process is told once, and ends all processes within seconds.

Without this, a process whose fellow failed waits in a collective for it until a timeout, or ends with an error about a lost
connection that hides the first one. Here a thread per process looks at a board that all share (`mm_utils.ranks.Board`) once a
second, one small request, whatever the main thread does. It hears of a failure, answers a roll call with where its process
is, and looks after the processes before and after its own on the same machine, to tell of one that was killed.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from mm_utils import ranks
from mm_utils.processes import identity, is_alive, same_machine, write_stack

logger = logging.getLogger(__name__)

POLL = 1.0  # seconds between two looks at the board
GRACE = 2.0  # seconds in which a process that died without a word may yet be explained by another's failure
LONGEST_EXIT = 30.0  # seconds that a failed process may take to tidy up
Answer = dict[str, Any]  # of one process to a roll call
_active: "Listener | None" = None
_begun = 0
_at_stop: list[Callable[[], object]] = []


def at_stop(call: Callable[[], object]) -> None:
    """Let `Listener.stop` call this first: it leaves without what the interpreter does at its own end."""
    _at_stop.append(call)


def listen() -> "Listener":
    """The listener of this process, a new one where there is none; it does nothing while there is one process.

    All processes call this equally often. Whoever began it calls `finish` or `fail`.
    """
    global _active, _begun
    if _active is None or _active.over.is_set():
        _begun += 1
        _active = Listener(f"failures{_begun}")
    return _active


def is_listening() -> bool:
    """Whether `listen` would return one that somebody began."""
    return _active is not None and not _active.over.is_set()


class Listener:
    """Hears what other processes fail of, and tells them of this one's failure.

    Attributes:
        over: set when it listens no more.
        position: gives where this process is, for roll calls.
    """

    def __init__(self, name: str) -> None:
        self.over, self.position = threading.Event(), _nowhere
        self._name, self._ready = name, threading.Event()
        self._board: ranks.Board | None = None
        self._first, self._seen, self._called, self._written = False, 0, 0, "[]"
        self._fellows: dict[int, psutil.Process] = {}
        self._strangers: set[int] = set()
        self._missed: dict[int, float] = {}
        self._thread = threading.Thread(target=self._listen, name="failures", daemon=True)
        self._thread.start()

    @property
    def is_alone(self) -> bool:
        """Whether there is nobody to tell."""
        return self._board is None and ranks.world_size() == 1

    # -- what the process itself has to say ---------------------------------------------------------------------------

    def report(self, error: Exception) -> bool:
        """Tell the other processes that this one failed; returns whether it is this one that tells the user.

        It does not return where the error is but the echo of another's failure: then that is said in one line, and the
        process ends.
        """
        if ranks.world_size() > 1:
            self._ready.wait(5 * POLL)
        if self._board is None or self._first:
            return True
        if ranks.is_lost_connection(error):
            self._explain()
        self._first = True  # before the board has it, for the listening thread
        if within(5 * POLL, lambda: self.announce(f"process {self._rank} failed: {one_line(error)}")) is False:
            self._first = False
            self._wait_for_the_end()
        return True

    def announce(self, reason: str) -> bool:
        """End all processes for a reason; returns whether it is the first."""
        board = self._joined()
        notice = json.dumps({"rank": self._rank, "reason": reason})
        first = board.post_once("end", notice) == notice
        board.count("notices", 1)
        return first

    def roll_call(self) -> list[Answer | None]:
        """What every process answers within three looks at the board: its `position`, host and pid; None for no answer."""
        board = self._joined()
        number = board.count("roll_calls", 1)
        board.post("roll_call", str(number))
        board.count("notices", 1)
        answers: dict[int, Answer] = {}
        until = time.monotonic() + 3 * POLL
        while len(answers) < self._world and time.monotonic() < until:
            time.sleep(POLL / 2)
            missing = [rank for rank in range(self._world) if rank not in answers]
            for rank, text in zip(missing, board.read(*(f"answer/{rank}" for rank in missing)), strict=True):
                if text and json.loads(text)["number"] >= number:
                    answers[rank] = json.loads(text)
        return [answers.get(rank) for rank in range(self._world)]

    def ask_for_stacks(self, of: list[int]) -> None:
        """Let these processes write to stderr what their main thread is doing."""
        board = self._joined()
        board.post("stacks", json.dumps(of))
        board.count("notices", 1)

    def name(self, rank: int) -> str:
        """A process, with its host and pid as far as it has told them."""
        [text] = self._joined().read(f"process/{rank}")
        known = json.loads(text) if text else None
        return f"process {rank}" + (f" (host {known['host']}, pid {known['pid']})" if known else "")

    def finish(self) -> None:
        """This process is done, and well: its end is no failure, and it hears of none any more."""
        if self._board is not None and not self.over.is_set():
            board = self._board

            def leave() -> None:
                board.post(f"left/{self._rank}", "")
                if self._rank == 0:  # which may keep the board: the others are to stop looking at it
                    self.announce("")
                self._acknowledge(board, 10 * POLL)

            self.over.set()
            within(15 * POLL, leave)
        self.over.set()

    def fail(self) -> NoReturn:
        """Exit with status 1, once the other processes have heard, in half a minute at most."""
        self.over.set()
        if self._board is not None:
            board = self._board
            within(5 * POLL, lambda: self._acknowledge(board, 3 * POLL, waits=True))
            # What is tidied up at the end may wait for a process that is gone.
            nothing = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(LONGEST_EXIT, exit=True, file=nothing)
        sys.exit(1)

    def stop(self, reason: str, seconds: float = 0.0) -> NoReturn:
        """Say why in one line, and leave after so many seconds with status 1, whatever the main thread is stuck in."""
        logger.error("Stopped, because %s", reason)
        for call in _at_stop:
            call()
        if self._board is not None:
            board = self._board
            within(5 * POLL, lambda: self._acknowledge(board, 3 * POLL))
        time.sleep(seconds)
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)

    def _acknowledge(self, board: ranks.Board, seconds: float, waits: bool = False) -> None:
        """This process has heard of the end; it may wait for all others. Process 0 does, as it may keep the board."""
        board.count("heard", 1)
        until = time.monotonic() + seconds
        while (waits or self._rank == 0) and board.count("heard") < self._world and time.monotonic() < until:
            time.sleep(POLL / 10)

    def _explain(self) -> None:
        """A collective failed here: end with the reason of it, if there is one to be had."""
        self.over.wait(2 * POLL + 2 * GRACE)  # the thread may hear it, and ends the process
        answers = within(10 * POLL, self.roll_call)
        if answers is None:
            self.stop("process 0 or its launcher, which keeps the board of all processes, does not answer")
        missing = [rank for rank, answer in enumerate(answers) if answer is None]
        if missing:
            # Whoever is first says it; the thread ends this process with what he said.
            dead = [rank for rank in missing if rank in self._fellows and not is_alive(self._fellows[rank])]
            self.announce(
                self._told_gone(dead[0])
                if dead
                else f"{self.name(missing[0])} is gone or does not answer (killed? out of memory? its machine lost?)"
            )
            self._wait_for_the_end()

    def _wait_for_the_end(self) -> None:
        self.over.wait(10 * POLL + 2 * GRACE)

    # -- what it hears ----------------------------------------------------------------------------------------------------

    def _listen(self) -> None:
        while ranks.world_size() == 1:
            if self.over.wait(POLL / 2):
                return
        try:
            self._rank, self._world = ranks.rank(), ranks.world_size()
            board = ranks.Board(self._name)
            board.post(f"process/{self._rank}", json.dumps(identity()))
            self._board = board
            self._ready.set()
            while not self.over.wait(POLL):
                self._attend(board)
        except RuntimeError:
            if not self.over.wait(GRACE):
                self.stop(
                    "process 0 or its launcher, which keeps the board of all processes, is gone without a word (killed? out "
                    "of memory?)"
                )

    def _attend(self, board: ranks.Board) -> None:
        seen = board.count("notices")
        if seen != self._seen:
            self._seen = seen
            end, roll_call, stacks = board.read("end", "roll_call", "stacks")
            if end:
                self._end(json.loads(end), board)
            if roll_call and int(roll_call) > self._called:
                self._called = int(roll_call)
                answer = {"number": self._called, **identity(), **self.position()}
                board.post(f"answer/{self._rank}", json.dumps(answer))
            if stacks and stacks != self._written:
                self._written = stacks
                if self._rank in json.loads(stacks):
                    write_stack(self._rank)
        if not self.over.is_set():
            self._look_after_neighbours(board)

    def _end(self, notice: dict[str, Any], board: ranks.Board) -> None:
        if not notice["reason"]:
            self.over.set()
            board.count("heard", 1)
        elif not (self._first and notice["rank"] == self._rank):  # else the main thread has the word
            self.stop(notice["reason"], GRACE)  # after the one that failed, which launchers then take for the cause

    def _look_after_neighbours(self, board: ranks.Board) -> None:
        for rank in {(self._rank + 1) % self._world, (self._rank - 1) % self._world} - self._strangers:
            if rank not in self._fellows:
                [text] = board.read(f"process/{rank}")
                if text is None:
                    continue
                fellow = same_machine(json.loads(text))
                if fellow is None:
                    self._strangers.add(rank)
                    continue
                self._fellows[rank] = fellow
            if is_alive(self._fellows[rank]):
                continue
            if board.read(f"left/{rank}") != [None]:
                self._strangers.add(rank)
            elif time.monotonic() - self._missed.setdefault(rank, time.monotonic()) > GRACE:
                self.announce(self._told_gone(rank))

    def _told_gone(self, rank: int) -> str:
        return f"{self.name(rank)} is gone without a word (killed? out of memory?)"

    def _joined(self) -> ranks.Board:
        assert self._board is not None
        return self._board


def one_line(error: BaseException) -> str:
    """Type and message of an error, cut to what fits a line."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text if len(text) <= 500 else text[:500] + " ..."


def within(seconds: float, call: Callable[[], Any]) -> Any:
    """What a call returns, or None where it fails to talk to the board or takes longer, as it may where that hangs."""
    found: list[Any] = []

    def work() -> None:
        try:
            found.append(call())
        except RuntimeError as error:
            logger.debug("The board did not answer: %s", error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def _nowhere() -> Answer:
    return {}
