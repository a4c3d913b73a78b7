"""Killed at every point of a save, damaged in every file, full and slow disks, and resumed to the last bit."""

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from mm_utils.checkpointing.files import (
    MANIFEST,
    STATE_FILE,
    checkpoint_folders,
    find_checkpoint,
    newest_checkpoint,
    remove_unfinished,
    step_of,
    verify,
)
from mm_utils.checkpointing.writer import CheckpointWriter
from tests.kit.tiny_run import STEPS, TinyRun, alone, digest, losses, train

LAST, LIMIT = 5, 2
_EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir")


class Copied:
    """Stands for a snapshot of a step."""

    def __init__(self, step: int, numbers: int = 64):
        self.step, self.weights = step, {"weight": torch.full((numbers,), float(step))}
        self.nbytes = 4 * numbers

    def not_finite(self) -> list[str]:
        return []

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors")
        save_file({"moment": self.weights["weight"] / 2}, folder / "optimizer.safetensors")
        (folder / STATE_FILE).write_text(json.dumps({"global_step": self.step}))


def save(writer: CheckpointWriter, step: int, numbers: int = 64) -> int:
    snapshot: Any = Copied(step, numbers)
    writer.start(step, snapshot, {1})
    writer.wait()
    return writer.saved()


# -- killed while saving ------------------------------------------------------------------------------------------------


def save_and_tell(folder: Path, pipe: int, numbers: int) -> None:
    writer = CheckpointWriter(folder, LIMIT)
    for step in range(1, LAST + 1):
        assert save(writer, step, numbers) == step
        os.write(pipe, bytes([step]))


def killed(folder: Path, prepare: Callable[[int], None], numbers: int = 64) -> tuple[int, bool]:
    """The last step that was announced before a forked process ended, and whether it was killed.

    `prepare` is called with 0 in that process, and with its number in this one.
    """
    reader, writer = os.pipe()
    pid = os.fork()
    if not pid:
        try:
            prepare(0)
            save_and_tell(folder, writer, numbers)
        finally:
            os._exit(0)
    os.close(writer)
    prepare(pid)
    _, status = os.waitpid(pid, 0)
    told = os.read(reader, LAST)
    os.close(reader)
    return max(told, default=0), os.WIFSIGNALED(status)


