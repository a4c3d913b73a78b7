"""Worker processes of a loader: their options, their errors, their end."""

import signal
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch

PREFETCH = 4  # batches that each worker makes in advance
TIMEOUT = 240  # seconds for a batch; other ranks wait for 300


def worker_options(workers: int) -> dict[str, Any]:
    """Return the options of a `DataLoader` with this many workers."""
    return {
        "num_workers": workers,
        "prefetch_factor": PREFETCH if workers else None,
        "timeout": TIMEOUT if workers else 0,
        "worker_init_fn": _begin_worker,
    }


def _begin_worker(_: int) -> None:
    """Use one thread, and outlive a signal that a scheduler sends to every process of a run, which finishes its step meanwhile."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # the second one ends it


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


class WorkerLoader:
    """Iterate over the batches of a `DataLoader`; an error of its workers names the batch that was due.

    Args:
        loader: its batches; iterated again, those of persistent workers begin anew.
        length: number of batches.
        name: returns a batch's name for messages. Workers may have been at a later batch than the one that was due.
        num_workers: the loader's number of workers.
    """

    def __init__(self, loader: Iterable[Any], length: int, name: Callable[[int], str], num_workers: int):
        self.loader: Any = loader
        self.length, self.name, self.num_workers = length, name, num_workers
        _living.add(self)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[Any]:
        """Raise ValueError, of one line, if a worker was killed or a batch is overdue."""
        number = 0
        try:
            for batch in self.loader:
                number += 1
                yield batch
        except RuntimeError as error:
            if not str(error).startswith("DataLoader "):
                raise
            raise ValueError(f"{describe_killed(error)}, when {self.name(number)} was due. {REMEDY}") from error


REMEDY = (
    "Its memory or /dev/shm may have been full: pass a lower --dataloader_num_workers, or 0, or start the container with a larger "
    "--shm-size, and resume."
)


def describe_killed(error: RuntimeError) -> str:
    """Return torch's words on a worker that was killed or is late, without its own advice."""
    return str(error).split(". ")[0].strip(".")


_living: weakref.WeakSet[WorkerLoader] = weakref.WeakSet()


def end_workers() -> None:
    """End the workers of all loaders, before a process ends.

    Left to the garbage collector or to the exit, torch waits 5 seconds for every single one, as nothing tells it to end.
    """
    for loader in _living:
        loader.loader = None
