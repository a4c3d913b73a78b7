"""Image-text matching: the fusion head classifies pairs as matching or not.

Shape letters: P pairs, n this rank's rows, N the global batch, T rows and C columns of a tile, E embedding width, L tokens.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.model.row_noise import gumbel_noise, pair_keys
from mm_utils.objectives.losses import GlobalBatch, Tile, full_precision, same_pair, slices, tile_of
from mm_utils.objectives.terms import Batch, EncodedBatch, Report, RowPlan, RowTerm

MATCH_PRIOR_ENTROPY = 0.6365  # one positive to two negatives: a matching loss that stays here has learnt nothing


@dataclass
class MatchingPlan(RowPlan):
    """The pairs that this rank scores."""

    image_P: Tensor  # the pair's image among this rank's
    text_P: Tensor  # its text among all ranks'; or N + i, the negative that the data has for image i
    is_match_P: Tensor
    weight_P: Tensor  # of the pair's loss
    input_ids: Tensor  # tokens of the N texts of the global batch and, if the data has them, of its N negatives
    attention_mask: Tensor


class Matching(RowTerm):
    """Binary cross-entropy over pairs with hard negatives (ALBEF, arXiv 2107.07651).

    Each image is paired with a wrong text, and each text with a wrong image, drawn by similarity. A pair is scored on the
    rank and in the part of the batch that holds its image; only token ids are exchanged, so the result depends neither on
    the number of ranks nor on the number of parts. Without `hard`, negatives are drawn uniformly.

    An image for which the data has a negative (`negative_input_ids` of the batch) is paired with that, too. Its two wrong
    texts then count half each, so that one in three stays a match.
    """

    name = "matching"
    heads = ("fusion.match", "fusion.bridges", "fusion.cls_token")
    pairs_per_image = 3

    def __init__(self, seed: int = 0, hard: bool = True):
        super().__init__(seed)
        self.hard = hard

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> MatchingPlan:
        """Draw the pairs, with noise keyed by the seed and the step."""
        names = ("input_ids", "attention_mask")
        tokens = [distributed.gather_ragged(batch[name], shared.sizes) for name in names]
        has_negative_N = tokens[1].new_zeros(len(tokens[1]), dtype=torch.bool)
        if "negative_input_ids" in batch:
            negatives = [distributed.gather_ragged(batch[f"negative_{name}"], shared.sizes) for name in names]
            has_negative_N = negatives[1].any(1)
            tokens = [_stacked(*both) for both in zip(tokens, negatives, strict=True)]
        scale = scale if self.hard else torch.zeros_like(scale)
        return MatchingPlan(*self._draw_pairs(shared, scale, step, has_negative_N), *tokens)

    def part(
        self,
        model: FusionDualEncoderModel,
        encoded: EncodedBatch,
        batch: Batch,
        plan: MatchingPlan,
        shared: GlobalBatch,
        start_row: int,
    ) -> tuple[Tensor, Tensor]:
        """Score the pairs whose image is in this part of the batch."""
        image_P, text_P, is_match_P, weight_P = plan.image_P, plan.text_P, plan.is_match_P, plan.weight_P
        if len(encoded) < shared.sizes[distributed.rank()]:
            here = ((image_P >= start_row) & (image_P < start_row + len(encoded))).nonzero()[:, 0]
            image_P, text_P, is_match_P = image_P[here] - start_row, text_P[here], is_match_P[here]
            weight_P = weight_P[here]
        states, mask, text_P = _texts(model, text_P, batch, encoded, plan, shared.offset + start_row)
        logits_P = _score(model, encoded.keys_values, states, mask, image_P, text_P).float()
        losses_P = F.binary_cross_entropy_with_logits(logits_P, is_match_P.to(logits_P.dtype), reduction="none")
        return (weight_P * losses_P).sum(), (weight_P * ((logits_P > 0) == is_match_P)).sum()

    def metrics(self, loss: Tensor, accuracy: Tensor) -> Report:
        """Log also how far the loss is below the entropy of the share of matches."""
        return {**super().metrics(loss, accuracy), "matching_lift": MATCH_PRIOR_ENTROPY - loss}

    def _draw_pairs(
        self, shared: GlobalBatch, scale: Tensor, step: int, has_negative_N: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Return all ranks' pair weight, and this rank's images, texts, match flags, weights."""
        mine = slice(shared.offset, shared.offset + shared.sizes[distributed.rank()])
        key = 2 * (self.seed * 1_000_003 + step)
        chosen_texts = hard_negatives(shared.image_NE[mine], shared.text_NE, scale, shared, key)
        chosen_images = hard_negatives(shared.text_NE[mine], shared.image_NE, scale, shared, key + 1)
        text_N, image_N = distributed.gather(torch.stack([chosen_texts, chosen_images], 1), shared.sizes).unbind(1)
        own = torch.arange(mine.start, mine.stop, device=text_N.device)
        chosen = (chosen_texts >= 0, (image_N >= mine.start) & (image_N < mine.stop), has_negative_N[mine])
        text_places, here, negative_places = _places(*chosen)
        with_text, with_negative = own[text_places], own[negative_places]
        image_P = torch.cat([own, with_text, image_N[here], with_negative]) - mine.start
        text_P = torch.cat([own, text_N[with_text], here, len(text_N) + with_negative])
        is_match_P = torch.arange(len(image_P), device=own.device) < len(own)
        wrong_texts_N = (text_N >= 0).long() + has_negative_N
        weight_P = torch.ones(len(image_P), device=own.device)
        weight_P[len(own) : len(own) + len(with_text)] /= wrong_texts_N[with_text]
        weight_P[len(image_P) - len(with_negative) :] /= wrong_texts_N[with_negative]
        total = len(text_N) + (wrong_texts_N > 0).sum() + (image_N >= 0).sum()
        return total.clamp(min=1), image_P, text_P, is_match_P, weight_P


