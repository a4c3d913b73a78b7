"""Prepare an objective for its processes: both encoders on each, sharded or not, or apart."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn
from transformers import TrainerCallback

from mm_utils import distributed
from mm_utils.data.batches.machine_limits import check_loading
from mm_utils.data.streams.stream import Stream
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.placement.apart import ApartObjective, TowerExchange
from mm_utils.extras.placement.split import Split
from mm_utils.objectives import JointObjective, Objective, RowTerm
from mm_utils.objectives.contrastive import Contrastive
from mm_utils.reliability.watchdog import StragglerDetection
from mm_utils.training import fsdp_deepspeed
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.throughput import Throughput

logger = logging.getLogger(__name__)

unsharded = fsdp_deepspeed.unsharded


@dataclass
class Prepared:
    """An objective as this process trains it.

    Attributes:
        unwrapped: the objective itself; another one than was given where encoders are apart.
        objective, optimizer: what accelerate made of it, and of the optimizer.
    """

    unwrapped: Objective
    objective: nn.Module
    optimizer: torch.optim.Optimizer

    def adjust(self, callbacks: Sequence[TrainerCallback]) -> list[TrainerCallback]:
        """Return the callbacks, with the exchange of encoders that are apart.

        None of them then takes all processes for alike, as the detection of stragglers does.
        """
        if not isinstance(self.unwrapped, ApartObjective):
            return list(callbacks)
        for each in callbacks:
            if isinstance(each, Throughput):
                each.flops = None
        kept = [each for each in callbacks if not isinstance(each, StragglerDetection)]
        return [*kept, TowerExchange(self.unwrapped)]


def prepare(
    args: TrainingArguments,
    accelerator: Accelerator,
    objective: Objective,
    optimizer: torch.optim.Optimizer,
    data: TrainingData,
) -> Prepared:
    """Place the encoders as `--placement` says; called on all processes.

    Raises:
        ValueError: if backend, objective or data cannot be placed so, with the reason.
    """
    fsdp_deepspeed.configure_backend(accelerator, objective, args.batch_sizes.at(0))
    split = choose_split(args, accelerator, objective, data)
    if split is None:
        wrapped, optimizer = accelerator.prepare(objective, optimizer)
        fsdp_deepspeed.initialise_fsdp_root(wrapped)
        return Prepared(objective, wrapped, optimizer)
    assert isinstance(objective, JointObjective)
    logger.info("Encoders are apart: images on %d of %d processes, texts on the others", split.vision, split.world)
    apart = ApartObjective(objective, split, data.loaders.pad_token_id)
    data.loaders.division = split.division
    check_loading(data.loaders, args.batch_sizes.sizes[-1], args.per_device_eval_batch_size)
    if args.micro_batch_size is None:  # whole, with gradients averaged after the last part, which is the only one
        args.micro_batch_size = str(args.batch_sizes.sizes[-1])
    # In evaluation mode, accelerate moves a model to the device and does not wrap it.
    wrapped = accelerator.prepare_model(apart, evaluation_mode=True)
    distributed.broadcast([*apart.parameters(), *apart.buffers()], 0, accelerator.device)  # as DDP does
    return Prepared(apart, wrapped, accelerator.prepare(optimizer))


def choose_split(
    args: TrainingArguments, accelerator: Accelerator, objective: Objective, data: TrainingData
) -> Split | None:
    """Return which processes have which encoder; None for both on each.

    Raises:
        ValueError: if `--placement apart` is not possible, with the reason.
    """
    kind, images = args.placed
    world = distributed.world_size()
    if kind == "together":
        return None
    if reason := reason_against(args, accelerator, objective, data):
        raise ValueError(f"--placement is {args.placement}; {reason}")
    if world == 1:
        logger.info("--placement is %s; both encoders are on the one process", args.placement)
        return None
    images = world // 2 if images is None else images
    if images >= world:
        raise ValueError(
            f"--placement is {args.placement}; of {world} processes that leaves none for the texts. Give at most "
            f"apart:{world - 1}."
        )
    return Split(images, world - images)


def reason_against(
    args: TrainingArguments, accelerator: Accelerator, objective: Objective, data: TrainingData
) -> str | None:
    """Return why the encoders of a run cannot be apart, and what to do; None if they can."""
    if not isinstance(objective, JointObjective):
        return f"a {type(objective).__name__} does not train two encoders. Use together."
    backend = {DistributedType.FSDP: "FSDP2", DistributedType.DEEPSPEED: "DeepSpeed"}.get(accelerator.distributed_type)
    reasons = {
        f"{backend} divides every weight among all processes. Use together, or accelerate_configs/multi_gpu.yaml.": backend,
        "in fp16 one encoder alone may have to skip a step. Use bf16, or together.": accelerator.scaler is not None,
        "--dataset_name names several media, so there are more than two encoders. Use together.": objective.model.media,
        "--balance deals images and texts together, by speed. Drop it, or use together.": args.balance,
        "--streaming gives every process shards of its own. Use together.": isinstance(data.order, Stream),
        "--cache_features has run a frozen encoder before training. Use together.": data.features is not None,
        "--micro_batch_size auto tries pairs, of which no process has both sides. Give a number of rows, or use "
        "together.": args.micro_batch_size == "auto",
    }
    for term in objective.weights:
        remedy = "Drop it, or use together."
        reasons |= {
            f"--objectives has {term.name}, which needs an image and its text on one process. {remedy}": isinstance(
                term, RowTerm
            ),
            f"--objectives has {term.name}, which needs further embeddings of both sides. {remedy}": not isinstance(
                term, Contrastive
            ),
        }
    return next((reason for reason, holds in reasons.items() if holds), None)
