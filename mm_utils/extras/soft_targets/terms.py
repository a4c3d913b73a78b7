"""InfoNCE towards soft targets, exact and in tiles as in `mm_utils.objectives.losses`, whose shape letters these are."""

from collections.abc import Mapping
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.objectives.losses import AtEmbeddings, Directions, GlobalBatch, Tile, add_product, logits_of, slices
from mm_utils.objectives.terms import Batch, EmbeddingTerm, EncodedBatch, LossInputs


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


def distilled_info_nce(
    image_nE: Tensor,
    text_nE: Tensor,
    scale: Tensor,
    teacher_image_nE: Tensor,
    teacher_text_nE: Tensor,
    batch: GlobalBatch,
    tile: Tile | None = None,
    teacher_scale: float | None = None,
) -> Tensor:
    """Return InfoNCE towards a teacher's soft targets (ALBEF, arXiv 2107.07651), a scalar.

    loss = -1/2N sum_i [sum_j q_ij log softmax_j(scale a_i b_j) + the same of b_i a_j], q_ij = softmax_j of the teacher's
    scale a'_i b'_j, where j runs over i itself and its negatives. No gradient goes through the teacher, nor by `scale`
    through its softmax. Arguments are those of `info_nce`, the teacher's unit embeddings of the same rows, and its own
    inverse temperature, if it is not `scale`.
    """
    wide = torch.stack([teacher_image_nE, teacher_text_nE], 1).detach().to(batch.image_NE.dtype)
    teacher_NE = distributed.gather(wide, batch.sizes)
    given = scale.detach().to(wide.dtype) if teacher_scale is None else teacher_scale
    mine = given * teacher_NE[batch.offset : batch.offset + len(image_nE)]
    teachers = ((mine[:, 0], teacher_NE[:, 1]), (mine[:, 1], teacher_NE[:, 0]))
    return AtEmbeddings.apply(partial(_distilled, teachers), batch, tile, image_nE, text_nE, scale)


def _distilled(
    teachers: Directions, directions: Directions, scale: Tensor, batch: GlobalBatch, total: int, tile: Tile
) -> tuple[Tensor, tuple[Tensor, ...]]:
    lse_n2 = batch.image_NE.new_empty(len(directions[0][0]), 2)
    teacher_lse_n2, loss_n2 = torch.empty_like(lse_n2), torch.empty_like(lse_n2)
    lowest = torch.finfo(
        lse_n2.dtype
    ).min  # -inf less -inf, of a tile with other positives alone, would not be a number
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        scaled_nE = scale * rows_nE
        for part in slices(len(rows_nE), tile.rows):
            lse_T, teacher_lse_T = lse_n2.new_full((2, part.stop - part.start), lowest)
            expected_T = torch.zeros_like(lse_T)
            for columns in slices(len(columns_NE), tile.columns):
                logits_TC, _ = logits_of(scaled_nE, columns_NE, batch, part, columns)
                teacher_TC, _ = logits_of(*teachers[direction], batch, part, columns)
                lse_T = torch.logaddexp(lse_T, logits_TC.logsumexp(1))
                before_T, teacher_lse_T = teacher_lse_T, torch.logaddexp(teacher_lse_T, teacher_TC.logsumexp(1))
                target_TC = (teacher_TC - teacher_lse_T[:, None]).exp_()
                found_T = target_TC.mul_(logits_TC.masked_fill_(logits_TC == -torch.inf, 0.0)).sum(1)
                expected_T = expected_T * (before_T - teacher_lse_T).exp() + found_T
            lse_n2[part, direction], teacher_lse_n2[part, direction] = lse_T, teacher_lse_T
            loss_n2[part, direction] = lse_T - expected_T
    shared_N5 = distributed.gather(torch.cat([lse_n2, teacher_lse_n2, loss_n2.sum(1, keepdim=True)], 1), batch.sizes)
    grads = []
    for direction, (rows_nE, columns_NE) in enumerate(directions):
        scaled_nE, grad_nE = scale * rows_nE, torch.empty_like(rows_nE)
        for part in slices(len(rows_nE), tile.rows):
            for columns in slices(len(columns_NE), tile.columns):
                logits_TC, _ = logits_of(scaled_nE, columns_NE, batch, part, columns)
                teacher_TC, _ = logits_of(*teachers[direction], batch, part, columns)
                weight_TC = (logits_TC - lse_n2[part, direction, None]).exp_() - (
                    teacher_TC - teacher_lse_n2[part, direction, None]
                ).exp_()
                weight_TC += logits_TC.sub_(shared_N5[columns, 1 - direction]).exp_()
                weight_TC -= teacher_TC.sub_(shared_N5[columns, 3 - direction]).exp_()
                add_product(grad_nE[part], weight_TC, columns_NE, columns)
        grads.append(grad_nE.div_(2 * total))
    scale_grad = (grads[0] * directions[0][0]).sum()
    loss = shared_N5[:, 4].sum() / (2 * total)
    return loss, (grads[0].mul_(scale), grads[1].mul_(scale), scale_grad)
