"""Every way out of a script ends its workers and itself, within seconds, with the status that docs/reliability.md names."""

import atexit
import importlib
import logging
import multiprocessing
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from transformers import TrainerCallback

import scripts.prepare_data
import scripts.pretrain
from mm_utils.data.batches import workers
from mm_utils.data.batches.dataset import Pairs
from mm_utils.data.prepare import ingest
from mm_utils.distributed import RunError
from mm_utils.run.script import run_script
from tests.kit.processes import forks

SECONDS = 10.0


class Act(TrainerCallback):
    """Does something once, at an event of a step, or `after` the run."""

    def __init__(self, event: str, deed: Callable[[], Any], step: int = 2):
        self.deed = deed
        self.step = step
        self.done = False
        setattr(self, event, self._act)

    def _act(self, *given: Any, **kwargs: Any) -> None:
        if not self.done and (not given or given[1].global_step == self.step):
            self.done = True
            print("it begins", time.time(), file=sys.stderr, flush=True)
            self.deed()

    def after(self) -> None:
        pass


def raises(error: BaseException) -> None:
    raise error


def start_thread() -> None:
    threading.Thread(target=time.sleep, args=(60,), name="mine").start()


def signals(number: int, times: int = 1) -> None:
    """As a keyboard or a scheduler does: to every process of the run."""
    for _ in range(times):
        os.killpg(0, number)
        time.sleep(0.3)


def in_worker(deed: Callable[[], Any], then: Callable[[], Any] = bool) -> None:
    """Do something in the workers that begin after this."""
    usual = Pairs.__getitems__

    def read(pairs, draws):
        if torch.utils.data.get_worker_info() is not None:
            deed()
        return usual(pairs, draws)

    Pairs.__getitems__ = read  # type: ignore[method-assign]
    then()


def end_as_python_does(function: Callable[[], Any], log: Path) -> None:
    """Call `function` by `run_script` in a session of its own, and exit as an interpreter."""
    os.setsid()
    multiprocessing.set_start_method("fork", force=True)  # of workers, as in a script
    signal.signal(signal.SIGINT, signal.default_int_handler)
    out = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(out, 1), os.dup2(out, 2)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115
    logging.root.handlers.clear()
    status = 0
    try:
        run_script(function)
    except SystemExit as end:
        status = end.code
    except KeyboardInterrupt:
        status = 130
    except BaseException:
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        status = 1
    threading._shutdown()
    atexit._run_exitfuncs()
    sys.stderr.flush()
    os._exit(status)


def outcome(function: Callable[[], Any], log: Path) -> tuple[int | None, float, int, str]:
    """Return the status, the seconds from "it begins" to the end, the processes that are left, and the log."""
    process = forks().Process(target=end_as_python_does, args=(function, log))
    process.start()
    process.join(120)
    end = time.time()
    left = [each for each in psutil.process_iter() if each.pid != process.pid and _session(each.pid) == process.pid]
    process.kill()
    for each in left:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    text = log.read_text().replace("\r", "\n")
    [begun] = re.findall(r"it begins ([\d.]+)", text) or ["0"]
    return process.exitcode, end - float(begun), len(left), text


def _session(pid: int) -> int:
    with suppress(ProcessLookupError):
        return os.getsid(pid)
    return 0


def pretrain(flags: list[str], workers: int, act: Act, before: Callable[[], Any] | None = None) -> None:
    if before:
        before()
    scripts.pretrain.main([*flags, "--dataloader_num_workers", str(workers)], callbacks=[act])
    act.after()


