"""What of a run is kept: checkpoints to go on from, and the model at its end."""

import logging
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from transformers import ProcessorMixin, TrainerState

from mm_utils import adapters
from mm_utils.averaging import WeightAverage
from mm_utils.backends import with_scalars
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives import Objective
from mm_utils.preflight import settle
from mm_utils.saving import CheckpointWriter
from mm_utils.snapshot import RUN_FILE, Buffers, copied, load_optimizer, read_json, take

logger = logging.getLogger(__name__)

_DEEPSPEED = "deepspeed"


class Checkpoints:
    """Copies a run on all ranks and writes it on the main process; gives it back to any number of ranks.

    Args:
        accelerator: which prepared the optimizer.
        output_dir: of the run.
        limit: how many checkpoints to keep.
        processor: saved beside the model.
        objective: not wrapped, with the model in it.
        optimizer: of its parameters.
        average: of the weights, if there is one; at the end it is saved in their place.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        output_dir: Path,
        limit: int | None,
        processor: ProcessorMixin,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
    ):
        self.accelerator, self.output_dir, self.processor = accelerator, output_dir, processor
        self.objective, self.model, self.optimizer, self.average = objective, objective.model, optimizer, average
        self.writer = CheckpointWriter(output_dir, limit)
        self._buffers: dict[str, Buffers] = {}

    @property
    def nbytes(self) -> int:
        """About what a checkpoint takes on the disk, with two numbers of the optimizer for each that is trained."""
        parameters = list(self.model.parameters())
        weights = sum(parameter.nbytes for parameter in parameters)
        trained = sum(parameter.nbytes for parameter in parameters if parameter.requires_grad)
        return weights + 2 * trained + (weights if self.average is not None else 0)

    def save(self, state: TrainerState, run: dict[str, Any], keep: Collection[int]) -> None:
        """Copy everything on all ranks and begin to write; `run` is any JSON, `keep` the steps not to be removed."""
        scaler, main = self.accelerator.scaler, self.accelerator.is_main_process
        run = {**run, "scaler": None if scaler is None else scaler.state_dict()}
        optimizer = None if self._has_deepspeed else self.optimizer
        self.writer.wait()  # it reads the memory that is copied to
        snapshot = take(
            self.model, self.processor, self.objective, optimizer, self.average, state, run, main, self._buffers
        )
        if self._has_deepspeed:
            snapshot.folders.append(self._save_deepspeed())
        if main:
            self.writer.start(state.global_step, snapshot, keep)

    def read(self, path: Path) -> dict[str, Any]:
        """What `save` was given as `run`."""
        return read_json(path / RUN_FILE)

    def load(self, path: Path, run: dict[str, Any]) -> None:
        """Take up weights, optimizer, average and the loss scaler's scale, on all ranks.

        Raises:
            ValueError: if it is of another model.
        """
        self.load_weights(path)
        if self._has_deepspeed:
            self.accelerator.load_state(str(path / _DEEPSPEED))
        else:
            load_optimizer(self.optimizer, self.objective, path)
        if self.accelerator.scaler is not None and run["scaler"] is not None:
            self.accelerator.scaler.load_state_dict(run["scaler"])

    def load_weights(self, path: Path) -> None:
        """Take up weights and average alone, on all ranks."""
        adapters.load_weights(self.model, path)
        if self.average is not None:
            self.average.load(path)

    def save_model(self) -> None:
        """Write model and processor to the output folder, and the stock dual encoder to `dual_encoder/` inside it.

        Raises:
            ValueError: on all ranks, if the weights are not finite.
        """
        main = self.accelerator.is_main_process
        weights = copied(self.model.state_dict(), main)
        if self.average is not None:
            weights |= copied(self.average.values, main)
        bad = [name for name, value in weights.items() if not value.isfinite().all()]
        settle(
            f"the weights after the last step are not finite ({len(bad)} tensors, such as {bad[0]}), and are not saved. "
            "Resume from the newest checkpoint, or train again, with a lower --learning_rate, or in bf16 or fp32."
            if bad
            else None
        )
        if main:
            self.model.save_pretrained(self.output_dir, state_dict=adapters.merged(with_scalars(weights)))
            self.processor.save_pretrained(self.output_dir)
            if type(self.model) is FusionDualEncoderModel:  # what classes were told by finds no images any more
                save_dual_encoder(self.output_dir, self.processor)
        self.accelerator.wait_for_everyone()

    @property
    def _has_deepspeed(self) -> bool:
        return self.accelerator.distributed_type == DistributedType.DEEPSPEED

    def _save_deepspeed(self) -> Path:
        """DeepSpeed cuts the optimizer's state in pieces without names; its own files go into the checkpoint as they are."""
        folder = self.output_dir / f".{_DEEPSPEED}" / _DEEPSPEED
        if self.accelerator.is_main_process:
            shutil.rmtree(folder.parent, ignore_errors=True)
        self.accelerator.wait_for_everyone()
        self.accelerator.save_state(str(folder))
        self.accelerator.wait_for_everyone()
        return folder


def save_dual_encoder(folder: Path, processor: ProcessorMixin) -> None:
    """Write `dual_encoder/` beside a saved model, as stock transformers loads it; say why where it cannot."""
    model = FusionDualEncoderModel.from_pretrained(folder)
    try:
        stock = model.to_dual_encoder()
    except ValueError as error:
        logger.info("No dual_encoder/ folder: %s.", error)
        return
    stock.save_pretrained(folder / "dual_encoder")
    processor.save_pretrained(folder / "dual_encoder")
