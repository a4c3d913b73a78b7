"""A step whose figures the host reads in the next one, as on a GPU, learns and writes down what one does that is read at once.

It runs on the CPU, with the fused AdamW that GPUs take.
"""

import json
import math
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from mm_utils import distributed
from mm_utils.checkpointing.files import newest_checkpoint
from mm_utils.model.adapt import WeightAverage
from mm_utils.reliability import skipped
from mm_utils.reliability.signals import Interrupted
from mm_utils.training.arguments import NONFINITE_FILE
from mm_utils.training.callbacks import CallbackRunner, TemperatureClamp
from mm_utils.training.trainer import Trainer
from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import Signalled, TinyRun, build

QUIET = {"max_steps": 8, "eval_steps": 100, "save_steps": 0, "logging_steps": 100}


def trainer_of(run: TinyRun, late: bool, poison: dict[int, float] | None = None) -> Trainer:
    """A trainer with a fused optimizer; `poison` multiplies the gradient of a step, counted from 0."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer = build(run, [])
    for group in trainer.optimizer.param_groups:
        group["fused"] = True
    trainer.step.reads_late = late
    backward = trainer.step._backward

    def poisoned(batch: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
        report = backward(batch, step)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None and step in (poison or {}):
                parameter.grad.mul_((poison or {})[step])
        return report

    trainer.step._backward = poisoned  # type: ignore[method-assign]
    return trainer


def outcome(folder: Path, late: bool) -> dict[str, Any]:
    """All that a run leaves that has a step without a finite gradient, and one with a gradient of 0."""
    given = QUIET | {"logging_steps": 3, "eval_steps": 7, "save_steps": 5}
    trainer = trainer_of(TinyRun(folder, arguments=given), late, {2: math.nan, 3: math.inf, 4: 0.0})
    trainer.train()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    timed = {"pairs_per_second", "data_wait", "peak_memory_gib", "rank_seconds"}
    return {
        "weights": dict(trainer.model.state_dict()),
        "average": trainer.average.values if trainer.average else {},
        "optimizer": {f"{n} {k}": v for n, s in enumerate(trainer.optimizer.state.values()) for k, v in s.items()},
        "rows": [{name: value for name, value in row.items() if name not in timed} for row in rows],
        "written": (folder / NONFINITE_FILE).read_text(),
        "run": json.loads((folder / "checkpoint-5" / "run.json").read_text()),
    }


def test_reading_late_changes_nothing(tmp_path: Path) -> None:
    at_once, late = outcome(tmp_path / "at_once", False), outcome(tmp_path / "late", True)
    assert [json.loads(line)["step"] for line in late["written"].splitlines()] == [3, 4]
    assert late["run"]["nonfinite_steps"] == 2
    for name in ("rows", "written", "run"):
        assert late[name] == at_once[name]
    for name in ("weights", "average", "optimizer"):
        assert late[name].keys() == at_once[name].keys()
        assert all(torch.equal(late[name][key], value) for key, value in at_once[name].items())
    assert max(float(value) for key, value in late["optimizer"].items() if key.endswith("step")) == 5  # of 8


def test_too_many_steps_end_the_run_a_step_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(skipped, "MAX_NONFINITE_STEPS", 2)
    trainer = trainer_of(TinyRun(tmp_path, arguments=QUIET), True, dict.fromkeys(range(2, 8), math.nan))
    with pytest.raises(FloatingPointError, match=r"^2 steps had a loss .* the last one step 4\."):
        trainer.train()
    assert trainer.state.global_step == 4
    assert all(parameter.isfinite().all() for parameter in trainer.model.parameters())
    assert trainer.average is not None
    assert all(value.isfinite().all() for value in trainer.average.values.values())


def test_with_a_loss_scaler_only_a_finite_step_moves_weights_and_average(tmp_path: Path) -> None:
    """Gradients of 0, infinite ones, and a loss that is not finite change nothing; the scale is lowered by overflows alone."""
    trainer = trainer_of(TinyRun(tmp_path, arguments=QUIET), False, {2: 0.0, 3: math.inf, 5: math.nan})
    accelerator, step = trainer.accelerator, trainer.step
    prepared: Any = trainer.optimizer
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step.optimizer = AcceleratedOptimizer(prepared.optimizer, scaler=scaler)
    accelerator.unscale_gradients = lambda: scaler.unscale_(prepared.optimizer)  # type: ignore[method-assign]
    step.nonfinite.has_scaler, backward = True, step._backward

    def losing(batch: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
        report = backward(batch, number)
        return report | {"loss": report["loss"] * (math.nan if number == 4 else 1.0)}

    step._backward = losing  # type: ignore[method-assign]
    assert step.average is not None
    moved, scales = [], []
    for number, batch in enumerate(trainer.data.train_batches(0, 7)):
        kept = [dict(trainer.model.state_dict()), step.average.values]
        before = [{name: value.clone() for name, value in each.items()} for each in kept]
        step.run(batch, number)
        step.finish()
        after = [dict(trainer.model.state_dict()), step.average.values]
        moved.append([any(not torch.equal(a[k], b[k]) for k in b) for a, b in zip(after, before, strict=True)])
        scales.append(scaler.get_scale())
    assert moved == [[number in (0, 1, 6)] * 2 for number in range(7)]
    assert scales == [1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0, 256.0]
    assert [json.loads(line)["step"] for line in (tmp_path / NONFINITE_FILE).read_text().splitlines()] == [5]


def test_the_average_moves_as_each_of_its_weights_would(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.LayerNorm(5))
    average = WeightAverage(model, 0.9)
    right = {name: value.detach().clone() for name, value in model.named_parameters()}
    with torch.no_grad():
        for name, value in model.named_parameters():
            value += torch.randn(value.shape)
            right[name].lerp_(value, 1 - 0.9)
    average.update()
    assert all(torch.equal(average.values[name], value) for name, value in right.items())


# -- what ranks agree on ------------------------------------------------------------------------------------------------
def stopped(folder: Path, only: int) -> tuple[int, int]:
    strike = Signalled("forward", 5, signal.SIGTERM, only=only)
    trainer = trainer_of(TinyRun(folder, strike=strike, dropout=0.0, arguments=QUIET), True)
    try:
        trainer.train()
    except Interrupted as interrupted:
        return interrupted.number, trainer.state.global_step
    return 0, trainer.state.global_step


def test_a_signal_to_one_rank_stops_both_a_step_later(tmp_path: Path) -> None:
    assert run_on_ranks(2, stopped, tmp_path, 1) == [(signal.SIGTERM, 6)] * 2
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-6"


def agreements() -> list[tuple[list[list[int]], bool]]:
    runner = CallbackRunner([], lambda: (None, None, {}), torch.device("cpu"))  # type: ignore[arg-type, return-value]
    found, rank = [], distributed.rank()
    calls = [((0, 0), rank == 1, True), ((3 * rank, 7), False, True), ((0, 2), False, True), ((0, 0), False, False)]
    for numbers, saves, later in calls:
        runner.control.should_save = saves
        found.append((runner.agree(*numbers, later=later), runner.control.should_save))
    return found


def test_what_is_set_on_one_rank_is_done_on_all_a_call_later() -> None:
    expected = [([], False), ([[0, 0], [3, 7]], True), ([], False), ([[0, 2], [0, 0]], False)]
    assert run_on_ranks(2, agreements) == [expected] * 2


def test_alone_nothing_is_left_open() -> None:
    runner = CallbackRunner([], lambda: (SimpleNamespace(), None, {}), torch.device("cpu"))  # type: ignore[arg-type, return-value]
    assert runner.agree(4, 0, later=True) == [[4, 0]]


def test_the_gradient_that_moves_the_weights_is_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(TinyRun(tmp_path), [])
    step: Any = trainer.step
    step.optimizer_args.max_grad_norm, norms = 1e-3, []

    def note(*_: Any) -> None:
        gradients = [weight.grad for weight in trainer.model.parameters() if weight.grad is not None]
        norms.append(float(torch.nn.utils.get_total_norm(gradients)))

    monkeypatch.setattr(step.optimizer, "step", note)
    [batch] = trainer.data.train_batches(0, 1)
    report = step.run(batch, 0)
    assert float(report["grad_norm"]) > 1e-2
    assert norms == [pytest.approx(1e-3, rel=1e-2)]


@pytest.mark.parametrize(("before", "after"), [(-3.0, 0.0), (2.0, 2.0), (9.0, 4.605170)])
def test_the_inverse_temperature_stays_between_1_and_its_bound(before: float, after: float) -> None:
    model = SimpleNamespace(logit_scale=torch.tensor(before))
    TemperatureClamp(100.0).on_step_end(None, None, None, model=model)  # type: ignore[arg-type]
    assert float(model.logit_scale) == pytest.approx(after)


def test_each_step_draws_its_own_dropout_and_the_same_when_it_is_repeated(tmp_path: Path) -> None:
    trainer, drawn = build(TinyRun(tmp_path), []), []
    trainer.model.text_model.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(1))))
    [batch] = trainer.data.train_batches(0, 1)
    for step in (0, 1, 0):
        trainer.step.run(batch, step)
    assert drawn[0] == drawn[2] != drawn[1]
