"""Signals are recorded while a run trains; otherwise, and repeated, they have their usual effect."""

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import Dataset

from mm_utils.data.batches.workers import worker_loader
from mm_utils.reliability import signals
from mm_utils.reliability.signals import Interrupted, Interruption
from tests.kit.tiny_run import alone

SIGNALS = [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1]


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_recorded_and_handlers_are_restored(
    number: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    before = [signal.getsignal(each) for each in SIGNALS]
    with Interruption() as found:
        assert found.number == 0
        for each in (number, *SIGNALS):  # a launcher forwards it, or sends another
            os.kill(os.getpid(), each)
        assert found.number == number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert capfd.readouterr().err.count("A signal asks the run to stop") == 1


def raised(number: int) -> None:
    raise Interrupted(number)


def again_later(first: int, second: int) -> int:
    signals._REPEAT_SECONDS = 0.1
    with Interruption() as found:
        os.kill(os.getpid(), first)
        time.sleep(0.2)
        os.kill(os.getpid(), second)
    return found.number


def without_stderr(number: int) -> int:
    """As with `2>&1 | tee`: the keyboard's signal ends the reader first."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    with Interruption() as found:
        os.kill(os.getpid(), number)
    return found.number


def forked_alone() -> int:
    """The signal that ends a forked data worker after one that nothing follows, as its main process is gone."""
    signals._WORKER_SECONDS = 1
    with Interruption():
        pid = os.fork()
        if not pid:
            while True:
                time.sleep(0.05)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        return os.WTERMSIG(os.waitpid(pid, 0)[1])


@pytest.mark.parametrize(
    ("function", "args", "status", "returned"),
    [
        *((raised, (number,), 128 + number, None) for number in SIGNALS),
        (again_later, (signal.SIGTERM, signal.SIGTERM), -signal.SIGTERM, None),
        (again_later, (signal.SIGUSR1, signal.SIGTERM), 0, signal.SIGUSR1),  # from a launcher that ends
        (without_stderr, (signal.SIGINT,), 0, signal.SIGINT),
        (forked_alone, (), 0, signal.SIGALRM),
    ],
)
def test_exit_status_and_record(
    function: Callable[..., Any], args: tuple[Any, ...], status: int, returned: Any
) -> None:
    assert alone(function, *args) == (status, returned)


class Slow(Dataset[int]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> int:
        time.sleep(0.02)
        return row


def groups_that_are_signalled() -> list[tuple[int, int]]:
    """Signal every process of the group from outside, as a keyboard and `scancel` do."""
    os.setsid()
    group, ends = os.getpid(), []
    for number in SIGNALS:
        with Interruption() as found:
            rows = 0
            # "fork", as in a process that was not forked itself
            for _ in worker_loader(Slow(), 2, multiprocessing_context="fork"):
                rows += 1
                if rows == 4:
                    pid = os.fork()
                    if not pid:
                        os.setpgid(0, 0)
                        os.killpg(group, number)
                        os._exit(0)
                    os.waitpid(pid, 0)
        ends.append((rows, found.number))
    return ends


def test_loading_continues_after_a_signal_to_the_whole_group() -> None:
    """The workers survive what a scheduler sends to every process, so that the run finishes its step."""
    assert alone(groups_that_are_signalled) == (0, [(24, number) for number in SIGNALS])
