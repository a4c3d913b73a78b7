"""Place the two encoders on two devices of one process, or give processes unequal shares of a batch."""

from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import send_to_device
from torch import nn

from mm_utils import distributed
from mm_utils.data.batches.order import Division, GlobalOrder
from mm_utils.data.training_data import TrainingData
from mm_utils.objectives.joint import Objective
from mm_utils.training.arguments import TrainingArguments


def share_batches(args: TrainingArguments, data: TrainingData) -> None:
    """Set how many rows of each batch every process gets, for `--rank_shares`.

    Raises:
        ValueError: if there is not one share for each process, or the data is a stream.
    """
    if args.rank_shares is None:
        return
    world, shares = distributed.world_size(), args.rank_shares.split(",")
    if len(shares) != world or not all(share.isdecimal() and int(share) for share in shares):
        raise ValueError(
            f"--rank_shares is {args.rank_shares}; there are {world} processes. Give a number above 0 for each, such as 2,1."
        )
    if not isinstance(data.order, GlobalOrder):
        raise ValueError(
            f"--rank_shares is {args.rank_shares}; a stream gives every process whole shards. Drop it, or --streaming."
        )
    data.loaders.division = Division(tuple(map(float, shares)))


def place_encoders(args: TrainingArguments, accelerator: Accelerator, objective: Objective) -> None:
    """Move the encoders to `--vision_device` and `--text_device`; all else stays on the accelerator's device.

    Raises:
        ValueError: if there are several processes, or the text encoder's table of words is needed elsewhere.
    """
    places = {"vision": args.vision_device, "text": args.text_device}
    if not any(places.values()):
        return
    flags = " ".join(f"--{name}_device {place}" for name, place in places.items() if place)
    if distributed.world_size() > 1:
        raise ValueError(
            f"{flags} is set; there are {distributed.world_size()} processes, each with a device of its own. Start one "
            "process, or drop it: DDP and FSDP2 divide the work among processes."
        )
    model: Any = objective.model
    if args.text_device and model.token_head is not None:
        raise ValueError(
            f"{flags} is set; --objectives predicts words by the text encoder's own table, on the device of the head. Drop "
            "--text_device: --vision_device alone frees as much memory."
        )
    for tower, place in ((model.vision_model, args.vision_device), (model.text_model, args.text_device)):
        if place:
            run_on(tower, torch.device(place), accelerator.device)


def run_on(tower: nn.Module, device: torch.device, home: torch.device) -> None:
    """Move a tower to a device; its inputs are sent there, and its outputs back `home`."""
    tower.to(device)
    tower.register_forward_pre_hook(lambda _, args, kwargs: send_to_device((args, kwargs), device), with_kwargs=True)
    tower.register_forward_hook(lambda _, args, outputs: send_to_device(outputs, home))
