"""Re-ranking: the fusion head reorders the first K candidates of each query.

The score of a pair is the scaled cosine + sum_v weight_v x voice v. The head has up to two voices:
- match: its match logit (ALBEF, arXiv 2107.07651, section 3.2), 0 for a head that was not trained to match;
- caption: the log probability of the caption given the image (arXiv 2306.01879), minus the log probability of the caption
  alone, estimated by the mean probability over the caption's candidate images. That is the same for all images of a caption:
  it changes image to text, and not text to image.

A voice's weight on the training pairs says nothing, because the towers rank those right already. So weights are fitted on the
validation split. Its own figures are cross-fitted: the images, those with equal captions together, are cut into two folds, and each
fold is ranked with the weights fitted on the other. If that does not gain mean recall beyond its interval of 95 %, all weights are 0. The
weights that the model keeps are then fitted on both folds together; other splits play no part.

Shape letters: M images, T texts, V voices, Q queries, K candidates, P pairs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.evaluation.embeddings import (
    Embeddings,
    Keyed,
    best_rank,
    cosine_ranks,
    image_shares,
    right_items,
    take_texts,
    top_candidates,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

PAIRS = 256  # pairs per forward of the head
FOLDS = 2  # of the images, by their id, for weights that were fitted on the other one
SMALLEST = 0.01  # a weight below it is 0, and its voice need not be computed


def stored_weights(model: FusionDualEncoderModel) -> dict[str, float]:
    """Return the fitted weights but those of 0; without any, that of the match logit."""
    fitted = model.config.rerank_weights
    return {"match": 1.0} if fitted is None else {name: weight for name, weight in fitted.items() if weight}


_SAYS = {  # what a score of the head is, for people
    "match": "match (that both belong together)",
    "caption": "caption (how much more probable the image makes the text)",
}


def describe_weights(model: FusionDualEncoderModel) -> str:
    """Return a sentence on re-ranking, for logs and the card; "" if nothing was fitted."""
    weights = stored_weights(model)
    if model.fusion is None or model.config.rerank_weights is None:
        return ""
    if not model.config.rerank_weights:
        return "Re-ranking is off: no fusion head was trained."
    if not weights:
        return "Re-ranking is off: the fusion head did not help beyond noise on the validation split."
    added = " + ".join(f"{weight:g} x {_SAYS[name]}" for name, weight in weights.items())
    return (
        f"Re-ranking orders by scaled cosine + {added}; the weights were fitted on the validation split, each half of whose "
        "images is ranked here with those of the other half."
    )


@dataclass
class DirectionRanks:
    """Ranks of all queries of one direction, from 1, the same on all ranks."""

    queries: Keyed
    cosine_Q: Tensor  # by the two towers alone
    reranked_Q: Tensor | None = None  # after re-ranking all K candidates; None without a head
    # The K candidates of each query in their new order, and their scores, both `[Q, K]`; None without a head.
    reranked_items: Tensor | None = None
    reranked_scores: Tensor | None = None

    @property
    def best_Q(self) -> Tensor:
        """The ranks of a search: after re-ranking, where there is a head."""
        return self.cosine_Q if self.reranked_Q is None else self.reranked_Q


def combine(cosine_QK: Tensor, voices_VQK: Tensor, weight_FV: Tensor, key_Q: Tensor) -> Tensor:
    """Return scaled cosine + weighted voices `[Q, K]`, by each query's fold, without zeros."""
    weight_VQ1 = weight_FV.to(cosine_QK)[key_Q % FOLDS].T[..., None]  # [F, V] -> [V, Q, 1]
    # a voice of weight 0 may be infinite, and their product NaN
    return cosine_QK + (weight_VQ1 * voices_VQK).where(weight_VQ1 != 0, 0).sum(0)


class Listed(NamedTuple):
    """The first K items of the queries of one direction, best first; `[Q, K]` where nothing else is said."""

    cosine_QK: Tensor  # scaled cosines
    voices_VQK: Tensor  # `[V, Q, K]`, of no voice before pairs are scored
    right_QK: Tensor  # whether the item is right
    group_Q: Tensor  # `[Q]`; images with equal captions are one group, see `Keyed`
    item_QK: Tensor | None = None
    pair_QK: Tensor | None = None  # pair numbers

    def of_fold(self, fold: int) -> "Listed":
        """Return the queries of one fold."""
        mine = self.group_Q % FOLDS == fold
        return Listed(self.cosine_QK[mine], self.voices_VQK[:, mine], self.right_QK[mine], self.group_Q[mine])


def find_candidates(split: Embeddings, top_k: int, scale: float) -> dict[str, Listed]:
    """Find the candidates of each direction."""
    found = {}
    texts = len(split.text_TE)
    for direction, (queries, items) in split.directions.items():
        cosine_QK, item_QK = top_candidates(queries, items, top_k)
        query_Q1 = torch.arange(len(item_QK), device=item_QK.device)[:, None]
        image, text = (item_QK, query_Q1) if direction == "text_to_image" else (query_Q1, item_QK)
        right_QK = right_items(queries, items, item_QK)
        found[direction] = Listed(
            scale * cosine_QK, cosine_QK[None, :0], right_QK, queries.group, item_QK, image * texts + text
        )
    return found


