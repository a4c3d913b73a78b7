"""Several starts of one run: their list, what a restart by the launcher resumes, and restarts that gain nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from mm_utils.run import restarts
from tests.kit.processes import PATIENCE, begin_training, launched

ROOT = Path(__file__).parents[2]


def test_all_attempts_of_a_launch_have_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    first = launched(monkeypatch, "a", 0)
    assert len(first) == 1
    assert launched(monkeypatch, "a", 2) == first
    assert launched(monkeypatch, "b", 0) != first
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE")
    assert restarts.launcher_names() == []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "job-7")
    assert restarts.launcher_names() == [f"{os.uname().nodename}:job-7"]
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert restarts.launcher_names() == []


def test_starts_are_listed_and_those_of_a_launch_are_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    restarts.record_start(tmp_path, {"python": "3.10"}, [])
    begin_training(tmp_path, 0)
    launch = launched(monkeypatch, "a")
    restarts.record_start(tmp_path, {"python": "3.11"}, launch)
    starts = json.loads((tmp_path / "environment.json").read_text())
    assert [start["python"] for start in starts] == ["3.10", "3.11"]
    assert starts[0]["resumed_from"] == 0
    assert restarts.earlier_starts(tmp_path, launch) == starts[1:]
    assert restarts.earlier_starts(tmp_path, []) == []
    assert [path.name for path in tmp_path.iterdir()] == ["environment.json"]


@pytest.mark.parametrize("text", ["", "[{", "{}", "[1, 2]", "\0"])
def test_a_damaged_list_is_begun_anew(text: str, tmp_path: Path) -> None:
    (tmp_path / "environment.json").write_text(text)
    assert restarts.earlier_starts(tmp_path) == []
    restarts.record_start(tmp_path, {"a": 1}, [])
    begin_training(tmp_path, 3)
    assert [start["resumed_from"] for start in restarts.earlier_starts(tmp_path)] == [3]


def test_the_checkpoint_that_a_restart_resumes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = launched(monkeypatch, "a")
    assert restarts.resume_name(None, tmp_path, launch) is None
    assert restarts.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    restarts.record_start(tmp_path, {}, launch)
    assert restarts.resume_name(None, tmp_path, launch) == "latest"
    (tmp_path / "checkpoint-9").mkdir()  # of another run, as this one has not begun to train
    assert restarts.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    begin_training(tmp_path, 4)
    assert restarts.resume_name("there/checkpoint-4", tmp_path, launch) == "latest"
    (tmp_path / "checkpoint-9").rmdir()
    assert restarts.resume_name("there/checkpoint-4", tmp_path, launch) == "there/checkpoint-4"
    assert restarts.resume_name(None, tmp_path, launched(monkeypatch, "b")) is None


def start_at(folder: Path, launch: list[str], step: int | None) -> None:
    restarts.record_start(folder, {}, launch)
    if step is not None:
        begin_training(folder, step)


@pytest.mark.parametrize(
    ("steps", "stops"),
    [
        ((0, 0, 0), True),
        ((0, 4, 4, 4), True),
        ((4, None, 4), True),
        ((4, None, None, 4), True),
        ((0, 4, 4), False),
        ((0, 4, 8), False),
        ((0, 0, 4), False),
        ((0, None, 4), False),
    ],
)
def test_restarts_that_gain_no_step_end(
    steps: tuple[int | None, ...], stops: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for attempt, step in enumerate(steps[:-1]):
        start_at(tmp_path, launched(monkeypatch, "a", attempt), step)
    launch = launched(monkeypatch, "a", len(steps) - 1)
    if stops:
        with pytest.raises(
            ValueError, match=rf"no step was gained in 2 restarts: each went on from step {steps[-1]}\."
        ):
            start_at(tmp_path, launch, steps[-1])
    else:
        start_at(tmp_path, launch, steps[-1])
    assert restarts.earlier_starts(tmp_path)[-1]["resumed_from"] == steps[-1]


def test_without_a_list_nothing_is_recorded(tmp_path: Path) -> None:
    begin_training(tmp_path, 4)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_launcher_that_restarts_finds_the_folder_and_ends_when_nothing_is_gained(
    tmp_path: Path, children: list[int]
) -> None:
    """The first attempt saves at step 2 and dies, as do all that follow."""
    script = tmp_path / "train.py"
    script.write_text(
        "import json, os\n"
        "from pathlib import Path\n"
        "from mm_utils.run.start import run_script\n"
        "from tests.run.test_restarts import begin_training\n"
        "from tests.run.test_start import start\n"
        "def main():\n"
        "    args = start(None)\n"
        "    folder = Path(args.output_dir)\n"
        "    found = [path.name for path in folder.glob('checkpoint-*')]\n"
        "    with open('attempts.jsonl', 'a') as file:\n"
        "        file.write(json.dumps([str(folder), args.resume_from_checkpoint, found]) + '\\n')\n"
        "    begin_training(folder, 2)\n"
        "    (folder / 'checkpoint-2').mkdir(exist_ok=True)\n"
        "    os._exit(9)\n"
        "run_script(main)\n"
    )
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1"}
    command = [
        sys.executable, "-m", "torch.distributed.run", "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0",
    ]  # fmt: skip
    (tmp_path / "outputs" / "pretrain-1").mkdir(parents=True)  # another run's
    launcher = subprocess.Popen(
        [*command, "--max_restarts", "2", str(script)],
        cwd=tmp_path, env=variables, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    children.append(launcher.pid)
    _, messages = launcher.communicate(timeout=10 * PATIENCE)
    assert launcher.returncode != 0
    attempts = [json.loads(line) for line in (tmp_path / "attempts.jsonl").read_text().splitlines()]
    assert attempts[0] == ["outputs/pretrain-2", None, []]
    assert attempts[1:] == [["outputs/pretrain-2", "latest", ["checkpoint-2"]]] * 2
    assert "no step was gained in 2 restarts: each went on from step 2." in messages
    starts = json.loads((tmp_path / "outputs" / "pretrain-2" / "environment.json").read_text())
    assert [start["restarts"] for start in starts] == [0, 1, 2]
