"""Terms that compare all images with all texts of the global batch; exact and in tiles as in `losses`, whose letters these are."""

from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import softplus

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import (
    AtEmbeddings,
    Directions,
    GlobalBatch,
    full_precision,
    info_nce,
    logits_of,
    same_pair,
    slices,
)
from mm_utils.objectives.terms import Batch, EmbeddingTerm, Encoded, Report


class InfoNCE(EmbeddingTerm):
    """A softmax over the batch, both ways (CLIP, arXiv 2103.00020); see `losses.info_nce`."""

    name = "contrastive"

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Compute the loss in tiles; each rank computes its own rows."""
        return info_nce(own.embeds["image"], own.embeds["text"], own.scale, batch)

    def metrics(self, value: Tensor, own: Encoded) -> Report:
        """Log the loss and the temperature."""
        return {"contrastive_loss": value, "temperature": 1 / own.scale.detach()}


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
    image_nE: Tensor, text_nE: Tensor, scale: Tensor, bias: Tensor, batch: GlobalBatch, tile: int | None = None
) -> Tensor:
    """Return the pairwise sigmoid loss (SigLIP, arXiv 2303.15343), a scalar.

    loss = 1/N sum_i [softplus(-z_ii) + sum_j softplus(z_ij)], z_ij = scale a_i b_j + bias, where j runs over the
    negatives of i. Arguments are those of `info_nce`, and `bias`, the scalar added to every logit.
    """
    return AtEmbeddings.apply(_sigmoid, batch, tile, image_nE, text_nE, scale, bias)


def _sigmoid(
    directions: Directions, scale: Tensor, bias: Tensor, batch: GlobalBatch, total: int, tile: int
) -> tuple[Tensor, tuple[Tensor, ...]]:
    loss, bias_grad = batch.image_NE.new_zeros(2)  # of this rank's images against all texts: every pair once
    grads = []
    # The texts' logits of one process are the columns of its images'.
    text_grad_NE = torch.zeros_like(batch.text_NE) if distributed.world_size() == 1 else None
    for direction, (rows_nE, columns_NE) in enumerate(directions if text_grad_NE is None else directions[:1]):
        scaled_nE = scale * rows_nE
        grad_nE = torch.empty_like(rows_nE)
        for part in slices(len(rows_nE), tile):
            logits_TN, own = logits_of(scaled_nE, columns_NE, batch, part)
            logits_TN += bias
            negated = -logits_TN[own]
            weight_TN = logits_TN.sigmoid()
            weight_TN[own] = -negated.sigmoid()
            torch.mm(weight_TN, columns_NE, out=grad_nE[part])
            if text_grad_NE is not None:
                text_grad_NE.addmm_(weight_TN.T, rows_nE[part])
            if direction == 0:
                logits_TN[own] = negated
                # Above 40, softplus(x) is x to the last digit of fp64
                loss = loss + softplus(logits_TN, threshold=40).sum()
                bias_grad = bias_grad + weight_TN.sum()
        grads.append(grad_nE.div_(total))
    if text_grad_NE is not None:
        grads.append(text_grad_NE.div_(total))
    scale_grad = (grads[0] * directions[0][0]).sum()
    loss = distributed.sum_over_ranks(loss) / total
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad, bias_grad / total)


class Distillation(EmbeddingTerm):
    """InfoNCE towards a teacher's soft targets (TinyCLIP, arXiv 2309.12314).

    -1/2N sum_ij q_ij log softmax_j(scale a_i b_j), both ways, where q is the softmax of the teacher's similarities, at its own inverse
    temperature `scale`, or the student's where that is None. A batch has the teacher's embeddings as `teacher_image` and
    `teacher_text`, from `mm_utils.training.teacher`; every process computes all N x N similarities.
    """

    name = "distillation"
    refuses: ClassVar[Mapping[str, str]] = {"streaming": "never has all rows at hand, over which a teacher runs"}
    scale: float | None = None

    def embed(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch) -> dict[str, Tensor]:
        """Return the teacher's embeddings."""
        return {f"distillation_{side}": batch[f"teacher_{side}"] for side in ("image", "text")}

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Gather the teacher's embeddings, for `of_batch`."""
        teacher_n2E = torch.stack([own.embeds["distillation_image"], own.embeds["distillation_text"]], 1)
        self._teacher_N2E = distributed.gather(teacher_n2E, batch.sizes)
        return super().loss(own, batch)

    def of_batch(self, image_NE: Tensor, text_NE: Tensor, scale: Tensor, batch: GlobalBatch) -> Tensor:
        """Return the loss; pairs that share an image or a caption are no negatives of each other."""
        with full_precision(scale.device):
            student_NN = scale * image_NE @ text_NE.T
            one_NE, other_NE = self._teacher_N2E.to(image_NE.dtype).unbind(1)
            teacher_NN = (scale.detach() if self.scale is None else self.scale) * one_NE @ other_NE.T
        shared_NN = same_pair(batch.ids_N2, batch.ids_N2).fill_diagonal_(False)
        student_NN = student_NN.masked_fill(shared_NN, -torch.inf)
        teacher_NN = teacher_NN.masked_fill(shared_NN, -torch.inf)
        losses = [
            # the teacher's 0 times the student's -inf would be NaN
            -(teacher.softmax(1) * student.log_softmax(1).masked_fill(shared_NN, 0)).sum(1)
            for student, teacher in ((student_NN, teacher_NN), (student_NN.T, teacher_NN.T))
        ]
        return torch.cat(losses).mean()
