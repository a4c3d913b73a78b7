import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate import Accelerator
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker
from accelerate.utils import LoggerType

from mm_utils import tracking as module
from mm_utils.tracking import FILE, Tracking

never = threading.Event()


class FakeTracker(GeneralTracker):
    """Writes down its calls; what is in `faults` raises or, as `hang`, does not return while the test runs."""

    name = "fake"
    requires_logging_directory = False
    calls: ClassVar[list[tuple[Any, ...]]] = []
    faults: ClassVar[dict[str, str]] = {}
    raised: ClassVar[list[str]] = []

    def __init__(self, project: str, **arguments: Any) -> None:
        super().__init__()
        # Those of this test: what hung in another is let go later, and goes on.
        self.taken, self.injected, self.told = self.calls, self.faults, self.raised
        self._call("init", project, arguments)

    @property
    def tracker(self) -> None:
        return None

    def start(self) -> None:
        self._call("start", *sys.argv[1:])

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self._call("config", values)

    def log(self, values: dict[str, Any], step: int | None = None, **kwargs: Any) -> None:
        self._call("log", step, values)

    def finish(self) -> None:
        self._call("finish")

    def _call(self, name: str, *what: Any) -> None:
        fault = self.injected.get(name)
        if fault == "hang":
            never.wait(300)
        elif fault:
            self.told.append(name)
            raise ConnectionError(fault)
        self.taken.append((name, *what))


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
        return Tracking(Accelerator(log_with=list(names) or ["fake"]), "pretrain", config, tmp_path)

    yield start
    never.set()


def logged(kind: type[FakeTracker] = FakeTracker) -> list[int]:
    return [call[1] for call in kind.calls if call[0] == "log"]


def test_everything_arrives_in_order(track: Callable[..., Tracking]) -> None:
    tracking = track(seed=1, lr_values=[1, 2], nothing=None)
    for step in range(100):
        tracking.log({"loss": 1 / (1 + step)}, step=step)
    tracking.finish()
    assert FakeTracker.calls[0] == ("init", "pretrain", {})
    assert ("config", {"seed": 1, "lr_values": "[1, 2]"}) in FakeTracker.calls
    assert logged() == list(range(100))
    assert FakeTracker.calls[-1] == ("finish",)


@pytest.mark.parametrize("call", ["init", "start", "config", "log", "finish"])
def test_a_tracker_that_raises_is_named_once(
    track: Callable[..., Tracking], caplog: pytest.LogCaptureFixture, call: str
) -> None:
    FakeTracker.faults[call] = "no network"
    tracking = track("fake", "other")
    for step in range(20):
        tracking.log({"loss": 1.0}, step=step)
    tracking.finish()
    [warning] = caplog.records
    assert "fake" in warning.getMessage()
    assert "no network" in warning.getMessage()
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


def test_what_waits_is_bounded(
    track: Callable[..., Tracking], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MOST_WAITING", 10)
    FakeTracker.faults["log"] = "hang"
    tracking = track()
    for step in range(1000):
        tracking.log({"loss": 1.0}, step=step)
    tracking.finish(timeout=0.1)
    [warning] = caplog.records
    assert "10 calls wait" in warning.getMessage()


def test_a_tracker_that_comes_back_gets_the_rest(track: Callable[..., Tracking], tmp_path: Path) -> None:
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


def test_a_resumed_run_leaves_out_what_was_sent(track: Callable[..., Tracking], tmp_path: Path) -> None:
    first = track()
    for step in (10, 20, 30):
        first.log({"loss": 1.0}, step=step)
    first.finish()
    again = track(resume_from_checkpoint="latest")  # from step 10
    for step in (20, 30, 40):
        again.log({"loss": 1.0}, step=step)
    again.finish()
    assert logged() == [10, 20, 30, 30, 40]  # of the last one it is not known whether all figures were sent
    anew = track()
    anew.log({"loss": 1.0}, step=10)
    anew.finish()
    assert logged()[-1] == 10


def init_arguments() -> list[dict[str, Any]]:
    return [call[2] for call in FakeTracker.calls if call[0] == "init"]


@pytest.mark.parametrize(("name", "argument"), [(name, chosen[0]) for name, chosen in module.CHOSEN_IDS.items()])
def test_an_id_of_ours_survives_a_resume(
    track: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch, name: str, argument: str
) -> None:
    take_the_place_of(name, monkeypatch)
    for resume in (None, "latest", None):
        track(name, resume_from_checkpoint=resume).finish()
    first, resumed, other = init_arguments()
    assert first == resumed
    assert first[argument] != other[argument]
    assert first.keys() & {"resume", "mode"}, "the first start must not insist that the run exists"


@pytest.mark.parametrize(("name", "argument"), [(name, given[1]) for name, given in module.GIVEN_IDS.items()])
def test_an_id_of_the_tracker_survives_a_resume(
    track: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch, name: str, argument: str
) -> None:
    run = SimpleNamespace(info=SimpleNamespace(run_id="r1"), hash="r1", id="r1")
    monkeypatch.setattr(FakeTracker, "tracker", run)
    take_the_place_of(name, monkeypatch)
    for resume in (None, "latest", None):
        track(name, resume_from_checkpoint=resume).finish()
    assert init_arguments() == [{}, {argument: "r1"}, {}]


def take_the_place_of(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The fake is what accelerate makes of `name`, whether that is installed or not."""
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, name, FakeTracker)
    monkeypatch.setattr("accelerate.tracking._available_trackers", [LoggerType(name)])


def test_broken_memory_starts_anew(
    track: Callable[..., Tracking], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for content in ("", "[1, 2]", '{"fake": 3}', '{"fake": {"step": "x", "id": 4}}'):
        (tmp_path / FILE).write_text(content)
        tracking = track(resume_from_checkpoint="latest")
        tracking.log({"loss": 1.0}, step=1)
        tracking.finish()
        assert json.loads((tmp_path / FILE).read_text())["fake"]["step"] == 1
    assert len(logged()) == 4


def test_it_gets_no_secret(track: Callable[..., Tracking], monkeypatch: pytest.MonkeyPatch) -> None:
    url = "https://user:S3cr3tValue@example.org/pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train_file", url])
    track(train_file=url, files=[url], api_key="S3cr3tValue").finish()
    assert "S3cr3tValue" not in repr(FakeTracker.calls)
    assert ("start", "--train_file", "https://***@example.org/pairs.jsonl") in FakeTracker.calls
    assert sys.argv[-1] == url


@pytest.mark.faults
@pytest.mark.slow
@pytest.mark.parametrize("fault", ["", "log"])
def test_an_interrupted_process_sends_its_last_figures_and_ends(tmp_path: Path, fault: str) -> None:
    script = f"""
import sys, time
from accelerate import Accelerator
from mm_utils import tracking
from tests.test_tracking import FakeTracker
class Slow(FakeTracker):
    def log(self, values, step=None, **kwargs):
        time.sleep(1e6 if {bool(fault)} else 0.2)
        print("sent", step)
accelerator = Accelerator(log_with=Slow("pretrain"))
figures = tracking.Tracking(accelerator, "pretrain", {{}}, {str(tmp_path)!r})
for step in range(5):
    figures.log({{"loss": 1.0}}, step=step)
sys.exit(143)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[1]
    )
    assert done.returncode == 143, done.stderr
    assert done.stdout.count("sent") == (0 if fault else 5)
