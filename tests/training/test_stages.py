"""The stages of a run, what judges and what is saved of each; which steps move the weights, and what is due when."""

import copy
import json
import math
import re
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.optimizer import AcceleratedOptimizer
from safetensors.torch import load_file

from mm_utils.checkpointing.files import checkpoint_folders, find_checkpoint, step_of
from mm_utils.run.start import check_vision_device
from mm_utils.training.arguments import NONFINITE_FILE, TrainingArguments
from mm_utils.training.optim import schedule
from mm_utils.training.stages import Stage, stages_of
from mm_utils.training.step import TrainStep
from mm_utils.training.trainer import Trainer
from tests.kit.objectives import tiny_objective
from tests.kit.processes import logged, rows_of, run_on_ranks
from tests.kit.tiny_run import STEPS, Signalled, TinyRun, alone, build, exiting, train, trainers

HEAD = "fusion."
TOWERS = ("vision_model.", "text_model.")
Recalls = dict[int, tuple[float, float]]


def run_of(folder: Path, recalls: Recalls, reranks: bool = True, **more: Any) -> TinyRun:
    """A run of 10 steps, evaluated every second and after step 5, in whose last 5 the head learns.

    Args:
        recalls: by step, the encoders' recall, and that by the head.
        reranks: whether re-ranking is on, so that its recall is the head's.
    """
    figures = {
        step: {"mean_recall": own, "head_mean_recall": head, "rerank_mean_recall": head if reranks else own}
        for step, (own, head) in recalls.items()
    }
    given = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "mean_recall"}
    arguments = given | {"save_total_limit": 99} | more.pop("arguments", {})
    weights = {"match": 0.5} if reranks else {}
    more = {"new_head": True, "head_share": 0.5, "rerank_weights": weights} | more
    return TinyRun(folder, figures=figures, arguments=arguments, **more)