def _places(*masks: Tensor) -> list[Tensor]:
    """Return where each mask is true, in order; the host waits once for all masks."""
    counts = torch.stack([mask.sum() for mask in masks]).tolist()
    ordered = [mask.int().sort(descending=True, stable=True).indices for mask in masks]
    return [places[:count] for places, count in zip(ordered, counts, strict=True)]


def _stacked(tokens_NL: Tensor, negatives_NL: Tensor) -> Tensor:
    """Return both, one below the other, padded to the longer, `[2N, L]`."""
    width = max(tokens_NL.shape[1], negatives_NL.shape[1])
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in (tokens_NL, negatives_NL)])


def _texts(
    model: FusionDualEncoderModel, text_P: Tensor, batch: Batch, encoded: EncodedBatch, plan: MatchingPlan, first: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return states and mask of this part's texts and needed others, `text_P` as places there.

    The part's own texts begin at text `first` of the global batch.
    """
    own = len(encoded)
    place_P = text_P - first
    foreign = (place_P < 0) | (place_P >= own)
    if own == len(plan.input_ids):
        return encoded.text_states, batch["attention_mask"], place_P
    # Every rank encodes at least one foreign text, because FSDP's ranks must run the same modules.
    any_text = text_P.new_zeros(1), text_P[:0]
    foreign_P = text_P[foreign]
    wanted, position = foreign_P.unique(return_inverse=True) if len(foreign_P) else any_text
    wanted_mask = plan.attention_mask[wanted]
    longest = max(1, int(wanted_mask.sum(1).max()))
    wanted_mask = wanted_mask[:, :longest]
    pooled, foreign_states = model.text_features(plan.input_ids[wanted, :longest], wanted_mask)
    if "text_states" in batch:  # rounded as this rank's own are, which were stored
        foreign_states = foreign_states.to(batch["text_states"].dtype).to(pooled)
    _, foreign_states = model.project_text(pooled, foreign_states)
    width = max(longest, encoded.text_states.shape[1])
    parts = ((encoded.text_states[:own], batch["attention_mask"]), (foreign_states, wanted_mask))
    states = torch.cat([F.pad(states, (0, 0, 0, width - states.shape[1])) for states, _ in parts])
    mask = torch.cat([F.pad(mask, (0, width - mask.shape[1])) for _, mask in parts])
    return states, mask, place_P.masked_scatter(foreign, own + position)


def _score(
    model: FusionDualEncoderModel,
    keys_values: KeysValues,
    states: Tensor,
    mask: Tensor,
    image_P: Tensor,
    text_P: Tensor,
) -> Tensor:
    """Return match logits `[P]`; a rank without pairs scores one and drops it."""
    pairs = len(image_P)
    if not pairs:
        image_P = text_P = image_P.new_zeros(1)
        mask = mask.new_ones(1, states.shape[1])
    # index_select, because the backward of indexing adds in no fixed order on CPUs, and runs would not repeat
    keys_values = tuple(layer.index_select(1, image_P) for layer in keys_values)
    return model.match_pairs(keys_values, states.index_select(0, text_P), mask[text_P])[:pairs]


def hard_negatives(
    query_nE: Tensor, keys_NE: Tensor, scale: Tensor, batch: GlobalBatch, key: int, tile: Tile | None = None
) -> Tensor:
    """Draw a negative for each own row: its global index, -1 if there is none, int64 `[n]`.

    Row i's negative j is drawn with probability proportional to exp(scale <q_i, k_j>) (ALBEF, arXiv 2107.07651), in log
    space by the Gumbel-max trick, so nothing can underflow; pairs that share an image or a caption are never drawn. The
    noise is a hash of `key` and of the ids of both pairs: the draw depends neither on the order of the batch nor on how many
    ranks hold it.
    """
    tile = tile or tile_of(len(query_nE), len(keys_NE), query_nE.device)
    ids_n2, pair_N = batch.ids_N2[batch.offset : batch.offset + len(query_nE)], pair_keys(batch.ids_N2)
    pair_n = pair_N[batch.offset : batch.offset + len(query_nE)]
    chosen_n = torch.full_like(pair_n, -1)
    best_n = torch.full_like(pair_n, -torch.inf, dtype=torch.float32)
    for part in slices(len(query_nE), tile.rows):
        for columns in slices(len(keys_NE), tile.columns):
            with full_precision(query_nE.device):
                logits_TC = scale.float() * query_nE[part].float() @ keys_NE[columns].float().T
            logits_TC = logits_TC + gumbel_noise(pair_n[part], pair_N[columns], key)
            logits_TC = logits_TC.masked_fill(same_pair(ids_n2[part], batch.ids_N2[columns]), -torch.inf)
            best_T, index_T = logits_TC.max(1)
            is_better = best_T > best_n[part]
            chosen_n[part] = torch.where(is_better, index_T + columns.start, chosen_n[part])
            best_n[part] = torch.where(is_better, best_T, best_n[part])
    return chosen_n
