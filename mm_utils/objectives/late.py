"""Late interaction: every word takes its best cell of the image, contrasted over groups of the global batch.

A pair's score costs words x cells products, so all pairs of N images and texts cost N^2 times that. Batches of more than
`GROUP` pairs are therefore cut into groups at random, and a pair's negatives are those of its group: the cost is N x `GROUP`.

Shape letters: n this rank's pairs, N the global batch, G pairs of a group, r those of them that are this rank's, C cells, L
words, D their width.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.row_noise import pair_keys, uniform_noise
from mm_utils.objectives.losses import TILE_ELEMENTS, GlobalBatch, full_precision, same_pair
from mm_utils.objectives.terms import Batch, EmbeddingTerm, EncodedBatch, LossInputs

GROUP = 256  # pairs that are contrasted with each other: on one core, 64 of them take 0.06 s a step


class LateInteraction(EmbeddingTerm):
    """InfoNCE over the scores of `mm_utils.model.modeling_fusion_dual_encoder.LateHead` (FILIP, arXiv 2111.07783)."""

    name = "late"
    heads = ("late_head",)
    reads_sides = True

    def prepare(self, model: FusionDualEncoderModel) -> None:
        """Add embeddings of words and cells to the model."""
        model.add_late_head()

    def embed(self, model: FusionDualEncoderModel, encoded: EncodedBatch, batch: Batch) -> Mapping[str, Tensor]:
        """Return the cells of the images and the weighted words of the texts."""
        words = model.late_words(encoded.text_states, batch["attention_mask"])
        return {"late_cells": encoded.keys_values[-1][0], "late_words": words}

    def loss(self, own: LossInputs, batch: GlobalBatch) -> Tensor:
        """Compute the loss group by group; each rank computes its own rows."""
        return late_info_nce(own.embeds["late_cells"], own.embeds["late_words"], batch)


def late_info_nce(cells_nCD: Tensor, words_nLD: Tensor, batch: GlobalBatch) -> Tensor:
    """Return InfoNCE in both directions over the scores of late interaction, a scalar.

    loss = 1/2N sum_i [-log softmax_j(s_ij)_i - log softmax_j(s_ji)_i], s_ij = sum_l max_c <word l of text j, cell c of
    image i>, where j runs over i itself and its negatives in its group. The value is the global one; gradients are multiplied
    by the number of ranks, which average them.
    """
    total, world, own = (
        len(batch.image_NE),
        distributed.world_size(),
        range(batch.offset, batch.offset + len(cells_nCD)),
    )
    if not total:
        return 0 * (cells_nCD.sum() + words_nLD.sum())
    cells_NCD = distributed.gather(cells_nCD.detach(), batch.sizes)
    words_NLD = distributed.gather(words_nLD.detach(), batch.sizes)
    words = slice(0, int((words_NLD != 0).any(-1).any(0).sum()))  # what pads all texts costs nothing
    value, sums_n2, blocks = cells_nCD.new_zeros(()), cells_nCD.new_zeros(len(own), 2), []
    with full_precision(cells_nCD.device):
        for group in _groups(batch):
            mine = group[(group >= own.start) & (group < own.stop)]
            row = mine - own.start
            negative_rG = ~same_pair(batch.ids_N2[mine], batch.ids_N2[group])
            right_rG = mine[:, None] == group
            others = (cells_NCD[group], words_NLD[group, words])
            ours = (cells_nCD.index_select(0, row), words_nLD[:, words].index_select(0, row))
            if len(mine) == len(group):  # one process: both directions are one matrix
                image_rG = pair_scores(*ours)
                text_rG = image_rG.T
            else:
                image_rG, text_rG = pair_scores(ours[0], others[1]), pair_scores(others[0], ours[1]).T
            both = [score.detach().masked_fill(~(negative_rG | right_rG), -torch.inf) for score in (image_rG, text_rG)]
            sums_n2[row] = torch.stack([score.logsumexp(1) for score in both], 1)
            value += sums_n2[row].sum() - both[0][right_rG].sum() - both[1][right_rG].sum()
            blocks.append((group, row, right_rG, (image_rG, text_rG), both))
        sums_N2 = distributed.gather(sums_n2, batch.sizes)
        surrogate = value.new_zeros(())
        for group, row, right_rG, scores, both in blocks:
            for direction, (score_rG, fixed_rG) in enumerate(zip(scores, both, strict=True)):
                if direction and len(row) == len(group):
                    continue
                # d loss / d score: this pair's image chose among texts, and its text among images
                here, there = sums_n2[row, direction, None], sums_N2[group, 1 - direction]
                gradient_rG = (fixed_rG - here).exp() + (fixed_rG - there).exp() - 2.0 * right_rG
                surrogate = surrogate + (gradient_rG * score_rG).sum()
    value = distributed.sum_over_ranks(value) / (2 * total)
    return value + world * (surrogate - surrogate.detach()) / (2 * total)


def pair_scores(cells_mCD: Tensor, words_kLD: Tensor) -> Tensor:
    """Return the score of every image with every text, `[m, k]`: the sum over words of each one's best cell."""
    (images, cells, _), (texts, words, _) = cells_mCD.shape, words_kLD.shape
    flat = words_kLD.flatten(0, 1).T
    tile = max(1, TILE_ELEMENTS // max(1, cells * texts * words))
    best = [
        (part.flatten(0, 1) @ flat).unflatten(0, (len(part), cells)).max(1).values for part in cells_mCD.split(tile)
    ]
    return torch.cat(best).view(images, texts, words).sum(2)


def _groups(batch: GlobalBatch) -> list[Tensor]:
    """Cut the global batch into groups of at most `GROUP` pairs, by a hash: the same on any number of processes."""
    pairs = len(batch.ids_N2)
    if pairs <= GROUP:
        return [torch.arange(pairs, device=batch.ids_N2.device)]
    draw = uniform_noise(pair_keys(batch.ids_N2), torch.zeros_like(batch.ids_N2[:1, 0]), int(batch.ids_N2.sum()))
    return list(draw[:, 0].argsort().tensor_split(-(-pairs // GROUP)))