STOPPED = "Stopped by a signal after step 2. Resume: "
AFTER = "Stopped by a signal, after the last step of a stage. Resume: "
WAYS = {
    "bug": (Act("on_step_end", partial(raises, KeyError("a bug"))), 1, "KeyError: 'a bug'"),
    "mistake": (Act("on_evaluate", partial(raises, ValueError("a mistake"))), 1, "in raises"),
    "refusal": (Act("on_train_begin", partial(raises, RunError("a is b; c."))), 1, "ERROR a is b; c."),
    "a thread that stays": (
        Act("after", start_thread),
        0,
        "mine still runs and is ended now",
    ),
    "exit": (Act("on_step_end", partial(sys.exit, 3)), 3, ""),
    "exit as if done": (
        Act("on_step_end", partial(sys.exit, 0)),
        1,
        "ended the run before its end. Set control.should",
    ),
    "worker's bug": (Act("on_evaluate_begin", partial(in_worker, partial(raises, KeyError("a bug")))), 1, "KeyError"),
    "worker hangs": (
        Act("on_evaluate_begin", partial(in_worker, partial(time.sleep, 60), partial(raises, KeyError("a bug")))),
        1,
        "KeyError",
    ),
    "SIGTERM": (Act("on_step_end", partial(signals, signal.SIGTERM)), 143, STOPPED),
    "SIGINT while a checkpoint is written": (Act("on_save_begin", partial(signals, signal.SIGINT)), 130, STOPPED),
    "SIGTERM between stages": (Act("on_train_end", partial(signals, signal.SIGTERM)), 143, AFTER),
    "SIGINT at the end": (Act("on_train_end", partial(signals, signal.SIGINT), step=4), 130, AFTER),
}


CASES = [(way, workers) for way in WAYS for workers in (0, 1, 3) if workers or "worker" not in way]


@pytest.mark.parametrize(("way", "workers"), CASES)
def test_a_run_ends(way: str, workers: int, tiny_flags: list[str], tmp_path: Path) -> None:
    act, status, last = WAYS[way]
    flags = [*tiny_flags, "--eval_steps", "2", "--output_dir", str(tmp_path / "run")]
    found, seconds, left, text = outcome(partial(pretrain, flags, workers, act), tmp_path / "log")
    assert (found, left) == (status, 0), text
    assert last in text
    assert seconds < SECONDS


def sleep(*_: Any) -> None:
    time.sleep(60)


def prepare(words: list[str], number: int) -> None:
    """Ctrl-C on a terminal while the processes work, or SIGTERM to the script alone."""
    ingest.ingest = sleep  # type: ignore[assignment]

    def interrupt():
        print("it begins", time.time(), file=sys.stderr)
        os.killpg(0, number) if number == signal.SIGINT else os.kill(os.getpid(), number)

    threading.Timer(1.0, interrupt).start()
    scripts.prepare_data.main(words)


def test_preparing_ends_with_its_processes(corpus: Path, tmp_path: Path) -> None:
    words = ["--sources", str(corpus), "--num_proc", "2", "--output_dir", str(tmp_path / "prepared")]
    for number in (signal.SIGINT, signal.SIGTERM):
        found, seconds, left, text = outcome(partial(prepare, words, number), tmp_path / number.name)
        assert (found, left) == (128 + number, 0), text
        assert f"Stopped by {number.name}. " in text
        assert seconds < SECONDS


def fail(script: str, words: list[str]) -> None:
    workers._begin_worker = lambda _: raises(KeyError("a bug"))  # type: ignore[assignment]
    print("it begins", time.time(), file=sys.stderr)
    importlib.import_module(script).main([*words, "--dataloader_num_workers", "3"])


def test_other_scripts_end_with_their_workers(pretrained: str, corpus: Path, tmp_path: Path) -> None:
    words = ["--model_name_or_path", pretrained, "--train_file", str(corpus)]
    for script, more in (
        ("scripts.embed", ["--index_dir", str(tmp_path / "index")]),
        ("scripts.eval_retrieval", ["--split", "train"]),
    ):
        found, seconds, left, text = outcome(partial(fail, script, [*words, *more]), tmp_path / script)
        assert (found, left) == (1, 0), text
        assert "a bug" in text
        assert seconds < 2 * SECONDS  # with its start
