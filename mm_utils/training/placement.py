"""Place the image encoder on another device than the rest, in a run of one process."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from mm_utils import distributed
from mm_utils.objectives.joint import Objective
from mm_utils.training.arguments import TrainingArguments


def place_encoders(args: TrainingArguments, accelerator: Accelerator, objective: Objective) -> None:
    """Move the image encoder to `--vision_device`; all else stays on the accelerator's device.

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
    model: Any = objective.model
    run_on(model.vision_model, torch.device(args.vision_device), accelerator.device)


def run_on(tower: nn.Module, device: torch.device, home: torch.device) -> None:
    """Move a tower to a device; its inputs are sent there, and its outputs back `home`."""
    tower.to(device)
    tower.register_forward_pre_hook(lambda _, args, kwargs: send_to_device((args, kwargs), device), with_kwargs=True)
    tower.register_forward_hook(lambda _, args, outputs: send_to_device(outputs, home))
