"""Image-text matching: the fusion head classifies pairs as matching or not.

Shape letters: P pairs, n this rank's rows, N the global batch, T rows and C columns of a tile, E embedding width, L tokens.
"""

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.copies import HostCopy, to_device
from mm_utils.model.encoding import knows_padding, length_groups
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues, rows_of
from mm_utils.model.row_noise import gumbel_noise, pair_keys
from mm_utils.objectives.losses import GlobalBatch, Tile, full_precision, same_pair, slices, tile_of
from mm_utils.objectives.negatives import Negatives
from mm_utils.objectives.terms import Batch, EncodedBatch, Report, RowPlan, RowTerm

MATCH_PRIOR_ENTROPY = 0.6365  # one positive to two negatives: a matching loss that stays here has learnt nothing


class Pairs(NamedTuple):
    """The pairs that a rank scores, on the host."""

    image_P: np.ndarray  # the pair's image among this rank's
    text_P: np.ndarray  # its text among all ranks'; or N + i, the negative that the data has for image i
    is_match_P: np.ndarray
    weight_P: np.ndarray  # of the pair's loss


class MatchingPlan(RowPlan):
    """The pairs that are scored, on their way to the host.

    Args:
        drawn_N4: the wrong text of every image and the wrong image of every text, -1 for none; tokens of every text and of the
            negative that the data has for its image, 0 for none.
        rows: this rank's rows among the N.
        input_ids, attention_mask: tokens of the N texts of the global batch and, if the data has them, of its N negatives.
    """

    def __init__(self, drawn_N4: Tensor, rows: range, input_ids: Tensor, attention_mask: Tensor):
        self._drawn, self._rows = HostCopy(drawn_N4), rows
        self.input_ids, self.attention_mask = input_ids, attention_mask

    @cached_property
    def total(self) -> Tensor:  # type: ignore[override]
        """The weight of the pairs of all ranks."""
        text_N, image_N, _, negative_N = self._drawn.numpy().T
        wrong = ((text_N >= 0) | (negative_N > 0)).sum() + (image_N >= 0).sum()
        return torch.tensor(max(1, len(text_N) + int(wrong)))

    @cached_property
    def lengths(self) -> np.ndarray:
        """Tokens of the N texts and of the N negatives."""
        return self._drawn.numpy()[:, 2:].T.flatten()

    @cached_property
    def pairs(self) -> Pairs:
        """All matches, images with a wrong text, texts with a wrong image, images with negatives."""
        text_N, image_N, _, negative_N = self._drawn.numpy().T
        rows = np.arange(self._rows.start, self._rows.stop)
        with_text, with_negative = rows[text_N[rows] >= 0], rows[negative_N[rows] > 0]
        with_image = np.flatnonzero((image_N >= self._rows.start) & (image_N < self._rows.stop))
        image_P = np.concatenate([rows, with_text, image_N[with_image], with_negative]) - self._rows.start
        text_P = np.concatenate([rows, text_N[with_text], with_image, len(text_N) + with_negative])
        share_N = 1 / np.maximum(1, (text_N >= 0) + (negative_N > 0).astype(int))
        weight_P = np.ones(len(image_P), np.float32)
        weight_P[len(rows) : len(rows) + len(with_text)] = share_N[with_text]
        weight_P[len(image_P) - len(with_negative) :] = share_N[with_negative]
        return Pairs(image_P, text_P, np.arange(len(image_P)) < len(rows), weight_P)


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
    readers = (Negatives(),)

    @classmethod
    def build(cls, args: Any, seed: int, tokenizer: PreTrainedTokenizerBase | None) -> "Matching":
        """Return the term."""
        return cls(seed)

    def plan(
        self, model: FusionDualEncoderModel, batch: Batch, shared: GlobalBatch, scale: Tensor, step: int
    ) -> MatchingPlan:
        """Draw the pairs, with noise keyed by the seed and the step."""
        names = ("input_ids", "attention_mask")
        own = [[batch[name] for name in names]]
        if "negative_input_ids" in batch:
            own.append([batch[f"negative_{name}"] for name in names])
        lengths = [mask.sum(1) for _, mask in own]
        chosen = self.draw(shared, scale, step)
        drawn_n4 = torch.stack([*chosen, *lengths, torch.zeros_like(lengths[0])][:4], 1)
        everyone = [
            [distributed.gather_ragged(rows, shared.sizes, longest=shared.longest) for rows in each] for each in own
        ]
        tokens = (_stacked(*parts) for parts in zip(*everyone, strict=True))
        rows = range(shared.offset, shared.offset + len(drawn_n4))
        return MatchingPlan(distributed.gather(drawn_n4, shared.sizes), rows, *tokens)

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
        pairs, device = plan.pairs, plan.input_ids.device
        if len(encoded) < shared.sizes[distributed.rank()]:
            is_here = (pairs.image_P >= start_row) & (pairs.image_P < start_row + len(encoded))
            pairs = Pairs(*(values[is_here] for values in pairs))
        pairs = Pairs(*(values[(-plan.lengths[pairs.text_P]).argsort(kind="stable")] for values in pairs))
        lengths = plan.lengths[pairs.text_P].tolist()
        groups = length_groups(lengths, device.type) if batch.get("lengths") else [range(len(lengths))]
        states, mask, text_P = _texts(model, pairs.text_P, batch, encoded, plan, shared.offset + start_row)
        image_P, is_match_P, weight_P = (
            to_device(each, device) for each in (pairs.image_P - start_row, pairs.is_match_P, pairs.weight_P)
        )
        given, place_P, logits = (model, encoded.keys_values), to_device(text_P, device), []
        for group in groups:  # of about one length
            rows = slice(group.start, group.stop)
            longest = max([1, *lengths[rows]])
            logits.append(_score(*given, states[:, :longest], mask[:, :longest], image_P[rows], place_P[rows]))
        logits_P = torch.cat(logits).float()
        losses_P = F.binary_cross_entropy_with_logits(logits_P, is_match_P.to(logits_P.dtype), reduction="none")
        return (weight_P * losses_P).sum(), (weight_P * ((logits_P > 0) == is_match_P)).sum()

    def metrics(self, loss: Tensor, accuracy: Tensor) -> Report:
        """Log also how far the loss is below the entropy of the share of matches."""
        return {**super().metrics(loss, accuracy), "matching_lift": MATCH_PRIOR_ENTROPY - loss}

    def draw(self, shared: GlobalBatch, scale: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Return a wrong text of each own image, a wrong image of each text; -1: none; `[n]`."""
        mine = slice(shared.offset, shared.offset + shared.sizes[distributed.rank()])
        key = 2 * (self.seed * 1_000_003 + step)
        return (
            hard_negatives(shared.image_NE[mine], shared.text_NE, scale, shared, key),
            hard_negatives(shared.text_NE[mine], shared.image_NE, scale, shared, key + 1),
        )


def _stacked(*tokens: Tensor) -> Tensor:
    """Return texts, `[N, L]` each, one below the other, padded to the longest."""
    width = max(part.shape[1] for part in tokens)
    return torch.cat([F.pad(part, (0, width - part.shape[1])) for part in tokens])


def _texts(
    model: FusionDualEncoderModel,
    text_P: np.ndarray,
    batch: Batch,
    encoded: EncodedBatch,
    plan: MatchingPlan,
    first: int,
) -> tuple[Tensor, Tensor, np.ndarray]:
    """Return states and mask of own and foreign texts of a part, and `text_P` as places there.

    The part's own texts begin at text `first` of the global batch.
    """
    own, device = len(encoded), plan.input_ids.device
    place_P = text_P - first
    if own == len(plan.input_ids):
        return encoded.text_states, batch["attention_mask"], place_P
    is_foreign = (place_P < 0) | (place_P >= own)
    wanted, position = np.unique(text_P[is_foreign], return_inverse=True)
    place_P[is_foreign] = own + position
    # Every rank encodes at least one foreign text, because FSDP's ranks must run the same modules.
    wanted = wanted if len(wanted) else np.zeros(1, int)
    lengths = plan.lengths[wanted]
    longest, chosen = max(1, lengths.max()), to_device(wanted, device)
    wanted_mask = plan.attention_mask[chosen, :longest]
    with knows_padding(lengths.min() < longest):
        pooled, foreign_states = model.text_features(plan.input_ids[chosen, :longest], wanted_mask)
    if "text_states" in batch:  # rounded as this rank's own are, which were stored
        foreign_states = foreign_states.to(batch["text_states"].dtype).to(pooled)
    head: Any = model.fusion
    foreign_states = head.encode_text(foreign_states)
    width = max(longest, encoded.text_states.shape[1])
    parts = ((encoded.text_states[:own], batch["attention_mask"]), (foreign_states, wanted_mask))
    states = torch.cat([F.pad(states, (0, 0, 0, width - states.shape[1])) for states, _ in parts])
    mask = torch.cat([F.pad(mask, (0, width - mask.shape[1])) for _, mask in parts])
    return states, mask, place_P


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
    keys_values = tuple(rows_of(layer, image_P, 1) for layer in keys_values)
    return model.match_pairs(keys_values, rows_of(states, text_P), mask[text_P])[:pairs]


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
