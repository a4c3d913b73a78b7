"""Encoders on different processes have the gradient of one process with both."""

from typing import Any

import pytest
import torch
from torch import nn

from mm_utils import distributed
from mm_utils.data.batches.order import Division
from mm_utils.extras.placement.apart import ApartObjective
from mm_utils.extras.placement.split import Split, loss_rows
from mm_utils.model.adapt import WeightAverage
from mm_utils.objectives.grad_cache import MicroBatch, backward, backward_with_retry
from tests.kit.objectives import ALONE, PAIRS, global_batch, share_of, tiny_objective
from tests.kit.ranks import run_on_ranks
from tests.kit.training_runs import accelerator_of_this_rank

CASES = {
    2: [("contrastive", (9,), PAIRS), ("contrastive", (9,), 2), ("sigmoid", (9,), 4), ("sigmoid_of_widths", (9,), 9)],
    3: [("contrastive", (5, 4), 2), ("sigmoid", (9,), 3), ("contrastive_of_widths", (9, 0), 9)],
}
"""By the number of processes: the objective, the images of each process that has some, and `--micro_batch_size`."""
NORM = 0.01
"""The gradient is clipped to this."""


def objective_of(kind: str) -> Any:
    objective = tiny_objective(kind)
    for term in [term for term in objective.weights if term.name == "matching"]:
        del objective.weights[term]
    if objective.model.fusion is not None:
        objective.model.fusion.requires_grad_(False)
    return type(objective)(objective.model, objective.weights)


def measured(objective: Any, report: dict[str, torch.Tensor]) -> dict[str, Any]:
    norm = float(objective.clip_gradients(ALONE, NORM))
    gradients = {
        name: parameter.grad.clone() for name, parameter in objective.named_parameters() if parameter.grad is not None
    }
    return {"loss": report["loss"].item(), "norm": norm, "gradients": gradients}


def on_this_rank(cases: list[tuple[str, tuple[int, ...], int]]) -> list[dict[str, Any]]:
    found, rank = [], distributed.rank()
    for kind, images, part in cases:
        split = Split(len(images), distributed.world_size() - len(images))
        low = sum(images[:rank])
        mine = share_of(global_batch(kind), low, low + (images[rank] if rank < len(images) else 0))
        objective = ApartObjective(objective_of(kind), split, 0)
        dealt = objective.deal(mine)
        report = backward_with_retry(ALONE, objective, dealt, 5, MicroBatch(part), objective.zero_grad)
        found.append(measured(objective, report))
    return found


@pytest.fixture(autouse=True)
def clips_as_accelerate_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ALONE, "clip_grad_norm_", nn.utils.clip_grad_norm_, raising=False)


@pytest.mark.parametrize("world", CASES)
def test_apart_has_the_gradient_of_one_process(world: int) -> None:
    by_rank = run_on_ranks(world, on_this_rank, CASES[world])
    for place, (kind, images, _) in enumerate(CASES[world]):
        objective = objective_of(kind)
        right = measured(objective, backward(ALONE, objective, global_batch(kind), 5, None))
        largest = max(gradient.abs().max() for gradient in right["gradients"].values())
        for rank, found in enumerate(cases[place] for cases in by_rank):
            assert found["loss"] == pytest.approx(right["loss"], rel=1e-12)
            assert found["norm"] == pytest.approx(right["norm"], rel=1e-12)
            other = "text" if rank < len(images) else "vis"
            assert not any(name.startswith(f"model.{other}") for name in found["gradients"])
            assert {name for name in right["gradients"] if f"model.{other}" not in name} <= found["gradients"].keys()
            for name, gradient in found["gradients"].items():
                expected = right["gradients"].get(name, torch.zeros_like(gradient))
                torch.testing.assert_close(gradient, expected, rtol=1e-12, atol=1e-12 * float(largest))


def exchanged_on_this_rank() -> dict[str, torch.Tensor]:
    """Weights, running statistics, moments and averages, after a step and the exchange."""
    accelerator_of_this_rank()
    rank, objective = distributed.rank(), objective_of("contrastive")
    objective.model.vision_model.register_buffer("mean", torch.full((2,), float(rank)))
    apart = ApartObjective(objective, Split(1, 1), 0)
    apart.average = WeightAverage(apart.model, 0.9)
    optimizer = torch.optim.AdamW(apart.parameters(), lr=0.1)
    for name, parameter in apart.named_parameters():
        if name.startswith("model.vis" if rank == 0 else "model.text") or "logit" in name:
            parameter.grad = torch.ones_like(parameter)
    apart.gradient_average().receive()
    optimizer.step()
    apart.average.update()
    apart.exchange()  # before an evaluation
    apart.exchange(optimizer)  # before a checkpoint
    names = {parameter: name for name, parameter in apart.named_parameters()}
    state = {f"{names[p]} {key}": value for p, each in optimizer.state.items() for key, value in each.items()}
    return {
        **apart.state_dict(),
        **state,
        **{f"average {name}": value for name, value in apart.average.values.items()},
    }


def test_every_process_has_both_encoders_after_the_exchange() -> None:
    first, second = run_on_ranks(2, exchanged_on_this_rank)
    assert first.keys() == second.keys()
    assert {name: value for name, value in first.items() if not torch.equal(value, second[name])} == {}
    began = tiny_objective("contrastive").state_dict()
    assert not torch.equal(first["model.text_projection.weight"], began["model.text_projection.weight"])
    assert first["model.text_projection.weight exp_avg"].abs().min() > 0


def test_every_row_and_pair_is_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed, "world_size", lambda: 5)
    split, draws = Split(2, 3), [(row, 0) for row in range(11)]
    assert [row for rank in range(5) for row in draws[split.division.of_rank(len(draws), rank, 5)]] == draws
    assert all(draws[split.division.of_rank(len(draws), rank, 5)] == [] for rank in (2, 3, 4))
    assert [row for rows in split.text_rows(11) for row in rows] == list(range(11))
    assert list(map(len, split.text_rows(11)[:2])) == [0, 0]
    assert [row for rows in loss_rows(11) for row in rows] == list(range(11))
    assert split.division == Division((1, 1, 0, 0, 0))
