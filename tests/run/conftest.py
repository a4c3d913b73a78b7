"""Fixtures of the tests of starts."""

import contextlib
import os
import signal
from collections.abc import Iterator

import pytest
from accelerate import PartialState

from mm_utils.run import output_folder


@pytest.fixture(autouse=True)
def alone() -> Iterator[None]:
    """Set up the state that a script's accelerator sets up; leave no folder locked."""
    PartialState()
    yield
    output_folder.unlock()


@pytest.fixture
def children() -> Iterator[list[int]]:
    """The pids of processes that end with the test."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, 0)
