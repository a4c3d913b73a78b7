"""One optimizer step: learning rate, gradient of the global batch, clipping, update.

A step whose loss or gradient is not finite changes nothing and is written down. Our own random numbers are functions of seed, step and row
(`mm_utils.model.row_noise`). Those of a backbone's own dropout, if it is kept, are functions of seed, step and rank: a resumed run
repeats the uninterrupted one without stored random states, on the same number of processes.
"""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mm_utils import distributed
from mm_utils.objectives.grad_cache import backward_that_fits
from mm_utils.reliability.skipped import NonfiniteSteps
from mm_utils.sharding import full_tensor
from mm_utils.training.arguments import NONFINITE_FILE, OptimizerArguments, TrainingArguments
from mm_utils.training.optim import BATCH_EXPONENT, schedule
from mm_utils.training.stages import Stage

logger = logging.getLogger(__name__)

_MIN_LOSS_SCALE = 2.0**-14


@dataclass
class TrainStep:
    """The optimizer step of a run, of a prepared objective and optimizer, whose groups have a `peak_lr`."""

    args: TrainingArguments
    optimizer_args: OptimizerArguments
    accelerator: Accelerator
    objective: nn.Module
    optimizer: torch.optim.Optimizer
    stage: Stage

    def __post_init__(self) -> None:
        self.unwrapped: Any = self.accelerator.unwrap_model(self.objective)
        self.sizes = self.args.batch_sizes
        size = self.args.micro_batch_size
        share = -(-max(self.sizes.sizes) // distributed.world_size())  # rounded up
        # Pairs that this rank holds at a time, None for all; "auto" is all of this process, halved when memory runs out.
        self.micro_batch_size = None if size is None else share if size == "auto" else int(size)
        path = Path(str(self.args.output_dir), NONFINITE_FILE)
        self.nonfinite = NonfiniteSteps(path, self.accelerator.scaler is not None)
        self._is_first = True

    def run(self, batch: dict[str, Any], step: int) -> dict[str, Tensor]:
        """Take a step with one global batch; return the objective's report and the gradient norm.

        A step whose loss or gradient is not finite, or whose gradient is 0, changes nothing.

        Raises:
            ValueError: if not even one pair fits into memory.
            FloatingPointError: if too many steps were not finite.
        """
        if self._is_first or not (self.objective.training and self.unwrapped.model.training):  # 3 % of a small step
            self.objective.train()
        growth = (self.sizes.at(step) / self.sizes.at(0)) ** BATCH_EXPONENT  # from 256 to 1,024 pairs: 2
        rate = growth * schedule(step - self.stage.begin, self.stage.end - self.stage.begin, self.optimizer_args)
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate * self.stage.rate
        if self._is_first:
            self._is_first = False
            self._settle_order(batch)
        report = self._backward(batch, step)
        norm = self._clip(self.optimizer_args.max_grad_norm or math.inf)
        report["grad_norm"] = full_tensor(torch.as_tensor(norm))  # a sharded one of FSDP2
        scaler = self.accelerator.scaler
        # The one place of a step where the host waits for its device.
        if self.nonfinite.may_move(step, report, batch["image_ids"]):
            self.optimizer.step()
            if (highest := self.unwrapped.highest_scale) is not None:
                with torch.no_grad():  # CLIP keeps the inverse temperature in 1 to 100 (arXiv 2103.00020)
                    self.unwrapped.model.logit_scale.clamp_(0.0, math.log(highest))
        elif scaler is not None:
            scaler.update()  # lower or raise the scale, by what unscaling has found
            if scaler.get_scale() < _MIN_LOSS_SCALE:
                raise FloatingPointError(
                    f"the gradients of fp16 training are not finite at any scale, up to step {step + 1}. Lower --learning_rate, "
                    "or train in bf16."
                )
        self.optimizer.zero_grad()
        return report

    def _settle_order(self, batch: dict[str, Any]) -> None:
        """Take this start's first step once for nothing, where that settles the order of DDP's sums.

        DDP packs gradients anew after the first step of every start. Three and more numbers are added up in an order that
        depends on where they lie, so the step after a resumption would differ in the last digits.
        """
        wrapped = isinstance(self.objective, DistributedDataParallel)
        if self.micro_batch_size is None and wrapped and distributed.world_size() >= 3:
            buffers = [buffer.clone() for buffer in self.objective.buffers()]  # running statistics too
            self._backward(batch, 0)
            self.optimizer.zero_grad()
            with torch.no_grad():
                for buffer, value in zip(self.objective.buffers(), buffers, strict=True):
                    buffer.copy_(value)

    def _backward(self, batch: dict[str, Any], step: int) -> dict[str, Tensor]:
        def restart() -> None:
            self.optimizer.zero_grad()
            place = (self.args.seed * 1_000_003 + step) * distributed.world_size() + distributed.rank()
            set_seed(place % 2**32)  # numpy takes no larger seed

        report, self.micro_batch_size = backward_that_fits(
            self.accelerator, self.objective, batch, step, self.micro_batch_size, restart
        )
        return report

    def _clip(self, max_norm: float) -> Tensor:
        """Clip the norm of the averaged gradient; return what it was, the same on all ranks."""
        if self.accelerator.distributed_type in (DistributedType.NO, DistributedType.MULTI_GPU):
            self.accelerator.unscale_gradients()  # what follows it in accelerate takes 1 % of a small step
            return nn.utils.clip_grad_norm_(self.objective.parameters(), max_norm)
        return self.accelerator.clip_grad_norm_(self.objective.parameters(), max_norm)
