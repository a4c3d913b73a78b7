"""Report the first failure of any process once, and end all processes within seconds.

Otherwise the processes that did not fail wait in a collective until its timeout, or end with an error about a lost connection
that hides the first one. A thread in every process polls a store that all share (`distributed.KeyValueStore`) once a second,
one small request, whatever the main thread does. It reads failures, answers status queries, and checks the processes before
and after its own on the same machine, to report one that was killed.
"""

import faulthandler
import json
import logging
import multiprocessing
import os
import platform
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NoReturn

import psutil

from mm_utils import distributed
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

POLL_SECONDS = 1.0
EXIT_GRACE_SECONDS = 2.0  # between the end of a process and its report as lost; its failure may be reported meanwhile
CLEANUP_SECONDS = 30.0  # for the clean-up of a process that failed
_LOST_STORE = "process 0 or its launcher, which holds the store of all processes,"
Status = dict[str, Any]
_active: "FailureMonitor | None" = None
_started = 0
_at_stop: list[Callable[[], object]] = []


def at_stop(call: Callable[[], object]) -> None:
    """Register a call for `FailureMonitor.stop`, which skips what the interpreter does at exit."""
    _at_stop.append(call)


def start_monitor() -> "FailureMonitor":
    """Return this process's running monitor, or start one.

    All processes must call this equally often; the caller that started the monitor calls `finish` or `fail`.
    """
    global _active, _started
    if _active is None or _active.finished.is_set():
        _started += 1
        _active = FailureMonitor(f"failures{_started}")
    return _active


def is_monitoring() -> bool:
    """Return whether this process has a running monitor."""
    return _active is not None and not _active.finished.is_set()


