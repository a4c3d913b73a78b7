"""A run that does not learn is warned once for each cause; a tracker gets the log and no secret, and one that fails is named once."""

import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from torch.nn.functional import normalize
from transformers import TrainerControl, TrainerState

from mm_utils.distributed import RunError
from mm_utils.objectives.contrastive import sigmoid_loss
from mm_utils.objectives.losses import gather_batch, info_nce
from mm_utils.training import trackers
from mm_utils.training.arguments import OptimizerArguments, TrainingArguments
from mm_utils.training.callbacks import ProgressBar, Throughput
from mm_utils.training.trackers import Tracking
from mm_utils.training.warnings import CollapseWarning, chance_loss
from tests.kit.hub import FakeTracker

CHANCE = math.log(64)


@pytest.mark.parametrize("pairs", [2, 7, 64])
def test_chance_is_the_loss_of_embeddings_that_are_all_alike(pairs: int) -> None:
    rows = normalize(torch.ones(pairs, 8), dim=1)
    batch = gather_batch(rows, rows, torch.arange(2 * pairs).view(pairs, 2))
    scale = torch.tensor(10.0)
    assert info_nce(rows, rows, scale, batch).item() == pytest.approx(chance_loss(pairs, sigmoid=False), rel=1e-5)
    best = -math.log(pairs - 1) - 10.0
    found = [sigmoid_loss(rows, rows, scale, torch.tensor(best + off), batch).item() for off in (-0.1, 0.0, 0.1)]
    assert found[1] == pytest.approx(chance_loss(pairs, sigmoid=True), rel=1e-5)
    assert found[1] == min(found)