def weights(folder: Path, *begin: str) -> dict[str, torch.Tensor]:
    found = load_file(folder / "model.safetensors")
    return {name: value for name, value in found.items() if name.startswith(begin or ("",))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def saved(folder: Path) -> dict[str, Any]:
    """The row that names what was saved; there is one."""
    [found] = [row for row in rows_of(folder) if "saved_step" in row]
    return found


BEST_EARLY = {2: (0.9, 0.9), 4: (0.5, 0.5), 5: (0.4, 0.4), 6: (0.8, 0.85), 8: (0.8, 0.95), 10: (0.8, 0.9)}
COSTLY = BEST_EARLY | {8: (0.7, 0.86), 10: (0.6, 0.8)}


@pytest.mark.parametrize(
    ("recalls", "reranks", "more", "expected"),
    [
        pytest.param(BEST_EARLY, True, {}, (8, None), id="the best head"),
        pytest.param(COSTLY, True, {}, (8, 5), id="projections that got worse are put back"),
        pytest.param(BEST_EARLY, False, {}, (8, 5), id="a head within noise is kept, off"),
        pytest.param(BEST_EARLY, True, {"arguments": {"metric_for_best_model": "score"}}, (None, None), id="a figure of one's own"),
        pytest.param(COSTLY, True, {"new_head": False}, (5, None), id="a head of before, better as it was"),
    ],
)  # fmt: skip
def test_each_stage_is_judged_by_what_it_trains(
    recalls: Recalls, reranks: bool, more: dict[str, Any], expected: tuple[int | None, int | None], tmp_path: Path
) -> None:
    """Both begin with the best weights of what was before them, and the saved model has the best head and encoders."""
    run = run_of(tmp_path, recalls, reranks, **more)
    (head, projections) = expected
    assert alone(train, run)[0] == 0
    row = saved(tmp_path)
    first = 2
    if head is None:
        scores = logged(tmp_path, "eval_score")
        first = max((2, 4, 5), key=scores.__getitem__)
        head = max((6, 8, 10), key=scores.__getitem__)
    assert (row["saved_part"], row["saved_step"], row.get("saved_projections_step")) == ("head", head, projections)
    assert row["saved_by"] == ("eval_score" if "score" in str(more) else "eval_head_mean_recall")
    of = {step: weights(tmp_path / f"checkpoint-{step}") for step in {first, 5, 6, 10, head}}
    assert all(torch.equal(value, of[5][name]) for name, value in of[10].items() if name.startswith(TOWERS))
    assert all(torch.equal(value, of[first][name]) for name, value in of[5].items() if not name.startswith(HEAD))
    for name, value in weights(tmp_path).items():
        assert torch.equal(value, of[head if name.startswith(HEAD) else projections or head][name])


STOPS = {2: (0.9, 0.9), 4: (0.8, 0.8), 6: (0.9, 0.5), 8: (0.9, 0.4), 10: (0.9, 0.9)}


def test_early_stopping_ends_the_stages_one_by_one(tmp_path: Path) -> None:
    """The encoders' after step 4, with those of step 2; the head's after step 8."""
    run = run_of(tmp_path, STOPS, patience=1)
    status, (_, last, rows) = alone(train, run)
    assert (status, last, len(rows)) == (0, 8, 7)  # step 5 is not taken
    assert list(logged(tmp_path, "eval_mean_recall")) == [2, 4, 6, 8]
    assert saved(tmp_path)["saved_step"] == 6
    assert same(weights(tmp_path, *TOWERS), weights(tmp_path / "checkpoint-2", *TOWERS))
    assert alone(train, run)[1][1] == 8  # a run that has stopped does not go on
    assert saved(tmp_path)["saved_step"] == 6


@pytest.mark.parametrize(
    ("metric", "best"), [("eval_loss", 4), ("text_to_image_mean_rank", 4), ("text_to_image_recall@1", 2)]
)
def test_losses_and_ranks_are_better_when_lower(metric: str, best: int) -> None:
    args = TrainingArguments(metric_for_best_model=metric)
    name = args.metric_for_best_model
    history = [{"step": 2, f"eval_{name}": 3.0}, {"step": 4, f"eval_{name}": 2.0}]
    assert Stage("encoders", 0, 4, {}, name).ranked(history)[0] == best
    assert args.greater_is_better == (best == 2)


@pytest.mark.parametrize(("patience", "step"), [(100, 5), (100, 8), (1, 4)])
def test_a_resumed_run_saves_what_an_uninterrupted_one_does(patience: int, step: int, tmp_path: Path) -> None:
    recalls = STOPS if patience == 1 else BEST_EARLY
    more = {"arguments": {"save_total_limit": 1}}
    assert alone(train, run_of(tmp_path / "straight", recalls, patience=patience, **more))[0] == 0
    strike = Signalled("forward", step, signal.SIGTERM)
    broken = run_of(tmp_path / "run", recalls, patience=patience, strike=strike, **more)
    assert alone(exiting, broken)[0] == 143
    assert alone(train, run_of(tmp_path / "run", recalls, patience=patience, **more))[0] == 0
    assert same(weights(tmp_path / "run"), weights(tmp_path / "straight"))
    assert saved(tmp_path / "run") == saved(tmp_path / "straight")


def exact(folder: Path, micro_batch_size: str | None = None) -> None:
    arguments = {"micro_batch_size": micro_batch_size}
    train(run_of(folder, BEST_EARLY, exact=True, dropout=0.0, arguments=arguments))


def test_processes_and_parts_change_nothing(tmp_path: Path) -> None:
    alone(exact, tmp_path / "one")
    alone(exact, tmp_path / "parts", "2")
    run_on_ranks(2, exact, tmp_path / "two")
    for name in ("parts", "two"):
        assert saved(tmp_path / name) == saved(tmp_path / "one")
        torch.testing.assert_close(weights(tmp_path / name), weights(tmp_path / "one"), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    ("share", "expected"),
    [
        (None, [("head", 0, 10)]),  # both encoders are frozen
        (0.5, [("encoders", 0, 5), ("head", 5, 10)]),
        (0.25, [("encoders", 0, 8), ("head", 8, 10)]),
        (0.0, [("head", 0, 10)]),
        (0.01, [("encoders", 0, 10)]),
    ],
)
def test_the_stages_of_a_run(share: float | None, expected: list[tuple[str, int, int]]) -> None:
    objective = tiny_objective("contrastive_matching")
    if share is None:
        objective.model.freeze("vision")
        objective.model.freeze("text")
    stages = stages_of(objective, TrainingArguments(max_steps=10), 0.5 if share is None else share, 100)
    assert [(stage.name, stage.begin, stage.end) for stage in stages] == expected
    assert [stage.is_last for stage in stages] == [False] * (len(stages) - 1) + [True]
    for stage in stages:
        parts = {name.split(".")[1] for name in stage.trains}
        assert ("fusion" in parts) == (stage.name == "head")
        assert ("vision_model" in parts) == (stage.name == "encoders" or share == 0)
        assert "visual_projection" in parts


# -- the step of a trainer ---------------------------------------------------------------------------------------------
QUIET = {"max_steps": 8, "eval_steps": 100, "save_steps": 0, "logging_steps": 100}


def trainer_of(run: TinyRun, poison: dict[int, float]) -> Trainer:
    """A trainer; `poison` multiplies the gradient of a step, counted from 0."""
    run.folder.mkdir(parents=True, exist_ok=True)
    trainer = build(run, [])
    backward = trainer.step._backward

    def poisoned(batch, step):
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


def test_steps_that_are_not_finite_are_counted_over_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the next stage, and where it is resumed."""
    usual = TrainStep._backward
    counts = []

    def poisoned(self, batch, step):
        report = usual(self, batch, step)
        if step in (1, 6):
            report["loss"] = report["contrastive_loss"] = torch.tensor(math.nan)
        return report

    monkeypatch.setattr(TrainStep, "_backward", poisoned)
    for resume in (None, "latest"):
        checkpoint = find_checkpoint(resume, tmp_path)
        for number, trainer in enumerate(trainers(TinyRun(tmp_path, head_share=0.5), [], checkpoint)):
            trainer.train(None if number else checkpoint)
            counts.append(trainer.step.nonfinite.count)
    assert counts == [1, 2, 2]
    rows = map(json.loads, (tmp_path / NONFINITE_FILE).read_text().splitlines())
    assert [(row["contrastive_loss"], row["loss"]) for row in rows] == [("nan", "nan")] * 2  # the term is named


def test_a_best_checkpoint_that_is_gone_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    keeping = {"eval_steps": 2, "save_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "mine"}
    run = TinyRun(tmp_path, arguments=keeping, figures={step: {"mine": float(step == 4)} for step in range(STEPS + 1)})
    train(run)
    shutil.rmtree(tmp_path / "checkpoint-4")
    trainer = build(run, [])
    trainer.train(find_checkpoint("latest", tmp_path))
    assert "checkpoint-4, the best, is not there; those of step 8" in caplog.text
    assert "as the checkpoint of step 4 (1) is not there" in trainer.choice


def test_with_a_loss_scaler_only_a_finite_step_moves_the_weights(tmp_path: Path) -> None:
    """Gradients of 0, infinite ones, and a loss that is not finite change nothing; the scale is lowered by overflows alone."""
    trainer = trainer_of(TinyRun(tmp_path, arguments=QUIET), {2: 0.0, 3: math.inf, 5: math.nan})
    accelerator = trainer.accelerator
    step = trainer.step
    prepared = trainer.optimizer
    scaler = accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
    step.optimizer = AcceleratedOptimizer(prepared.optimizer, scaler=scaler)
    accelerator.unscale_gradients = lambda: scaler.unscale_(prepared.optimizer)  # type: ignore[method-assign]
    step.nonfinite.has_scaler = True
    backward = step._backward
    scales = []

    def losing(batch, number):
        report = backward(batch, number)
        scales.append(scaler.get_scale())
        return report | {"loss": report["loss"] * (math.nan if number == 4 else 1.0)}

    step._backward = losing  # type: ignore[method-assign]
    assert moved_by(trainer, 7) == [0, 1, 6]
    assert scales == [1024.0, 1024.0, 1024.0, 1024.0, 512.0, 512.0, 256.0]
    assert written(tmp_path) == [5]


def test_the_gradient_that_moves_the_weights_is_clipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = build(TinyRun(tmp_path), [])
    step = trainer.step
    step.optimizer_args.max_grad_norm = 1e-3
    norms = []

    def note(*_):
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
    trainer = build(TinyRun(tmp_path), [])
    drawn = []
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
    sent = []
    monkeypatch.setattr("mm_utils.training.objective_cache.send_to_device", lambda value, to: sent.append(to) or value)
    for places in ({}, {"vision_device": "cpu:1"}):  # to torch, a place of its own
        trainer = build(TinyRun(tmp_path, arguments=QUIET | places), [])
        hooks = [len(tower._forward_hooks) for tower in (trainer.model.vision_model, trainer.model.text_model)]
        assert hooks == ([1, 0] if places else [0, 0])
        moved_by(trainer, 3)
        learnt.append(trainer.model.state_dict())
    assert all(torch.equal(learnt[1][name], value) for name, value in learnt[0].items())
    there = torch.device("cpu:1")
    back = torch.device("cpu")
    assert sent == [there, back] * (len(sent) // 2)
    assert sent


@pytest.mark.parametrize(
    ("name", "processes", "said"),
    [
        ("cpu", 2, "there are 2 processes"),
        ("cuda:99", 1, ". Give a device that this machine has, or drop it."),
        ("gpu", 1, "Expected one of cpu, cuda"),
        ("meta", 1, "no data!. Give a device"),
    ],
)
def test_a_place_that_there_is_not_is_one_line(
    name: str, processes: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mm_utils.distributed.world_size", lambda: processes)
    with pytest.raises(ValueError, match=re.escape(said)) as refused:
        check_vision_device(name)
    assert str(refused.value).startswith(f"--vision_device is {name}; ")
    assert "\n" not in str(refused.value)


def log(metric: str, *values: float) -> list[dict[str, Any]]:
    return [{"step": step, f"eval_{metric}": value} for step, value in enumerate(values, 1)]


def test_of_equal_evaluations_encoders_keep_the_first_and_heads_the_longest_trained() -> None:
    encoders = Stage("encoders", 0, 9, {}, "mean_recall")
    head = Stage("head", 0, 9, {}, "head_mean_recall", asked="mean_recall")
    assert encoders.ranked(log("mean_recall", 0.3, 0.5, 0.5)) == [2, 3, 1]
    assert head.ranked(log("head_mean_recall", 0.3, 0.5, 0.5)) == [3, 2, 1]


def test_the_rate_of_every_stage_falls_to_its_end(tmp_path: Path) -> None:
    ends = []
    for trainer in trainers(TinyRun(tmp_path, head_share=0.5), [], None):
        begin = trainer.stage.begin
        end = trainer.stage.end
        [batch] = trainer.data.train_batches(end - 1, end)
        trainer.step.run(batch, end - 1)
        for group in trainer.optimizer.param_groups:
            share = group["lr"] / group["peak_lr"] / trainer.stage.rate
            expected = schedule(end - begin - 1, end - begin, trainer.step.optimizer_args)
            assert share == pytest.approx(expected)
            assert share < 0.5
        ends.append((begin, end))
    assert ends == [(0, 5), (5, 10)]
