"""Image-text matching: the fusion head classifies pairs as matching or not.

Shape letters: P pairs, n this rank's rows, N the global batch, T rows of a tile, E embedding width, L tokens.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from mm_utils import distributed
from mm_utils.model.encoding import knows_padding
from mm_utils.model.fusion import rows_of
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.model.packing import length_groups, to_device
from mm_utils.model.row_noise import gumbel_noise, pair_keys
from mm_utils.objectives.losses import GlobalBatch, full_precision, same_pair, slices, tile_rows
from mm_utils.objectives.negatives import Negatives
from mm_utils.objectives.terms import Batch, Encoded, RowPlan, RowSums, TermOnRows


class Pairs(NamedTuple):
    """The pairs that a rank scores, on the host."""

    image_P: np.ndarray  # the pair's image among this rank's
    text_P: np.ndarray  # its text among all ranks'; or N + i, the negative that the data has for image i
    is_match_P: np.ndarray
    weight_P: np.ndarray  # of the pair's loss


@dataclass
class MatchingPlan(RowPlan):
    """The pairs that are scored."""

    pairs: Pairs  # this rank's: all matches, images with a wrong text, texts with a wrong image, images with negatives
    rows: range  # this rank's rows among the N
    lengths: np.ndarray  # tokens of the N texts of the global batch, and of the N negatives of the data, 0 for none
    input_ids: Tensor  # tokens of these texts and, if the data has them, negatives
    attention_mask: Tensor


class Matching(TermOnRows):
    """Binary cross-entropy over pairs with hard negatives (ALBEF, arXiv 2107.07651).

    Each image is paired with a wrong text, and each text with a wrong image, drawn by similarity. A pair is scored on the
    rank and in the part of the batch that holds its image; only token ids are exchanged, so the result depends neither on
    the number of ranks nor on the number of parts.

    An image for which the data has a negative (`negative_input_ids` of the batch) is paired with that, too. Its two wrong
    texts then count half each, so that one in three stays a match.
    """

    name = "matching"
    heads = ("fusion.match", "fusion.bridges", "fusion.cls_token")
    pairs_per_image = 3
    readers = (Negatives(),)

    def plan(self, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int) -> MatchingPlan:
        """Draw the pairs, with noise keyed by the seed and the step; the one wait of a host for its device."""
        names = ("input_ids", "attention_mask")
        sizes = shared.sizes
        own = [batch[name] for name in names]
        negatives = [batch[f"negative_{name}"] for name in names if "negative_input_ids" in batch]
        length_n = own[1].sum(1)
        negative_n = negatives[1].sum(1) if negatives else torch.zeros_like(length_n)
        # [n, 4]: wrong text, wrong image, tokens of the text and of the negative; copied to the host at once
        drawn_n4 = torch.stack([*self.draw(shared, scale, step), length_n, negative_n], 1)
        tokens = [distributed.gather_ragged(part, sizes, longest=shared.longest) for part in (*own, *negatives)]
        ids = _one_below_the_other(*tokens[::2])
        mask = _one_below_the_other(*tokens[1::2])
        text_N, image_N, length_N, negative_N = distributed.gather(drawn_n4, sizes).cpu().numpy().T
        first = shared.offset
        last = shared.offset + len(drawn_n4)
        rows = np.arange(first, last)
        with_text = rows[text_N[rows] >= 0]
        with_negative = rows[negative_N[rows] > 0]
        # texts of any rank, whose wrong image is here
        with_image = np.flatnonzero((image_N >= first) & (image_N < last))
        # matches, wrong texts, wrong images, negatives of the data
        image_P = np.concatenate([rows, with_text, image_N[with_image], with_negative]) - first
        text_P = np.concatenate([rows, text_N[with_text], with_image, len(text_N) + with_negative])
        # 0.5 where an image has a drawn text and a negative of the data
        share_N = 1 / np.maximum(1, (text_N >= 0) + (negative_N > 0).astype(int))
        weight_P = np.ones(len(image_P), np.float32)
        weight_P[len(rows) : len(rows) + len(with_text)] = share_N[with_text]
        weight_P[len(image_P) - len(with_negative) :] = share_N[with_negative]
        # the matches come first
        pairs = Pairs(image_P, text_P, np.arange(len(image_P)) < len(rows), weight_P)
        wrong = ((text_N >= 0) | (negative_N > 0)).sum() + (image_N >= 0).sum()
        # the sum of all ranks' weights: matches, a wrong text an image, a wrong image a text
        total = torch.tensor(max(1, len(text_N) + int(wrong)))
        return MatchingPlan(total, pairs, range(first, last), np.concatenate([length_N, negative_N]), ids, mask)

    def rows(self, model: FusionDualEncoderModel, encoded: Encoded, batch: Batch, plan: MatchingPlan) -> RowSums:
        """Score the pairs whose image is in this part of the batch."""
        pairs = plan.pairs
        start = batch["places"][0]
        device = plan.input_ids.device
        if len(encoded) < len(plan.rows):
            is_here = (pairs.image_P >= start) & (pairs.image_P < start + len(encoded))
            pairs = Pairs(*(values[is_here] for values in pairs))
        # longest first, as `length_groups` wants them
        pairs = Pairs(*(values[(-plan.lengths[pairs.text_P]).argsort(kind="stable")] for values in pairs))
        lengths = plan.lengths[pairs.text_P].tolist()
        groups = length_groups(lengths, device.type) if encoded.groups_texts else [range(len(lengths))]
        states, mask, text_P = _texts(model, pairs.text_P, batch, encoded, plan, plan.rows.start + start)
        image_P = to_device(pairs.image_P - start, device)
        is_match_P = to_device(pairs.is_match_P, device)
        weight_P = to_device(pairs.weight_P, device)
        place_P = to_device(text_P, device)
        logits = []
        for group in groups:  # of about one length
            rows = slice(group.start, group.stop)
            longest = max([1, *lengths[group.start : group.stop]])
            images = image_P[rows]
            texts = place_P[rows]
            seen = mask[:, :longest]
            if not len(group):  # a rank without pairs scores one and drops it
                images = texts = image_P.new_zeros(1)
                seen = mask.new_ones(1, longest)
            keys_values = tuple(rows_of(layer, images, 1) for layer in encoded.keys_values)
            scores = model.match_pairs(keys_values, rows_of(states[:, :longest], texts), seen[texts])
            logits.append(scores[: len(group)])
        logits_P = torch.cat(logits).float()
        losses_P = F.binary_cross_entropy_with_logits(logits_P, is_match_P.to(logits_P.dtype), reduction="none")
        return RowSums((weight_P * losses_P).sum(), (weight_P * ((logits_P > 0) == is_match_P)).sum())

    def draw(self, shared: GlobalBatch, scale: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return a wrong text of each own image, a wrong image of each text; -1: none; `[n]`."""
        mine = slice(shared.offset, shared.offset + shared.sizes[distributed.rank()])
        key = 2 * (self.seed * 1_000_003 + step)  # a prime above the steps of a run, so that no two runs draw alike
        return (
            hard_negatives(shared.image_NE[mine], shared.text_NE, scale, shared, key),
            hard_negatives(shared.text_NE[mine], shared.image_NE, scale, shared, key + 1),
        )


