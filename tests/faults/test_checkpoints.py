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

    def __init__(self, step: int):
        self.step, self.weights = step, {"weight": torch.full((64,), float(step))}

    def write(self, folder: Path) -> None:
        save_file(self.weights, folder / "model.safetensors")
        save_file({"moment": self.weights["weight"] / 2}, folder / "optimizer.safetensors")
        (folder / STATE_FILE).write_text(json.dumps({"global_step": self.step}))


def save(writer: CheckpointWriter, step: int) -> int:
    snapshot: Any = Copied(step)
    writer.start(step, snapshot, {1})
    writer.wait()
    return writer.saved()


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
    count, real = itertools.count(1), os.fsync

    def strike() -> None:
        if threading.current_thread().name == "checkpoint" and next(count) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def fsync(handle: Any) -> None:
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


DAMAGES: dict[str, Callable[[Path, Path], object]] = {
    "cut in half": lambda path, _: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
    "missing": lambda path, _: path.unlink(),
    "with a bit flipped": lambda path, _: flip(path, path.stat().st_size // 2),
    "with a bit of its end flipped": lambda path, _: flip(path, path.stat().st_size - 2),
    "of another step": lambda path, older: shutil.copy(older, path),
}
FILES = [f"{name}.safetensors" for name in ("model", "optimizer", "ema")]
FILES += [STATE_FILE, "run.json", "config.json", MANIFEST]
SAME = ("run.json", "config.json")  # in all checkpoints of a run
CASES = [case for case in itertools.product(FILES, DAMAGES) if case[0] not in SAME or case[1] != "of another step"]


@pytest.mark.parametrize(("name", "damage"), CASES)
def test_a_damaged_file_is_named_and_the_checkpoint_before_is_taken(
    name: str, damage: str, straight: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    DAMAGES[damage](run / f"checkpoint-{STEPS}" / name, straight / "checkpoint-9" / name)
    assert find_checkpoint("latest", run) == run / "checkpoint-9"
    assert f"checkpoint-{STEPS} is damaged and passed over: {'' if name == MANIFEST else name}" in caplog.text
    with pytest.raises(ValueError, match="it is damaged: " if name == MANIFEST else name):
        find_checkpoint(str(run / f"checkpoint-{STEPS}"), run)


def test_what_else_lies_about_is_neither_read_nor_removed(straight: Path, tmp_path: Path) -> None:
    run = shutil.copytree(straight, tmp_path / "run")
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/file").touch()
    (run / "checkpoint-11").symlink_to(tmp_path / "precious")
    shutil.copytree(run / f"checkpoint-{STEPS}", run / ".checkpoint-12.tmp")
    (run / "model.safetensors").unlink()
    assert alone(train, TinyRun(run))[0] == 0
    assert digest(run) == digest(straight)
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
    with pytest.raises(ValueError, match="would not be the same run") as caught:
        train(run)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"identity": {"data": "others"}}, "data was rows and is others"),
        ({"arguments": {"seed": 43}}, "seed was 42 and is 43"),
        ({"arguments": {"global_batch_size": 4}}, "batch sizes was "),
        ({"kind": "contrastive"}, "fusion_vision_taps was [-1, -2] and is [-1], so it would not be the same run"),
    ],
)
def test_another_run_is_not_gone_on_with(change: dict[str, Any], message: str, straight: Path, tmp_path: Path) -> None:
    status, told = alone(refused, TinyRun(tmp_path / "run", str(straight / "checkpoint-9"), **change))
    assert status == 0
    assert message in told
