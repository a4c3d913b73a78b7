"""Prepare what a run trains for its processes; configure FSDP2 and DeepSpeed so that it learns with them what it does with DDP.

By default, Accelerate lets both round more than autocast does: weights (and so the temperature), the loss, and the sums of
gradients. Here weights are fp32, and autocast rounds where it is safe.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import TrainerCallback

from mm_utils.data.training_data import TrainingData
from mm_utils.model.modeling_fusion_dual_encoder import FusionLayer
from mm_utils.objectives import JointObjective, Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import RunCallback

MIN_BLOCK_PARAMETERS = 1_000_000  # FSDP2 gathers and frees larger blocks one by one; all else is one unit


@dataclass
class Prepared:
    """An objective as this process trains it.

    Attributes:
        unwrapped: the objective itself; a callback may put another one in its place.
        objective, optimizer: what accelerate made of it, and of the optimizer.
        callbacks: those of the training loop.
    """

    unwrapped: Objective
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    callbacks: Sequence[TrainerCallback]


def prepare(
    args: TrainingArguments,
    accelerator: Accelerator,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
    callbacks: Sequence[TrainerCallback],
) -> Prepared:
    """Prepare an objective for all processes alike, unless a callback does it in its own way; called on all ranks.

    Raises:
        ValueError: if backend, objective or data do not go together, with the reason.
    """
    configure_backend(accelerator, objective, args.batch_sizes.at(0))
    for each in callbacks:
        if isinstance(each, RunCallback):
            found = each.prepare(args, accelerator, objective, optimizer, data, callbacks)
            if found is not None:
                return found
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    initialise_fsdp_root(wrapped)
    return Prepared(objective, wrapped, optimizer, callbacks)


def configure_backend(accelerator: Accelerator, objective: Objective, global_batch_size: int) -> None:
    """Configure FSDP2 or DeepSpeed, if the run uses one; call it before `accelerator.prepare`.

    Raises:
        ValueError: if accelerate's configuration or the objective is not supported with the backend.
    """
    if accelerator.distributed_type == DistributedType.FSDP:
        _configure_fsdp(accelerator, objective)
    elif accelerator.distributed_type == DistributedType.DEEPSPEED:
        _configure_deepspeed(accelerator, objective, global_batch_size)
    elif objective.model.media and accelerator.ddp_handler is not None:
        # DDP else packs gradients in the order in which they came in the first step, so as that step's medium has it.
        accelerator.ddp_handler.find_unused_parameters = True


def _configure_fsdp(accelerator: Accelerator, objective: Objective) -> None:
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version is {plugin.fsdp_version} in the configuration of accelerate; this needs FSDP2. Set it to 2, or use "
            "accelerate_configs/fsdp2.yaml."
        )
    if isinstance(objective, JointObjective) and objective.needs_teacher:
        raise ValueError(
            "--objectives has a term that learns from the weight average, which replaces the weights in the middle of a step; "
            "FSDP2 does not allow that. Drop the term, or use DDP (accelerate_configs/multi_gpu.yaml)."
        )
    plugin.mixed_precision_policy = None
    plugin.auto_wrap_policy, plugin.transformer_cls_names_to_wrap = transformer_auto_wrap_policy, blocks(objective)
    objective.groups_texts = False  # ranks with different numbers of groups would wait for each other
    make_shardable(objective)


def _configure_deepspeed(accelerator: Accelerator, objective: Objective, global_batch_size: int) -> None:
    plugin = accelerator.state.deepspeed_plugin
    if objective.model.media:
        raise ValueError(
            "--dataset_name names several media, and DeepSpeed would move the towers of all in every step. Use DDP or FSDP2."
        )
    if plugin.zero_stage == 3:
        raise ValueError(
            "zero_stage is 3 in the configuration of accelerate; this shards weights by FSDP2 only. Use "
            "accelerate_configs/fsdp2.yaml, or set it to 2."
        )
    config = plugin.deepspeed_config
    # DeepSpeed requires a value; it has no effect, as each rank's share of the batch is one micro-batch.
    config["train_micro_batch_size_per_gpu"] = max(1, global_batch_size // accelerator.num_processes)
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed precision is fp16, which DeepSpeed would train in throughout. Use bf16, or DDP.")
    if config.pop("bf16", {}).get("enabled"):
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    make_shardable(objective)


def blocks(objective: nn.Module) -> list[str]:
    """Return the class names of large modules that are stacked in lists."""
    rows = [module for module in objective.modules() if isinstance(module, (nn.ModuleList, nn.Sequential))]
    large = {
        type(block).__name__
        for row in rows
        for block in row
        if not type(block).__module__.startswith("torch.")
        and sum(parameter.numel() for parameter in block.parameters()) >= MIN_BLOCK_PARAMETERS
    }
    return sorted(large)


def make_shardable(objective: nn.Module) -> None:
    """Turn scalars into vectors of one, make weights contiguous, in place, for both backends."""
    for parameter in objective.parameters():
        parameter.data = (parameter.data if parameter.dim() else parameter.data.view(1)).contiguous()


def initialise_fsdp_root(objective: nn.Module) -> None:
    """Make the objective the root of FSDP2, and register the methods that use its weights.

    FSDP2 treats the first module whose forward runs as the root. So run a no-op forward on the objective right after
    `accelerator.prepare`. Methods besides `forward` must be registered, so that FSDP2 gathers the weights there too.
    """
    methods = {Objective: ("encode", "part"), FusionLayer: ("encode_image",)}
    for module in objective.modules():
        for kind, names in methods.items():
            if isinstance(module, FSDPModule) and isinstance(module, kind):
                for name in names:
                    register_fsdp_forward_method(module, name)
    if isinstance(objective, FSDPModule):
        # The warning is about writing into the view, which never happens here.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
        root: Any = objective
        root.do_nothing = lambda: None
        register_fsdp_forward_method(root, "do_nothing")
        root.do_nothing()
        root.reshard()


@contextmanager
def unsharded(objective: nn.Module) -> Iterator[None]:
    """Gather all weights, so that methods of the model can be called from outside the objective."""
    if not isinstance(objective, FSDPModule):
        yield
        return
    objective.unshard()
    try:
        yield
    finally:
        objective.reshard()
