"""Worker processes of a loader: their number, their memory, replacements for killed ones."""

import logging
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any

import torch
from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

PREFETCH = 4  # batches that each worker makes in advance
TIMEOUT = 240  # seconds for a batch; other ranks wait for 300
MAX_RESTARTS, RESTART_WINDOW = 3, 100  # restarts within this many batches
_MEASURE_SECONDS = 0.8  # per number of workers, of which at most five are measured


def worker_options(workers: int) -> dict[str, Any]:
    """Return the options of a `DataLoader` with this many workers."""
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCH if workers else None,
        "timeout": TIMEOUT if workers else 0,
        "worker_init_fn": _use_one_thread,
    }


def _use_one_thread(_: int) -> None:
    torch.set_num_threads(1)


class CheckedLoader:
    """A loader with the same number of batches on every rank, that calls `check` before each."""

    def __init__(self, loader: Any, check: Callable[[], None]):
        self.loader, self.check = loader, check

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        for batch in self.loader:
            self.check()
            yield batch

    def beside(self, other: Any) -> "CheckedLoader":
        """Return another loader with the same check."""
        return CheckedLoader(other, self.check)


# -- number of workers --------------------------------------------------------------------------------------------------


def choose_workers(most: int, rate: Callable[[int], float]) -> int:
    """Return the smallest of 1, 2, 4 ... `most` workers whose rate is within 10 % of the best.

    `rate` returns the rows per second of a number of workers. The search ends at a number that is not faster than the one
    before. Logs the rates.
    """
    rates: dict[int, float] = {}
    for workers in [*(2**power for power in range(most.bit_length()) if 2**power < most), most]:
        rates[workers] = rate(workers)
        if rates[workers] < 1.1 * max([value for other, value in rates.items() if other != workers], default=0.0):
            break
    chosen = min(workers for workers, value in rates.items() if value >= 0.9 * max(rates.values()))
    shown = ", ".join(f"{value:,.0f} with {workers}" for workers, value in rates.items())
    logger.info("Loader workers: %d; images per second: %s.", chosen, shown)
    return chosen


def loading_rate(loader: DataLoader) -> float:
    """Measure rows per second, after each worker's first batch, with as many of each worker."""
    batches = iter(loader)
    for _ in islice(batches, loader.num_workers):
        pass
    images, start = 0, time.perf_counter()
    for number, batch in enumerate(batches, 1):
        images += len(batch["rows"])
        if time.perf_counter() - start > _MEASURE_SECONDS and number % loader.num_workers == 0:
            break
    return images / (time.perf_counter() - start)


def free_shared_memory() -> int | None:
    """Return the free bytes of /dev/shm; None where tensors do not travel through a folder."""
    if not sys.platform.startswith("linux"):
        return None
    with suppress(OSError):
        found = os.statvfs("/dev/shm")
        return found.f_bavail * found.f_frsize
    return None


# -- workers that are killed --------------------------------------------------------------------------------------------


class RestartingLoader:
    """Iterate over batches; after a worker was killed, new workers continue at the batch due.

    A batch is a function of its step, so they make the same batches.

    Args:
        make: returns a loader of the batches from this number on.
        length: number of batches.
        name: returns a batch's name for messages. The batch that was due is named; workers may have been at a later one.
        num_workers: the loader's number of workers.
    """

    def __init__(
        self, make: Callable[[int], Iterable[Any]], length: int, name: Callable[[int], str], num_workers: int
    ):
        self.make, self.length, self.name, self.num_workers = make, length, name, num_workers
        self.loader: Any = None
        _living.add(self)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Raise ValueError, of one line, if a batch is overdue or workers are killed repeatedly."""
        if self.loader is None:
            self.loader = self.make(0)
        loader, batches, number = self.loader, None, 0  # type: Any, Any, int
        failures: list[int] = []  # numbers of the batches that were due
        while number < self.length:
            try:
                with _worker_errors():
                    if batches is None:
                        _check_idle(loader)
                        batches = iter(loader)
                    batch = next(batches)
            except RuntimeError as error:
                problem = str(error).strip(". ")
                if not problem.startswith("DataLoader "):
                    raise
            else:
                number += 1
                yield batch
                continue
            # In a thread: torch takes seconds to end the others, and hangs if one was killed in the middle of a message.
            abandoned, loader, batches, self.loader = [loader, batches], None, None, None
            ending = threading.Thread(target=abandoned.clear, daemon=True)
            ending.start()
            ending.join(10)
            message = (
                f"{problem}, when {self.name(number)} was due. If this happens again, pass --dataloader_num_workers lower "
                f"than {self.num_workers}, or 0."
            )
            failures = [earlier for earlier in failures if number - earlier < RESTART_WINDOW] + [number]
            if len(failures) > MAX_RESTARTS or "timed out" in problem:
                raise ValueError(message)
            logger.warning("%s New workers make the same batches.", message)
            loader = self.make(number)


_living: weakref.WeakSet[RestartingLoader] = weakref.WeakSet()


def end_workers() -> None:
    """End the workers of all loaders, before a process ends.

    Left to the garbage collector or to the exit, torch waits 5 seconds for every single one, as nothing tells it to end.
    """
    for loader in _living:
        loader.loader = None


_torch_handler: Any = None


@contextmanager
def _worker_errors() -> Iterator[None]:
    """Let torch report killed workers inside this block only, not in the middle of a step.

    Torch does so by a handler of SIGCHLD, installed with the first workers, which raises a RuntimeError wherever the main
    thread happens to be.
    """
    global _torch_handler
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGCHLD"):
        yield
        return
    if _torch_handler is not None:
        signal.signal(signal.SIGCHLD, _torch_handler)
    try:
        _report_killed()  # those killed since the last block
        yield
    except (OSError, EOFError):
        time.sleep(0.5)  # a connection breaks a moment before the process at its other end has ended
        _report_killed()
        raise
    finally:
        _torch_handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _check_idle(loader: Any) -> None:
    """Raise RuntimeError if a worker has ended since the loader's last batch.

    Torch says so once, to whichever loader asks next; the one that it belongs to would wait for `TIMEOUT`.
    """
    workers = getattr(getattr(loader, "_iterator", None), "_workers", ())
    if ended := [str(worker.pid) for worker in workers if not worker.is_alive()]:
        raise RuntimeError(f"DataLoader worker (pid(s) {', '.join(ended)}) exited unexpectedly")


def _report_killed() -> None:
    if callable(_torch_handler):
        _torch_handler(signal.SIGCHLD, None)