@pytest.mark.parametrize(("device", "use", "shown"), [("cuda", 37, "37% gpu"), ("cuda", None, ""), ("cpu", 37, "")])
def test_the_log_says_how_busy_the_gpu_is(
    device: str, use: int | None, shown: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def utilization(_):
        if use is None:
            raise ModuleNotFoundError("pynvml does not seem to be installed or it can't be imported.")
        return use

    monkeypatch.setattr(torch.cuda, "utilization", utilization)
    state = TrainerState()
    rates = Throughput(torch.device(device))
    bar = ProgressBar()
    bar.bar = posted = SimpleNamespace(set_postfix_str=lambda text: setattr(posted, "text", text))
    rates.on_step_begin(None, state, TrainerControl(), data_wait=0.0)
    logs = {"loss": 1.0}
    for callback in (rates, bar):
        callback.on_log(None, state, TrainerControl(), logs=logs)
    assert logs.get("gpu") == (0.37 if shown else None)
    assert posted.text.partition("wait")[2].strip(", ") == shown


@pytest.mark.parametrize("medium", ["image", "sound", "clip"])
def test_the_figures_of_an_evaluation_are_called_by_their_medium(medium: str) -> None:
    bar = ProgressBar()
    lines = []
    data = SimpleNamespace(medium=medium)
    bar.bar = SimpleNamespace(write=lines.append)
    logs = {"eval_text_to_image_recall@1": 0.25, "eval_rerank_image_to_text_recall@1": 0.5, "eval_image_spread": 0.7}
    bar.on_log(None, TrainerState(), TrainerControl(), logs=logs, data=data)
    assert lines == [f"step 0: text to {medium} recall@1 0.250, rerank {medium} to text recall@1 0.500"]


HEALTHY = {"loss": 2.6, "contrastive_loss": 2.0, "grad_norm": 5.0}
STUCK = HEALTHY | {"contrastive_loss": CHANCE}
COLLAPSED = HEALTHY | {"contrastive_loss": CHANCE - 0.001, "grad_norm": 6e-5}
POINT = {"eval_image_spread": 1e-4, "eval_text_spread": 1e-4}


def read(rows: list[dict[str, float]], begin: int = 30, history: int = 0, **args: Any) -> None:
    """Log these rows of 400 steps, ten steps apart, after a warm-up of 20; the first `history` before a resumption."""
    warning = CollapseWarning(OptimizerArguments(warmup_ratio=20 / 400))
    listed = [row | {"step": begin + 10 * place} for place, row in enumerate(rows)]
    state = TrainerState(max_steps=400, is_world_process_zero=True, log_history=listed[:history])
    given = TrainingArguments(logging_steps=10, **args)
    warning.on_train_begin(given, state, TrainerControl())
    for row in listed[history:]:
        warning.on_log(given, state, TrainerControl(), logs=row)


def at(*losses: float, **figures: float) -> list[dict[str, float]]:
    return [HEALTHY | {"contrastive_loss": loss} | figures for loss in losses]


SCHEDULE = {"batch_size_schedule": "0:16,60:256"}
LOGS = {
    # what is logged, by a run with these arguments, and the warnings
    "chance, once": ([STUCK] * 25, {}, ["^contrastive_loss is 4.16 over steps 30 to 70; chance is 4.16, so all pairs look alike"]),
    "a line below chance": (at(CHANCE, CHANCE, 4.0, CHANCE, CHANCE, CHANCE), {}, []),
    "warm-up": ([STUCK] * 12, {"begin": -90}, []),
    "a resumed run": ([STUCK] * 5, {"history": 4}, ["steps 30 to 70"]),
    "chance of each step's batch": (at(*[math.log(16)] * 4, *[math.log(256)] * 5), SCHEDULE, ["chance is 5.55"]),
    "below chance of the sigmoid loss": (at(*[4.6] * 9, logit_bias=-9.0), {}, []),
    "chance of the sigmoid loss": (at(*[5.2] * 5, logit_bias=-9.0), {}, ["chance is 5.15"]),
    "equal captions": (at(*[0.0] * 3, grad_norm=0.0), {}, ["^contrastive_loss and grad_norm are 0 .* captions"]),
    "no gradient": (at(*[2.0] * 3, grad_norm=0.0), {}, ["^grad_norm is 0 at step 30;"]),
    "a loss that is not finite": (at(math.nan, math.nan, loss=math.nan), {}, []),
    "another objective": ([{"loss": 9.0, "grad_norm": 1.0}] * 30, {}, []),
}  # fmt: skip


@pytest.mark.parametrize("name", LOGS)
def test_the_warnings_of_a_log(name: str, caplog: pytest.LogCaptureFixture) -> None:
    rows, given, expected = LOGS[name]
    read(rows, **given)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == len(expected), said
    for message, pattern in zip(said, expected, strict=True):
        assert re.search(pattern, message), message


@pytest.mark.parametrize(
    ("rows", "stops"),
    [
        pytest.param([COLLAPSED] * 6, True, id="50 steps at chance, with no gradient"),
        pytest.param([COLLAPSED] * 5, False, id="40 steps"),
        pytest.param([COLLAPSED, POINT], True, id="an evaluation sees it"),
        pytest.param([COLLAPSED, POINT | {"eval_text_spread": 0.7}], False, id="only images are alike"),
        pytest.param([COLLAPSED | {"grad_norm": 0.1}] * 9, False, id="a plateau before learning"),
    ],
)
def test_a_collapsed_run_stops(rows: list[dict[str, float]], stops: bool) -> None:
    if not stops:
        return read(rows)
    with pytest.raises(RunError, match=r"embedded alike.*leave --learning_rate and --warmup_ratio out"):
        read(rows)


# -- trackers ------------------------------------------------------------------------------------------------------------
class OtherTracker(FakeTracker):
    name = "tensorboard"
    requires_logging_directory = True

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

    def run(**settings):
        tracking = Tracking("wandb,tensorboard", "pretrain", tmp_path, settings)
        for step in range(1, 4):
            logs = {"step": step, "loss": 0.5, "eval_mean_recall": 0.25}
            tracking.on_log(None, TrainerState(global_step=step), TrainerControl(), logs=logs)
        tracking.finish()

    return run


def test_rows_arrive_in_groups_and_no_secret(
    track: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = "https://user:S3cr3tValue@example.org/pairs.jsonl"
    monkeypatch.setattr(sys, "argv", ["pretrain.py", "--train_file", url])
    track(seed=1, lr_values=[1, 2], nothing=None, api_key="S3cr3tValue")
    rows = [("log", step, {"train/loss": 0.5, "eval/mean_recall": 0.25}) for step in (1, 2, 3)]
    for kind, folder in ((FakeTracker, {}), (OtherTracker, {"folder": str(tmp_path)})):
        config = kind.calls.pop(2)[1]
        assert kind.calls == [("init", "pretrain", folder), ("start",), *rows, ("finish",)]
        assert {**config, "api_key": ""} == {"seed": 1, "lr_values": "[1, 2]", "api_key": ""}
        assert "S3cr3tValue" not in repr(config)
    assert sys.argv[-1] == url


@pytest.mark.parametrize(
    ("call", "fault"), [*((call, "no network") for call in ("init", "start", "config", "finish")), ("log", "exits")]
)
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