def rank_directions(
    split: Embeddings, candidates: dict[str, Listed] | None = None, weight_FV: Tensor | None = None
) -> dict[str, DirectionRanks]:
    """Return the ranks by cosine in both directions and, with scored `candidates`, after re-ranking with weights `weight_FV` of each fold."""
    ranks = {}
    for direction, (queries, items) in split.directions.items():
        ranked = ranks[direction] = DirectionRanks(queries, cosine_ranks(queries, items))
        if candidates is None or weight_FV is None:
            continue
        found = candidates[direction]
        score_QK = combine(found.cosine_QK, found.voices_VQK, weight_FV, found.group_Q)
        ranked.reranked_scores, place_QK = score_QK.sort(1, descending=True)
        assert found.item_QK is not None
        ranked.reranked_items = found.item_QK.gather(1, place_QK)
        # Because ties count against it, a right item is among the first k exactly where its rank is at most k.
        among_Q = best_rank(score_QK, found.right_QK)
        ranked.reranked_Q = torch.where(ranked.cosine_Q <= score_QK.shape[1], among_Q, ranked.cosine_Q)
    return ranks


def with_voices(
    model: FusionDualEncoderModel,
    split: Embeddings,
    candidates: dict[str, Listed],
    loader: Iterable,
    accelerator: Accelerator,
    voices: Sequence[str],
) -> dict[str, Listed]:
    """Return the candidates with the head's voices: each pair is scored once, see `score_pairs`.

    From `caption`, the log of its mean probability among the text's K candidates is subtracted: how probable the text is by itself.
    """
    numbers = [found.pair_QK for found in candidates.values() if found.pair_QK is not None]
    # a pair that both directions list is scored once
    pairs, places = torch.cat([pair_QK.flatten() for pair_QK in numbers]).unique(return_inverse=True)
    scores = score_pairs(model, split, pairs, loader, accelerator, voices)
    parts = places.split([pair_QK.numel() for pair_QK in numbers])
    scored = {}
    for (name, found), part in zip(candidates.items(), parts, strict=True):
        scored[name] = found._replace(voices_VQK=scores[:, part.view_as(found.cosine_QK)])
    if "caption" in voices:
        voice = list(voices).index("caption")
        of_texts = scored["text_to_image"].voices_VQK[voice]
        prior_T = of_texts.logsumexp(1) - math.log(of_texts.shape[1])
        of_texts -= prior_T[:, None]
        scored["image_to_text"].voices_VQK[voice] -= prior_T[scored["image_to_text"].item_QK]
    return scored


@torch.no_grad()
def score_pairs(
    model: FusionDualEncoderModel,
    split: Embeddings,
    pairs: Tensor,
    loader: Iterable,
    accelerator: Accelerator,
    voices: Sequence[str],
) -> Tensor:
    """Return the voices `[V, P]` of different pairs given as image x T + text, in ascending order; the same on all ranks.

    Every rank scores the pairs of its own images, one share of images at a time. Pairs are sorted by text, so that a text is
    encoded once per share. The keys and values are removed from `split`, which was embedded from `loader`.
    """
    text_T2L = split.text_T2L
    scored = [pairs[:0]]
    scores = [torch.empty(0, len(voices), device=pairs.device)]
    progress = distributed.progress(None, "Re-ranking", unit="pair")
    for images, keys_values in image_shares(model, split, loader, accelerator):
        image = pairs // len(text_T2L)
        mine = pairs[(image >= images.start) & (image < images.stop)]
        mine = mine[(mine % len(text_T2L)).argsort(stable=True)]
        # FSDP needs the same number of forwards on every rank; a rank without pairs left repeats its first one.
        most = max(distributed.gather_sizes(len(mine), mine.device))
        of_share = []
        for low in range(0, most, PAIRS):
            block = mine[low : low + PAIRS] if low < len(mine) else mine[:1]
            if not len(block):  # a rank without images
                continue
            text, place = (block % len(text_T2L)).unique(return_inverse=True)
            input_ids, mask = take_texts(text_T2L, text)
            local = block // len(text_T2L) - images.start
            own = tuple(layer[:, local] for layer in keys_values)
            with accelerator.autocast():
                _, states = model.encode_text(input_ids, mask)
                score_PV = model.voice_scores(voices, own, states[place], mask[place], input_ids[place])
            of_share.append(score_PV.float())
            progress.update(len(block))
        scored.append(mine)
        # scores[0] is empty, for a share without pairs; what a rank scored to keep others company is cut off
        scores.append(torch.cat([*of_share, scores[0]])[: len(mine)])
        del keys_values  # before the next share is encoded
    mine = torch.cat(scored)
    sizes = distributed.gather_sizes(len(mine), mine.device)
    order = distributed.gather(mine, sizes).argsort()
    return distributed.gather(torch.cat(scores), sizes)[order].T


def fit_weights(directions: list[Listed]) -> list[float]:
    """Return the weights of the voices by which the right candidates are most likely, from 0 on.

    They maximise the mean log likelihood of the right candidates under softmax_k(a cosine_k + sum_v b_v voice_vk), the
    conditional logit (McFadden 1974), over queries with a right and a wrong candidate; the weights are b / a.
    """
    voices = len(directions[0].voices_VQK)
    listed = []
    for one in directions:
        some_Q = one.right_QK.any(1) & ~one.right_QK.all(1)
        score = torch.cat([one.cosine_QK[None], one.voices_VQK])[:, some_Q].double().cpu()
        if not some_Q.any() or not score.isfinite().all():
            return [0.0] * voices
        listed.append((score, one.right_QK[some_Q].cpu()))
    log_weight = torch.zeros(1 + voices, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = log_weight.new_zeros(())
        for score, right in listed:
            logits = torch.einsum("v,vqk->qk", log_weight.exp(), score)  # no exponential is negative
            total = total + (logits.logsumexp(1) - logits.masked_fill(~right, -torch.inf).logsumexp(1)).mean()
        total.backward()
        return total

    optimizer.step(loss)
    found = (log_weight[1:] - log_weight[0]).detach().exp()
    return [round(value, 3) if SMALLEST <= value < math.inf else 0.0 for value in found.tolist()]
