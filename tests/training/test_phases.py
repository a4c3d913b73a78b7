"""The two parts of a run with a fusion head: what judges each, what the second begins with, and what is saved."""

import json
import logging
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mm_utils.checkpointing.files import checkpoint_folders, step_of
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments
from mm_utils.training.phases import Phases
from tests.kit.launches import logged
from tests.kit.objectives import tiny_objective
from tests.kit.ranks import run_on_ranks
from tests.kit.tiny_run import Signalled, TinyRun, alone, exiting, train

HEAD, JOINTS = "fusion.", ("visual_projection.", "text_projection.", "logit_scale")
Recalls = dict[int, tuple[float, float]]


def run_of(folder: Path, recalls: Recalls, reranks: bool = False, **more: Any) -> TinyRun:
    """A run of 10 steps, evaluated every second and after step 5, in whose last 5 the head learns.

    Args:
        recalls: by step, the encoders' recall, and that by the head.
        reranks: whether re-ranking is on, so that its recall is the head's.
    """
    figures = {}
    for step, (own, head) in recalls.items():
        figures[step] = {"mean_recall": own, "head_mean_recall": head, "rerank_mean_recall": head if reranks else own}
    given: dict[str, Any] = {"eval_steps": 2, "load_best_model_at_end": True, "metric_for_best_model": "mean_recall"}
    arguments = given | {"save_total_limit": 1, "ema_decay": 0.0} | more.pop("arguments", {})
    return TinyRun(folder, figures=figures, arguments=arguments, **{"new_head": True} | more)


def weights(folder: Path, *begin: str) -> dict[str, torch.Tensor]:
    found = load_file(folder / "model.safetensors")
    return {name: value for name, value in found.items() if name.startswith(begin or ("",))}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


def saved(folder: Path) -> dict[str, Any]:
    """The row that names what was saved; there is one."""
    rows = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    [found] = [row for row in rows if "saved_step" in row]
    return found


BEST_EARLY: Recalls = {2: (0.9, 0.9), 4: (0.5, 0.5), 5: (0.4, 0.4), 6: (0.8, 0.85), 8: (0.8, 0.95), 10: (0.8, 0.9)}
COSTLY: Recalls = BEST_EARLY | {8: (0.7, 0.86), 10: (0.6, 0.8)}


@pytest.mark.parametrize(
    ("recalls", "reranks", "more", "expected"),
    [
        pytest.param(BEST_EARLY, True, {}, (8, "head", "eval_head_mean_recall", None), id="the best head"),
        pytest.param(COSTLY, True, {}, (8, "head", "eval_head_mean_recall", 2), id="projections that got worse are put back"),
        pytest.param(BEST_EARLY, False, {}, (8, "head", "eval_head_mean_recall", 2), id="a head within noise is kept, off"),
        pytest.param(
            BEST_EARLY, True, {"arguments": {"metric_for_best_model": "score"}}, (None, "head", "eval_score", None),
            id="a figure of one's own",
        ),
        pytest.param(
            COSTLY, True, {"new_head": False}, (2, "head", "eval_head_mean_recall", None), id="a head of before, better as it was"
        ),
    ],
)  # fmt: skip
def test_each_part_is_judged_by_what_it_trains(
    recalls: Recalls, reranks: bool, more: dict[str, Any], expected: tuple[Any, ...], tmp_path: Path
) -> None:
    run = run_of(tmp_path, recalls, reranks, **more)
    assert alone(train_with_weights if reranks else train, run)[0] == 0
    row, (step, *rest) = saved(tmp_path), expected
    assert [row["saved_part"], row["saved_by"], row.get("saved_projections_step")] == rest
    if step is None:
        scores = {at: value for at, value in logged(tmp_path, "eval_score").items() if at > 5}
        step = max(scores, key=lambda at: scores[at])
    assert row["saved_step"] == step
    best = tmp_path / f"checkpoint-{step}"
    assert same(weights(tmp_path, HEAD), weights(best, HEAD))
    projections = best if rest[2] is None else tmp_path / f"checkpoint-{rest[2]}"
    assert same(weights(tmp_path, *JOINTS), weights(projections, *JOINTS))


def train_with_weights(run: TinyRun) -> Any:
    """Train a run whose evaluations find that re-ranking helps."""
    from tests.kit import tiny_run

    measure = tiny_run._score

    def fitted(run: TinyRun, trainer: Any, model: Any, loader: Any) -> dict[str, float]:
        model.config.rerank_weights = {"match": 0.5}
        return measure(run, trainer, model, loader)

    tiny_run._score = fitted
    return train(run)


