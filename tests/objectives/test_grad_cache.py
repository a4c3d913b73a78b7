"""Cutting the batch into parts changes memory and time, never the gradient."""

from typing import Any

import pytest
import torch
from torch import nn

from mm_utils.objectives.grad_cache import TooManyPairsError, backward_that_fits
from mm_utils.objectives.joint import JointObjective, Objective
from tests.kit.objectives import (
    ALONE,
    PAIRS,
    assert_same,
    global_batch,
    measured,
    step_in_parts,
    tiny_objective,
)


def test_no_activation_outlives_its_part():
    """The largest number of pairs in one forward with gradient is the part's."""
    objective, sizes = tiny_objective("contrastive"), []

    def note(module: nn.Module, given: Any, out: Any) -> None:
        if torch.is_grad_enabled():
            sizes.append(len(out.last_hidden_state))

    objective.model.vision_model.register_forward_hook(note)
    step_in_parts(objective, global_batch(), 2)
    assert max(sizes) == 2
    assert sum(sizes) == PAIRS


def with_batch_norm() -> JointObjective:
    objective = tiny_objective("contrastive")
    objective.model.vision_model.register_module("norm", nn.BatchNorm2d(3, dtype=torch.double))
    objective.model.vision_model.register_forward_pre_hook(
        lambda module, _, named: ((), named | {"pixel_values": module.norm(named["pixel_values"])}), with_kwargs=True
    )
    return objective.train()


def test_batch_norms_count_every_part_once():
    objective, batch = with_batch_norm(), global_batch()
    norm = objective.model.vision_model.norm
    step_in_parts(objective, batch, 5)
    once = nn.BatchNorm2d(3, dtype=torch.double)
    for part in (batch["pixel_values"][4:], batch["pixel_values"][:4]):  # the last part is embedded first to stay
        once(part)
    assert norm.num_batches_tracked == 2
    torch.testing.assert_close(norm.running_var, once.running_var)
    assert norm.track_running_stats


class Full:
    """Runs out of memory when more than `most` pairs are embedded with gradient, in the `fails`-th such pass or later."""

    def __init__(self, objective: JointObjective, most: int, fails: int = 0):
        self.encode, self.most, self.left = objective.encode, most, fails
        objective.encode = self  # type: ignore[method-assign]

    def __call__(self, batch: dict[str, Any], *given: bool) -> Any:
        if torch.is_grad_enabled() and len(batch["ids"]) > self.most:
            self.left -= 1
            if self.left < 0:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return self.encode(batch, *given)


def until_it_fits(objective: JointObjective, batch: dict[str, Any], size: int | None) -> dict[str, Any]:
    report, size = backward_that_fits(ALONE, objective, batch, 5, size, objective.zero_grad)
    return {**measured(objective, report), "size": size}


@pytest.mark.parametrize("fails", [0, 1])
def test_a_step_that_ran_out_of_memory_is_repeated_in_halves(fails):
    kind = "contrastive_matching"
    objective = tiny_objective(kind)
    Full(objective, 2, fails)
    found = until_it_fits(objective, global_batch(), 4)
    assert found["size"] == 2
    assert_same(found, step_in_parts(tiny_objective(kind), global_batch(), None))


@pytest.mark.parametrize(("size", "message"), [(1, "with a single pair"), (None, "--micro_batch_size auto")])
def test_a_step_that_never_fits_names_the_remedy(size, message):
    objective = tiny_objective("contrastive")
    Full(objective, 0)
    with pytest.raises(TooManyPairsError, match=message):
        until_it_fits(objective, global_batch() | {"rows": torch.arange(PAIRS)}, size)


def test_an_own_objective_that_computes_a_step_as_a_whole_says_what_parts_need():
    class Own(Objective):
        def forward(self, batch: dict[str, Any], step: int) -> dict[str, torch.Tensor]:
            return {"loss": self.model.logit_scale.exp()}

    own = Own(tiny_objective("contrastive").model)
    step_in_parts(own, global_batch(), None)
    with pytest.raises(
        ValueError, match=r"Own has no method encode; .*Drop --micro_batch_size, or write encode, plan"
    ):
        step_in_parts(own, global_batch(), 4)


def test_every_part_drops_out_again_what_it_did() -> None:
    objective, seen = tiny_objective("contrastive"), []
    dropout = objective.model.text_model.embeddings.dropout = nn.Dropout(0.5)
    dropout.register_forward_hook(lambda module, given, out: seen.append(out == 0))
    objective.train()
    step_in_parts(objective, global_batch(), 3, seed=11)
    first, second, _, again, again_second = seen  # parts of 3 rows; the last is embedded once
    assert not torch.equal(first[:, :3], second[:, :3])
    assert torch.equal(first, again)
    assert torch.equal(second, again_second)
