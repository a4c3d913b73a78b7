"""The contrastive loss of all pairs of the global batch."""

from torch import Tensor

from mm_utils.objectives.losses import GlobalBatch, info_nce
from mm_utils.objectives.terms import EmbeddingTerm, Encoded, Report


class InfoNCE(EmbeddingTerm):
    """A softmax over the batch, both ways (CLIP, arXiv 2103.00020); see `losses.info_nce`."""

    name = "contrastive"

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        return info_nce(own.embeds["image"], own.embeds["text"], own.scale, batch)

    def metrics(self, value: Tensor, own: Encoded) -> Report:
        """Log the loss and the temperature."""
        return {"contrastive_loss": value, "temperature": 1 / own.scale.detach()}
