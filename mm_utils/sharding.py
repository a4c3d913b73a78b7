"""Sharded tensors (FSDP2): whole ones of shards, and shards of whole ones. Its import takes 2 s, which preparing does without."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def full_tensor(parameter: Tensor) -> Tensor:
    """Return the unsharded parameter; called on all ranks."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def shard_like(value: Tensor, parameter: Tensor) -> Tensor:
    """Reshape a full tensor like `parameter` and shard it in the same way; called on all ranks."""
    value = value.view(parameter.shape)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


@torch.no_grad()
def load_full_weights(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy all weights, unsharded, into a module that may be sharded; called on all ranks.

    Raises:
        ValueError: if the weights are those of another model.
    """
    own = module.state_dict()
    sizes = {name: value.numel() for name, value in own.items()}
    stored = {name: value.numel() for name, value in weights.items()}
    if differing := [name for name in {**own, **weights} if sizes.get(name) != stored.get(name)]:
        raise ValueError(
            f"the checkpoint is of another model: {len(differing)} of its weights differ, such as {differing[0]}. Give the "
            "arguments that it was trained with; its folder's parent has them in config.yaml."
        )
    for name, value in own.items():
        value.copy_(shard_like(weights[name], value))