def _one_below_the_other(*texts: Tensor) -> Tensor:
    """Return texts, `[t, L]` or `[t, L, C]` each, padded to the longest."""
    width = max(part.shape[1] for part in texts)
    return torch.cat([F.pad(part, (*(0, 0) * (part.dim() - 2), 0, width - part.shape[1])) for part in texts])


def _texts(
    model: FusionDualEncoderModel, text_P: np.ndarray, batch: Batch, encoded: Encoded, plan: MatchingPlan, first: int
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return states and mask of own and foreign texts of a part, and `text_P` as places there.

    The part's own texts begin at text `first` of the global batch.
    """
    own = len(encoded)
    device = plan.input_ids.device
    place_P = text_P - first
    # the part is the whole global batch, of data without negatives: no text is foreign
    if own == len(plan.input_ids):
        return encoded.text_states, batch["attention_mask"], place_P
    is_foreign = (place_P < 0) | (place_P >= own)
    # a text that several images here are paired with is encoded once
    wanted, position = np.unique(text_P[is_foreign], return_inverse=True)
    place_P[is_foreign] = own + position
    # Every rank encodes at least one foreign text, because FSDP's ranks must run the same modules.
    wanted = wanted if len(wanted) else np.zeros(1, int)
    lengths = plan.lengths[wanted]
    longest = max(1, lengths.max())
    chosen = to_device(wanted, device)
    wanted_mask = plan.attention_mask[chosen, :longest]
    with knows_padding(lengths.min() < longest):
        _, foreign_states = model.text_features(plan.input_ids[chosen, :longest], wanted_mask)
    head: Any = model.fusion
    foreign_states = head.encode_text(foreign_states)
    states = _one_below_the_other(encoded.text_states[:own], foreign_states)
    return states, _one_below_the_other(batch["attention_mask"][:own], wanted_mask), place_P


def hard_negatives(
    query_nE: Tensor, keys_NE: Tensor, scale: Tensor, batch: GlobalBatch, key: int, tile: int | None = None
) -> Tensor:
    """Draw a negative for each own row: its global index, -1 if there is none, int64 `[n]`.

    Row i's negative j is drawn with probability proportional to exp(scale <q_i, k_j>) (ALBEF, arXiv 2107.07651), in log
    space by the Gumbel-max trick, so nothing can underflow; pairs that share an image or a caption are never drawn. The
    noise is a hash of `key` and of the ids of both pairs: the draw depends neither on the order of the batch nor on how many
    ranks hold it.
    """
    mine = slice(batch.offset, batch.offset + len(query_nE))
    ids_n2 = batch.ids_N2[mine]
    pair_N = pair_keys(batch.ids_N2)
    chosen_n = torch.full_like(pair_N[mine], -1)
    for part in slices(len(query_nE), tile or tile_rows(len(keys_NE), query_nE.device)):
        with full_precision(query_nE.device):
            logits_TN = scale.float() * query_nE[part].float() @ keys_NE.float().T
        logits_TN = logits_TN + gumbel_noise(pair_N[mine][part], pair_N, key)
        best_T, index_T = logits_TN.masked_fill(same_pair(ids_n2[part], batch.ids_N2), -torch.inf).max(1)
        chosen_n[part] = torch.where(best_T > -torch.inf, index_T, -1)
    return chosen_n
