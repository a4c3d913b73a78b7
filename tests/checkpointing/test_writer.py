"""Checkpoints written beside the training: what fails is logged, tried again, or given up, and nothing overlaps."""

import errno
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from mm_utils.checkpointing import writer as writing
from mm_utils.checkpointing.files import STATE_FILE, checkpoint_folders, step_of, verify
from mm_utils.checkpointing.writer import MOST_FAILURES, CheckpointWriter

MIB = 2**20


class Copied:
    """Stands for a snapshot; `fault` is called in the middle of writing."""

    def __init__(self, value: float = 1.0, fault: Callable[[], None] = lambda: None):
        self.weights, self.fault = {"weight": torch.full((8,), value)}, fault

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors")
        self.fault()
        (folder / STATE_FILE).write_text("{}")


def failing(error: Exception, times: int = 1000) -> Callable[[], None]:
    """Fails n times."""
    left = [error] * times

    def fault() -> None:
        if left:
            raise left.pop()

    return fault


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWriter:
    monkeypatch.setattr(writing, "_PAUSES", (0.01, 0.02))
    return CheckpointWriter(tmp_path, 2)


def save(writer: CheckpointWriter, step: int, snapshot: Any, keep: tuple[int, ...] = ()) -> int:
    writer.start(step, snapshot, keep)
    writer.wait()
    return writer.saved()


def steps_in(folder: Path) -> list[int]:
    assert not list(folder.glob(".*")), "something unfinished was left"
    return [step_of(path) for path in checkpoint_folders(folder) if not verify(path)]


def test_the_newest_are_kept_and_each_is_reported_once(writer: CheckpointWriter, tmp_path: Path) -> None:
    for step in (1, 2, 3):
        assert save(writer, step, Copied(), keep=(1,)) == step
        assert writer.saved() == 0
    assert steps_in(tmp_path) == [1, 2, 3]
    save(writer, 4, Copied())
    assert steps_in(tmp_path) == [3, 4]
    assert (writer.failures, writer.problem) == (0, "")


def test_the_loop_goes_on_while_a_slow_disk_is_written_to_and_two_saves_never_overlap(
    writer: CheckpointWriter, tmp_path: Path
) -> None:
    go_on, inside = threading.Event(), [0, 0]

    def slow() -> None:
        inside[0] += 1
        inside[1] = max(inside)
        go_on.wait(30)
        time.sleep(0.05)
        inside[0] -= 1

    writer.start(1, Copied(fault=slow), ())  # type: ignore[arg-type]
    assert not go_on.is_set()
    assert (writer.saved(), writer.failures) == (0, 0)
    threading.Timer(0.2, go_on.set).start()
    writer.start(2, Copied(fault=slow), ())  # type: ignore[arg-type]
    assert go_on.is_set()
    assert writer.saved() == 1
    writer.wait()
    assert inside == [0, 1]
    assert steps_in(tmp_path) == [1, 2]


def test_failures_in_succession_are_counted_and_the_last_one_is_reported(
    writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, 1, Copied())
    for step in (2, 3):
        assert save(writer, step, Copied(fault=failing(RuntimeError("no")))) == 0
    assert writer.failures == MOST_FAILURES - 1
    assert "step 3 could not be written: RuntimeError: no. Older checkpoints are intact" in caplog.text
    assert save(writer, 4, Copied(fault=failing(OSError(errno.EIO, "a network disk stutters"), times=2))) == 4
    assert writer.failures == 0
    for step in (5, 6, 7):
        save(writer, step, Copied(fault=failing(ValueError("never"))))
    assert writer.failures == MOST_FAILURES
    assert writer.problem == "the checkpoint of step 7 could not be written: ValueError: never"
    assert steps_in(tmp_path) == [1, 4]


def test_weights_that_are_not_finite_are_not_written(writer: CheckpointWriter, tmp_path: Path) -> None:
    save(writer, 1, Copied(float("nan")))
    assert (writer.failures, steps_in(tmp_path)) == (MOST_FAILURES, [])
    assert "the weights after step 1 are not finite (1 tensors, such as weight)" in writer.problem


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported_with_its_path_and_free_space_and_not_retried(
    full: Exception, writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, 1, Copied())
    assert save(writer, 2, Copied(fault=failing(full, times=1))) == 0
    assert f"the disk of {tmp_path} is full, or a quota is used up" in writer.problem
    assert "retrying" not in caplog.text
    assert steps_in(tmp_path) == [1]
    assert save(writer, 3, Copied()) == 3


@pytest.mark.parametrize(
    ("free", "there", "kept", "outcome"),
    [(30, 0, 2, ""), (29, 0, 2, "warning"), (9, 0, 2, "error"), (20, 1, 2, ""), (10, 5, 2, ""), (9, 2, 2, "error"),
     (20, 0, None, ""), (19, 0, None, "warning")],
)  # fmt: skip
def test_room_for_checkpoints(
    free: int, there: int, kept: int | None, outcome: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    """`free` in MiB; a checkpoint takes 10."""
    for step in range(there):
        (tmp_path / f"checkpoint-{step}").mkdir()
        with open(tmp_path / f"checkpoint-{step}/model.safetensors", "wb") as file:
            file.truncate(10 * MIB)
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=free * MIB))
    if outcome == "error":
        with pytest.raises(ValueError, match=rf"^{tmp_path} has {free}.0 MiB free; a checkpoint takes 10.0 MiB"):
            writing.check_room(tmp_path, 10 * MIB, kept)
    else:
        writing.check_room(tmp_path, 10 * MIB, kept)
    assert ("Free some, or give an --output_dir" in caplog.text) == (outcome == "warning")
