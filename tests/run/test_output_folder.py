"""The output folder of a run: one run at a time writes to it, and folders that hold other things are refused."""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mm_utils.distributed import RunError
from mm_utils.run import output_folder
from mm_utils.training.arguments import TrainingArguments
from tests.kit.processes import PATIENCE, fork, is_alive, read_report

if sys.platform == "win32":
    pytest.skip("POSIX processes", allow_module_level=True)


def lock_and_report(folder: Path) -> Callable[[Callable[[str], Any]], None]:
    return lambda report: report(output_folder.lock_folder(folder, 0) or "locked")


def test_a_second_run_is_refused_with_the_name_of_the_first(tmp_path: Path, children: list[int]) -> None:
    pid, reading = fork(children, lock_and_report(tmp_path))
    assert read_report(reading) == "locked\n"
    problem = output_folder.lock_folder(tmp_path, 0.1)
    assert problem is not None
    assert (
        f"--output_dir is {tmp_path}; a run is writing there: process {pid} on {os.uname().nodename}, since" in problem
    )
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [output_folder.lock_folder(tmp_path, 0) for _ in range(2)] == [None, None]  # its own lock is no other's
    assert f"process {os.getpid()} on" in (tmp_path / ".lock").read_text()


def test_a_run_that_was_done_meanwhile_is_not_replaced(tmp_path: Path, children: list[int]) -> None:
    """Two starts at once: the second waits for the lock of the first, and looks into the folder again."""

    def hold(report: Callable[[str], Any]) -> None:
        report(output_folder.lock_folder(tmp_path, 0) or "locked")
        time.sleep(0.5)
        (tmp_path / "metrics.jsonl").write_text("{}")
        os._exit(0)

    _, reading = fork(children, hold)
    assert read_report(reading) == "locked\n"
    assert "already holds a run" in problem(tmp_path)
    assert output_folder.lock_folder(tmp_path, PATIENCE) is None


def test_the_workers_of_a_killed_run_do_not_keep_its_lock(tmp_path: Path, children: list[int]) -> None:
    def run(report: Callable[[str], Any]) -> None:
        output_folder.lock_folder(tmp_path, 0)
        worker = os.fork()
        if worker == 0:
            time.sleep(2 * PATIENCE)
        report(str(worker))

    pid, reading = fork(children, run)
    worker = int(read_report(reading))
    children.append(worker)
    assert output_folder.lock_folder(tmp_path, 0) is not None
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    assert is_alive(worker)
    assert output_folder.lock_folder(tmp_path, 0) is None


def test_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(output_folder.fcntl, "lockf", refuse)
    assert output_folder.lock_folder(tmp_path, 0) is None


# -- whose files they are -----------------------------------------------------------------------------------------------
RUNS_OWN = ("metrics.jsonl", "model.safetensors", "README.md", "config.yaml", "retrieval.png", "tokenizer.json",
            "dual_encoder/config.json", "checkpoint-4/run.json", "checkpoint-2.superseded/run.json")  # fmt: skip
OTHERS = ("README.md", "config.yaml", "tokenizer.json", "dual_encoder/notes.txt")
FOREIGN = ("thesis.txt", "checkpoint-notes/thesis.txt", "checkpoint-4b", "my.model", "photos/README.md")


def write_files(folder: Path, names: Iterable[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("{}")


def files_in(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()} - {".lock"}


def problem(folder: Path) -> str:
    """Why a start cannot have a folder; "" if it can."""
    try:
        output_folder.claim_folder("pretrain", TrainingArguments(output_dir=str(folder)), {}, [])
        return ""
    except RunError as error:
        return str(error)


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (FOREIGN, ""),
        ((*RUNS_OWN, *FOREIGN), "it already holds a run"),
        *(((name,), f"it holds {name.partition('/')[0]}, which no run of this project wrote") for name in OTHERS),
    ],
)
def test_a_folder_with_files_is_used_if_nothing_of_others_is_replaced(
    names: Sequence[str], said: str, tmp_path: Path
) -> None:
    write_files(tmp_path, names)
    assert problem(tmp_path).startswith(f"--output_dir is {tmp_path}; {said}" if said else "")
    assert bool(problem(tmp_path)) == bool(said)
    assert files_in(tmp_path) == set(names)


def test_a_run_to_resume_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RunError, match="of which run, --output_dir says"):
        output_folder.claim_folder("pretrain", TrainingArguments(resume_from_checkpoint="latest"), {}, [])


@pytest.mark.parametrize(
    ("folder", "config", "said"),
    [
        ("/", {}, "or the root of a disk. Give a folder of its own"),
        ("home", {}, "it is your home folder"),
        ("data", {"train_file": "data/pairs.jsonl"}, "--train_file is data/pairs.jsonl, and"),
        (".", {"train_file": "pairs.jsonl"}, "--train_file is pairs.jsonl, and"),
        ("images/run", {"dataset_name": "images"}, "--dataset_name is images"),
        ("other/../images", {"dataset_name": "images"}, "--dataset_name is images"),
        ("data/run", {"train_file": "data/pairs.jsonl", "dataset_name": "user/set", "seed": 1}, ""),
        ("images/tuned", {"model_name_or_path": "images"}, ""),
        ("data", {"train_file": "hf://data/x.parquet"}, ""),
    ],
)
def test_a_folder_of_other_things_is_no_output_folder(
    folder: str, config: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "images").mkdir()
    found = output_folder.misplaced(Path(folder), config) or ""
    assert said in found
    assert bool(found) == bool(said)
