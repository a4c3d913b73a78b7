"""The trainer itself on a tiny model: which steps move the weights, what is due when, what ranks agree on."""

import copy
import json
import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer

from mm_utils.checkpointing.files import checkpoint_folders, step_of
from mm_utils.training.arguments import NONFINITE_FILE
from mm_utils.training.prepared import place_encoders
from mm_utils.training.trainer import Trainer
from tests.kit.tiny_run import Signalled, TinyRun, alone, build, exiting, train

QUIET = {"max_steps": 8, "eval_steps": 100, "save_steps": 0, "logging_steps": 100}


def trainer_of(run: TinyRun, poison: dict[int, float]) -> Trainer:
    """A trainer; `poison` multiplies the gradient of a step, counted from 0."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer = build(run, [])
    backward = trainer.step._backward

    def poisoned(batch: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
        report = backward(batch, step)
        for parameter in trainer.model.parameters():
            if parameter.grad is not None and step in poison:
                parameter.grad.mul_(poison[step])
        return report

    trainer.step._backward = poisoned  # type: ignore[method-assign]
    return trainer


def moved_by(trainer: Trainer, steps: int) -> list[int]:
    """The steps that moved the weights."""
    moved = []
    for number, batch in enumerate(trainer.data.train_batches(0, steps)):
        before = copy.deepcopy(trainer.model.state_dict())
        trainer.step.run(batch, number)
        if any(not torch.equal(before[name], value) for name, value in trainer.model.state_dict().items()):
            moved.append(number)
    return moved


def written(folder: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (folder / NONFINITE_FILE).read_text().splitlines()]


def test_a_step_without_a_finite_gradient_or_without_any_moves_nothing(tmp_path: Path) -> None:
    trainer = trainer_of(TinyRun(tmp_path, arguments=QUIET), {2: math.nan, 3: math.inf, 4: 0.0})
    assert moved_by(trainer, 6) == [0, 1, 5]
    assert max(float(state["step"]) for state in trainer.optimizer.state.values()) == 3
    assert (written(tmp_path), trainer.step.nonfinite.count) == ([3, 4], 2)


def test_with_a_loss_scaler_only_a_finite_step_moves_the_weights(tmp_path: Path) -> None:
    """Gradients of 0, infinite ones, and a loss that is not finite change nothing; the scale is lowered by overflows alone."""
    trainer = trainer_of(TinyRun(tmp_path, arguments=QUIET), {2: 0.0, 3: math.inf, 5: math.nan})
    accelerator, step = trainer.accelerator, trainer.step
    prepared: Any = trainer.optimizer
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step.optimizer = AcceleratedOptimizer(prepared.optimizer, scaler=scaler)
    accelerator.unscale_gradients = lambda: scaler.unscale_(prepared.optimizer)  # type: ignore[method-assign]
    step.nonfinite.has_scaler, backward, scales = True, step._backward, []

    def losing(batch: dict[str, Any], number: int) -> dict[str, torch.Tensor]:
        report = backward(batch, number)
        scales.append(scaler.get_scale())
        return report | {"loss": report["loss"] * (math.nan if number == 4 else 1.0)}

    step._backward = losing  # type: ignore[method-assign]
    assert moved_by(trainer, 7) == [0, 1, 6]
    assert scales == [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
    assert written(tmp_path) == [5]


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
def test_the_inverse_temperature_stays_between_1_and_its_bound(before: float, after: float, tmp_path: Path) -> None:
    trainer = build(TinyRun(tmp_path), [])
    trainer.model.logit_scale.data.fill_(before)
    [batch] = trainer.data.train_batches(0, 1)
    trainer.step.run(batch, 0)
    assert trainer.model.logit_scale.item() == pytest.approx(after, abs=0.02)


def test_each_step_draws_its_own_dropout_and_the_same_when_it_is_repeated(tmp_path: Path) -> None:
    trainer, drawn = build(TinyRun(tmp_path), []), []
    trainer.model.text_model.register_forward_pre_hook(lambda *_: drawn.append(float(torch.rand(1))))
    [batch] = trainer.data.train_batches(0, 1)
    for step in (0, 1, 0):
        trainer.step.run(batch, step)
    assert drawn[0] == drawn[2] != drawn[1]


# -- what is due when -----------------------------------------------------------------------------------------------------
def test_without_saving_there_is_no_checkpoint_but_for_a_signal(tmp_path: Path) -> None:
    never = {"save_steps": 0}
    assert alone(train, TinyRun(tmp_path / "quiet", arguments=never))[0] == 0
    assert not checkpoint_folders(tmp_path / "quiet")
    run = TinyRun(tmp_path / "asked", strike=Signalled("forward", 5, signal.SIGTERM), arguments=never)
    assert alone(exiting, run)[0] == 143
    assert [step_of(path) for path in checkpoint_folders(tmp_path / "asked")] == [5]


# -- where the image encoder is -------------------------------------------------------------------------------------------
def test_a_placed_encoder_learns_the_same_in_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = []
    for places in ({}, {"vision_device": "cpu"}):
        trainer = build(TinyRun(tmp_path, arguments=QUIET | places), [])
        hooks = [len(tower._forward_hooks) for tower in (trainer.model.vision_model, trainer.model.text_model)]
        assert hooks == ([1, 0] if places else [0, 0])
        moved_by(trainer, 3)
        learnt.append(trainer.model.state_dict())
    assert all(torch.equal(learnt[1][name], value) for name, value in learnt[0].items())
    monkeypatch.setattr("mm_utils.training.prepared.distributed.world_size", lambda: 2)
    with pytest.raises(ValueError, match="--vision_device is cpu; there are 2 processes"):
        place_encoders(trainer.args, trainer.accelerator, trainer.objective)
