"""Prepare what a run trains for its processes; `mm_utils.training.sharded` does what FSDP2 and DeepSpeed need."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mm_utils.data.training_data import TrainingData
from mm_utils.objectives.joint import Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.placement import place_encoders
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
        root: Any = wrapped
        initialise_fsdp_root(root)
    return wrapped, optimizer


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
