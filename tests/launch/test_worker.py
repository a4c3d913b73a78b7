"""What a worker of Ray does, without Ray: the folder, the script, the callback; and the error where Ray is missing."""

import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tqdm.auto import tqdm
from transformers import TrainerControl, TrainerState

from mm_utils.arguments import LAUNCH_VARIABLE
from mm_utils.launch import worker
from mm_utils.launch.worker import RayCallback, load_main, prepare
from mm_utils.reliability.signals import Interruption
from mm_utils.run import restarts

ROOT = Path(__file__).parents[2]


@pytest.fixture
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process as it was before `prepare`."""
    folder, argv, begin = Path.cwd(), sys.argv, tqdm.__init__
    for name in (restarts.LAUNCHER_VARIABLE, LAUNCH_VARIABLE, "ACCELERATE_USE_CPU"):
        monkeypatch.setenv(name, "")
    yield
    os.chdir(folder)
    sys.argv, tqdm.__init__ = argv, begin


def task(folder: Path, script: str = "train.py") -> dict[str, Any]:
    path = folder / script
    named = {"launch": "ray:mine", "launcher": "python scripts/launch_ray.py --num_workers 2"}
    return {"script": str(path), "argv": ["--seed", "1"], "folder": str(folder), "on_cpu": True, **named}


@pytest.mark.usefixtures("restored")
def test_a_worker_is_where_the_command_was_given(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prepare(task(tmp_path))
    assert Path.cwd() == tmp_path
    assert sys.argv == ["train.py", "--seed", "1"]
    assert restarts.launcher_names() == ["ray:mine"]
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    for _ in tqdm(range(3), disable=False):
        pass
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("restored")
def test_a_machine_without_the_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"gone; a machine of Ray cannot enter it: No such file"):
        prepare(task(tmp_path / "gone"))


def test_restarts_of_a_launch_are_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(restarts.LAUNCHER_VARIABLE, "ray:first")
    launch = restarts.launcher_names()
    assert restarts.resume_name(None, tmp_path, launch) is None
    restarts.record_start(tmp_path, {}, launch)
    assert json.loads((tmp_path / "environment.json").read_text())[0]["launch"] == ["ray:first"]
    assert restarts.resume_name(None, tmp_path, launch) == "latest"
    monkeypatch.setenv(restarts.LAUNCHER_VARIABLE, "ray:second")
    assert restarts.resume_name(None, tmp_path, restarts.launcher_names()) is None


def test_a_script_is_found_by_its_path(tmp_path: Path) -> None:
    for name in ("pretrain", "finetune"):
        main = load_main(str(ROOT / f"scripts/{name}.py"))
        assert (main.__name__, main.__module__) == ("main", f"scripts.{name}")
    for name in ("embed", "eval_retrieval", "eval_zero_shot", "mine_negatives"):
        assert callable(load_main(str(ROOT / f"scripts/{name}.py")))
    for name in ("export", "search", "prepare_data"):  # on several processes they would write over each other
        with pytest.raises(ValueError, match=r"has no main\(argv, callbacks\)"):
            load_main(str(ROOT / f"scripts/{name}.py"))
    (tmp_path / "other.py").write_text("def main(argv=None):\n    callbacks = argv\n")
    with pytest.raises(ValueError, match=r"other\.py; it has no main\(argv, callbacks\)"):
        load_main(str(tmp_path / "other.py"))


class Calls:
    """Ray's two functions, and the events of a run of one process."""

    def __init__(self, preempted_at: int = 99):
        self.rows: list[dict[str, Any]] = []
        self.looks: list[int] = []
        self.state = TrainerState(max_steps=100)
        self.preempted_at = preempted_at
        self.callback = RayCallback(self.rows.append, self.is_preempted)
        self.event("on_train_begin")

    def is_preempted(self) -> bool:
        self.looks.append(self.state.global_step)
        return self.state.global_step >= self.preempted_at

    def event(self, name: str, **values: Any) -> None:
        model = SimpleNamespace(device=torch.device("cpu"))
        getattr(self.callback, name)(None, self.state, TrainerControl(), model=model, **values)

    def step(self) -> None:
        self.state.global_step += 1
        self.event("on_step_end")


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the time forward."""
    now = [0.0]
    monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: now[0]))

    def forward(seconds: float) -> None:
        now[0] += seconds

    return forward


def test_evaluations_are_reported_at_once_and_training_rows_after_seconds(clock: Callable[[float], None]) -> None:
    calls = Calls()
    calls.event("on_log", logs={"step": 0, "eval_mean_recall": 0.1})
    clock(worker.LOOK_SECONDS - 1)
    calls.event("on_log", logs={"step": 1, "loss": 3.0})
    clock(1.1)
    calls.event("on_log", logs={"step": 2, "loss": 2.0})
    calls.event("on_log", logs={"step": 3, "loss": 1.0})
    assert [row["step"] for row in calls.rows] == [0, 2]


def test_a_preemption_stops_the_run_as_a_signal_does(caplog: pytest.LogCaptureFixture) -> None:
    calls = Calls(preempted_at=2)
    with Interruption() as signals, caplog.at_level(logging.WARNING):
        calls.step()
        assert (signals.number, calls.callback.has_stopped) == (0, False)
        calls.step()
        assert (signals.number, calls.callback.has_stopped) == (signal.SIGTERM, True)
        calls.step()
    assert calls.looks == [1, 2]
