"""Worker processes of a loader: how they begin and end."""

import atexit
import multiprocessing
import os
import signal
import threading
import weakref
from contextlib import suppress
from typing import Any

import torch
from torch.utils.data import DataLoader

from mm_utils.files import allow_open_files

PREFETCH = 4  # batches that each worker makes in advance
PATIENCE = 2.0  # seconds, in which a worker ends by itself
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
    """Use one thread; a signal that a scheduler or keyboard sends to every process is for the main one, which ends this one."""
    torch.set_num_threads(1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=end_with_parent, daemon=True).start()


def end_with_parent() -> None:
    """End this process when its parent is killed: torch ends a worker too, but waits for ever until somebody reads its last batch."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def end_workers() -> None:
    """End the workers of all loaders, and kill those that have not ended `PATIENCE` seconds later.

    Left to the garbage collector or to the exit, torch waits 5 seconds for every single one, as nothing tells it to end, and
    `multiprocessing` for ever.
    """
    is_main = threading.current_thread() is threading.main_thread()
    former = signal.signal(signal.SIGINT, signal.SIG_IGN) if is_main else None  # Ctrl-C once more would leave some
    patience = threading.Timer(PATIENCE, _kill_children)
    patience.daemon = True
    patience.start()
    for loader in _living:
        if (iterator := loader._iterator) is not None:
            with suppress(RuntimeError):  # torch's report of a worker that was killed
                iterator._shutdown_workers()  # type: ignore[attr-defined]
            loader._iterator = None
    patience.cancel()
    _kill_children()
    if is_main:
        signal.signal(signal.SIGINT, signal.SIG_DFL if former is None else former)


def _kill_children() -> None:
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


atexit.register(end_workers)  # of a notebook or a script of one's own: `multiprocessing` would wait for them
