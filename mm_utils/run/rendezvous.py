"""Draw a fresh key prefix per start, so that no process reads a dead one's address.

`accelerate launch` and torchrun keep one key-value store for all restarts, and process groups write their addresses to the same
keys every time (torch 2.15 and before), so a restarted process may read the address of a dead one, and fail or hang. Here process
0 draws a prefix and hands it to the processes that are present, until all have it. TORCHELASTIC_RESTART_COUNT is not such a prefix:
with `--rdzv_backend c10d` it counts only the failures of its own machine, so two machines never meet again.
"""

import functools
import time
import uuid
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

POLL_SECONDS = 0.1
_SCHEME = "fresh"


@functools.cache
def init_method() -> str:
    """Return the `init_method` for `init_process_group`."""
    dist.register_rendezvous_handler(_SCHEME, _connect)
    return f"{_SCHEME}://"


def rendezvous(store: dist.Store, rank: int, world_size: int, timeout: float) -> str:
    """Return a new key prefix, the same on all ranks; any of them may be restarted meanwhile.

    Process 0 hands the prefix to the newest process of every rank; each other process announces itself, and accepts each new
    invitation until all have joined.

    Raises:
        TimeoutError: if not all ranks call this within `timeout` seconds.
    """
    store = dist.PrefixStore("rendezvous", store)
    own = uuid.uuid4().hex
    deadline = time.monotonic() + timeout
    missing = list(range(1, world_size)) if rank == 0 else [0]
    if rank:
        store.set(f"newest/{rank}", own)
    while True:
        if rank == 0:
            for other in missing:
                if store.check([f"newest/{other}"]):  # it may be a dead process of an earlier start, and never join
                    store.set(f"invitation/{store.get(f'newest/{other}').decode()}", own)
            missing = [other for other in missing if not store.check([f"joined/{own}/{other}"])]
            if not missing:
                store.set(f"complete/{own}", "")
                return own
        elif store.check([f"invitation/{own}"]):
            prefix = store.get(f"invitation/{own}").decode()
            store.set(f"joined/{prefix}/{rank}", "")
            if store.check([f"complete/{prefix}"]):
                return prefix
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"process {rank} waited {timeout:.0f} s for process {missing[0]}, or for others. Look at the logs of their "
                "machines, and check that they can reach each other."
            )
        time.sleep(POLL_SECONDS)


def _connect(url: str, timeout: timedelta, **kwargs: Any) -> Iterator[tuple[dist.Store, int, int]]:
    # 'fresh://' -> 'env://', by which torch finds the store of the launcher
    for store, rank, world_size in dist.rendezvous(url.replace(_SCHEME, "env", 1), timeout=timeout, **kwargs):
        prefix = rendezvous(store, rank, world_size, timeout.total_seconds())
        yield dist.PrefixStore(prefix, store), rank, world_size
