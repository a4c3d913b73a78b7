"""Cross-entropy over classes.

Shape letters: n this rank's rows, M rows of the training split, C classes.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.model.row_noise import set_row_keys
from mm_utils.objectives.joint import Objective, Plan, blank_pair
from mm_utils.objectives.terms import Batch, Encoded, Report


def weigh_classes(label_M: Tensor, classes: int, kind: str) -> Tensor:
    """Return the weight of each class, float32 `[C]`; 0 for a class without rows.

    `none` is 1 each; with `balanced`, all classes count alike and rows 1 on average.
    """
    if kind == "none":
        return torch.ones(classes)
    count_C = label_M.bincount(minlength=classes).float()
    present = count_C > 0
    return torch.where(present, len(label_M) / (present.sum() * count_C.clamp(min=1)), 0.0)


@dataclass
class ClassificationPlan(Plan):
    """The weight and the number of the rows of all ranks, `[2]`."""

    total: Tensor = field(default_factory=lambda: torch.ones(2))


class ClassificationObjective(Objective):
    """Cross-entropy of each row's class: the weighted mean over the global batch.

    No row's loss depends on another row, so nothing is encoded in advance, and the gradients of parts add up.
    """

    row_ids = "rows"  # a row without text has no `ids`
    model: FusionDualEncoderForClassification
    label_M: Tensor  # class of each row of the training split
    weight_C: Tensor  # weight of each class

    def __init__(self, model: FusionDualEncoderForClassification, label_M: Tensor, weight_C: Tensor, seed: int = 0):
        super().__init__(model, seed)
        self.register_buffer("label_M", label_M, persistent=False)
        self.register_buffer("weight_C", weight_C, persistent=False)

    def encode(self, batch: Batch, for_backward: bool = True) -> Encoded:
        """Return nothing, as `part` runs the model."""
        return Encoded({})

    def plan(self, encoded: Encoded, batch: Batch, step: int) -> ClassificationPlan:
        """Add up the rows and their weights over all ranks."""
        weight_n = self._row_weights(batch)
        total = distributed.sum_over_ranks(torch.stack([weight_n.sum(), weight_n.new_tensor(len(weight_n))]))
        return ClassificationPlan(total=total.clamp(min=torch.finfo(total.dtype).tiny))

    def part(
        self, encoded: Encoded, batch: Batch, plan: ClassificationPlan, gradients: dict, start: int, share: float
    ) -> tuple[Tensor, Tensor]:
        """Return the part's loss, and its loss and number of correct rows as sums, `[2]`."""
        own = len(batch["rows"])
        shown = batch if own else blank_pair(batch)
        set_row_keys(self.model, shown.get("row_keys"))
        logits = self.model.classify(shown["pixel_values"], shown["input_ids"], shown["attention_mask"])
        logits_nC, label_n = logits[:own].float(), self.label_M[batch["rows"]]
        loss = (F.cross_entropy(logits_nC, label_n, reduction="none") * self._row_weights(batch)).sum()
        correct = (logits_nC.argmax(1) == label_n).sum()
        sums = torch.stack([loss.detach(), correct.to(loss)])
        return loss * (distributed.world_size() / plan.total[0]), sums

    def report(self, plan: ClassificationPlan, sums: Tensor) -> Report:
        """Return the weighted mean loss and the accuracy."""
        loss, correct = distributed.sum_over_ranks(sums.to(plan.total))
        return {"loss": loss / plan.total[0], "train_accuracy": correct / plan.total[1]}

    def _row_weights(self, batch: Batch) -> Tensor:
        return self.weight_C[self.label_M[batch["rows"]]]
