"""Signals are recorded while a run trains, rows that are skipped are listed and counted, and a hang is shown with its place."""

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.data.batches.order import SHOWN_IN_VALIDATION
from mm_utils.files import append_rows
from mm_utils.reliability import signals
from mm_utils.reliability.signals import Interruption
from mm_utils.reliability.skipped import SKIPPED_FILE, SkippedSamples
from mm_utils.reliability.watchdog import HangDetection
from mm_utils.run.start import make_accelerator
from mm_utils.training.arguments import TrainingArguments
from tests.kit.jsonl import read_lines
from tests.kit.processes import let_accelerate_find_ranks, run_on_ranks
from tests.kit.tiny_run import alone

# -- signals ------------------------------------------------------------------------------------------------------------
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


@pytest.mark.parametrize(
    ("function", "args", "status", "returned"),
    [
        (again_later, (signal.SIGTERM, signal.SIGTERM), -signal.SIGTERM, None),
        (again_later, (signal.SIGUSR1, signal.SIGTERM), 0, signal.SIGUSR1),  # from a launcher that ends
        (without_stderr, (signal.SIGINT,), 0, signal.SIGINT),
    ],
)
def test_exit_status_and_record(
    function: Callable[..., Any], args: tuple[Any, ...], status: int, returned: Any
) -> None:
    assert alone(function, *args) == (status, returned)


# -- rows that are skipped ----------------------------------------------------------------------------------------------
class Run:
    """Steps of `batch` rows, of which some are skipped for the given reasons."""

    def __init__(self, folder: Path, max_corrupt_share: float = 0.01, batch: int = 100, step: int = 0):
        self.skipped = SkippedSamples()
        self.state = TrainerState(global_step=step)
        self.args: Any = TrainingArguments(str(folder), global_batch_size=batch, max_corrupt_share=max_corrupt_share)
        self.event("on_train_begin")

    def event(self, name: str, **values: Any) -> None:
        model = SimpleNamespace(device=torch.device("cpu"))
        getattr(self.skipped, name)(self.args, self.state, TrainerControl(), model=model, **values)

    def log(self) -> int:
        logs = {"loss": 1.0}
        self.event("on_log", logs=logs)
        return logs.get("skipped_images", 0)

    def step(self, *reasons: str, first: int = 0) -> None:
        self.state.global_step += 1
        ids = [f"id-{first + place}" for place in range(len(reasons))]
        skipped = [f"image {name}: {why}" for name, why in zip(ids, reasons, strict=True)]
        self.event("on_step_end", batch={"skipped_ids": ids, "skipped": skipped})


def lines(folder: Path) -> list[dict[str, Any]]:
    return read_lines(folder / SKIPPED_FILE)


def test_skipped_rows_are_written_once_and_their_count_is_resumed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, 0.5)
    for step in range(1, 16):
        run.step("it has 0 bytes", first=step)
        assert step % 5 or run.log() == step
    append_rows(tmp_path / SKIPPED_FILE, [{"step": 16}])  # of a step after the checkpoint, which is taken again
    Run(tmp_path, step=15)
    assert lines(tmp_path) == [
        {"step": step, "image_id": f"id-{step}", "reason": f"image id-{step}: it has 0 bytes"} for step in range(1, 16)
    ]
    assert run.skipped.state() == {"args": {}, "attributes": {"count": 15}}
    [said] = caplog.records
    assert said.message.endswith(f"listed in {tmp_path / SKIPPED_FILE}, such as image id-1: it has 0 bytes")


SHOWN = f"shard a, row 3: {SHOWN_IN_VALIDATION}"


@pytest.mark.parametrize(
    ("reason", "corrupt", "pairs", "stops"),
    [("broken", 19, 20, False), ("broken", 20, 2000, False), ("broken", 20, 1999, True), (SHOWN, 200, 200, False)],
)
def test_too_large_a_share_stops_the_run(reason: str, corrupt: int, pairs: int, stops: bool, tmp_path: Path) -> None:
    """Rows that validation has are listed but not counted."""
    run = Run(tmp_path, batch=pairs)
    run.step(*[reason] * corrupt)
    if stops:
        with pytest.raises(ValueError, match=f"--max_corrupt_share is 0.01; {corrupt} of {pairs:,} rows"):
            run.log()
    else:
        assert run.log() == (0 if reason == SHOWN else corrupt)
    assert len(lines(tmp_path)) == corrupt


def three_steps(folder: Path) -> list[Any]:
    """Return the logged counts, or errors, of steps in which only rank 1 has unreadable rows."""
    let_accelerate_find_ranks()
    make_accelerator()
    run = Run(folder, 0.1, batch=50)
    seen = []
    for step in (1, 2, 3):
        run.step(*["broken"] * (9 * distributed.rank()), first=100 * step)
        try:
            seen.append(run.log())
        except ValueError as error:
            seen.append(str(error))
    return [*seen, run.skipped.state()]


def test_all_ranks_have_the_same_count_and_stop_at_the_same_step(tmp_path: Path) -> None:
    one, other = run_on_ranks(2, three_steps, tmp_path)
    assert one == other
    assert one[:2] == [9, 18]
    assert one[2].startswith(
        "--max_corrupt_share is 0.1; 27 of 150 rows could not be read, such as image id-308: broken."
    )
    assert len(lines(tmp_path)) == 27


# -- hangs: `tests/faults/test_processes.py` lets real processes hang ----------------------------------------------------
def hangs_here(file: str) -> None:
    os.dup2(os.open(file, os.O_WRONLY | os.O_CREAT), 2)
    distributed.world_size = lambda: 2

    def trains_here():
        with HangDetection(0.2) as detection:
            detection._phase = "data"
            time.sleep(60)

    thread = threading.Thread(target=trains_here)  # under Ray it is not the main thread
    thread.start()
    thread.join()


def test_the_place_is_that_of_the_thread_that_trains(tmp_path: Path) -> None:
    assert alone(hangs_here, str(tmp_path / "said"))[0] == 1
    said = (tmp_path / "said").read_text()
    assert "has been in 'data' of step 0 for 0 s. --ddp_timeout is 0 s" in said
    assert "in trains_here\n" in said
