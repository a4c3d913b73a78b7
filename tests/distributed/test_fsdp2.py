"""A step of sharded weights is a step of whole ones: two processes, `fully_shard` on towers, the head's layers and the objective."""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate.utils import DistributedType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from mm_utils import distributed
from mm_utils.distributed import full_tensor
from mm_utils.objectives import JointObjective
from mm_utils.objectives.grad_cache import backward
from mm_utils.training.fsdp_deepspeed import initialise_fsdp_root, make_shardable
from tests.objectives.test_grad_cache import assert_same, step
from tests.objectives.test_joint import global_batch, share_of, tiny_objective
from tests.test_distributed import run_on_ranks

KINDS = ("altered", "sigmoid_matching")


@contextmanager
def no_sync(model: Any) -> Iterator[None]:
    """What accelerate's `no_sync` does to FSDP2 models."""
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)


SHARDED = SimpleNamespace(
    device=torch.device("cpu"),
    backward=lambda loss: loss.backward(),
    no_sync=no_sync,
    unwrap_model=lambda model: model,
    autocast=nullcontext,
    distributed_type=DistributedType.FSDP,
)


def sharded(objective: JointObjective) -> JointObjective:
    make_shardable(objective)
    objective.is_wrapped, objective.groups_texts = False, False
    mesh = init_device_mesh("cpu", (distributed.world_size(),))
    model = objective.model
    layers = model.fusion.layers if model.fusion is not None else ()
    for part in (model.vision_model, model.text_model, *layers, objective):
        fully_shard(part, mesh=mesh)
    initialise_fsdp_root(objective)
    return objective


def steps_on_this_rank(sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    low = sum(sizes[: distributed.rank()])
    mine = share_of(global_batch(), low, low + sizes[distributed.rank()])
    found = []
    for kind in KINDS:
        for micro_batch_size in (None, 9, 2):
            objective = sharded(tiny_objective(kind))
            assert isinstance(objective, FSDPModule)
            report = backward(SHARDED, objective, mine, 5, micro_batch_size)
            named = objective.named_parameters()
            gradients = {
                n: torch.zeros(p.shape, dtype=p.dtype) if p.grad is None else full_tensor(p.grad) for n, p in named
            }
            found.append(
                {"kind": kind, "report": {n: value.item() for n, value in report.items()}, "gradients": gradients}
            )
    return found


@pytest.mark.parametrize("sizes", [(5, 4), (8, 1)])
def test_sharded_gradients_are_those_of_one_process(sizes: tuple[int, ...]) -> None:
    for found in run_on_ranks(2, steps_on_this_rank, sizes):
        for case in found:
            right = step(tiny_objective(case["kind"]), global_batch(), None)
            case["gradients"] = {
                name: gradient.view(right["gradients"][name].shape) for name, gradient in case["gradients"].items()
            }
            assert_same(case, right)
