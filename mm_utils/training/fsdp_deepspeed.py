"""What FSDP2 and DeepSpeed must be told, so that a run learns with them what it learns with DDP.

By default, Accelerate lets both round more than autocast does: weights, so the temperature, too, the loss, and the sums of
gradients. Here weights are fp32, and autocast rounds where it is safe.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from mm_utils.modeling_fusion_dual_encoder import FusionLayer
from mm_utils.objectives import JointObjective, Objective

LEAST_PARAMETERS = 1_000_000  # of a block that FSDP2 gathers and frees by itself; all else is one unit
_SCALARS = ("logit_scale", "logit_bias")


def get_ready(accelerator: Accelerator, objective: Objective, global_batch_size: int) -> None:
    """Call it before `accelerator.prepare`.

    Raises:
        ValueError: if the configuration of accelerate, or the objective, is one that this cannot be done with.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        _get_fsdp_ready(accelerator, objective)
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        _get_deepspeed_ready(accelerator, objective, global_batch_size)


def _get_fsdp_ready(accelerator: Accelerator, objective: Objective) -> None:
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
    plugin.mixed_precision_policy = None
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, blocks(objective)
    objective.groups_texts = False  # ranks may have other numbers of groups, and would wait for each other
    make_shardable(objective)


def _get_deepspeed_ready(accelerator: Accelerator, objective: Objective, global_batch_size: int) -> None:
    plugin = accelerator.state.deepspeed_plugin
    if plugin.zero_stage == 3:
        raise ValueError(
            "zero_stage is 3 in the configuration of accelerate; this shards weights by FSDP2 only. Use "
            "accelerate_configs/fsdp2.yaml, or set it to 2."
        )
    config = plugin.deepspeed_config
    # DeepSpeed wants to know; it does not matter, as each rank's share of the batch is one micro-batch.
    config["train_micro_batch_size_per_gpu"] = max(1, global_batch_size // accelerator.num_processes)
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed precision is fp16, which DeepSpeed would train in throughout. Use bf16, or DDP.")
    if config.pop("bf16", {}).get("enabled"):
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
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
    """Make vectors of one of temperature and bias, and all weights contiguous, in place: both refuse others."""
    for parameter in objective.parameters():
        parameter.data = (parameter.data if parameter.dim() else parameter.data.view(1)).contiguous()


def wake(objective: nn.Module) -> None:
    """Call it after `accelerator.prepare`, before anything else of the objective: what is called first is FSDP2's root.

    FSDP2 is told which methods besides `forward` use a module's weights, so that it gathers them there too.
    """
    methods = {JointObjective: ("encode", "part"), FusionLayer: ("encode_image",)}
    for module in objective.modules():
        for kind, names in methods.items():
            if isinstance(module, FSDPModule) and isinstance(module, kind):
                for name in names:
                    register_fsdp_forward_method(module, name)
    if isinstance(objective, FSDPModule):
        # Writing into it would be a mistake, and nobody does.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
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
