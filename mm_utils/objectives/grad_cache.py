"""Any batch in any memory: its gradient part by part (gradient caching, arXiv 2101.06983).

A contrastive loss needs the embeddings of the whole batch, so accumulating the losses of parts is another loss, with
fewer negatives. Here every part is first embedded without gradient; the loss is taken once, at the embeddings; then every
part is embedded again, with the same dropout, and its share of the gradient is pushed through the towers. The result
equals the single pass.

The last part, which is the largest, is embedded with gradient at once and never again, so K parts cost at most (K-1)/K of
one more forward pass, and a share that fits costs nothing. Rows come sorted by the length of their caption
(`mm_utils.data.batches.dataset.Collator`), so every part is padded to its own longest only. Whatever the number of parts,
which may differ between ranks, ranks share the embeddings once and average the gradients once, at the end; nothing of a step is
final before that, so a step that ran out of memory on any rank can be repeated in smaller parts on all.

Batch norms in training mode see one part at a time, which is another function; their running statistics are updated
once. Pretrained ones are frozen by default (`FusionDualEncoderConfig.freeze_batch_norm`).
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from mm_utils import distributed
from mm_utils.objectives.terms import Batch, Encoded, Report

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


class OutOfMemoryError(RuntimeError):
    """Some rank ran out of memory; raised on all ranks, and no gradient counts. `here`: it was this rank."""

    def __init__(self, here: bool):
        super().__init__("out of memory " + ("on this process" if here else "on another process"))
        self.here = here


class TooManyPairsError(ValueError):
    """A batch, or a single pair of it, does not fit into memory."""


def is_out_of_memory(error: Exception) -> bool:
    """Return whether memory ran out: in torch's allocator, or in a library that allocates by itself."""
    libraries = (
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED",
        "CUDNN_STATUS_ALLOC_FAILED",
        "could not create a memory object",  # oneDNN
        "could not create a primitive",
    )
    is_known = isinstance(error, torch.OutOfMemoryError) or should_reduce_batch_size(error)
    return is_known or (isinstance(error, RuntimeError) and any(sign in str(error) for sign in libraries))


def backward_that_fits(
    accelerator: Accelerator,
    objective: nn.Module,
    batch: Batch,
    step: int,
    micro_batch_size: int | None,
    restart: Callable[[], None],
) -> tuple[Report, int | None]:
    """Call `backward`, and again in smaller parts where memory runs out on any rank; return also the size that fits here.

    Args:
        restart: called before each try; it clears gradients and seeds the random numbers of the step.

    Raises:
        TooManyPairsError: if the batch, or a single pair where there is a micro-batch size, does not fit into memory.
    """
    size = micro_batch_size
    while True:
        restart()
        try:
            return backward(accelerator, objective, batch, step, size), size
        except OutOfMemoryError as error:
            here = error.here
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
            raise TooManyPairsError(
                f"memory ran out with {len(batch['rows'])} pairs on this process. Set --micro_batch_size auto, which changes "
                "nothing that is learnt, or --gradient_checkpointing."
            ) from error
        restart()  # frees the gradients
        clear_device_cache(garbage_collection=True)
        if here and size is not None:
            held = min(size, len(batch["lengths"]))
            if held < 2:
                raise TooManyPairsError(
                    "memory ran out with a single pair, the smallest part. Set --gradient_checkpointing, a smaller "
                    "--image_size or --max_seq_length, or take a smaller model."
                )
            size = held // 2
            logger.warning(
                "Step %d ran out of memory with %d pairs at a time; it is repeated with %d, which changes nothing that is learnt",
                step + 1, held, size,
            )  # fmt: skip


def backward(
    accelerator: Accelerator, objective: nn.Module, batch: Batch, step: int, micro_batch_size: int | None
) -> Report:
    """Add a global batch's gradient to the parameters; return the report, without gradient.

    Args:
        batch: this rank's share, longest caption first.
        micro_batch_size: pairs of this rank to hold activations of at a time; None for all, with gradients averaged while
            the backward pass still runs.

    Raises:
        ValueError: if the batch has to be cut and the backend cannot do it.
        OutOfMemoryError: with a `micro_batch_size`, on all ranks if one runs out of memory; not with FSDP2.
    """
    if micro_batch_size is None:
        with accelerator.autocast():  # DDP would enter autocast by itself, FSDP2 does not
            report = objective(batch, step)
        accelerator.backward(report["loss"])
        return {name: value.detach() for name, value in report.items()}
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "--micro_batch_size is set; DeepSpeed takes a step with every backward pass. Drop the flag, or use DDP or FSDP2."
        )
    return _CachedStep(accelerator, objective, batch, step, micro_batch_size).run()


