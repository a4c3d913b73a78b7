"""A tracker gets the log by groups and no secret; one that fails is named once."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from transformers import TrainerControl, TrainerState

from mm_utils.training import trackers
from mm_utils.training.trackers import TrackerArguments, Tracking
from tests.kit.trackers import FakeTracker


class OtherTracker(FakeTracker):
    name, requires_logging_directory = "tensorboard", True

    def __init__(self, project: str, folder: str) -> None:
        super().__init__(project, folder=folder)


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs with two trackers, and logs some rows."""
    for name, kind in (("wandb", FakeTracker), ("tensorboard", OtherTracker)):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
        for attribute, value in (("name", name), ("calls", []), ("faults", {})):
            monkeypatch.setattr(kind, attribute, value, raising=False)
    installed = [SimpleNamespace(value=name) for name in ("wandb", "tensorboard")]
    monkeypatch.setattr(trackers, "get_available_trackers", lambda: installed)
    monkeypatch.setattr(trackers, "filter_trackers", lambda names, folder: names)

    def run(**settings: Any) -> None:
        tracking, main = Tracking(TrackerArguments("wandb,tensorboard")), SimpleNamespace(is_main_process=True)
        given = SimpleNamespace(accelerator=main, name="pretrain", settings=settings, output_dir=tmp_path)
        tracking.on_start(SimpleNamespace(run=given))
        for step in range(1, 4):
            logs = {"step": step, "loss": 0.5, "eval_mean_recall": 0.25}
            tracking.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=logs)
        tracking.on_publish(None)

    return run


def test_rows_arrive_in_groups_and_no_secret(
    track: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://user:S3cr3tValue@example.org/pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train_file", url])
    track(seed=1, lr_values=[1, 2], nothing=None, api_key="S3cr3tValue")
    rows = [("log", step, {"train/loss": 0.5, "eval/mean_recall": 0.25}) for step in (1, 2, 3)]
    hidden = ("start", "--train_file", "https://***@example.org/pairs.jsonl")
    for kind, folder in ((FakeTracker, {}), (OtherTracker, {"folder": str(tmp_path)})):
        config = kind.calls.pop(2)[1]
        assert kind.calls == [("init", "pretrain", folder), hidden, *rows, ("finish",)]
        assert {**config, "api_key": ""} == {"seed": 1, "lr_values": "[1, 2]", "api_key": ""}
        assert "S3cr3tValue" not in repr(config)
    assert sys.argv[-1] == url


@pytest.mark.parametrize("fault", ["no network", "exits"])
@pytest.mark.parametrize("call", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_raises_is_named_once(
    track: Callable[..., None], caplog: pytest.LogCaptureFixture, call: str, fault: str
) -> None:
    FakeTracker.faults[call] = fault
    track()
    [warning] = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert "wandb" in warning
    assert fault in warning
    for kind, has_rows in ((OtherTracker, True), (FakeTracker, call in ("config", "finish"))):
        assert [call[1] for call in kind.calls if call[0] == "log"] == [1, 2, 3] * has_rows
