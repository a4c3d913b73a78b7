"""Every warning of a run that does not learn: when it comes, how often, and when it does not."""

import math
import re
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import TrainerControl, TrainerState

from mm_utils.distributed import RunError
from mm_utils.objectives.contrastive import sigmoid_loss
from mm_utils.objectives.losses import gather_batch, info_nce
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments
from mm_utils.training.warnings import CollapseWarning, chance_loss

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


HEALTHY = {"loss": 2.6, "contrastive_loss": 2.0, "grad_norm": 5.0, "learning_rate": 1e-3}
STUCK = HEALTHY | {"contrastive_loss": CHANCE}
COLLAPSED = HEALTHY | {"contrastive_loss": CHANCE - 0.001, "grad_norm": 6e-5}
SPREAD = {"eval_image_effective_rank": 60.0, "eval_image_spread": 0.7, "eval_text_spread": 0.7}
POINT = SPREAD | {"eval_image_spread": 1e-4, "eval_text_spread": 1e-4}


def read(rows: list[dict[str, float]], begin: int = 30, steps: int = 400, history: int = 0, **args: Any) -> None:
    """Log these rows, ten steps apart, after a warm-up of 20 steps; the first `history` before a resumption."""
    warning = CollapseWarning(OptimizerArguments(warmup_ratio=20 / steps))
    listed: Any = [row | {"step": begin + 10 * place} for place, row in enumerate(rows)]
    state = TrainerState(max_steps=steps, is_world_process_zero=True, log_history=listed[:history])
    given: Any = TrainingArguments(**{"logging_steps": 10} | args)
    warning.on_train_begin(given, state, TrainerControl())
    for row in listed[history:]:
        warning.on_log(given, state, TrainerControl(), logs=row)


def at(*losses: float, **figures: float) -> list[dict[str, float]]:
    return [HEALTHY | {"contrastive_loss": loss} | figures for loss in losses]


def recall(value: float) -> dict[str, float]:
    return SPREAD | {"eval_mean_recall": value}


SCHEDULE = {"batch_size_schedule": "0:16,60:256"}
LOGS: dict[str, tuple[list[dict[str, float]], dict[str, Any], list[str]]] = {
    # what is logged, by a run with these arguments, and the warnings
    "a healthy log": ([*at(*(CHANCE * 0.97**line for line in range(30))), SPREAD], {}, []),
    "four lines at chance": ([STUCK] * 4, {}, []),
    "chance, once": ([STUCK] * 25, {}, ["^contrastive_loss is 4.16 over steps 30 to 70; chance is 4.16, and all pairs look alike"]),
    "a line below chance": (at(CHANCE, CHANCE, 4.0, CHANCE, CHANCE, CHANCE), {}, []),
    "falling from above chance": (at(6.0, 5.7, 5.4, 5.1, 4.8, 4.5, 4.2), {}, []),
    "warm-up": ([STUCK] * 12, {"begin": -90}, []),
    "a resumed run": ([*[STUCK] * 4, recall(0.46), STUCK, recall(0.3)], {"history": 5}, ["steps 30 to 80", "was 0.460 at step 70"]),
    "chance of each step's batch": (at(*[math.log(16)] * 4, *[math.log(256)] * 5), SCHEDULE, ["chance is 5.55"]),
    "below the chance of a larger batch": (at(*[math.log(16)] * 4, *[0.8 * math.log(256)] * 9), SCHEDULE, []),
    "below chance of the sigmoid loss": (at(*[4.6] * 9, logit_bias=-9.0), {}, []),
    "chance of the sigmoid loss": (at(*[5.2] * 5, logit_bias=-9.0), {}, ["chance is 5.15"]),
    "a rate of 0": (at(*[CHANCE] * 5, learning_rate=0.0), {}, [r"and learning_rate is 0\. Raise --learning_rate\."]),
    "few steps": ([STUCK] * 5, {"steps": 24, "logging_steps": 2}, ["24 steps are too few. Raise --num_train_epochs"]),
    "texts that are one point": ([STUCK, SPREAD | {"eval_text_spread": 0.001}, *[STUCK] * 4], {}, ["all texts are embedded alike"]),
    "no gradient": (at(*[2.0] * 3, grad_norm=0.0), {}, ["^grad_norm is 0 at step 30;"]),
    "a loss that is not finite": (at(math.nan, math.nan, loss=math.nan), {}, ["^The loss or its gradient is not finite"]),
    "a step that is not finite": (at(2.0, 2.0, nonfinite_steps=1), {}, ["not finite at or before step 30;"]),
    "an infinite gradient, which is the loss scaler's business": (at(*[2.0] * 3, grad_norm=math.inf), {}, []),
    "recall that varies": ([*map(recall, (0.46, 0.45, 0.42))], {}, []),
    "recall that falls": ([*map(recall, (0.46, 0.41, 0.3))], {}, [r"^eval_mean_recall is 0.410 at step 40 and was 0.460 at step 30"]),
    "another objective": ([{"loss": 9.0, "grad_norm": 1.0, "learning_rate": 0.0}] * 30, {}, []),
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
        pytest.param([COLLAPSED | {"contrastive_loss": CHANCE - 0.1}] * 9, False, id="below chance"),
    ],
)
def test_a_collapsed_run_stops(rows: list[dict[str, float]], stops: bool) -> None:
    if not stops:
        return read(rows)
    with pytest.raises(RunError, match=r"embedded alike.*leave --learning_rate and --warmup_ratio out"):
        read(rows)
