"""Loaders whose workers may be killed or hang: they are started again, and go on with the batch that was due.

What torch does about it: its handler of SIGCHLD raises a RuntimeError wherever the training loop happens to be, in the middle
of a step or of a checkpoint; and without that handler, a worker that is killed while it writes leaves its loader waiting for
the rest of a message for ever. So the handler here replaces it, and raises only while a batch of that loader is waited for.

A batch is a function of its step, so what comes after a restart is what would have come without.
"""

import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.process import BaseProcess
from typing import Any

from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

HANG_SECONDS = 240.0
"""A batch that takes longer never comes; other ranks wait for this one for 300 s."""
MOST_KILLED, MOST_HUNG = 3, 1
ENOUGH = 100
"""After so many good batches, earlier faults are forgotten."""

_CAUSES = {
    signal.SIGKILL: "most likely because memory ran out",
    signal.SIGBUS: "most likely because /dev/shm is full, or a file became shorter while it was read",
    signal.SIGSEGV: "a library that decodes images has crashed",
}
_waiting: "_Iteration | None" = None


class RestartingLoader:
    """Iterates over `length` batches of a `DataLoader`, however often its workers have to be started again.

    Args:
        make: a loader of the batches from this number on.
        length: batches of the whole.
        name: what a batch is called in a message, by its number.
        parts: items of the loader per batch, and
        join: what makes a batch of them.
    """

    def __init__(
        self,
        make: Callable[[int], DataLoader],
        length: int,
        name: Callable[[int], str],
        parts: int = 1,
        join: Callable[[list[Any]], Any] = lambda parts: parts[0],
    ):
        self.make, self.length, self.name, self.parts, self.join = make, length, name, parts, join
        self.loader: DataLoader | None = make(0)
        self.num_workers = self.loader.num_workers

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Raises a ValueError, of one line, once workers die or hang again and again."""
        given, good, killed, hung = 0, 0, 0, 0
        self.loader = self.make(0) if self.loader is None else self.loader
        iteration = _Iteration(self.loader)
        try:
            while given < self.length:
                lost = None
                try:
                    parts = [iteration.next() for _ in range(self.parts)]
                except _WorkerError as error:
                    lost = str(error)
                except Exception:
                    self.loader = None
                    iteration.abandon()  # which takes 10 s if left to torch, while other ranks wait for this one
                    raise
                if lost is None:
                    given, good = given + 1, good + 1
                    yield self.join(parts)
                    continue
                self.loader = None
                iteration.abandon()
                killed, hung = (killed, hung) if good < ENOUGH else (0, 0)
                killed, hung, good = killed + (not iteration.hung), hung + iteration.hung, 0
                said = self._say(lost, given, killed + hung)
                if killed > MOST_KILLED or hung > MOST_HUNG:
                    raise ValueError(said)
                logger.warning("%s The workers are started again, and batches stay what they are.", said)
                iteration = _Iteration(self.make(given))
        finally:
            iteration.close()

    def _say(self, what: str, given: int, times: int) -> str:
        often = [f"{times} times in short succession"] if times > 1 else []
        sentence = ", ".join([what, *often, f"while {self.name(given)} was waited for"])
        return f"{sentence}. If it goes on, set --dataloader_num_workers lower than {self.num_workers}, or to 0."


class _WorkerError(Exception):
    """Workers died, or no batch came."""


class _Iteration:
    """One pass over a loader, watched by a thread."""

    def __init__(self, loader: DataLoader):
        self.loader: DataLoader | None = loader
        self.hung = False
        self._batches: Any = loader._iterator  # of an earlier pass, if workers persist
        self._began = False
        self._since: float | None = None
        self._over = threading.Event()
        if loader.num_workers:
            threading.Thread(target=self._watch, args=(HANG_SECONDS,), daemon=True, name="loader watch").start()

    @property
    def workers(self) -> list[BaseProcess]:
        return getattr(self._batches, "_workers", [])

    def next(self) -> Any:
        """The next item.

        Raises:
            _WorkerError: if a worker was killed, or none gave an item in time.
        """
        global _waiting
        outer = _waiting
        try:
            _waiting, self._since = self, time.monotonic()
            self.check()
            if not self._began and self.loader is not None:
                self._batches, self._began = iter(self.loader), True
                if self.workers:
                    _handle_ends_of_workers()
            return next(self._batches)
        except (RuntimeError, OSError, EOFError) as error:
            self._since = None
            if not self._is_end_of_worker(error):
                raise
            raise _WorkerError(self._what_happened(error)) from error
        finally:
            _waiting, self._since = outer, None

    def check(self) -> None:
        """Raises a `_WorkerError` if a worker has been killed."""
        if self._killed():
            raise _WorkerError(self._what_happened())

    def abandon(self) -> None:
        """End all workers, and let go of the loader, its memory, and whatever the workers may have locked."""
        self.close()
        for worker in self.workers:
            worker.kill()
        if self.workers:
            self._batches._worker_result_queue.cancel_join_thread()
            # In a thread, as it waits for one that may wait for a message of which half has been written.
            ending = threading.Thread(target=self._batches._shutdown_workers, daemon=True)
            ending.start()
            ending.join(10)
        self.loader = self._batches = None

    def close(self) -> None:
        """Stop watching."""
        global _waiting
        self._over.set()
        if _waiting is self:  # a signal came while `next` put it back
            _waiting = None

    def _watch(self, limit: float) -> None:
        while not self._over.wait(min(1.0, limit / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > limit and self.workers:
                self.hung = True
                for worker in self.workers:
                    worker.kill()  # which ends the waiting for them
                return

    def _killed(self) -> list[BaseProcess]:
        """Workers that did not end by themselves; those of a stream do, when they have read everything."""
        return [worker for worker in self.workers if worker.exitcode]

    def _is_end_of_worker(self, error: Exception) -> bool:
        if self.hung or str(error).startswith("DataLoader worker"):
            return True
        if isinstance(error, (OSError, EOFError)):  # a broken connection is seen before the end of who broke it
            time.sleep(0.5)
        return bool(self._killed())

    def _what_happened(self, error: Exception | None = None) -> str:
        if self.hung:
            return f"the loader's workers gave nothing for {HANG_SECONDS:g} s"
        killed = self._killed()
        if not killed:
            return str(error)
        code = killed[0].exitcode or 0
        if code > 0:
            return f"worker {killed[0].pid} of the loader ended with exit code {code}"
        cause = next((f", {cause}" for number, cause in _CAUSES.items() if number == -code), "")
        return f"worker {killed[0].pid} of the loader was killed by signal {-code}{cause}"


def _handle_ends_of_workers() -> None:
    """Put the handler in the place of the one that a `DataLoader` sets when it starts its first workers."""
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "SIGCHLD"):
        signal.signal(signal.SIGCHLD, _on_end_of_child)


def _on_end_of_child(*_: Any) -> None:
    if _waiting is not None:
        _waiting.check()
