"""Processes of one start find each other, and nothing of a start before.

`accelerate launch` keeps one store of keys for all its restarts (`--rdzv_backend static`, the default), and torch's process
groups write to the same keys every time (2.15 and before). So after a restart a process may read where one that is dead has
listened, and fails, or waits as long as it may. Here, before anything else, process 0 gives the meeting a name that there
never was, hands it to those who are there now, and waits until they have it; all that the group writes is under that name.
"""

import functools
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL = 0.1  # seconds between two looks at the store
_SCHEME = "meeting"


@functools.cache
def init_method() -> str:
    """What to give to `init_process_group`, in place of `env://`."""
    dist.register_rendezvous_handler(_SCHEME, _rendezvous)
    return f"{_SCHEME}://"


def meet(store: dist.Store, rank: int, world: int, seconds: float) -> str:
    """The name of the meeting of these processes, one for all; all must call this.

    Any of them may be started anew meanwhile, as long as it is called by so many at last.

    Raises:
        TimeoutError: if not all came in so many seconds.
    """
    store, until = dist.PrefixStore("meeting", store), time.monotonic() + seconds
    return _invite(store, world, until, seconds) if rank == 0 else _come(store, rank, until, seconds)


def _invite(store: dist.Store, world: int, until: float, seconds: float) -> str:
    """Hand a new name to whoever is there, until all have it."""
    name, missing = uuid.uuid4().hex, list(range(1, world))
    while True:
        for rank in missing:
            if store.check([f"here/{rank}"]):  # maybe one of a start before, which will not come
                store.set(f"invited/{store.get(f'here/{rank}').decode()}", name)
        missing = [rank for rank in missing if not store.check([f"came/{name}/{rank}"])]
        if not missing:
            store.set(f"begun/{name}", "")
            return name
        if time.monotonic() > until:
            raise TimeoutError(
                f"{len(missing)} of {world} processes have not come within {seconds:.0f} s, process {missing[0]} for one. "
                "Look at what their machines wrote, and whether those can reach this one."
            )
        time.sleep(POLL)


def _come(store: dist.Store, rank: int, until: float, seconds: float) -> str:
    """Say who is there now, and take the newest name that is handed out until all have it."""
    own = uuid.uuid4().hex
    store.set(f"here/{rank}", own)
    while True:
        if store.check([f"invited/{own}"]):
            name = store.get(f"invited/{own}").decode()
            store.set(f"came/{name}/{rank}", "")
            if store.check([f"begun/{name}"]):
                return name
        if time.monotonic() > until:
            raise TimeoutError(
                f"process {rank} has waited {seconds:.0f} s for process 0, or for others that it waits for. Look at what "
                "process 0 wrote."
            )
        time.sleep(POLL)


def _rendezvous(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    for store, rank, world in dist.rendezvous(url.replace(_SCHEME, "env", 1), timeout=timeout, **kwargs):
        yield dist.PrefixStore(meet(store, rank, world, timeout.total_seconds()), store), rank, world
