"""Signals are recorded while a run trains; otherwise, and repeated, they have their usual effect."""

import os
import signal
import threading
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
        os.kill(os.getpid(), number)
        assert found.number == number
        for other in SIGNALS:  # a launcher forwards it, or sends another
            os.kill(os.getpid(), other)
        assert found.number == number
    assert [signal.getsignal(each) for each in SIGNALS] == before
    assert capfd.readouterr().err.count("A signal asks the run to stop") == 1


def test_a_scheduler_interrupts_a_run_in_any_thread() -> None:
    signals.interrupt(signal.SIGTERM)  # while nothing trains
    ready, asked, found = threading.Event(), threading.Event(), []

    def work() -> None:
        with Interruption() as interrupted:
            ready.set()
            asked.wait(60)
            found.append(interrupted.number)
        with Interruption() as interrupted:
            found.append(interrupted.number)

    thread = threading.Thread(target=work)
    thread.start()
    ready.wait(60)
    signals.interrupt(signal.SIGTERM)
    signals.interrupt(signal.SIGINT)
    asked.set()
    thread.join(60)
    assert found == [signal.SIGTERM, 0]


# -- in processes of their own ------------------------------------------------------------------------------------------
def raised(number: int) -> None:
    raise Interrupted(number)


def again_later(first: int, second: int) -> None:
    signals._REPEAT_SECONDS = 0.1
    with Interruption():
        os.kill(os.getpid(), first)
        time.sleep(0.2)
        os.kill(os.getpid(), second)
        time.sleep(60)


def another_later(first: int, second: int) -> int:
    """As from a launcher that ends: the system then signals its children."""
    signals._REPEAT_SECONDS = 0.1
    with Interruption() as found:
        os.kill(os.getpid(), first)
        time.sleep(0.2)
        os.kill(os.getpid(), second)
    return found.number


def after_the_loop(number: int) -> None:
    with Interruption():
        pass
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    os.kill(os.getpid(), number)


def without_stderr(number: int) -> int:
    """As with `2>&1 | tee`: the keyboard's signal ends the reader first."""
    reader, writer = os.pipe()
    os.close(reader)
    os.dup2(writer, 2)
    with Interruption() as found:
        os.kill(os.getpid(), number)
    return found.number


def with_a_handler_of_c() -> int:
    """A handler that is not Python's cannot be restored; count the signals that get the default."""
    real = signal.signal
    formers: dict[int, Any] = {}

    def unknown(number: int, handler: Any) -> Any:
        formers[number] = handler
        return None if callable(handler) else real(number, handler)

    signal.signal = unknown  # type: ignore[assignment]
    with Interruption():
        pass
    return sum(handler == signal.SIG_DFL for handler in formers.values())


CASES: list[tuple[Callable[..., Any], tuple[Any, ...], int, Any]] = [
    *((raised, (number,), 128 + number, None) for number in SIGNALS),
    (again_later, (signal.SIGTERM, signal.SIGTERM), -signal.SIGTERM, None),
    (another_later, (signal.SIGUSR1, signal.SIGTERM), 0, signal.SIGUSR1),
    (after_the_loop, (signal.SIGTERM,), -signal.SIGTERM, None),
    (without_stderr, (signal.SIGINT,), 0, signal.SIGINT),
    (with_a_handler_of_c, (), 0, 3),
]


@pytest.mark.parametrize(("function", "args", "status", "returned"), CASES)
def test_exit_status_and_record(
    function: Callable[..., Any], args: tuple[Any, ...], status: int, returned: Any
) -> None:
    assert alone(function, *args) == (status, returned)


class Slow(Dataset[int]):
    """Rows that hold the pid of the process that made them."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> int:
        time.sleep(0.02)
        return os.getpid()


def _signal_from_outside(group: int, number: int) -> None:
    pid = os.fork()
    if not pid:
        os.setpgid(0, 0)
        os.killpg(group, number)
        os._exit(0)
    os.waitpid(pid, 0)


def groups_that_are_signalled() -> list[tuple[int, int]]:
    """Signal every process of the group from outside, as a keyboard and `scancel` do."""
    os.setsid()
    ends = []
    for number in SIGNALS:
        pids: list[int] = []
        with Interruption() as found:
            # "fork", as in a process that was not forked itself
            for batch in worker_loader(Slow(), 2, multiprocessing_context="fork"):
                pids.append(int(batch))
                if len(pids) == 4:
                    _signal_from_outside(os.getpid(), number)
        ends.append((len(pids), found.number))
    return ends


def test_loading_continues_after_a_signal_to_the_whole_group() -> None:
    """The workers survive what a scheduler sends to every process, so that the run finishes its step."""
    assert alone(groups_that_are_signalled) == (0, [(24, number) for number in SIGNALS])


def forked_alone(seconds: int) -> int:
    """Return the signal that ends a forked process after one that nothing follows."""
    signals._WORKER_SECONDS = seconds
    with Interruption():
        pid = os.fork()
        if not pid:
            time.sleep(0.05)
            until = time.monotonic() + 60
            while time.monotonic() < until:
                time.sleep(0.05)
            os._exit(0)
        time.sleep(0.2)
        os.kill(pid, signal.SIGTERM)
        return os.WTERMSIG(os.waitpid(pid, 0)[1])


@pytest.mark.skipif(not hasattr(signal, "alarm"), reason="no alarm on this system")
def test_a_worker_whose_main_process_is_gone_ends_after_a_while() -> None:
    assert alone(forked_alone, 1) == (0, signal.SIGALRM)
