"""What can be known of a process from inside and from its neighbours: who it is, whether it lives, what it is doing."""

import os
import platform
import sys
import threading
import traceback
from typing import Any

import psutil
import torch


def place() -> str:
    """Where the main thread is: its innermost line that belongs to no library."""
    frames = traceback.extract_stack(sys._current_frames()[threading.main_thread().ident or 0])
    libraries = (os.path.dirname(os.__file__), os.path.dirname(os.path.dirname(torch.__file__)))
    frame = ([frame for frame in frames if not frame.filename.startswith(libraries)] or frames)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno} in {frame.name}"


def write_stack(rank: int) -> None:
    """Let stderr have the last calls of the main thread."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    lines = "".join(traceback.format_stack(frame)[-12:])
    sys.stderr.write(f"What process {rank} is doing, most recent call last:\n{lines}")
    sys.stderr.flush()


def identity() -> dict[str, Any]:
    """What tells this process from all others: host, pid, and when it began."""
    return {"host": platform.node(), "pid": os.getpid(), "created": psutil.Process().create_time()}


def same_machine(other: dict[str, Any]) -> psutil.Process | None:
    """The process, if it is one of those that are seen from here, as others of the same number may be."""
    try:
        process = psutil.Process(other["pid"])
        same = other["host"] == platform.node() and abs(process.create_time() - other["created"]) < 1
    except psutil.Error:
        return None
    return process if same else None


def is_alive(process: psutil.Process) -> bool:
    """Whether it runs, or is stopped; one that ended and was not waited for is not alive."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