class _CachedStep:
    def __init__(self, accelerator: Accelerator, objective: nn.Module, batch: Batch, step: int, micro_batch_size: int):
        self.accelerator = accelerator
        self.wrapped = objective
        self.step = step
        unwrapped = objective.module if isinstance(objective, DistributedDataParallel) else objective
        self.objective = cast(Any, unwrapped)
        rows = len(batch["lengths"])
        first = max(0, rows - micro_batch_size)  # few parts, the last as large as possible; no rows are one part
        parts = -(-first // micro_batch_size)  # rounded up
        self.cuts = [*(distributed.share(first, part, parts) for part in range(parts)), range(first, rows)]
        # FSDP gathers weights in every pass and averages gradients in the last: its ranks run in lockstep.
        self.sharded = accelerator.distributed_type == DistributedType.FSDP
        if self.sharded:
            count = max(distributed.gather_sizes(len(self.cuts), accelerator.device))
            self.cuts = [distributed.share(rows, place, count) for place in range(count)]
        self.batch = self.objective.with_keys(batch, step)
        self.parts = [_take(self.batch, rows) for rows in self.cuts]
        devices = {accelerator.device, *(weight.device for weight in self.objective.parameters())}
        self.gpus = [device for device in devices if device.type == "cuda"]

    def run(self) -> Report:
        """Embed all parts, plan, and backpropagate part by part."""
        embeds, kept = self._on_all_ranks(self._embed)
        everyone = {}
        for name in kept.embeds:
            everyone[name] = torch.cat([part[name] for part in embeds])
        plan = self.objective.plan(replace(kept, embeds=everyone), self.batch, self.step)
        # temperature and bias belong to every part, with `share` of their gradient
        gradients = [dict(plan.gradients) for _ in embeds]
        for name in everyone:
            if (whole := plan.gradients[name]) is not None:
                for mine, part in zip(gradients, whole.split([len(part[name]) for part in embeds]), strict=True):
                    mine[name] = part
        sums = self._on_all_ranks(lambda: self._replay(kept, plan, gradients))
        if not self.sharded:
            distributed.average_gradients(self.objective.parameters())
        return self.objective.report(plan, sums)

    def _embed(self) -> tuple[list[dict[str, Tensor]], Encoded]:
        """Return the embeddings of every part, and the last part as it was encoded, with gradient."""
        embeds = []
        for place in range(len(self.cuts) - 1):
            with self._same_dropout(place), torch.no_grad(), _frozen_statistics(self.objective):
                embeds.append(self._encode(place, for_backward=False).embeds)
        kept = self._encode(len(self.cuts) - 1)
        return [*embeds, {name: value.detach() for name, value in kept.embeds.items()}], kept

    def _replay(self, kept: Encoded, plan: Any, gradients: list[dict[str, Tensor | None]]) -> Tensor:
        """Backpropagate every part, the kept part first, to free its memory; return their sums."""
        last = len(self.cuts) - 1
        total = torch.zeros(())  # on the CPU: a tensor without dimensions is added to one of any device
        for place in (last, *range(last)):
            encoded = kept
            if place < last:
                with self._same_dropout(place):
                    encoded = self._encode(place)
            with self.accelerator.autocast():
                loss, sums = self.objective.part(
                    encoded, self.parts[place], plan, gradients[place], 1 / len(self.cuts)
                )
            # Sharded gradients are averaged by the very last backward pass.
            is_final = place == max(0, last - 1)
            with nullcontext() if self.sharded and is_final else self.accelerator.no_sync(self.wrapped):
                self.accelerator.backward(loss)
            total = total + sums
        return total

    @contextmanager
    def _same_dropout(self, place: int) -> Iterator[None]:
        """Draw the same random numbers whenever a part is embedded, and none from the step's."""
        with torch.random.fork_rng(devices=self.gpus):
            # the last part draws from the step's seed itself
            torch.manual_seed((torch.initial_seed() + 1 + place) % 2**63)
            yield

    def _encode(self, place: int, for_backward: bool = True) -> Encoded:
        # One autocast per part: weights that it casts under no_grad would be reused where a gradient is needed.
        with self.accelerator.autocast():
            return self.objective.encode(self.parts[place], for_backward)

    def _on_all_ranks(self, work: Callable[[], Result]) -> Result:
        """Run `work` on every rank; one out of memory raises on all."""
        result = None
        try:
            result = work()
        except RuntimeError as error:
            if self.sharded or not is_out_of_memory(error):
                raise
        if any(is_lost for [is_lost] in distributed.gather_on_hosts([int(result is None)], self.accelerator.device)):
            raise OutOfMemoryError(here=result is None)
        assert result is not None
        return result


def _take(batch: Batch, rows: range) -> Batch:
    """Return some rows of a training batch, one caption an image, padded to their longest."""
    # what belongs to the batch as a whole, such as the roll call, is neither a tensor nor a list
    part: Batch = {
        name: value[rows.start : rows.stop] for name, value in batch.items() if isinstance(value, (Tensor, list))
    }
    longest = max(part["lengths"], default=1)
    return part | {name: part[name][:, :longest] for name in ("input_ids", "attention_mask")}


@contextmanager
def _frozen_statistics(model: nn.Module) -> Iterator[None]:
    """Keep batch norms in training mode from updating their running statistics."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = not norm.training  # in evaluation mode it selects the statistics that are used
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True
