"""Tensors that FSDP2 has spread over the ranks: taken together, and apart again."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor


def whole(parameter: Tensor) -> Tensor:
    """A parameter with the other ranks' share of it. All ranks must ask."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def like(value: Tensor, parameter: Tensor) -> Tensor:
    """A whole tensor in the shape of a parameter of as many numbers, and sharded as that is. All ranks must ask."""
    value = value.view(parameter.shape)
    if not isinstance(parameter, DTensor):
        return value
    return distribute_tensor(value.to(parameter.device), parameter.device_mesh, parameter.placements)


@torch.no_grad()
def load_whole(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Copy whole weights, all that there are, into a module that may be sharded. All ranks must call it.

    Raises:
        ValueError: if they are of another model.
    """
    own = module.state_dict()
    differing = [
        name
        for name in {**own, **weights}
        if name not in own or name not in weights or own[name].numel() != weights[name].numel()
    ]
    if differing:
        shapes = [
            f"{name} is {_shape(own.get(name))}, in the checkpoint {_shape(weights.get(name))}"
            for name in differing[:3]
        ]
        raise ValueError(
            f"the checkpoint is of another model: {len(differing)} of its weights differ; {'; '.join(shapes)}. Give the "
            "arguments that it was trained with; its folder's parent has them in config.yaml."
        )
    for name, value in own.items():
        value.copy_(like(weights[name], value))


def _shape(value: Tensor | None) -> str:
    return "missing" if value is None else str(list(value.shape))
