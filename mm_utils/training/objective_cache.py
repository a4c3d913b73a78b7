"""Prepare what a run trains for its processes, so that it learns with FSDP2 and DeepSpeed what it does with DDP.

By default, Accelerate lets both round more than autocast does: weights (and so the temperature), the loss, and the sums of
gradients. Here weights are fp32, and autocast rounds where it is safe.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

from mm_utils.model.fusion import FusionLayer
from mm_utils.objectives.objective import Objective
from mm_utils.training.arguments import TrainingArguments

MIN_BLOCK_PARAMETERS = 1_000_000  # FSDP2 gathers and frees larger blocks one by one; all else is one unit


def prepare(
    args: TrainingArguments,
    accelerator: Accelerator,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    max_grad_norm: float,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the objective and the optimizer as this process trains them; called on all ranks, for each stage of a run.

    Raises:
        ValueError: if backend, objective or data do not go together, with the reason.
    """
    accelerator.free_memory()  # what it had prepared for the stage before
    if isinstance(objective, FSDPModule):  # for which that has sharded it
        return objective, accelerator.prepare_optimizer(optimizer)
    backend = accelerator.distributed_type.value
    if backend == "FSDP":
        configure_fsdp(accelerator, objective, args.batch_sizes.at(0))
    elif backend == "DEEPSPEED":
        configure_deepspeed(accelerator, objective, args.batch_sizes.at(0), max_grad_norm)
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    place_encoders(args, accelerator, objective)
    if isinstance(wrapped, FSDPModule):
        initialise_fsdp_root(wrapped)  # type: ignore[arg-type]
    return wrapped, optimizer


def place_encoders(args: TrainingArguments, accelerator: Accelerator, objective: Objective) -> None:
    """Move the image encoder to `--vision_device`; its inputs are sent there, and its outputs back."""
    if args.vision_device is None:
        return
    device = torch.device(args.vision_device)
    home = accelerator.device
    tower = objective.model.vision_model.to(device)
    if not tower._forward_hooks:  # the second stage of a run finds them
        tower.register_forward_pre_hook(lambda _, args, named: send_to_device((args, named), device), with_kwargs=True)
        tower.register_forward_hook(lambda _, args, outputs: send_to_device(outputs, home))


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


# -- FSDP2 and DeepSpeed -------------------------------------------------------------------------------------------------
def configure_fsdp(accelerator: Accelerator, objective: Objective, global_batch_size: int) -> None:
    """Configure FSDP2; called before `accelerator.prepare`, as the other is.

    Raises:
        ValueError: if accelerate's configuration or the objective is not supported with it.
    """
    plugin = accelerator.state.fsdp_plugin
    if plugin.fsdp_version != 2:
        raise ValueError(
            f"fsdp_version is {plugin.fsdp_version} in the configuration of accelerate; this needs FSDP2. Set it to 2, or use "
            "accelerate_configs/fsdp2.yaml."
        )
    plugin.mixed_precision_policy = None
    plugin.auto_wrap_policy = transformer_auto_wrap_policy
    plugin.transformer_cls_names_to_wrap = blocks(objective)
    objective.groups_texts = False  # ranks with different numbers of groups would wait for each other
    make_shardable(objective)


def configure_deepspeed(
    accelerator: Accelerator, objective: Objective, global_batch_size: int, max_grad_norm: float
) -> None:
    """Configure DeepSpeed, as `configure_fsdp`."""
    plugin = accelerator.state.deepspeed_plugin
    if plugin.zero_stage == 3:
        raise ValueError(
            "zero_stage is 3 in the configuration of accelerate; this shards weights by FSDP2 only. Use "
            "accelerate_configs/fsdp2.yaml, or set it to 2."
        )
    config = plugin.deepspeed_config
    if (parts := config.get("gradient_accumulation_steps", 1)) not in (1, "auto"):
        raise ValueError(
            f"gradient_accumulation_steps is {parts} in the configuration of DeepSpeed; a step is --global_batch_size pairs. Set "
            "it to 1, and give --micro_batch_size to hold fewer pairs at a time."
        )
    config["gradient_clipping"] = max_grad_norm  # DeepSpeed clips by itself, at 1 where nothing says otherwise
    # DeepSpeed requires a value; it has no effect, as each rank's share of the batch is one micro-batch.
    config["train_micro_batch_size_per_gpu"] = max(1, global_batch_size // accelerator.num_processes)
    if accelerator.mixed_precision == "fp16":
        raise ValueError("mixed precision is fp16, which DeepSpeed would train in throughout. Use bf16, or DDP.")
    if config.pop("bf16", {}).get("enabled"):
        config["torch_autocast"] = {"enabled": True, "dtype": "bfloat16", "lower_precision_safe_modules": []}
    make_shardable(objective)


def blocks(objective: nn.Module) -> list[str]:
    """Return the class names of large modules that are stacked in lists."""
    names = set[str]()
    for module in objective.modules():
        for block in module if isinstance(module, (nn.ModuleList, nn.Sequential)) else ():
            # 'ViTLayer' and the like, not an nn.Linear that stands in an nn.Sequential
            is_own = not type(block).__module__.startswith("torch.")
            if is_own and sum(weight.numel() for weight in block.parameters()) >= MIN_BLOCK_PARAMETERS:
                names.add(type(block).__name__)
    return sorted(names)


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
    # The warning is about writing into the view, which never happens here.
    warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor", UserWarning)
    root: Any = objective
    root.do_nothing = lambda: None
    register_fsdp_forward_method(root, "do_nothing")
    root.do_nothing()
    root.reshard()
