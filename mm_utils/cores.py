"""How many cores this process may use; it imports no library."""

import os


def available_cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cores_per_process() -> int:
    """Return this process's share of the machine's cores."""
    return available_cores() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
