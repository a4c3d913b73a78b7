"""Objectives that are a mean over rows: no row's loss depends on another's, so a batch may be cut anywhere."""

import torch
from torch import Tensor

from mm_utils import ranks
from mm_utils.objectives.joint import Objective
from mm_utils.objectives.terms import Batch, Report


class AdditiveObjective(Objective):
    """A weighted mean of losses over the rows of the global batch, on any number of processes and in any number of parts.

    A subclass gives `weights` and `sums`.
    """

    def weights(self, batch: Batch) -> Tensor:
        """What each of this rank's rows counts, `[n]`, not all of them 0 in a global batch."""
        raise NotImplementedError

    def sums(self, batch: Batch) -> tuple[Tensor, Report]:
        """The weighted sum of the losses of some rows, with gradient, even if there are none; and sums to log the mean of,
        each divided by the number of rows."""
        raise NotImplementedError

    def forward(self, batch: Batch, step: int) -> Report:
        """The report of one global batch, of which `batch` is this rank's share."""
        total = self.total(batch)
        loss, sums = self.part(batch, total)
        report = self.report(sums, total)
        return {**report, "loss": report["loss"] + (loss - loss.detach())}  # the global value, this rank's gradient

    def total(self, batch: Batch) -> Tensor:
        """Of all ranks: the weights and the rows, `[2]`."""
        weights = self.weights(batch)
        total = ranks.sum_over_ranks(torch.stack([weights.sum(), weights.new_tensor(len(weights))]))
        return total.clamp(min=torch.finfo(total.dtype).tiny)

    def part(self, batch: Batch, total: Tensor) -> tuple[Tensor, Report]:
        """A scalar whose gradient, averaged over ranks, is that of a part of the batch; and the part's sums for `report`."""
        loss, sums = self.sums(batch)
        return loss * (ranks.world_size() / total[0]), {"loss": loss.detach(), **sums}

    def report(self, sums: Report, total: Tensor) -> Report:
        """What the trainer logs, from the sums of all this rank's parts."""
        everyone = ranks.sum_over_ranks(torch.stack([value.to(total) for value in sums.values()]))
        of_all = dict(zip(sums, everyone, strict=True))
        return {name: value / total[0 if name == "loss" else 1] for name, value in of_all.items()}
