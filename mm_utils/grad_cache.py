"""Any batch in any memory: the gradient of the whole batch, a part of it at a time (gradient caching, arXiv 2101.06983).

A contrastive loss needs the embeddings of the whole batch, so accumulating the losses of parts is another loss, with
fewer negatives. Here every part is first embedded without gradient; the loss is taken once, at the embeddings; then every
part is embedded again, with the same dropout, and its share of the gradient is pushed through the towers. The result
equals the single pass.

The last part, which is the largest, is embedded with gradient at once and never again, so K parts cost at most (K-1)/K of
one more forward pass, and a share that fits costs nothing. Rows come sorted by the length of their caption
(`mm_utils.data.batches.Collator`), so every part is padded to its own longest only. Whatever the number of parts, which may
differ between ranks, ranks share the embeddings once and average the gradients once, after the last part; nothing of a
step is final before that, so a step that ran out of memory on any rank can be repeated in smaller parts on all.

Batch norms in training mode see one part at a time, which is another function; their running statistics are updated
once. Pretrained ones are frozen by default (`FusionDualEncoderConfig.freeze_batch_norm`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import TypeVar

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from accelerate.utils.memory import should_reduce_batch_size
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from mm_utils import ranks
from mm_utils.objectives import JointObjective
from mm_utils.objectives.additive import AdditiveObjective
from mm_utils.objectives.terms import Batch, Encoded, Plan, Report

Result = TypeVar("Result")


class OutOfMemoryError(RuntimeError):
    """Some rank ran out of memory; raised on all of them, with nothing learnt and no gradient that counts.

    Attributes:
        here: whether it was this rank.
    """

    def __init__(self, here: bool):
        super().__init__("out of memory " + ("on this process" if here else "on another process"))
        self.here = here


def backward(
    accelerator: Accelerator, objective: nn.Module, batch: Batch, step: int, micro_batch_size: int | None
) -> Report:
    """Add the gradient of one global batch to the parameters; returns what the objective reports, without gradient.

    Args:
        objective: as `accelerator` prepared it.
        batch: this rank's share, longest caption first.
        micro_batch_size: pairs of this rank to hold activations of at a time; None = all, with gradients averaged while
            the backward pass still runs.

    Raises:
        ValueError: if the batch has to be cut and the objective cannot be.
        OutOfMemoryError: with a `micro_batch_size`, on all ranks if one runs out of memory.
    """
    if micro_batch_size is None:
        with accelerator.autocast():  # DDP would have it by itself, FSDP2 has not
            report = objective(batch, step)
        accelerator.backward(report["loss"])
        return {name: value.detach() for name, value in report.items()}
    whole = accelerator.unwrap_model(objective)
    if not isinstance(whole, (JointObjective, AdditiveObjective)):
        raise ValueError(
            f"--micro_batch_size cuts the batch, and {type(whole).__name__} cannot be cut. Drop the flag."
        )
    if accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise ValueError(
            "--micro_batch_size is set; DeepSpeed takes a step with every backward pass. Drop the flag, or use DDP or FSDP2."
        )
    if isinstance(whole, AdditiveObjective):
        return _accumulate(accelerator, objective, whole, batch, micro_batch_size)
    return _InParts(accelerator, objective, whole, batch, step, micro_batch_size).run()


def _accumulate(
    accelerator: Accelerator, objective: nn.Module, whole: AdditiveObjective, batch: Batch, micro_batch_size: int
) -> Report:
    """A loss that is a mean over rows needs no cache: the parts' gradients add up, over the weight of the global batch."""
    if accelerator.distributed_type == DistributedType.FSDP:
        raise ValueError(
            "--micro_batch_size is set; FSDP trains this objective in one part only. Drop the flag, or use DDP."
        )
    total, device = whole.total(batch), accelerator.device

    def work() -> Report:
        sums: Report = {}
        for cut in cuts(len(batch["rows"]), micro_batch_size):
            with accelerator.autocast():
                loss, of_part = whole.part(_take(batch, cut), total)
            with accelerator.no_sync(objective):
                accelerator.backward(loss)
            sums = {name: value + sums.get(name, 0) for name, value in of_part.items()}
        return sums

    sums = _together(device, work)
    ranks.average_gradients(objective.parameters())
    return whole.report(sums, total)


