"""Any batch in any memory: the gradient of the whole batch, a part of it at a time (gradient caching, arXiv 2101.06983).

A contrastive loss needs the embeddings of the whole batch, so accumulating the losses of parts is another loss, with
fewer negatives. Here every part is first embedded without gradient; the loss is taken once, at the embeddings; then every
part is embedded again, with the same dropout, and its share of the gradient is pushed through the towers. The result
equals the single pass; it costs one more forward pass of the towers. Gradients are synchronised once, with the last part.
"""

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch
from accelerate import Accelerator
from torch import Tensor, nn

from mm_utils import ranks
from mm_utils.objectives import Batch, ContrastiveObjective, Report


def backward(
    accelerator: Accelerator, objective: nn.Module, batch: Batch, step: int, micro_batch_size: int | None
) -> Report:
    """Add the gradient of one global batch to the parameters; returns what the objective reports, without gradient.

    Args:
        objective: as `accelerator` prepared it.
        batch: this rank's share.
        micro_batch_size: pairs to hold activations of at a time; None = all.

    Raises:
        ValueError: if the batch has to be cut and the objective cannot be.
    """
    rows = len(batch["ids"])
    parts = 1
    if micro_batch_size is not None:
        parts = -(-max(ranks.gather_sizes(rows, accelerator.device)) // micro_batch_size)  # as many on every rank
    if parts <= 1:
        report = objective(batch, step)
        accelerator.backward(report["loss"])
        return {name: value.detach() for name, value in report.items()}
    whole = accelerator.unwrap_model(objective)
    if not isinstance(whole, ContrastiveObjective):
        raise ValueError(
            f"--micro_batch_size cuts the batch, and {type(whole).__name__} cannot be cut. Drop the flag."
        )
    cuts = [ranks.share(rows, part, parts) for part in range(parts)]
    states, embeds = [], []
    with torch.no_grad():
        for cut in cuts:
            states.append(_RandomState(accelerator.device))
            embeds.append(whole.encode(_take(batch, cut), match=False))
    image_nE, text_nE = (torch.cat([getattr(part, name) for part in embeds]) for name in ("image_nE", "text_nE"))
    plan = whole.plan(image_nE, text_nE, embeds[0].scale, batch, step)
    sums: Tensor | float = 0.0
    for cut, state in zip(cuts, states, strict=True):
        with nullcontext() if cut is cuts[-1] else accelerator.no_sync(objective):
            with state.replayed():
                part = objective(_take(batch, cut), step, plan=plan, low=cut.start, share=1 / parts)
            accelerator.backward(part["loss"])
        sums = sums + part["sums"]
    assert isinstance(sums, Tensor)
    return whole.report(plan, sums)


def _take(batch: Batch, rows: range) -> Batch:
    """Some rows of a training batch, in which every image has one caption."""
    return {name: value[rows.start : rows.stop] for name, value in batch.items() if isinstance(value, Tensor)}


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