def kill_at(point: int) -> None:
    """End this process at the nth thing that the writing thread does to the disk."""
    count = itertools.count(1)

    def strike() -> None:
        if threading.current_thread().name == "checkpoint" and next(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def hook(event: str, _: tuple[Any, ...]) -> None:
        if event in _EVENTS:
            strike()

    real = os.fsync

    def fsync(fd: Any) -> None:
        strike()
        real(fd)

    os.fsync = fsync
    sys.addaudithook(hook)


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
        told, was_killed = killed(folder, lambda pid, point=point: None if pid else kill_at(point))  # type: ignore[misc]
        problem = look(folder, told)
        if problem:
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


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut by a byte": lambda path, _: path.write_bytes(path.read_bytes()[:-1]),
    "cut in half": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "empty": lambda path, _: path.write_bytes(b""),
    "missing": lambda path, _: path.unlink(),
    "with a bit flipped": lambda path, _: _patch(path, path.stat().st_size // 2, 1),
    "with a bit of its last byte flipped": lambda path, _: _patch(path, path.stat().st_size - 1, 128),
    "with its end zeroed": lambda path, _: path.write_bytes(path.read_bytes()[:-9].ljust(path.stat().st_size, b"\0")),
    "of another step": lambda path, older: shutil.copy(older, path),
}


def _patch(path: Path, place: int, bits: int) -> None:
    content = bytearray(path.read_bytes())
    content[place] ^= bits
    path.write_bytes(content)


FILES = [f"{name}.safetensors" for name in ("model", "optimizer", "ema")]
FILES += [STATE_FILE, "run.json", "config.json", MANIFEST]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    name: str, damage: str, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path, older = straight / f"checkpoint-{STEPS}" / name, straight / "checkpoint-9" / name
    if damage == "of another step" and path.read_bytes() == older.read_bytes():
        pytest.skip("this file is the same in every step")
    run = shutil.copytree(straight, tmp_path / "run")
    if name == MANIFEST and damage == "cut by a byte":
        _patch(run / f"checkpoint-{STEPS}" / name, 0, 1)  # its last byte is a line's end, which says nothing
    else:
        DAMAGES[damage](run / f"checkpoint-{STEPS}" / name, older)
    assert find_checkpoint("latest", run) == run / "checkpoint-9"
    assert f"checkpoint-{STEPS} is damaged and passed over: {'' if name == MANIFEST else name}" in caplog.text
    with pytest.raises(ValueError, match="it is damaged: " if name == MANIFEST else name):
        find_checkpoint(str(run / f"checkpoint-{STEPS}"), run)


class _Canary:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (open, (self.path, "w"))


def test_what_else_lies_about_is_neither_read_nor_removed(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (run / "checkpoint-11").symlink_to(tmp_path / "precious")
    shutil.copytree(run / f"checkpoint-{STEPS}", run / ".checkpoint-12.tmp")
    for name in ("optimizer.bin", "scheduler.bin", "random_states_0.pkl", "pytorch_model.bin"):
        torch.save(_Canary(str(tmp_path / "canary")), run / f"checkpoint-{STEPS}" / name)
    (run / "model.safetensors").unlink()
    assert alone(train, TinyRun(run))[0] == 0
    assert digest(run) == digest(straight)
    assert not (tmp_path / "canary").exists()
    assert (tmp_path / "precious/file").exists()
    assert not list(run.glob(".*"))


# -- resumed ------------------------------------------------------------------------------------------------------------


class Killed:
    """Ends the process at a place of a step, once in the life of a run."""

    def __init__(self, mark: Path, place: str, step: int):
        self.mark, self.place, self.step = mark, place, step

    def __call__(self, place: str, step: int) -> None:
        if (place, step) == (self.place, self.step) and not self.mark.exists():
            self.mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


PLACES = [("batch", 1), ("forward", 2), ("forward", 4), ("end", 6), ("evaluation", 8), ("saved", 6), ("end", STEPS),
          ("saved", STEPS)]  # fmt: skip


@pytest.mark.parametrize("place", PLACES, ids=lambda place: "-".join(map(str, place)))
def test_a_run_that_is_killed_ends_as_if_it_had_not_been(
    place: tuple[str, int], straight: Path, tmp_path: Path
) -> None:
    where, step = place
    run = TinyRun(tmp_path / "run", strike=Killed(tmp_path / "mark", where, step))
    status, _ = alone(train, run)
    assert status == -signal.SIGKILL
    path, _ = newest_checkpoint(run.folder)
    saved = 0 if path is None else step_of(path)
    assert step - saved <= 2 * 3  # the newest checkpoint may still have been in the making
    status, (_, last, _) = alone(train, run)
    assert (status, last) == (0, STEPS)
    assert digest(run.folder) == digest(straight)
    assert losses(run.folder) == losses(straight)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [18, 20])
def test_resumed_from_any_step_and_twice_in_an_epoch(rows: int, tmp_path: Path) -> None:
    straight = TinyRun(tmp_path / "straight", rows=rows, arguments={"save_steps": 1, "save_total_limit": None})
    assert alone(train, straight)[0] == 0
    for step in range(1, STEPS + 1):
        resume = str(straight.folder / f"checkpoint-{step}")
        run = TinyRun(tmp_path / str(step), resume, rows=rows, arguments={"save_steps": 1})
        assert alone(train, run)[0] == 0
        assert digest(run.folder) == digest(straight.folder)


def test_a_finished_run_is_finished(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    status, (_, last, seen) = alone(train, TinyRun(run))
    assert (status, last, seen) == (0, STEPS, [])
    assert digest(run) == digest(straight)
    assert losses(run) == losses(straight)


def refused(run: TinyRun) -> str:
    try:
        train(run)
    except ValueError as error:
        return str(error)
    return ""


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "other data": ({"identity": {"data": "others"}}, "data was rows and is others"),
    "another seed": ({"arguments": {"seed": 43}}, "seed was 42 and is 43"),
    "another batch size": ({"arguments": {"global_batch_size": 4}}, "batch sizes was "),
    "another model": (
        {"kind": "contrastive"},
        "fusion_vision_taps was [-1, -2] and is [-1], so it would not be the same run",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_another_run_is_not_gone_on_with(change: str, straight: Path, tmp_path: Path) -> None:
    given, message = CHANGES[change]
    resume = str(straight / "checkpoint-9")
    status, told = alone(refused, TinyRun(tmp_path / "run", resume, **given))
    assert status == 0
    assert message in told
