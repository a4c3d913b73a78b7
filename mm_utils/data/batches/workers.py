"""Worker processes of a loader: how they begin and end."""

import multiprocessing
import os
import signal
import threading
import weakref
from typing import Any

import torch
from torch.utils.data import DataLoader

from mm_utils.files import allow_open_files

PREFETCH = 4  # batches that each worker makes in advance
TIMEOUT = 240  # seconds for a batch; other ranks wait for 300

_living: weakref.WeakSet[DataLoader] = weakref.WeakSet()


def worker_loader(dataset: Any, workers: int, **options: Any) -> DataLoader:
    """Return a `DataLoader` with this many workers, which live until `end_workers`; the options are those of torch."""
    if workers:
        allow_open_files()
        options |= {"prefetch_factor": PREFETCH, "timeout": TIMEOUT, "persistent_workers": True}
    loader = DataLoader(dataset, num_workers=workers, worker_init_fn=_begin_worker, **options)
    _living.add(loader)
    return loader


def _begin_worker(_: int) -> None:
    """Use one thread, and outlive a signal that a scheduler sends to every process of a run, which finishes its step meanwhile."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda *_: signal.signal(signal.SIGTERM, signal.SIG_DFL))  # the second one ends it
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its parent is killed: torch ends a worker too, but waits for ever until somebody reads its last batch."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def end_workers() -> None:
    """End the workers of all loaders, before a process ends.

    Left to the garbage collector or to the exit, torch waits 5 seconds for every single one, as nothing tells it to end.
    """
    for loader in _living:
        if (iterator := loader._iterator) is not None:
            iterator._shutdown_workers()  # type: ignore[attr-defined]
            loader._iterator = None
