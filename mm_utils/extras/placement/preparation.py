"""Prepare an objective whose encoders are on different processes."""

import logging
from collections.abc import Sequence
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import TrainerCallback

from mm_utils import distributed
from mm_utils.data.batches.loaders import check_loading
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.placement.apart import ApartObjective
from mm_utils.extras.placement.split import Split
from mm_utils.objectives import JointObjective, Objective, RowTerm
from mm_utils.objectives.contrastive import Contrastive
from mm_utils.reliability.watchdog import StragglerDetection
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.callbacks import RunCallback
from mm_utils.training.prepared import Prepared

logger = logging.getLogger(__name__)


class Apart(RunCallback):
    """Place the encoders on different processes; copy both to every process before they are evaluated or saved.

    Args:
        placement: "apart", or "apart:N" for N processes with the images.
    """

    def __init__(self, placement: str):
        self.placement = placement
        self.objective: ApartObjective | None = None

    def prepare(
        self,
        args: TrainingArguments,
        accelerator: Accelerator,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        data: TrainingData,
        callbacks: Sequence[TrainerCallback],
    ) -> Prepared | None:
        """Place the encoders; None on one process, which has both."""
        split = self.choose_split(args, accelerator, objective, data)
        if split is None:
            return None
        assert isinstance(objective, JointObjective)
        logger.info("Encoders are apart: images on %d of %d processes, texts on the others", split.vision, split.world)
        self.objective = apart = ApartObjective(objective, split, data.loaders.pad_token_id)
        data.loaders.division = split.division
        check_loading(data.loaders, args.batch_sizes.sizes[-1], args.per_device_eval_batch_size)
        if args.micro_batch_size is None:  # whole, with gradients averaged after the last part, which is the only one
            args.micro_batch_size = str(args.batch_sizes.sizes[-1])
        # In evaluation mode, accelerate moves a model to the device and does not wrap it.
        wrapped = accelerator.prepare_model(apart, evaluation_mode=True)
        distributed.broadcast([*apart.parameters(), *apart.buffers()], 0, accelerator.device)  # as DDP does
        # The detection of stragglers takes all processes for alike.
        kept = [each for each in callbacks if not isinstance(each, StragglerDetection)]
        return Prepared(apart, wrapped, accelerator.prepare(optimizer), kept)

    def on_evaluate_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exchange what the last steps changed."""
        if self.objective is not None:
            self.objective.exchange()

    on_train_end = on_evaluate_begin

    def on_save_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Exchange what the last steps changed, with the state of the optimizer."""
        if self.objective is not None:
            self.objective.exchange(kwargs["optimizer"])

    def choose_split(
        self, args: TrainingArguments, accelerator: Accelerator, objective: Objective, data: TrainingData
    ) -> Split | None:
        """Return which processes have which encoder; None for both on the only one.

        Raises:
            ValueError: if the encoders cannot be apart, with the reason.
        """
        world = distributed.world_size()
        if reason := reason_against(args, accelerator, objective, data):
            raise ValueError(f"--placement is {self.placement}; {reason}")
        if world == 1:
            logger.info("--placement is %s; both encoders are on the one process", self.placement)
            return None
        _, _, given = self.placement.partition(":")
        images = int(given) if given else world // 2
        if images >= world:
            raise ValueError(
                f"--placement is {self.placement}; of {world} processes that leaves none for the texts. Give at most "
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
        "--streaming assigns shards of its own to every process. Use together.": not isinstance(
            data.order, GlobalOrder
        ),
        "--cache_features has run a frozen encoder before training. Use together.": bool(data.features),
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
