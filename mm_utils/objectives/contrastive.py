"""The contrastive losses: which image belongs to which text, among all of the global batch."""

from torch import Tensor

from mm_utils.losses import GlobalBatch, info_nce, sigmoid_loss
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.terms import EmbeddingTerm, Leaves, Report


class InfoNCE(EmbeddingTerm):
    """A softmax over the batch, in both directions (CLIP, arXiv 2103.00020); see `mm_utils.losses.info_nce`."""

    name = "contrastive"

    def loss(self, own: Leaves, batch: GlobalBatch) -> Tensor:
        """In tiles, each rank its own rows."""
        return info_nce(own.embeds["image"], own.embeds["text"], own.scale, batch)

    def figures(self, value: Tensor, own: Leaves) -> Report:
        """With the temperature."""
        return {"contrastive_loss": value, "temperature": 1 / own.scale.detach()}


class PairwiseSigmoid(EmbeddingTerm):
    """Every pair of the batch on its own (SigLIP, arXiv 2303.15343); see `mm_utils.losses.sigmoid_loss`."""

    name = "sigmoid"

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Give the model the bias that this loss starts from, if it has none."""
        if model.logit_bias is None:
            model.add_logit_bias()

    def loss(self, own: Leaves, batch: GlobalBatch) -> Tensor:
        """In tiles, each rank its own rows."""
        assert own.bias is not None
        return sigmoid_loss(own.embeds["image"], own.embeds["text"], own.scale, own.bias, batch)

    def figures(self, value: Tensor, own: Leaves) -> Report:
        """With temperature and bias."""
        assert own.bias is not None
        return {
            "contrastive_loss": value, "temperature": 1 / own.scale.detach(), "logit_bias": own.bias.detach(),
        }  # fmt: skip
