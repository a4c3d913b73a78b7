"""Cross-entropy over classes.

Shape letters: n this rank's rows, M rows of the training split, C classes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.finetuning.classifier import classify
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.model.row_noise import set_row_keys
from mm_utils.objectives.objective import Objective, Plan, blank_pair
from mm_utils.objectives.terms import Batch, Encoded, Report


@dataclass
class ClassificationPlan(Plan):
    """The number of the rows of all ranks, at least 1."""

    total: Tensor = field(default_factory=lambda: torch.ones(()))


class ClassificationObjective(Objective):
    """Cross-entropy of each row's class: the mean over the global batch.

    No row's loss depends on another row, so nothing is encoded in advance, and the gradients of parts add up.
    """

    row_ids = "rows"  # a row without text has no `ids`
    reranks = False
    model: FusionDualEncoderForClassification
    label_M: Tensor  # class of each row of the training split

    def __init__(self, model: FusionDualEncoderForClassification, label_M: Tensor, seed: int = 0):
        super().__init__(model, seed)
        # moves with the objective to its device, and is in no checkpoint
        self.register_buffer("label_M", label_M, persistent=False)

    @property
    def reads_pairs(self) -> bool:
        """True if the classifier reads what the fusion head makes of a row."""
        return self.model.config.classifier_inputs == "fused"

    def encode(self, batch: Batch, for_backward: bool = True) -> Encoded:
        """Return nothing, as `part` runs the model."""
        return Encoded({})

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> ClassificationPlan:
        """Count the rows of all ranks."""
        rows = torch.tensor(float(len(batch["rows"])), device=batch["rows"].device)
        return ClassificationPlan(total=distributed.sum_over_ranks(rows).clamp(min=1))

    def part(
        self, encoded: Encoded, batch: Batch, plan: ClassificationPlan, gradients: dict, share: float
    ) -> tuple[Tensor, Tensor]:
        """Return the part's loss, and its loss and number of correct rows as sums, `[2]`."""
        own = len(batch["rows"])
        shown = batch if own else blank_pair(batch)
        set_row_keys(self.model, shown.get("row_keys"))
        logits_nC = classify(self.model, shown)[:own].float()  # of a blank pair, none
        label_n = self.label_M[batch["rows"]]
        loss = F.cross_entropy(logits_nC, label_n, reduction="none").sum()
        correct = (logits_nC.argmax(1) == label_n).sum()
        sums = torch.stack([loss.detach(), correct.to(loss)])
        # averaged over ranks, a mean over all rows
        return loss * (distributed.world_size() / plan.total), sums

    def report(self, plan: ClassificationPlan, sums: Tensor) -> Report:
        """Return the mean loss and the accuracy."""
        loss, accuracy = distributed.sum_over_ranks(sums.to(plan.total)) / plan.total
        return {"loss": loss, "train_accuracy": accuracy}
