import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from transformers import TrainerControl, TrainerState

from mm_utils.extras.trackers import tracking as module
from mm_utils.extras.trackers.tracking import TrackerArguments, Tracking
from tests.kit.trackers import FakeTracker, never


class OtherTracker(FakeTracker):
    name = "other"
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}


@pytest.fixture
def track(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Tracking]]:
    """Starts a Tracking of one or more of the fake trackers."""
    never.clear()
    for kind in (FakeTracker, OtherTracker):
        monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, kind.name, kind)
        monkeypatch.setattr(kind, "calls", [])
        monkeypatch.setattr(kind, "faults", {})
        monkeypatch.setattr(kind, "raised", [])

    def start(*names: str, **config: Any) -> Tracking:
        tracking = Tracking(list(names) or ["fake"])
        tracking.start("pretrain", config, tmp_path)
        return tracking

    yield start
    never.set()


def logged(kind: type[FakeTracker] = FakeTracker) -> list[int]:
    return [call[1] for call in kind.calls if call[0] == "log"]


def test_logs_arrive_in_order_with_their_step(track: Callable[..., Tracking]) -> None:
    tracking = track(seed=1, lr_values=[1, 2], nothing=None)
    for step in range(100):
        logs = {"step": step, "epoch": 0.5, "loss": 1 / (1 + step)}
        tracking.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=logs)
    tracking.finish()
    assert FakeTracker.calls[:3] == [
        ("init", "pretrain", {}),
        ("start", *sys.argv[1:]),
        ("config", {"seed": 1, "lr_values": "[1, 2]"}),
    ]
    assert logged() == list(range(100))
    assert FakeTracker.calls[4] == ("log", 1, {"epoch": 0.5, "loss": 0.5})
    assert FakeTracker.calls[-1] == ("finish",)


@pytest.mark.parametrize("fault", ["no network", "exits"])
@pytest.mark.parametrize("call", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_raises_is_named_once(
    track: Callable[..., Tracking], caplog: pytest.LogCaptureFixture, call: str, fault: str
) -> None:
    FakeTracker.faults[call] = fault
    tracking = track("fake", "other")
    for step in range(20):
        tracking.log({"loss": 1.0}, step=step)
    tracking.finish()
    [warning] = caplog.records
    assert "fake" in warning.getMessage()
    assert fault in warning.getMessage()
    assert "metrics.jsonl" in warning.getMessage()
    assert logged(OtherTracker) == list(range(20)), "the other tracker does not suffer"
    assert logged() == (list(range(20)) if call in ("config", "finish") else [])


@pytest.mark.parametrize("call", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_hangs_stops_nothing(
    track: Callable[..., Tracking], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    FakeTracker.faults[call] = "hang"
    tracking = track("fake", "other")
    began = time.monotonic()
    for step in range(20):
        tracking.log({"loss": 1.0}, step=step)
    tracking.finish(timeout=2.0)
    assert time.monotonic() - began < 30
    [warning] = caplog.records
    assert "within 2 seconds" in warning.getMessage()
    assert len(logged(OtherTracker)) == 20


def test_the_queue_of_a_tracker_is_bounded(
    track: Callable[..., Tracking], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MAX_QUEUED", 10)
    FakeTracker.faults["log"] = "hang"
    tracking = track()
    for step in range(1000):
        tracking.log({"loss": 1.0}, step=step)
    tracking.finish(timeout=0.1)
    [warning] = caplog.records
    assert "10 calls wait" in warning.getMessage()


def test_a_tracker_that_recovers_gets_later_steps(track: Callable[..., Tracking]) -> None:
    FakeTracker.faults["log"] = "no network"
    tracking = track()
    tracking.log({"loss": 1.0}, step=1)
    until = time.monotonic() + 60
    while "log" not in FakeTracker.raised and time.monotonic() < until:
        time.sleep(0.01)
    FakeTracker.faults.clear()
    tracking.log({"loss": 1.0}, step=2)
    tracking.finish()
    assert logged() == [2]


def test_a_tracker_gets_no_secret(track: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://user:S3cr3tValue@example.org/pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train_file", url])
    track(train_file=url, files=[url], api_key="S3cr3tValue").finish()
    assert "S3cr3tValue" not in repr(FakeTracker.calls)
    assert ("start", "--train_file", "https://***@example.org/pairs.jsonl") in FakeTracker.calls
    assert sys.argv[-1] == url


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "log"])
def test_an_interrupted_process_sends_its_last_logs_and_ends(tmp_path: Path, fault: str) -> None:
    script = f"""
import sys, time
from accelerate import Accelerator
from mm_utils.extras.trackers.tracking import TrackerArguments, Tracking
from tests.extras.trackers.test_tracking import FakeTracker
class Slow(FakeTracker):
    def log(self, values, step=None, **kwargs):
        time.sleep(1e6 if {bool(fault)} else 0.2)
        print("sent", step)
tracking = Tracking(Slow("pretrain"))
tracking.start("pretrain", {{}}, {str(tmp_path)!r})
for step in range(5):
    tracking.log({{"loss": 1.0}}, step=step)
sys.exit(143)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout.count("sent") == (0 if fault else 5)


def test_a_run_has_the_name_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(FakeTracker):
        calls: ClassVar[list[tuple[Any, ...]]] = []

    class InFolder(FakeTracker):
        requires_logging_directory = True
        calls: ClassVar[list[tuple[Any, ...]]] = []

        def __init__(self, project: str, folder: str) -> None:
            super().__init__(project, folder=folder)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "wandb", Named)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", InFolder)
    monkeypatch.setattr(module, "filter_trackers", lambda names, folder: names)
    for run_name in (None, "first"):
        tracking = Tracking(["wandb", "tensorboard"], run_name)
        tracking.start("pretrain", {}, tmp_path)
        tracking.finish()
    named, in_folder = ([call[1:] for call in kind.calls if call[0] == "init"] for kind in (Named, InFolder))
    assert named == [("pretrain", {}), ("pretrain", {"name": "first"})]
    assert in_folder == [("pretrain", {"folder": str(tmp_path)}), ("pretrain/first", {"folder": str(tmp_path)})]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"run_name": "first"}, "--run_name is first; no tracker of --report_to (none) takes it"),
        ({"run_name": "first", "report_to": "none"}, "--run_name is first; no tracker of --report_to (none) takes it"),
        ({"run_name": "../first", "report_to": "all"}, "--run_name is '../first'; that is the path of a folder"),
    ],
)
def test_a_name_that_nothing_takes_is_refused(flags: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        TrackerArguments(**flags)
