"""Every warning of a run that does not learn: when it comes, how often, and when it does not."""

import logging
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import normalize
from transformers import TrainerControl, TrainerState

from mm_utils.distributed import RunError
from mm_utils.objectives.losses import gather_batch, info_nce
from mm_utils.objectives.sigmoid import sigmoid_loss
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments
from mm_utils.training.warnings import CollapseWarning, chance_loss
from scripts import pretrain

CHANCE = math.log(64)
Said = Callable[[], list[str]]


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


# -- warnings -----------------------------------------------------------------------------------------------------------
HEALTHY = {"loss": 2.6, "contrastive_loss": 2.0, "grad_norm": 5.0, "learning_rate": 1e-3}
EVALUATED = {
    f"eval_{side}_{name}": value
    for side in ("image", "text")
    for name, value in (("effective_rank", 60.0), ("spread", 0.7))
}

# What `accelerate launch scripts/pretrain.py --eval_steps 75` logged, every 10 steps and at the last one, 375.


class Run:
    """A run of 400 steps, logged every 10, whose log is written by hand; warm-up is its first 20 steps."""

    def __init__(self, main: bool = True, history: list[dict] | None = None, max_steps: int = 400, **args: Any):
        self.state = TrainerState(max_steps=max_steps, is_world_process_zero=main, log_history=history or [])
        self.args: Any = TrainingArguments(**{"logging_steps": 10} | args)
        self.warning = CollapseWarning(OptimizerArguments(warmup_ratio=0.05))
        self.step = history[-1]["step"] if history else 20
        self.warning.on_train_begin(self.args, self.state, TrainerControl())

    def write(self, **figures: float) -> None:
        row: Any = {"step": self.step, **figures}
        self.state.log_history.append(row)
        self.warning.on_log(self.args, self.state, TrainerControl(), logs=row)

    def log(self, lines: int = 1, **figures: float) -> "Run":
        for _ in range(lines):
            self.step += 10
            self.write(**{**HEALTHY, **figures})
        return self

    def losses(self, *values: float, **figures: float) -> "Run":
        for value in values:
            self.log(1, contrastive_loss=value, **figures)
        return self

    def evaluate(self, **figures: float) -> "Run":
        self.write(**{**EVALUATED, **{f"eval_{name}": value for name, value in figures.items()}})
        return self


@pytest.fixture
def said(caplog: pytest.LogCaptureFixture) -> Said:
    """Warnings so far."""
    caplog.set_level(logging.WARNING, logger="mm_utils")
    return lambda: [record.getMessage() for record in caplog.records if record.name == "mm_utils.training.warnings"]


COLLAPSED = {"contrastive_loss": CHANCE - 0.001, "grad_norm": 6e-5}


@pytest.mark.parametrize(
    ("figures", "lines", "evaluated", "stops"),
    [
        pytest.param(COLLAPSED, 6, {}, True, id="50 steps at chance, with no gradient"),
        pytest.param(COLLAPSED, 4, {}, False, id="40 steps"),
        pytest.param(COLLAPSED, 1, {"image_spread": 1e-4, "text_spread": 1e-4}, True, id="an evaluation sees it"),
        pytest.param(COLLAPSED, 1, {"image_spread": 1e-4}, False, id="only images are alike"),
        pytest.param(COLLAPSED | {"grad_norm": 0.1}, 9, {}, False, id="a plateau before learning"),
        pytest.param(COLLAPSED | {"contrastive_loss": CHANCE - 0.1}, 9, {}, False, id="below chance"),
    ],
)
def test_a_collapsed_run_stops_unless_it_is_asked_to_go_on(figures, lines, evaluated, stops) -> None:
    run = Run()

    def go_on() -> None:
        run.log(lines, **figures)
        if evaluated:
            run.evaluate(**evaluated)

    if not stops:
        return go_on()
    with pytest.raises(RunError, match=r"embedded alike.*leave --learning_rate and --warmup_ratio out"):
        go_on()
    run.warning.stops = False
    go_on()


