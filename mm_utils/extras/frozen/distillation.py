"""Soft targets of another model, a teacher."""

from collections.abc import Mapping
from typing import ClassVar

from torch import Tensor

from mm_utils.extras.albef.soft_targets import distilled_info_nce
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import Batch, EmbeddingTerm, EncodedBatch, LossInputs


class Distillation(EmbeddingTerm):
    """InfoNCE towards the soft targets of another model, a teacher (TinyCLIP, arXiv 2309.12314).

    Its unit embeddings of the images as evaluation sees them, and of the captions, are computed before training
    (`mm_utils.extras.frozen.teacher`) and are in the batch as `teacher_image` and `teacher_text`, `[n, width of the teacher]`.

    Attributes:
        scale: the teacher's own inverse temperature, of its softmax; set with the embeddings.
    """

    name = "distillation"
    refuses: ClassVar[Mapping[str, str]] = {"streaming": "never has all rows at hand, over which a teacher runs"}
    scale: float | None = None

    def embed(self, model: FusionDualEncoderModel, encoded: EncodedBatch, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's embeddings."""
        return {f"distillation_{side}": batch[f"teacher_{side}"] for side in ("image", "text")}

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        teacher = (own.embeds["distillation_image"], own.embeds["distillation_text"])
        student = (own.embeds["image"], own.embeds["text"], own.scale)
        return distilled_info_nce(*student, *teacher, batch, teacher_scale=self.scale)
