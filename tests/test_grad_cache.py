"""Cutting the batch into parts changes memory and time, never the gradient."""

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from mm_utils import ranks
from mm_utils.grad_cache import backward
from mm_utils.objectives import Objective
from tests.test_objectives import KINDS, PAIRS, global_batch, share_of, tiny_objective
from tests.test_ranks import run_on_ranks

ALONE = SimpleNamespace(
    device=torch.device("cpu"),
    backward=lambda loss: loss.backward(),
    no_sync=lambda model: nullcontext(),
    unwrap_model=lambda model: model,
    autocast=nullcontext,
    distributed_type=None,
)
SPLITS = [(5, 4), (8, 1), (9, 0)]


def step(objective: Objective, batch: dict[str, Any], micro_batch_size: int | None, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    report = backward(ALONE, objective, batch, 5, micro_batch_size)
    gradients = {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        for name, parameter in objective.named_parameters()
    }
    return {"report": {name: value.item() for name, value in report.items()}, "gradients": gradients}


def assert_same(found: dict[str, Any], right: dict[str, Any]) -> None:
    assert found["report"] == pytest.approx(right["report"], rel=1e-6, abs=3e-7)
    largest = max(gradient.abs().max() for gradient in right["gradients"].values())
    for name, gradient in right["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-6, atol=1e-8 * float(largest))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("micro_batch_size", [1, 2, 4, 5, 8])
def test_parts_give_the_gradient_of_the_whole(kind, micro_batch_size):
    whole = step(tiny_objective(kind), global_batch(), None)
    assert_same(step(tiny_objective(kind), global_batch(), micro_batch_size), whole)
    assert whole["gradients"]["model.logit_scale"].abs() > 1e-3


def on_this_rank(micro_batch_size: int) -> list[dict[str, Any]]:
    found = []
    for kind in KINDS:
        for sizes in SPLITS:
            low = sum(sizes[: ranks.rank()])
            mine = share_of(global_batch(), low, low + sizes[ranks.rank()])
            found.append({"kind": kind, **step(tiny_objective(kind), mine, micro_batch_size)})
    return found


def test_parts_on_two_ranks_give_the_gradient_of_one_process():
    """Gradients are averaged by `backward` itself; numbers of parts differ between the ranks."""
    by_rank = run_on_ranks(2, on_this_rank, 2)
    for cases in zip(*by_rank, strict=True):
        for case in cases:
            assert_same(case, step(tiny_objective(case["kind"]), global_batch(), None))


def test_the_second_pass_drops_out_what_the_first_did():
    objective = tiny_objective("contrastive")
    seen: list[torch.Tensor] = []
    objective.model.text_model.embeddings.dropout = nn.Dropout(0.5)
    objective.model.text_model.embeddings.dropout.register_forward_hook(
        lambda module, given, out: seen.append(out == 0)
    )
    objective.train()
    step(objective, global_batch(), 5)
    first, kept, again = seen  # parts of 5 and 4 rows: the second is embedded once
    assert not torch.equal(first[:4, :3], kept[:4, :3])
    assert torch.equal(first, again)


def test_no_activation_outlives_its_part():
    """The largest number of pairs in one forward with gradient is the part's."""
    objective, sizes = tiny_objective("contrastive"), []

    def note(module: nn.Module, given: Any, out: Any) -> None:
        if torch.is_grad_enabled():
            sizes.append(len(out.last_hidden_state))

    objective.model.vision_model.register_forward_hook(note)
    step(objective, global_batch(), 2)
    assert max(sizes) == 2
    assert sum(sizes) == PAIRS


def test_an_objective_that_cannot_be_cut_says_so():
    class Plain(Objective):
        def forward(self, batch, step):
            return {"loss": self.encode(batch, match=False).image_nE.sum()}

    plain = Plain(tiny_objective("contrastive").model)
    assert backward(ALONE, plain, global_batch(), 0, None)["loss"].isfinite()
    with pytest.raises(ValueError, match="Plain cannot be cut"):
        backward(ALONE, plain, global_batch(), 0, 2)
