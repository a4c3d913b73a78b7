"""Checkpoints that fail, are killed while they are written, or are damaged; and runs that are killed and resumed to the last bit."""

import errno
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from mm_utils.checkpointing import writer as writing
from mm_utils.checkpointing.files import (
    STATE_FILE,
    SUMS_FILE,
    checkpoint_folders,
    find_checkpoint,
    remove_unfinished,
    step_of,
    verify,
)
from mm_utils.checkpointing.writer import MOST_FAILURES, CheckpointWriter
from tests.kit.tiny_run import STEPS, alone

LAST = 5
LIMIT = 2
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Copied:
    """Stands for a snapshot of a step; `fault` is called in the middle of writing."""

    def __init__(self, step: int, fault: Callable[[], None] = lambda: None, value: float | None = None):
        self.step = step
        self.fault = fault
        self.weights = {"weight": torch.full((64,), float(step) if value is None else value)}

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors")
        self.fault()
        save_file({"moment": self.weights["weight"] / 2}, folder / "optimizer.safetensors")
        (folder / STATE_FILE).write_text(json.dumps({"global_step": self.step}))


def save(writer: CheckpointWriter, step: int, keep: tuple[int, ...] = (1,), **snapshot: Any) -> int:
    writer.start(step, Copied(step, **snapshot), keep)  # type: ignore[arg-type]
    writer.wait()
    return writer.saved()


# -- failed while saving ------------------------------------------------------------------------------------------------


@pytest.fixture
def writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CheckpointWriter:
    monkeypatch.setattr(writing, "_PAUSES", (0.01, 0.02))
    return CheckpointWriter(tmp_path, LIMIT)


def failing(error: Exception, times: int = 1000) -> Callable[[], None]:
    left = [error] * times

    def fault():
        if left:
            raise left.pop()

    return fault


def steps_in(folder: Path) -> list[int]:
    assert not list(folder.glob(".*")), "something unfinished was left"
    return [step_of(path) for path in checkpoint_folders(folder) if not verify(path)]


def test_the_loop_goes_on_while_a_slow_disk_is_written_to_and_two_saves_never_overlap(
    writer: CheckpointWriter, tmp_path: Path
) -> None:
    go_on = threading.Event()
    inside = [0, 0]

    def write_slowly():
        inside[0] += 1
        inside[1] = max(inside)
        go_on.wait(30)
        time.sleep(0.05)
        inside[0] -= 1

    writer.start(1, Copied(1, write_slowly), ())  # type: ignore[arg-type]
    assert (writer.saved(), writer.failures) == (0, 0)
    threading.Timer(0.2, go_on.set).start()
    writer.start(2, Copied(2, write_slowly), ())  # type: ignore[arg-type]
    assert go_on.is_set()
    assert writer.saved() == 1
    writer.wait()
    assert inside == [0, 1]
    assert steps_in(tmp_path) == [1, 2]


def test_failures_in_succession_are_counted_and_the_last_one_is_reported(
    writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, 1)
    for step in (2, 3):
        assert save(writer, step, fault=failing(RuntimeError("no"))) == 0
    assert writer.failures == MOST_FAILURES - 1
    assert "step 3 could not be written: RuntimeError: no. Older checkpoints are intact" in caplog.text
    assert save(writer, 4, fault=failing(OSError(errno.EIO, "a network disk stutters"), times=2)) == 4
    assert (writer.saved(), writer.failures) == (0, 0), "each is reported once"
    save(writer, 5, value=float("nan"))
    assert writer.failures == MOST_FAILURES
    assert "the weights after step 5 are not finite (1 tensors, such as weight)" in writer.problem
    assert steps_in(tmp_path) == [1, 4]


