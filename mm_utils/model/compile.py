"""Compile one layer of a kind and use it for all: the start takes seconds, where whole towers take a minute and more."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.packing import COMPILED

logger = logging.getLogger(__name__)

REPAID_AFTER = 1000
"""Steps from which on compiling repays its start (an H200: 18 s, and 25 ms less a step of 1,024 pairs)."""


def compile_if_repaid(model: FusionDualEncoderModel, asked: bool | None, steps: int, device: torch.device) -> None:
    """Compile the layers if `--torch_compile` asks for it; if it says nothing, on a GPU, for runs that repay it."""
    repays = device.type == "cuda" and steps >= REPAID_AFTER
    if asked or (asked is None and repays):
        compile_layers(model)
        logger.info("The layers of towers and head are compiled, which takes seconds in the first step")
    elif asked is None and device.type == "cuda":
        logger.info("Layers are not compiled: %d steps would not repay it (--torch_compile does it)", steps)


def compile_layers(model: FusionDualEncoderModel) -> None:
    """Compile what lies in lists of equal layers; what is around them runs as it is.

    Texts have other lengths in each step, so their number and length are variables of the compiled code. Kernels are not chosen
    by the clock. How they split a sum over tokens follows the first batch, so a resumed run is the whole one up to rounding.
    """
    from torch import _dynamo, _inductor  # seconds, for runs that compile alone

    _dynamo.config.recompile_limit = 64  # layers of all kinds share one function of transformers
    _dynamo.config.specialize_float = True  # scales and rates are constants; as variables they are traced twice
    settings: dict[str, Any] = {"deterministic": True} if "deterministic" in _inductor.list_options() else {}
    parts = ((model.vision_model, None), (model.text_model, True), (model.fusion, True))
    for part, dynamic in parts:
        if part is None:
            continue
        setattr(part, COMPILED, True)
        for layer in equal_layers(part):
            # `forward`, not the module: hooks of transformers (hidden states) and FSDP2 stay outside.
            layer.forward = partial(
                _first_call, layer, torch.compile(layer.forward, dynamic=dynamic, options=settings)
            )


def _first_call(layer: Any, compiled: Callable[..., Any], *args: Any, **named: Any) -> Any:
    """Remove transformers' recorders of attention, which are there by now: the compiler of torch 2.11 ends a graph at them."""
    for part in layer.modules():
        for number, hook in [*part._forward_hooks.items()]:
            if part is not layer and hook.__module__ == "transformers.utils.output_capturing":
                del part._forward_hooks[number]
    layer.forward = compiled
    return compiled(*args, **named)


def equal_layers(module: nn.Module) -> Iterator[Any]:
    """Yield the layers of the innermost lists in which all have the same class and weights of the same shapes."""
    for part in module.modules():
        is_innermost = not any(
            isinstance(inner, nn.ModuleList) for layer in part.children() for inner in layer.modules()
        )
        if isinstance(part, nn.ModuleList) and is_innermost and len({_shape(layer) for layer in part}) == 1:
            yield from part


def _shape(layer: nn.Module) -> tuple[Any, ...]:
    return type(layer), *((name, weight.shape) for name, weight in layer.named_parameters())
