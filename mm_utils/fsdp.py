"""What FSDP2 must know of the model."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from mm_utils.modeling_fusion_dual_encoder import (
    Attention,
    FusionDualEncoderForClassification,
    FusionDualEncoderModel,
    FusionHead,
    FusionLayer,
    RegionHead,
)
from mm_utils.objectives import JointObjective

LEAST_PARAMETERS = 1_000_000  # of a block that is sharded, gathered and freed by itself; all else is one unit
_SCALARS = ("logit_scale", "logit_bias")


def get_ready(accelerator: Accelerator, objective: nn.Module) -> None:
    """Let `accelerator.prepare` shard what computes, but for that, what it would compute on one device.

    The units are the large blocks of towers and head. Weights travel in fp32 and are rounded by autocast where it is safe,
    as without FSDP2: by default, Accelerate would round the temperature, the loss and the sums of gradients, too. Every
    process has the weights already, so none waits for them.

    Raises:
        ValueError: with the first FSDP, or with a teacher.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version is {plugin.fsdp_version} in the configuration of accelerate; this needs FSDP2. Set it to 2, or use "
            "accelerate_configs/fsdp2.yaml."
        )
    if isinstance(objective, JointObjective) and objective.needs_teacher:
        raise ValueError(
            "--objectives has a term that is taught by the weights' average, which takes their place in the middle of a step; "
            "FSDP2 does not let it. Drop the term, or use DDP (accelerate_configs/multi_gpu.yaml)."
        )
    plugin.mixed_precision_policy, plugin.cpu_ram_efficient_loading = None, False
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, blocks(objective)
    make_shardable(objective)


def blocks(objective: nn.Module) -> list[str]:
    """The classes of large modules that stand in a row."""
    rows = [module for module in objective.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    large = {
        type(block).__name__
        for row in rows
        for block in row
        if not type(block).__module__.startswith("torch.")
        and sum(parameter.numel() for parameter in block.parameters()) >= LEAST_PARAMETERS
    }
    return sorted(large)


def make_shardable(objective: nn.Module) -> None:
    """Make vectors of one of temperature and bias, and all weights contiguous, in place: FSDP2 refuses others."""
    for parameter in objective.parameters():
        parameter.data = (parameter.data if parameter.dim() else parameter.data.view(1)).contiguous()


def wake(objective: nn.Module) -> None:
    """Call it on what was sharded before anything else: what is called first is the root for FSDP2.

    It is told which methods besides `forward` use a module's weights, so that it gathers them there too.
    """
    methods = {
        JointObjective: ("encode", "part"),
        FusionDualEncoderModel: (
            *("encode_image", "encode_text", "vision_features", "text_features", "project_image", "project_text"),
            "match_pairs",
            *("token_logits", "caption_logits", "caption_scores", "region_embeds", "cell_embeds"),
        ),
        FusionDualEncoderForClassification: ("classify",),
        FusionHead: ("encode_vision", "encode_text", "match_logits", "decode"),
        FusionLayer: ("encode_image",),
        Attention: ("keys_values",),
        RegionHead: ("cells",),
    }
    for module in objective.modules():
        for kind, names in methods.items():
            if isinstance(module, FSDPModule) and isinstance(module, kind):
                for name in names:
                    register_fsdp_forward_method(module, name)
    if isinstance(objective, FSDPModule):
        root: Any = objective
        root.do_nothing = lambda: None
        register_fsdp_forward_method(root, "do_nothing")
        root.do_nothing()
        root.reshard()


@contextmanager
def gathered(objective: nn.Module) -> Iterator[None]:
    """Inside, methods of the model can be called by others than the objective."""
    if not isinstance(objective, FSDPModule):
        yield
        return
    objective.unshard()
    try:
        yield
    finally:
        objective.reshard()


def with_scalars(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """A model's weights with temperature and bias as scalars again."""
    return {name: value.squeeze() if name in _SCALARS else value for name, value in weights.items()}
