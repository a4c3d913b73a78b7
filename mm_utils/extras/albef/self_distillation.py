"""Soft targets of the averaged weights."""

from torch import Tensor

from mm_utils.extras.albef.soft_targets import distilled_info_nce
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import EmbeddingTerm, LossInputs


class SelfDistillation(EmbeddingTerm):
    """InfoNCE towards the weight average's soft targets (ALBEF, arXiv 2107.07651).

    Captions of web pairs often fit other images too; a hard target calls all of those wrong. ALBEF's weights are
    contrastive:0.6,self_distillation:0.4 with an `--ema_decay` of 0.995. It costs a forward pass of both towers.
    """

    name = "self_distillation"
    needs_teacher = True

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        teacher = (own.embeds["teacher_image"], own.embeds["teacher_text"])
        return distilled_info_nce(own.embeds["image"], own.embeds["text"], own.scale, *teacher, batch)