class FailureMonitor:
    """Report this process's failure to the others, and end this process when another one fails.

    The monitor does nothing while there is one process.

    Attributes:
        finished: set when the monitor has stopped.
        status: called in the monitor's thread for this process's answer to a status query.
    """

    def __init__(self, name: str) -> None:
        self.finished = threading.Event()
        self.status: Callable[[], Status] = dict
        self._name, self._connected = name, threading.Event()
        self._store: distributed.KeyValueStore  # once connected
        self._failed = False
        self._seen_notices = 0
        self._peers: dict[int, psutil.Process | None] = {}  # None: on another machine, or finished
        self._missing_since: dict[int, float] = {}
        threading.Thread(target=self._run, name="failures", daemon=True).start()

    @property
    def is_alone(self) -> bool:
        """Return whether there is no other process."""
        return not self._connected.is_set() and distributed.world_size() == 1

    # -- called by the process itself -----------------------------------------------------------------------------------

    def report(self, error: Exception) -> bool:
        """Report that this process failed; return whether it is to log the error.

        If the error is only a consequence of another process's failure, this call logs that failure in one line and ends
        the process.
        """
        if distributed.world_size() > 1:
            self._connected.wait(5 * POLL_SECONDS)
        if self._failed or not self._connected.is_set():
            return True
        if distributed.is_lost_connection(error):
            self._explain_lost_connection()
        self._failed = True  # before the store has the notice, which the monitor's thread would obey
        reason = f"process {self._rank} failed: {one_line(error, 500)}"
        if call_with_timeout(5 * POLL_SECONDS, lambda: self.announce(reason)) is False:
            self._failed = False
            self._wait_for_end()
        return True

    def announce(self, reason: str) -> bool:
        """End all processes; return whether this reason is the first, which all of them log."""
        notice = json.dumps({"rank": self._rank, "reason": reason})
        first = self._store.set_once("end", notice) == notice
        self._store.add("notices", 1)
        return first

    def query_status(self) -> list[Status | None]:
        """Return the `status` of each process, None for one that does not answer within three polls."""
        number = self._store.add("queries", 1)
        self._store.set("query", str(number))
        self._store.add("notices", 1)
        answers: dict[int, Status] = {}
        deadline = time.monotonic() + 3 * POLL_SECONDS
        while len(answers) < self._world_size and time.monotonic() < deadline:
            time.sleep(POLL_SECONDS / 2)
            missing = [rank for rank in range(self._world_size) if rank not in answers]
            for rank, text in zip(missing, self._store.get(*(f"status/{rank}" for rank in missing)), strict=True):
                if text and json.loads(text)["query"] >= number:
                    answers[rank] = json.loads(text)
        return [answers.get(rank) for rank in range(self._world_size)]

    def describe(self, rank: int) -> str:
        """Return a process's rank, host and pid for a message."""
        [text] = self._store.get(f"process/{rank}")
        known = json.loads(text) if text else None
        return f"process {rank}" + (f" (host {known['host']}, pid {known['pid']})" if known else "")

    def finish(self) -> None:
        """Stop without a failure; the other processes do not report the end of this process."""
        if self._connected.is_set() and not self.finished.is_set():
            self.finished.set()
            call_with_timeout(15 * POLL_SECONDS, self._leave)
        self.finished.set()

    def fail(self) -> NoReturn:
        """Exit with status 1 after the other processes have read the report, within half a minute."""
        self.finished.set()
        if self._connected.is_set():
            call_with_timeout(5 * POLL_SECONDS, lambda: self._acknowledge(3 * POLL_SECONDS, wait_for_all=True))
            # The clean-up at exit may wait for a process that is gone.
            nowhere = os.open(os.devnull, os.O_WRONLY)
            faulthandler.dump_traceback_later(CLEANUP_SECONDS, exit=True, file=nowhere)
        sys.exit(1)

    def stop(self, reason: str, delay: float = 0.0) -> NoReturn:
        """Log the reason; exit with status 1 after `delay` seconds, whatever the main thread does."""
        logger.error("Stopped, because %s.", reason)
        for call in _at_stop:
            call()
        if self._connected.is_set():
            call_with_timeout(5 * POLL_SECONDS, lambda: self._acknowledge(3 * POLL_SECONDS))
        time.sleep(delay)
        for child in multiprocessing.active_children():
            child.kill()
        logging.shutdown()
        sys.stderr.flush()
        os._exit(1)

    def _leave(self) -> None:
        self._store.set(f"left/{self._rank}", "")
        if self._rank == 0:  # its end may end the store, so the others must stop polling before
            self.announce("")
        self._acknowledge(10 * POLL_SECONDS)

    def _acknowledge(self, seconds: float, wait_for_all: bool = False) -> None:
        """Confirm that this process has read the notice, and wait for all others if asked to."""
        self._store.add("acknowledged", 1)
        deadline = time.monotonic() + seconds
        wait_for_all |= self._rank == 0  # which may hold the store
        while wait_for_all and time.monotonic() < deadline:
            if self._store.add("acknowledged") >= self._world_size:
                return
            time.sleep(POLL_SECONDS / 10)

    def _explain_lost_connection(self) -> None:
        """Report the process that is gone, if any; the monitor's thread then ends this process."""
        self.finished.wait(2 * POLL_SECONDS + 2 * EXIT_GRACE_SECONDS)  # or the thread reads a report meanwhile
        answers = call_with_timeout(10 * POLL_SECONDS, self.query_status)
        if answers is None:
            self.stop(f"{_LOST_STORE} does not answer")
        missing = [rank for rank, answer in enumerate(answers) if answer is None]
        if missing:
            self.announce(self._describe_lost(min(missing, key=lambda rank: not self._is_dead(rank))))
            self._wait_for_end()

    def _is_dead(self, rank: int) -> bool:
        process = self._peers.get(rank)
        return process is not None and not _is_alive(process)

    def _describe_lost(self, rank: int) -> str:
        if self._is_dead(rank):
            return f"{self.describe(rank)} ended without an error message (killed? out of memory?)"
        return f"{self.describe(rank)} is gone or does not answer (killed? out of memory? its machine lost?)"

    def _wait_for_end(self) -> None:
        self.finished.wait(10 * POLL_SECONDS + 2 * EXIT_GRACE_SECONDS)

    # -- in the monitor's thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        while distributed.world_size() == 1:
            if self.finished.wait(POLL_SECONDS / 2):
                return
        self._rank, self._world_size = distributed.rank(), distributed.world_size()
        try:
            self._store = distributed.KeyValueStore(self._name)
            created = psutil.Process().create_time()  # with host and pid it is unique
            identity = {"host": platform.node(), "pid": os.getpid(), "created": created}
            self._store.set(f"process/{self._rank}", json.dumps(identity))
            self._connected.set()
            while not self.finished.wait(POLL_SECONDS):
                self._poll()
        except RuntimeError:
            if not self.finished.wait(EXIT_GRACE_SECONDS):
                self.stop(f"{_LOST_STORE} ended without an error message (killed? out of memory?)")

    def _poll(self) -> None:
        notices = self._store.add("notices")
        if notices != self._seen_notices:
            self._seen_notices = notices
            end, query = self._store.get("end", "query")
            if end:
                self._obey(json.loads(end))
            if query:
                self._store.set(f"status/{self._rank}", json.dumps({"query": int(query), **self.status()}))
        if not self.finished.is_set():
            self._check_neighbours()

    def _obey(self, notice: dict[str, Any]) -> None:
        if not notice["reason"]:  # process 0 finished
            self.finished.set()
            self._store.add("acknowledged", 1)
        elif not (self._failed and notice["rank"] == self._rank):  # else the main thread logs its error
            # Launchers report the process that ends first as the cause, so let the one that failed end first.
            self.stop(notice["reason"], EXIT_GRACE_SECONDS)

    def _check_neighbours(self) -> None:
        for rank in {(self._rank + 1) % self._world_size, (self._rank - 1) % self._world_size}:
            if rank not in self._peers:
                [text] = self._store.get(f"process/{rank}")
                if text is not None:
                    self._peers[rank] = _local_process(json.loads(text))
            elif self._is_dead(rank):
                if self._store.get(f"left/{rank}") != [None]:
                    self._peers[rank] = None
                elif time.monotonic() - self._missing_since.setdefault(rank, time.monotonic()) > EXIT_GRACE_SECONDS:
                    self.announce(self._describe_lost(rank))


def call_with_timeout(seconds: float, call: Callable[[], Any]) -> Any:
    """Return the call's result, or None if the store fails or hangs longer than `seconds`."""
    results: list[Any] = []

    def work() -> None:
        try:
            results.append(call())
        except RuntimeError as error:
            logger.debug("The store did not answer: %s", error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else None


# -- processes ----------------------------------------------------------------------------------------------------------


def _local_process(identity: dict[str, Any]) -> psutil.Process | None:
    """Return the process if it runs here; another machine or container may have the same pid."""
    try:
        process = psutil.Process(identity["pid"])
        same = identity["host"] == platform.node() and abs(process.create_time() - identity["created"]) < 1
    except psutil.Error:
        return None
    return process if same else None


def _is_alive(process: psutil.Process) -> bool:
    """Return whether the process runs or is stopped; a zombie is not alive."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