def test_a_run_of_few_steps_is_told_so(said: Said) -> None:
    Run(max_steps=24, logging_steps=2).log(9, contrastive_loss=CHANCE)
    assert "24 steps are too few. Raise --num_train_epochs" in said()[0]


ALL_ALIKE = {"text_spread": 0.001}
Act = Callable[[Run], object]


def rows(run: Run, count: int, **figures: float) -> None:
    """Lines of these figures alone."""
    for _ in range(count):
        run.step += 10
        run.write(**figures)


STORIES: dict[str, tuple[dict[str, Any], list[tuple[Act, list[str]]]]] = {
    # of a run with these arguments: what is logged, and the warnings of it, in turn
    "a healthy log": ({}, [
        (lambda run: run.losses(*(CHANCE * 0.97**line for line in range(30))), []),
        (lambda run: run.evaluate().log(5).evaluate(image_effective_rank=31.0).log(3), []),
    ]),
    "chance, once after a window": ({}, [
        (lambda run: run.log(4, contrastive_loss=CHANCE), []),
        (lambda run: run.log(1, contrastive_loss=0.981 * CHANCE),
         ["^contrastive_loss is 4.14 over steps 30 to 70; chance is 4.16, and"]),
        (lambda run: run.log(20, contrastive_loss=CHANCE), []),
    ]),
    "a line below chance": ({}, [(lambda run: run.losses(CHANCE, CHANCE, 4.0, CHANCE, CHANCE, CHANCE), [])]),
    "falling from above chance": ({}, [(lambda run: run.losses(6.0, 5.7, 5.4, 5.1, 4.8, 4.5, 4.2), [])]),
    "chance of each step's batch": ({"batch_size_schedule": "0:16,60:256"}, [
        (lambda run: run.losses(*[math.log(16)] * 4, 0.7 * math.log(256), math.log(256)), []),
        (lambda run: run.log(4, contrastive_loss=math.log(256)), ["chance is 5.55"]),
    ]),
    "chance of the sigmoid loss": ({}, [
        (lambda run: run.log(9, contrastive_loss=4.6, logit_bias=-9.0), []),
        (lambda run: run.log(5, contrastive_loss=5.2, logit_bias=-9.0), ["chance is 5.15"]),
    ]),
    "a rate of 0": ({}, [
        (lambda run: run.log(5, contrastive_loss=CHANCE, learning_rate=0.0),
         [r"and learning_rate is 0\. Raise --learning_rate\."]),
    ]),
    "wrong pairs are closer": ({}, [
        (lambda run: run.log(5, contrastive_loss=5.0), [r"and wrong pairs are often the closer ones\."])
    ]),
    "all pairs alike": ({}, [(lambda run: run.log(5, contrastive_loss=CHANCE), [r"and all pairs look alike\."])]),
    "texts that are one point": ({}, [
        (lambda run: run.log(contrastive_loss=CHANCE).evaluate(**ALL_ALIKE).log(4, contrastive_loss=CHANCE), [
            "and all texts are embedded alike. Lower --learning_rate",
        ]),
        (lambda run: run.evaluate(**ALL_ALIKE), []),
    ]),
    "a larger batch": ({"batch_size_schedule": "0:16,120:4096"}, [
        (lambda run: run.log(9, contrastive_loss=0.5 * math.log(16)), []),
        (lambda run: run.log(9, contrastive_loss=0.5 * math.log(4096)), []),
    ]),
    "no gradient": ({}, [(lambda run: run.log(3, grad_norm=0.0), ["^grad_norm is 0 at step 30;"])]),
    **{
        f"{name} is not finite": ({}, [
            (lambda run, figures=figures: run.log(2, **figures),
             ["^The loss or its gradient is not finite at or before step 30;"]),
        ]) for name, figures in
        (("a loss", {"loss": math.nan, "contrastive_loss": math.nan}), ("a step", {"nonfinite_steps": 1}))
    },
    "an infinite gradient, which is the loss scaler's business": ({}, [(lambda run: run.log(3, grad_norm=math.inf), [])]),
    **{
        f"recall that falls, evaluated every {steps} steps": ({"eval_steps": steps}, [
            (lambda run: run.evaluate(mean_recall=0.46).log().evaluate(mean_recall=0.45), []),
            (lambda run: run.log().evaluate(mean_recall=0.42), []),
            (lambda run: run.log().evaluate(mean_recall=0.41),
             [f"^eval_mean_recall is 0.410 at step 50 and was 0.460 at step 20; the run forgets.*{remedy}"]),
            (lambda run: run.log().evaluate(mean_recall=0.3), []),
        ]) for steps, remedy in ((10, r"the weights of step 20 are kept\.$"), (0, "set --eval_steps.* to keep the best weights"))
    },
    "recall that falls while that of training images rises": ({}, [
        (lambda run: run.evaluate(mean_recall=0.46, train_mean_recall=0.5).log(), []),
        (lambda run: run.evaluate(mean_recall=0.3, train_mean_recall=0.9),
         ["; that of training images is 0.900 and was 0.500; the run forgets"]),
    ]),
    "warm-up": ({}, [
        (lambda run: setattr(run, "step", -100), []),
        (lambda run: run.log(12, contrastive_loss=CHANCE).evaluate(image_spread=0.0, text_effective_rank=1.0), []),
        (lambda run: run.log().evaluate(), []),
    ]),
    "sizes of a schedule, each with its own chance": (
        {"batch_size_schedule": "0:16,120:64", "global_batch_size": 64}, [
            (lambda run: run.losses(*[0.9 * math.log(16)] * 7, *[0.999 * math.log(16)] * 3), []),
            (lambda run: run.losses(*[0.999 * math.log(64)] * 4), []),
            (lambda run: run.losses(0.999 * math.log(64)), ["is 4.15 over steps 130 to 170; chance is 4.16"]),
        ]
    ),
    "retrieval figures alone": ({}, [(lambda run: run.log(9).write(**{"eval_text_to_image_recall@1": 0.0}), [])]),
    "another process": ({"main": False}, [(lambda run: run.log(30, contrastive_loss=CHANCE, grad_norm=0.0), [])]),
    "another objective": ({}, [(lambda run: rows(run, 30, loss=9.0, grad_norm=1.0, learning_rate=0.0), [])]),
}  # fmt: skip


