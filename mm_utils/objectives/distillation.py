"""Learn from a teacher: its similarities of a batch are soft targets of the towers (TinyCLIP, arXiv 2309.12314).

A batch has the teacher's embeddings as `teacher_image` and `teacher_text`, from `mm_utils.training.teacher`.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import GlobalBatch, full_precision, same_pair
from mm_utils.objectives.terms import Batch, EmbeddingTerm, Encoded


class Distillation(EmbeddingTerm):
    """InfoNCE towards a teacher's soft targets, at its own inverse temperature `scale`, or the student's where that is None."""

    name = "distillation"
    refuses: ClassVar[Mapping[str, str]] = {"streaming": "never has all rows at hand, over which a teacher runs"}
    scale: float | None = None

    def embed(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's embeddings."""
        return {f"distillation_{side}": batch[f"teacher_{side}"] for side in ("image", "text")}

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Gather the teacher's embeddings; every process then computes all N x N similarities."""
        teacher_n2E = torch.stack([own.embeds["distillation_image"], own.embeds["distillation_text"]], 1).detach()
        return SoftTargets(distributed.gather(teacher_n2E, batch.sizes), self.scale).loss(own, batch)


class SoftTargets(EmbeddingTerm):
    """-1/2N sum_ij q_ij log softmax_j(scale a_i b_j), both ways, where q is the softmax of the teacher's `[N, 2, E]`."""

    def __init__(self, teacher_N2E: Tensor, scale: float | None):
        super().__init__()
        self.teacher_N2E, self.scale = teacher_N2E, scale

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        """Return the loss; pairs that share an image or a caption are no negatives of each other."""
        with full_precision(scale.device):
            student_NN = scale * image_NE @ text_NE.T
            one_NE, other_NE = self.teacher_N2E.to(image_NE.dtype).unbind(1)
            teacher_NN = (scale.detach() if self.scale is None else self.scale) * one_NE @ other_NE.T
        shared_NN = same_pair(batch.ids_N2, batch.ids_N2).fill_diagonal_(False)
        student_NN, teacher_NN = (logits.masked_fill(shared_NN, -torch.inf) for logits in (student_NN, teacher_NN))
        losses = [
            -(teacher.softmax(1) * student.log_softmax(1).masked_fill(shared_NN, 0)).sum(1)
            for student, teacher in ((student_NN, teacher_NN), (student_NN.T, teacher_NN.T))
        ]
        return torch.cat(losses).mean()