def cuts(rows: int, micro_batch_size: int | None) -> list[range]:
    """The parts of a rank's rows: as few as may be, the last as large as may be; one empty part of no rows."""
    first = 0 if micro_batch_size is None else max(0, rows - micro_batch_size)
    parts = -(-first // micro_batch_size) if micro_batch_size is not None else 0
    return [*(ranks.share(first, part, parts) for part in range(parts)), range(first, rows)]


class _InParts:
    """One step, cut."""

    def __init__(
        self,
        accelerator: Accelerator,
        objective: nn.Module,
        whole: JointObjective,
        batch: Batch,
        step: int,
        micro_batch_size: int,
    ):
        self.accelerator, self.objective, self.whole, self.step = accelerator, objective, whole, step
        # FSDP gathers weights in every pass and averages gradients in the last: its ranks go in step.
        self.sharded = accelerator.distributed_type == DistributedType.FSDP
        self.cuts = cuts(len(batch["ids"]), micro_batch_size)
        if self.sharded:
            parts = max(ranks.gather_sizes(len(self.cuts), accelerator.device))
            self.cuts = [ranks.share(len(batch["ids"]), part, parts) for part in range(parts)]
        self.batch, self.parts = batch, [_take(batch, cut) for cut in self.cuts]
        self.states: list[_RandomState] = []
        self.gradients: list[dict[str, Tensor | None]] = [{} for _ in self.cuts]

    def run(self) -> Report:
        """Embed, decide, push."""
        embeds, kept = self._together(self._embed)
        everyone = {name: torch.cat([part[name] for part in embeds]) for name in kept.embeds}
        plan = self.whole.plan(replace(kept, embeds=everyone), self.batch, self.step)
        for name, gradient in plan.gradients.items():
            rows = [len(part[name]) for part in embeds]
            for mine, part in zip(self.gradients, gradient.split(rows) if gradient is not None else (), strict=False):
                mine[name] = part
        sums = self._together(lambda: self._push_all(kept, plan))
        if not self.sharded:
            ranks.average_gradients(self.objective.parameters())
        return self.whole.report(plan, sums)

    def _embed(self) -> tuple[list[dict[str, Tensor]], Encoded]:
        """The embeddings of every part, and the last part as it was encoded, with gradient."""
        embeds = []
        for place in range(len(self.cuts) - 1):
            self.states.append(_RandomState(self.accelerator.device))
            with torch.no_grad(), _statistics_kept(self.whole):
                embeds.append(self._encode(place, pushing=False).embeds)
        kept = self._encode(len(self.cuts) - 1)
        return [*embeds, {name: value.detach() for name, value in kept.embeds.items()}], kept

    def _push_all(self, kept: Encoded, plan: Plan) -> Tensor:
        """Push every part's gradient through the towers; the kept part first, to have its memory back."""
        sums = self._push(kept, plan, len(self.cuts) - 1, is_last=len(self.cuts) == 1)
        for place, state in enumerate(self.states):
            with state.replayed():
                encoded = self._encode(place, deciding=False)
            sums = sums + self._push(encoded, plan, place, is_last=place == len(self.states) - 1)
        return sums

    def _encode(self, place: int, deciding: bool = True, pushing: bool = True) -> Encoded:
        # One autocast per part: weights that it casts under no_grad would be used again where a gradient is wanted.
        with self.accelerator.autocast():
            return self.whole.encode(self.parts[place], deciding, pushing)

    def _push(self, encoded: Encoded, plan: Plan, place: int, is_last: bool) -> Tensor:
        with self.accelerator.autocast():
            loss, sums = self.whole.part(
                encoded, self.parts[place], plan, self.gradients[place], self.cuts[place].start, 1 / len(self.cuts)
            )
        # Sharded gradients are averaged by the very last backward pass.
        with nullcontext() if self.sharded and is_last else self.accelerator.no_sync(self.objective):
            self.accelerator.backward(loss)
        return sums

    def _together(self, work: Callable[[], Result]) -> Result:
        return _together(self.accelerator.device, work, catches=not self.sharded)


def _together(device: torch.device, work: Callable[[], Result], catches: bool = True) -> Result:
    """`work` on every rank; where one runs out of memory, all of them raise."""
    result = None
    try:
        result = work()
    except RuntimeError as error:
        if not catches or not should_reduce_batch_size(error):
            raise
    if ranks.any_rank(result is None, device):
        raise OutOfMemoryError(here=result is None)
    assert result is not None
    return result


def _take(batch: Batch, rows: range) -> Batch:
    """Some rows of a training batch, in which every image has one caption, padded to their longest."""
    part: Batch = {
        name: value[rows.start : rows.stop] for name, value in batch.items() if isinstance(value, (Tensor, list))
    }
    longest = max(part["lengths"], default=1)
    return part | {name: part[name][:, :longest] for name in ("input_ids", "attention_mask")}


@contextmanager
def _statistics_kept(model: nn.Module) -> Iterator[None]:
    """Inside, batch norms in training mode leave their running statistics alone."""
    norms = [module for module in model.modules() if isinstance(module, _BatchNorm) and module.track_running_stats]
    for norm in norms:
        norm.track_running_stats = not norm.training  # in evaluation mode it decides which statistics are used
    try:
        yield
    finally:
        for norm in norms:
            norm.track_running_stats = True


class _RandomState:
    """The random state at its creation, to run the same dropout again."""

    def __init__(self, device: torch.device):
        self.cpu = torch.get_rng_state()
        self.device = device if device.type == "cuda" else None
        self.cuda = torch.cuda.get_rng_state(device) if self.device is not None else None

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """Inside, random numbers are those drawn after the creation; afterwards all goes on as if nothing had been."""
        with torch.random.fork_rng(devices=[self.device] if self.device is not None else []):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None and self.device is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield
