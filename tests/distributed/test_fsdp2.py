"""A step of sharded weights is a step of whole ones: two processes, `fully_shard` on towers, the head's layers and the objective."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.fsdp import FSDPModule

from mm_utils import distributed
from mm_utils.distributed import full_tensor
from mm_utils.objectives.grad_cache import backward
from tests.kit.objectives import ALONE, assert_same, global_batch, sharded, share_of, step_in_parts, tiny_objective
from tests.kit.ranks import run_on_ranks

KINDS = ("contrastive", "sigmoid_matching")


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """What accelerate's `no_sync` does to FSDP2 models."""
    model.set_requires_gradient_sync(False)
    yield
    model.set_requires_gradient_sync(True)


SHARDED = SimpleNamespace(**{**vars(ALONE), "no_sync": no_sync, "distributed_type": DistributedType.FSDP})


def steps_on_this_rank(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    low = sum(sizes[: distributed.rank()])
    mine = share_of(global_batch(), low, low + sizes[distributed.rank()])
    found = []
    for kind in KINDS:
        for micro_batch_size in (None, 9, 2):
            objective = sharded(tiny_objective(kind))
            assert isinstance(objective, FSDPModule)
            report = backward(SHARDED, objective, mine, 5, micro_batch_size)
            gradients = {
                name: full_tensor(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
                for name, parameter in objective.named_parameters()
            }
            values = {name: value.item() for name, value in report.items()}
            found.append({"kind": kind, "report": values, "gradients": gradients})
    return found


@pytest.mark.parametrize("sizes", [(5, 4), (8, 1)])
def test_sharded_gradients_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    for found in run_on_ranks(2, steps_on_this_rank, sizes):
        for case in found:
            right = step_in_parts(tiny_objective(case["kind"]), global_batch(), None)
            case["gradients"] = {
                name: gradient.view(right["gradients"][name].shape) for name, gradient in case["gradients"].items()
            }
            assert_same(case, right)
