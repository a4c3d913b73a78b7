"""A tracker gets the log by groups and no secret; one that fails is named once."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from transformers import TrainerControl, TrainerState

from mm_utils.training import trackers
from mm_utils.training.trackers import TrackerArguments, Tracking
from tests.kit.trackers import FakeTracker


class OtherTracker(FakeTracker):
    name = "tensorboard"
    requires_logging_directory = True
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}

    def __init__(self, project: str, folder: str) -> None:
        super().__init__(project, folder=folder)


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs with two trackers, and logs some rows."""
    for name, kind in (("wandb", FakeTracker), ("tensorboard", OtherTracker)):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, kind)
        monkeypatch.setattr(kind, "calls", [])
        monkeypatch.setattr(kind, "faults", {})
    monkeypatch.setattr(FakeTracker, "name", "wandb")
    monkeypatch.setattr(trackers, "filter_trackers", lambda names, folder: names)
    monkeypatch.setattr(
        trackers, "get_available_trackers", lambda: [SimpleNamespace(value=n) for n in ("wandb", "tensorboard")]
    )

    def run(**settings: Any) -> None:
        tracking = Tracking(TrackerArguments("wandb,tensorboard"))
        main = SimpleNamespace(is_main_process=True)
        context = SimpleNamespace(
            run=SimpleNamespace(accelerator=main, name="pretrain", settings=settings, output_dir=tmp_path)
        )
        tracking.on_start(context)
        for step in range(1, 4):
            logs = {"step": step, "loss": 0.5, "eval_mean_recall": 0.25}
            tracking.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=logs)
        tracking.on_publish(context)

    return run


def logged(kind: type[FakeTracker]) -> list[int]:
    return [call[1] for call in kind.calls if call[0] == "log"]


def test_rows_arrive_in_groups(track: Callable[..., None], tmp_path: Path) -> None:
    track(seed=1, lr_values=[1, 2], nothing=None)
    row = {"train/loss": 0.5, "eval/mean_recall": 0.25}
    rows = [("log", step, row) for step in (1, 2, 3)]
    start = [("start", *sys.argv[1:]), ("config", {"seed": 1, "lr_values": "[1, 2]"})]
    assert FakeTracker.calls == [("init", "pretrain", {}), *start, *rows, ("finish",)]
    assert OtherTracker.calls == [("init", "pretrain", {"folder": str(tmp_path)}), *start, *rows, ("finish",)]


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
    assert logged(OtherTracker) == [1, 2, 3], "the other tracker does not suffer"
    assert logged(FakeTracker) == ([1, 2, 3] if call in ("config", "finish") else [])


def test_a_tracker_gets_no_secret(track: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://user:S3cr3tValue@example.org/pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train_file", url])
    track(train_file=url, files=[url], api_key="S3cr3tValue")
    assert "S3cr3tValue" not in repr(FakeTracker.calls)
    assert ("start", "--train_file", "https://***@example.org/pairs.jsonl") in FakeTracker.calls
    assert sys.argv[-1] == url