def test_the_heads_part_begins_with_the_best_encoders(tmp_path: Path) -> None:
    run = run_of(tmp_path, BEST_EARLY, arguments={"save_total_limit": None})
    assert alone(train, run)[0] == 0
    encoders = ("vision_model.", "text_model.")
    at = {step_of(path): weights(path, *encoders) for path in checkpoint_folders(tmp_path)}
    assert same(at[10], at[2])
    assert not same(at[2], at[3])


STOPS: Recalls = {2: (0.9, 0.9), 4: (0.8, 0.8), 6: (0.5, 0.5), 8: (0.5, 0.4), 10: (0.5, 0.9)}


def test_early_stopping_ends_the_parts_one_by_one(tmp_path: Path) -> None:
    """The encoders' after step 4, with those of step 2; the head's after step 8."""
    run = run_of(tmp_path, STOPS, patience=1)
    status, (_, last, rows) = alone(train, run)
    assert (status, last, len(rows)) == (0, 8, 7)  # step 5 is not taken
    assert list(logged(tmp_path, "eval_mean_recall")) == [2, 4, 6, 8]
    assert (saved(tmp_path)["saved_step"], saved(tmp_path)["saved_projections_step"]) == (6, 2)
    assert alone(train, run)[1][1] == 8  # a run that has stopped does not go on
    assert saved(tmp_path)["saved_step"] == 6


@pytest.mark.parametrize("patience", [100, 1])
@pytest.mark.parametrize("step", [4, 5, 8])
def test_a_resumed_run_saves_what_an_uninterrupted_one_does(patience: int, step: int, tmp_path: Path) -> None:
    if patience == 1 and step == 5:
        pytest.skip("not taken")
    recalls = STOPS if patience == 1 else BEST_EARLY
    assert alone(train, run_of(tmp_path / "straight", recalls, patience=patience))[0] == 0
    broken = run_of(tmp_path / "run", recalls, patience=patience, strike=Signalled("forward", step, signal.SIGTERM))
    assert alone(exiting, broken)[0] == 143
    assert alone(train, run_of(tmp_path / "run", recalls, patience=patience))[0] == 0
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
    ("frozen", "share", "expected"),
    [
        ((), 0.5, (True, 5)),
        ((), 0.0, (False, 0)),
        (("vision",), 0.25, (True, 8)),
        (("vision", "text"), 0.5, (False, 0)),
    ],
)
def test_where_the_head_begins(
    frozen: tuple[str, ...], share: float, expected: tuple[bool, int], caplog: pytest.LogCaptureFixture
) -> None:
    objective = tiny_objective("contrastive_matching")
    for tower in frozen:
        objective.model.freeze(tower)
    with caplog.at_level(logging.INFO):
        phases = Phases(objective, TrainingArguments(max_steps=10), OptimizerArguments(head_share=share), 10)
    assert (phases.is_split, phases.head_from) == expected
    parts = ["encoders"] * phases.head_from + ["head"] * (10 - phases.head_from) if phases.is_split else [None] * 10
    assert [phases.part(step) for step in range(10)] == parts
    assert ("--head_share 0.5 plays no part" in caplog.text) == (len(frozen) == 2)


def test_a_run_that_ends_before_the_head_says_that_none_was_trained(tmp_path: Path) -> None:
    """Its re-ranking is off, and its encoders are chosen by their own recall."""
    choice = alone(stopped, run_of(tmp_path, BEST_EARLY))[1]
    assert "No head was trained: the run ended at step 4, and its head learns from step 5 on." in choice
    assert (saved(tmp_path)["saved_step"], saved(tmp_path)["saved_part"]) == (2, "encoders")
    assert json.loads((tmp_path / "config.json").read_text())["rerank_weights"] == {}


def stopped(run: TinyRun) -> str:
    from tests.kit.tiny_run import build

    run.folder.mkdir(exist_ok=True)
    trainer = build(run, [])

    def stop(place: str, step: int) -> None:
        if (place, step) == ("end", 4):
            trainer.callbacks.control.should_training_stop = True

    run.strike = trainer.callbacks.callbacks[-2].strike = stop  # type: ignore[attr-defined]
    trainer.train()
    return trainer.choice
