"""Starts of a run: its folder, the files written there, and what a restart resumes."""

import contextlib
import json
import logging
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.distributed import RunError
from mm_utils.run import output_folder
from mm_utils.run.start import RunArguments, start_run
from mm_utils.training.arguments import TrainingArguments
from tests.kit.processes import begin_training, fork, launched, read_report
from tests.kit.ranks import let_accelerate_find_ranks, run_on_ranks


def start(folder: Path | None, **values: Any) -> TrainingArguments:
    """Start a run; return its training arguments."""
    args = TrainingArguments(output_dir=None if folder is None else str(folder), **values)
    return start_run("pretrain", Parsed([args, RunArguments()])).args


def starts(folder: Path) -> list[dict[str, Any]]:
    return json.loads((folder / "environment.json").read_text())


def test_a_start_writes_its_arguments_and_its_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["pretrain.py", "--hub_token", "hf_canaryabcdefghijkl", "--seed", "7"])
    start(tmp_path / "out", seed=7)
    [about] = starts(tmp_path / "out")
    assert about["command"] == "pretrain.py --hub_token *** --seed 7"
    assert about["hosts"] == [os.uname().nodename]
    assert (about["num_processes"], about["devices"]) == (1, ["cpu"])
    assert {"time", "python", "platform", "torch", "transformers", "accelerate", "datasets", "driver"} <= set(about)
    assert about["commit"] is None or len(about["commit"].removesuffix("-dirty")) == 40
    assert yaml.safe_load((tmp_path / "out/config.yaml").read_text())["seed"] == 7


def test_starts_in_one_folder_are_listed_together(tmp_path: Path) -> None:
    start(tmp_path)
    start(tmp_path)
    assert len(starts(tmp_path)) == 2


def test_two_runs_in_one_folder(tmp_path: Path, children: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    pid, reading = fork(children, lambda report: report(output_folder.lock_folder(tmp_path) or "locked"))
    assert read_report(reading) == "locked\n"
    monkeypatch.setattr(output_folder.lock_folder, "__defaults__", (0.1,))
    with pytest.raises(RunError, match=f"a run is writing there: process {pid} on"):
        start(tmp_path)
    assert not (tmp_path / "config.yaml").exists()


def test_a_folder_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file" / "out", tmp_path / "file", tmp_path / "\0"):
        with pytest.raises(RunError, match=r"it cannot be written: .* Give a folder that can"):
            start(folder)
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(RunError, match="it is your home folder"):
        start(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    ("options", "reason"), [("ro", "Read-only file system"), ("size=16k", "No space left on device")]
)
def test_a_disk_that_is_read_only_or_full(options: str, reason: str, tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(tmp_path)]
    if subprocess.run(command, capture_output=True, check=False).returncode:
        pytest.skip("mounting takes more rights")
    try:
        with contextlib.suppress(OSError), open(tmp_path / "other", "wb", buffering=0) as file:
            file.write(b"x" * 2**20)
        with pytest.raises(RunError, match=rf"^--output_dir is {tmp_path}/out; it cannot be written: {reason}\."):
            start(tmp_path / "out")
    finally:
        output_folder.unlock()
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_a_restart_resumes_in_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    launched(monkeypatch, "a", 0)
    first = start(None)
    assert (first.output_dir, first.resume_from_checkpoint) == ("outputs/pretrain-1", None)
    Path("outputs/pretrain-1/checkpoint-5").mkdir()
    launched(monkeypatch, "a", 1)
    again = start(None)
    assert (again.output_dir, again.resume_from_checkpoint) == ("outputs/pretrain-1", "latest")
    assert Path("outputs/pretrain-1/checkpoint-5").exists()
    launched(monkeypatch, "b", 0)
    other = start(None)
    assert (other.output_dir, other.resume_from_checkpoint) == ("outputs/pretrain-2", None)


def test_a_restart_takes_no_other_runs_folder_for_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first attempt died before it came to its folder."""
    launched(monkeypatch, "a", 0)
    start(tmp_path)
    (tmp_path / "checkpoint-5").mkdir()
    launched(monkeypatch, "b", 1)
    with pytest.raises(RunError, match="it already holds a run"):
        start(tmp_path)


def test_devices_are_checked_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    with pytest.raises(ValueError, match="fp16 needs a GPU"):
        start(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def start_on_rank(root: str) -> list[Any]:
    """Two starts on each of two ranks: one with other arguments on one rank, and one that is right."""
    let_accelerate_find_ranks()
    os.chdir(root)
    logging.disable()
    try:
        start(None, seed=distributed.rank())
    except ValueError as error:
        message = str(error)
    args = start(None)
    distributed.check_equal_on_all_ranks({"the data": "abc"})
    begin_training(Path(str(args.output_dir)), 3)
    return [message, args.output_dir, sorted(os.listdir("outputs")), starts(Path(str(args.output_dir)))]


def test_ranks_start_together(tmp_path: Path) -> None:
    first, second = run_on_ranks(2, start_on_rank, str(tmp_path))
    message, folder, made, [about] = first
    assert "--seed is 0 on rank 0 and 1 on rank 1; it differs between processes" in message
    assert second[0] == message
    assert second[1] == folder == "outputs/pretrain-1"
    assert made == ["pretrain-1"]
    assert (about["num_processes"], about["devices"]) == (2, ["cpu", "cpu"])
    assert about["resumed_from"] == 3