@pytest.mark.parametrize("story", STORIES)
def test_the_warnings_of_a_log(story: str, said: Said) -> None:
    arguments, acts = STORIES[story]
    run, expected = Run(**arguments), list[str]()
    for act, patterns in acts:
        act(run)
        expected += patterns
        found = said()
        assert len(found) == len(expected), found
        for message, pattern in zip(found, expected, strict=True):
            assert re.search(pattern, message), message


def test_a_resumed_run_knows_what_was_logged_before(said: Said) -> None:
    before = Run(main=False).log(4, contrastive_loss=CHANCE).evaluate(mean_recall=0.46)
    run = Run(history=before.state.log_history)
    assert said() == []
    run.log(1, contrastive_loss=CHANCE).evaluate(mean_recall=0.3)
    assert len(said()) == 2
    assert "over steps 30 to 70" in said()[0]
    assert "was 0.460 at step 60" in said()[1]


def test_a_real_run_that_learns_nothing_is_named(tiny_flags: list[str], tmp_path: Path, said: Said) -> None:
    flags = ["--max_steps", "10", "--learning_rate", "0", "--freeze_vision", "--freeze_text"]
    pretrain.main([*tiny_flags, *flags, "--output_dir", str(tmp_path)])
    assert any("contrastive_loss is" in message and "learning_rate is 0" in message for message in said())
