"""The pairwise sigmoid loss, exact and in tiles as in `mm_utils.objectives.losses`, whose shape letters these are."""

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import AtEmbeddings, Directions, GlobalBatch, Tile, add_product, logits_of, slices
from mm_utils.objectives.terms import EmbeddingTerm, Encoded, Report


class PairwiseSigmoid(EmbeddingTerm):
    """A binary loss for every pair (SigLIP, arXiv 2303.15343); see `sigmoid_loss`."""

    name = "sigmoid"
    has_bias = True

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add the bias that this loss starts from, if the model has none."""
        if model.logit_bias is None:
            model.add_logit_bias()

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        assert own.bias is not None
        return sigmoid_loss(own.embeds["image"], own.embeds["text"], own.scale, own.bias, batch)

    def metrics(self, value: Tensor, own: Encoded) -> Report:
        """Log the loss, the temperature and the bias."""
        assert own.bias is not None
        scalars = {"temperature": 1 / own.scale.detach(), "logit_bias": own.bias.detach()}
        return {"contrastive_loss": value, **scalars}


def sigmoid_loss(
    image_nE: Tensor, text_nE: Tensor, scale: Tensor, bias: Tensor, batch: GlobalBatch, tile: Tile | None = None
) -> Tensor:
    """Return the pairwise sigmoid loss (SigLIP, arXiv 2303.15343), a scalar.

    loss = 1/N sum_i [softplus(-z_ii) + sum_j softplus(z_ij)], z_ij = scale a_i b_j + bias, where j runs over the
    negatives of i. Arguments are those of `info_nce`, and `bias`, the scalar added to every logit.
    """
    return AtEmbeddings.apply(_sigmoid, batch, tile, image_nE, text_nE, scale, bias)


def _sigmoid(
    directions: Directions, scale: Tensor, bias: Tensor, batch: GlobalBatch, total: int, tile: Tile
) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss, bias_grad = batch.image_NE.new_zeros(2)  # of this rank's images against all texts: every pair once
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        scaled_nE, grad_nE = scale * rows_nE, torch.empty_like(rows_nE)
        for part in slices(len(rows_nE), tile.rows):
            for columns in slices(len(columns_NE), tile.columns):
                logits_TC, diagonal = logits_of(scaled_nE, columns_NE, batch, part, columns)
                logits_TC += bias
                negated = -logits_TC[diagonal]
                weight_TC = logits_TC.sigmoid()
                weight_TC[diagonal] = -negated.sigmoid()
                add_product(grad_nE[part], weight_TC, columns_NE, columns)
                if direction == 0:
                    logits_TC[diagonal] = negated
                    loss = loss + softplus(logits_TC, threshold=40).sum()
                    bias_grad = bias_grad + weight_TC.sum()
        grads.append(grad_nE.div_(total))
    scale_grad = (grads[0] * directions[0][0]).sum()
    loss = distributed.sum_over_ranks(loss) / total
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad, bias_grad / total)