@pytest.mark.parametrize(
    "full",
    [
        OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
        SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_full_disk_is_reported_with_its_path_and_not_tried_again(
    full: Exception, writer: CheckpointWriter, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    save(writer, 1)
    assert save(writer, 2, fault=failing(full, times=1)) == 0
    assert f"the disk of {tmp_path} is full, or a quota is used up" in writer.problem
    assert "retrying" not in caplog.text
    assert steps_in(tmp_path) == [1]
    assert save(writer, 3) == 3


def test_a_disk_without_room_for_a_checkpoint_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=9 * 2**20))
    writing.check_room(tmp_path, 9 * 2**20)
    with pytest.raises(ValueError, match=rf"^{tmp_path} has 9.0 MiB free; a checkpoint takes 10.0 MiB"):
        writing.check_room(tmp_path, 10 * 2**20)


# -- killed while saving ------------------------------------------------------------------------------------------------


def killed_at(point: int, folder: Path) -> tuple[int, bool]:
    """Save in a forked process that ends at the nth thing that the writing thread does to the disk.

    Return the last step that was announced before, and whether it was killed.
    """
    reader, announced = os.pipe()
    pid = os.fork()
    if pid:
        os.close(announced)
        _, status = os.waitpid(pid, 0)
        told = os.read(reader, LAST)
        os.close(reader)
        return max(told, default=0), os.WIFSIGNALED(status)
    count = itertools.count(1)
    real = os.fsync

    def strike():
        if threading.current_thread().name == "checkpoint" and next(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(handle):
        strike()
        real(handle)

    os.fsync = fsync
    sys.addaudithook(lambda event, _: strike() if event in _EVENTS else None)
    try:
        writer = CheckpointWriter(folder, LIMIT)
        for step in range(1, LAST + 1):
            assert save(writer, step) == step
            os.write(announced, bytes([step]))
    finally:
        os._exit(0)


def look(folder: Path, told: int) -> str:
    """What is wrong with what a killed run left, if anything."""
    path = find_checkpoint("latest", folder)
    found = 0 if path is None else step_of(path)
    if found < told:
        return f"step {told} was announced, {found} is the latest"
    if path is not None:
        if verify(path) or float(load_file(path / "model.safetensors")["weight"][0]) != found:
            return f"checkpoint {found} is not what was saved"
        if json.loads((path / STATE_FILE).read_text()) != {"global_step": found}:
            return f"checkpoint {found} is of several steps"
    remove_unfinished(folder)
    if found < LAST and save(CheckpointWriter(folder, LIMIT), LAST) != LAST:
        return "nothing can be saved any more"
    left = sorted(each.name for each in folder.iterdir())
    whole = [each.name for each in checkpoint_folders(folder) if not verify(each)]
    return "" if left == sorted(whole) and f"checkpoint-{LAST}" in whole else f"left were {left}"


def kill_everywhere(root: Path) -> tuple[int, list[str]]:
    """Number of points, and what went wrong."""
    torch.set_num_threads(1)
    wrong = []
    for point in itertools.count(1):
        folder = root / str(point)
        folder.mkdir()
        told, was_killed = killed_at(point, folder)
        if problem := look(folder, told):
            wrong.append(f"point {point}: {problem}")
        shutil.rmtree(folder)
        if not was_killed:
            return point - 1, wrong
    raise AssertionError


@pytest.mark.slow
def test_sigkill_at_every_point_of_five_saves(tmp_path: Path) -> None:
    status, (points, wrong) = alone(kill_everywhere, tmp_path)
    assert (status, wrong) == (0, [])
    assert points > 80


# -- damaged ------------------------------------------------------------------------------------------------------------


def flip(path: Path, place: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


DAMAGES = {
    "cut in half": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path, _: path.unlink(),
    "with a bit flipped": lambda path, _: flip(path, path.stat().st_size // 2),
    "with a bit of its end flipped": lambda path, _: flip(path, path.stat().st_size - 2),
    "of another step": lambda path, older: shutil.copy(older, path),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    damage: str, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each file of a checkpoint, one after the other."""
    run = shutil.copytree(straight, tmp_path / "run")
    newest = run / f"checkpoint-{STEPS}"
    older = run / "checkpoint-9"
    for path in sorted(newest.iterdir()):
        good = path.read_bytes()
        DAMAGES[damage](path, older / path.name)
        if not path.exists() or path.read_bytes() != good:  # some files are the same in all checkpoints
            caplog.clear()
            assert find_checkpoint("latest", run) == older
            assert f"checkpoint-{STEPS} is damaged and passed over: " in caplog.text
            assert path.name == SUMS_FILE or path.name in caplog.text
            with pytest.raises(ValueError, match=r"it is damaged: |it is not a checkpoint"):
                find_checkpoint(str(newest), run)
        path.write_bytes(good)
    assert find_checkpoint("latest", run) == newest


# -- resumed ------------------------------------------------------------------------------------------------------------
