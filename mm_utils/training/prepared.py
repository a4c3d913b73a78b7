"""Prepare what a run trains for its processes; `mm_utils.training.sharded` does what FSDP2 and DeepSpeed need."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mm_utils import distributed
from mm_utils.data.training_data import TrainingData
from mm_utils.objectives.joint import Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.sharded import configure_deepspeed, configure_fsdp, initialise_fsdp_root


def prepare(
    args: TrainingArguments,
    accelerator: Accelerator,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the objective and the optimizer as this process trains them; called on all ranks, for each stage of a run.

    Raises:
        ValueError: if backend, objective or data do not go together, with the reason.
    """
    accelerator.free_memory()  # what it had prepared for the stage before
    if isinstance(objective, FSDPModule):  # for which that has sharded it
        return objective, accelerator.prepare_optimizer(optimizer)
    backend = accelerator.distributed_type.value
    if backend in ("FSDP", "DEEPSPEED"):
        configure = configure_fsdp if backend == "FSDP" else configure_deepspeed
        configure(accelerator, objective, args.batch_sizes.at(0))
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    place_encoders(args, accelerator, objective)
    if isinstance(wrapped, FSDPModule):
        initialise_fsdp_root(wrapped)  # type: ignore[arg-type]
    return wrapped, optimizer


def place_encoders(args: TrainingArguments, accelerator: Accelerator, objective: Objective) -> None:
    """Move the image encoder to `--vision_device`; its inputs are sent there, and its outputs back.

    Raises:
        ValueError: if there are several processes.
    """
    if args.vision_device is None:
        return
    if distributed.world_size() > 1:
        raise ValueError(
            f"--vision_device is {args.vision_device}; there are {distributed.world_size()} processes, each with a device of its "
            "own. Start one process, or drop it: DDP and FSDP2 divide the work among processes."
        )
    device, home = torch.device(args.vision_device), accelerator.device
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
