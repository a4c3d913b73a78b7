"""One optimizer step: the rate, the gradient of the global batch in the memory that there is, clipping, the update.

A step that runs out of memory is repeated in smaller parts, on all ranks; one whose loss or gradient is not finite changes
nothing and is written down. What a step draws at random is a function of (seed, step, rank), so a resumed run repeats the
straight one without stored random states.
"""

import logging
import math
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object, set_seed
from accelerate.utils.memory import clear_device_cache
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mm_utils import ranks
from mm_utils.averaging import WeightAverage
from mm_utils.grad_cache import OutOfMemoryError, backward
from mm_utils.jsonl import append_rows
from mm_utils.memory import find_micro_batch_size
from mm_utils.optim import LR_RULES, OptimizerArguments, schedule
from mm_utils.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

NONFINITE_FILE = "nonfinite_steps.jsonl"  # in the output folder: step, figures and image ids
_LOWEST_SCALE = 2.0**-14


class Stepper:
    """Takes the steps of a run.

    Args:
        args, optimizer_args: the dataclasses.
        accelerator: which prepared the next two.
        objective, optimizer: the latter's groups carry a `peak_lr`.
        average: of the weights, if there is one.
        max_steps: of the whole run.
        max_seq_length: tokens of the longest caption there may be, for `--micro_batch_size auto`.

    Attributes:
        micro_batch_size: pairs that this rank holds at a time; None = all.
        nonfinite_steps: how many changed nothing.
    """

    def __init__(
        self,
        args: TrainingArguments,
        optimizer_args: OptimizerArguments,
        accelerator: Accelerator,
        objective: nn.Module,
        optimizer: torch.optim.Optimizer,
        average: WeightAverage | None,
        max_steps: int,
        max_seq_length: int,
    ):
        self.args, self.optimizer_args, self.accelerator = args, optimizer_args, accelerator
        self.objective, self.optimizer, self.average = objective, optimizer, average
        self.max_steps, self.max_seq_length, self.sizes = max_steps, max_seq_length, args.batch_sizes
        self.micro_batch_size: int | None = None
        self.nonfinite_steps, self._moved, self._is_settled = 0, False, False

    def take(self, batch: dict[str, Any], step: int) -> dict[str, Tensor]:
        """One global batch: loss, gradient, clipping, update. Returns what the objective reports and the gradient norm.

        A step whose loss or gradient is not finite, or whose gradient is 0, changes nothing. Call `follow` after it.

        Raises:
            ValueError: if not even one pair fits into memory.
            FloatingPointError: if too many steps were not finite.
        """
        self.objective.train()
        rate = schedule(step, self.max_steps, self.optimizer_args)
        rate *= (self.sizes.at(step) / self.sizes.at(0)) ** LR_RULES[self.optimizer_args.batch_size_lr_rule]
        for group in self.optimizer.param_groups:
            group["lr"] = group["peak_lr"] * rate
        report = self._backward(batch, step)
        norm = self.accelerator.clip_grad_norm_(
            self.objective.parameters(), self.optimizer_args.max_grad_norm or math.inf
        )
        report["grad_norm"] = torch.as_tensor(norm)
        # Of a batch without a row the gradient is 0, and momentum and weight decay would go on by themselves.
        self._moved = self._is_finite(report, batch, step) and report["grad_norm"].item() != 0
        # A loss scaler skips by itself, and counts on being asked.
        if self._moved or self.accelerator.scaler is not None:
            self.optimizer.step()
        self.optimizer.zero_grad()
        return report

    def follow(self) -> None:
        """Let the average follow the weights, once callbacks have bounded these."""
        if self._moved and self.average is not None:
            self.average.update()

    def _backward(self, batch: dict[str, Any], step: int) -> dict[str, Tensor]:
        """The gradient of the global batch, in smaller parts and once more where memory runs out."""
        size = self.args.micro_batch_size
        if self.micro_batch_size is None and size is not None:
            self.micro_batch_size = int(size) if size != "auto" else self._fitting_micro_batch(batch)
        if self.micro_batch_size is None and not self._is_settled:
            self._settle_sums(batch, step)
        while True:
            self._seed(step)
            try:
                return backward(self.accelerator, self.objective, batch, step, self.micro_batch_size)
            except OutOfMemoryError as error:
                here = error.here
            except torch.OutOfMemoryError as error:
                raise _too_large(batch) from error
            self.optimizer.zero_grad()
            clear_device_cache(garbage_collection=True)
            if here:
                self._halve_micro_batch(len(batch["rows"]), step)

    def _seed(self, step: int) -> None:
        set_seed(((self.args.seed * 1_000_003 + step) * ranks.world_size() + ranks.rank()) % 2**32)

    def _settle_sums(self, batch: dict[str, Any], step: int) -> None:
        """Let DDP find its order of the gradients in a first pass that nothing comes of.

        It packs them anew after the first step of every start. Three and more numbers are added up in an order that depends
        on where they lie, so the step after a resumption would differ from the straight run's in the last digits.
        """
        self._is_settled = True
        if not isinstance(self.objective, DistributedDataParallel) or ranks.world_size() < 3:
            return
        buffers = [buffer.clone() for buffer in self.objective.buffers()]
        self._seed(step)
        try:
            backward(self.accelerator, self.objective, batch, step, None)
        except torch.OutOfMemoryError as error:
            raise _too_large(batch) from error
        self.optimizer.zero_grad()
        with torch.no_grad():
            for buffer, value in zip(self.objective.buffers(), buffers, strict=True):
                buffer.copy_(value)

    def _fitting_micro_batch(self, batch: dict[str, Any]) -> int:
        largest = -(-self.sizes.sizes[-1] // ranks.world_size())
        size = find_micro_batch_size(self.accelerator, self.objective, batch, largest, self.max_seq_length)
        logger.info("--micro_batch_size auto: %d of %d pairs per process at a time", size, largest)
        return size

    def _halve_micro_batch(self, rows: int, step: int) -> None:
        assert self.micro_batch_size is not None
        held = min(self.micro_batch_size, rows)
        if held < 2:
            raise ValueError(
                "memory ran out with a single pair; smaller parts there are none. Set --gradient_checkpointing, a smaller "
                "--image_size or --max_seq_length, or take a smaller model."
            )
        self.micro_batch_size = held // 2
        logger.warning(
            "Step %d ran out of memory with %d pairs at a time; it is repeated with %d, which changes nothing else",
            step + 1, held, self.micro_batch_size,
        )  # fmt: skip

    def _is_finite(self, report: dict[str, Tensor], batch: dict[str, Any], step: int) -> bool:
        """Whether the step may change the weights; if not, its images are written down."""
        # An infinite gradient under a loss scaler only means that the scale was too high; the scaler skips the step.
        decisive = ["loss"] if self.accelerator.scaler is not None else ["loss", "grad_norm"]
        if all(math.isfinite(report[name].item()) for name in decisive):
            self._check_scale(step)
            return True
        self.nonfinite_steps += 1
        image_ids = gather_object(batch["image_ids"])
        path, step = Path(str(self.args.output_dir), NONFINITE_FILE), step + 1
        if self.accelerator.is_main_process:
            figures = {name: str(report[name].item()) for name in ("loss", "grad_norm")}
            append_rows(path, [{"step": step, **figures, "image_ids": image_ids}])
            logger.warning("Step %d was skipped: %s; its images are in %s", step, figures, path)
        if self.nonfinite_steps >= self.args.max_nonfinite_steps:
            raise FloatingPointError(
                f"--max_nonfinite_steps is {self.args.max_nonfinite_steps}, and as many steps had a loss or a gradient that "
                f"is not finite, the last one step {step}. Look at the images in {path}, lower --learning_rate, or train "
                "in bf16 or fp32."
            )
        return False

    def _check_scale(self, step: int) -> None:
        """A loss scaler that has gone down to this will not find a gradient that is finite."""
        scaler = self.accelerator.scaler
        if scaler is not None and scaler.get_scale() < _LOWEST_SCALE:
            raise FloatingPointError(
                f"the gradients of fp16 training are not finite at any scale, up to step {step + 1}. Lower --learning_rate, or "
                "train in bf16."
            )


def _too_large(batch: dict[str, Any]) -> ValueError:
    return ValueError(
        f"memory ran out with {len(batch['rows'])} pairs on this process. Set --micro_batch_size auto, which changes nothing "
        "that is learnt, or --gradient_checkpointing."
    )
