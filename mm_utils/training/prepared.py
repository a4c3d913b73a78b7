"""Prepare what a run trains for its processes; `mm_utils.extras.sharded` does what FSDP2 and DeepSpeed need."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import TrainerCallback

from mm_utils.data.training_data import TrainingData
from mm_utils.doors import entry
from mm_utils.objectives import Objective
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import RunCallback


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
    backend = accelerator.distributed_type.value
    if backend in ("FSDP", "DEEPSPEED"):
        configure = entry("BACKENDS", backend, f"accelerate is configured for {backend}")
        configure(accelerator, objective, args.batch_sizes.at(0))
    for each in callbacks:
        if isinstance(each, RunCallback):
            found = each.prepare(args, accelerator, objective, optimizer, data, callbacks)
            if found is not None:
                return found
    wrapped, optimizer = accelerator.prepare(objective, optimizer)
    if isinstance(wrapped, FSDPModule):
        entry("BACKENDS", "root", "accelerate is configured for FSDP")(wrapped)
    return Prepared(objective, wrapped, optimizer, callbacks)


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
