"""Re-ranking: the fusion head reorders the first K candidates of each query.

The score of a pair is the head's score + weight x inverse temperature x cosine. The head's score is one of
- match: its match logit. With weight 1 this is BLIP's sum (arXiv 2201.12086, section 4.2) with the learned temperature; with
  weight 0 the logit alone (ALBEF, arXiv 2107.07651, section 3.2).
- caption, for a model trained with captioning: the log probability of the caption given the image (arXiv 2306.01879), minus
  the log probability of the caption alone, estimated by the mean probability over the caption's candidate images.
- both: the sum of match logit and log probability of the caption given the image, minus the log of the mean of the exponential
  of this sum over the caption's candidate images.
What is subtracted is the same for all images of a caption: it changes image to text, and not text to image.

Shape letters: M images, T texts, Q queries, K candidates, P pairs.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.evaluation.embeddings import (
    Embeddings,
    Texts,
    best_rank,
    cosine_ranks,
    image_shares,
    size_in_bytes,
    top_candidates,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues

PAIRS = 256  # pairs per forward of the head
SCORES = ("match", "caption", "both")  # values of --rerank_score


@dataclass
class DirectionRanks:
    """Ranks of all queries of one direction, from 1, the same on all ranks."""

    image_key_Q: Tensor  # id of the image that each query is, or belongs to
    cosine_Q: Tensor  # ranks by the two towers alone
    # Ranks after re-ranking the first 1, 2, 4 ... K candidates, by that number; empty without a head.
    by_first: dict[int, Tensor] = field(default_factory=dict)
    # The K candidates of each query in their new order, and their scores, both `[Q, K]`; None without a head.
    reranked_items: Tensor | None = None
    reranked_scores: Tensor | None = None

    @property
    def reranked_Q(self) -> Tensor:
        """Ranks after re-ranking all K candidates."""
        return self.by_first[max(self.by_first)]


@dataclass
class PairScores:
    """The head's scores of pairs `[P]`, looked up by pair number: image x T + text."""

    pairs: Tensor  # sorted when the object is made
    scores: Tensor
    seconds: float  # time for scoring, with encoding the texts and the images that did not fit into memory
    length: float  # mean padded length of the texts, in tokens
    image_bytes: int  # size of one image's keys and values

    def __post_init__(self) -> None:
        order = self.pairs.argsort()
        self.pairs, self.scores = self.pairs[order], self.scores[order]

    def __call__(self, wanted: Tensor) -> Tensor:
        """Return the scores of the pairs `wanted`; minus infinity for one that was not scored."""
        place = torch.searchsorted(self.pairs, wanted).clamp(max=len(self.pairs) - 1)
        return self.scores[place].where(self.pairs[place] == wanted, -torch.inf)

    def minus_priors(self, text_pairs_TK: Tensor, texts: int) -> "PairScores":
        """Subtract from each text's scores the log of the mean of exp(score) over its K candidate images.

        For captions that is how probable the text is by itself; for `both`, the match belongs to the mean. Texts from T on (of
        `texts` in all) have no candidates, and keep their scores.
        """
        prior_T = self(text_pairs_TK).logsumexp(1) - math.log(text_pairs_TK.shape[1])
        prior = prior_T.new_zeros(texts)
        prior[: len(prior_T)] = prior_T
        return replace(self, scores=self.scores - prior[self.pairs % texts])


class Candidates(NamedTuple):
    """Cosine, index and pair number of each query's first K items, best first, all `[Q, K]`."""

    cosine: Tensor
    item: Tensor
    pair: Tensor


def find_candidates(split: Embeddings, top_k: int, texts: int) -> dict[str, Candidates]:
    """Find the candidates of each direction, with pair numbers among `texts` texts."""
    found = {}
    for direction, (queries, items) in split.directions.items():
        cosine_QK, item_QK = top_candidates(queries, items, top_k)
        query_Q1 = torch.arange(len(item_QK), device=item_QK.device)[:, None]
        image, text = (item_QK, query_Q1) if direction == "text_to_image" else (query_Q1, item_QK)
        found[direction] = Candidates(cosine_QK, item_QK, image * texts + text)
    return found


def rank_directions(
    split: Embeddings,
    candidates: dict[str, Candidates] | None = None,
    scores: PairScores | None = None,
    scale: float = 0.0,
) -> dict[str, DirectionRanks]:
    """Return the ranks by cosine in both directions and, with `candidates`, after re-ranking.

    The score of a candidate is the head's score + `scale` x cosine.
    """
    ranks = {}
    for direction, (queries, items) in split.directions.items():
        ranked = ranks[direction] = DirectionRanks(queries.key, cosine_ranks(queries, items))
        if candidates is None or scores is None:
            continue
        found = candidates[direction]
        score_QK, right_QK = scores(found.pair), items.key[found.item] == queries.key[:, None]
        if scale:
            score_QK = score_QK + scale * found.cosine
        ranked.reranked_scores, place_QK = score_QK.sort(1, descending=True)
        ranked.reranked_items = found.item.gather(1, place_QK)
        for first in numbers_of_candidates(found.item.shape[1]):
            # Because ties count against it, a right item is among the first k exactly where its rank is at most k.
            rank_Q = best_rank(score_QK[:, :first], right_QK[:, :first])
            ranked.by_first[first] = torch.where(ranked.cosine_Q <= first, rank_Q, ranked.cosine_Q)
    return ranks


def numbers_of_candidates(top_k: int) -> list[int]:
    """Return 1, 2, 4 ... up to and including `top_k`."""
    return [*(2**power for power in range(top_k.bit_length()) if 2**power < top_k), top_k]


@torch.no_grad()
def score_pairs(
    model: FusionDualEncoderModel,
    split: Embeddings,
    texts: Texts,
    pairs: Tensor,
    loader: Iterable,
    accelerator: Accelerator,
    score: str = "match",
) -> PairScores:
    """Score pairs given as image x T + text, each once, and gather the scores on all ranks.

    Every rank scores the pairs of its own images, one share of images at a time. Pairs are sorted by text, so that a text is
    encoded once per share. The keys and values are removed from `split`.

    Args:
        loader: the batches that `split` was embedded from.
        score: one of `SCORES`.
    """
    begin, tokens, image_bytes = time.perf_counter(), 0, 0
    pairs = pairs.unique()
    scored, scores = [pairs[:0]], [torch.empty(0, device=pairs.device)]
    progress = tqdm(desc="Re-ranking", unit="pair", leave=False, disable=not accelerator.is_main_process, delay=2)
    for images, keys_values in image_shares(model, split, loader, accelerator):
        image = pairs // len(texts)
        mine = pairs[(image >= images.start) & (image < images.stop)]
        mine = mine[(mine % len(texts)).argsort(stable=True)]
        if keys_values:
            image_bytes = size_in_bytes(keys_values) // len(images)
        # FSDP needs the same number of forwards on every rank; a rank without pairs left repeats its first one.
        most = max(distributed.gather_sizes(len(mine), mine.device))
        of_share = []
        for low in range(0, most, PAIRS):
            block = mine[low : low + PAIRS] if low < len(mine) else mine[:1]
            with accelerator.autocast():
                score_P, length = _score_block(model, texts, block, keys_values, images.start, score)
            of_share.append(score_P)
            if low < len(mine):
                tokens += length * len(block)
            progress.update(len(block))
        scored.append(mine)
        scores.append(torch.cat([*of_share, scores[0]])[: len(mine)])
        del keys_values  # before the next share is encoded
    mine = torch.cat(scored)
    sizes = distributed.gather_sizes(len(mine), mine.device)
    all_pairs, all_scores = distributed.gather(mine, sizes), distributed.gather(torch.cat(scores), sizes)
    seconds = time.perf_counter() - begin
    return PairScores(all_pairs, all_scores, seconds, tokens / max(1, len(mine)), image_bytes)


def _score_block(
    model: FusionDualEncoderModel, texts: Texts, block: Tensor, keys_values: KeysValues, first_image: int, score: str
) -> tuple[Tensor, int]:
    """Return the scores of pairs of this share's images, and the padded length of their texts."""
    if not len(block):  # a rank without images
        return torch.empty(0, device=block.device), 0
    text, place = (block % len(texts)).unique(return_inverse=True)
    read = texts.take(text)
    local = block // len(texts) - first_image
    own = tuple(layer[:, local] for layer in keys_values)
    scores = torch.zeros(len(block), device=block.device)
    if score != "caption":
        _, states = model.encode_text(read.input_ids, read.attention_mask)
        scores = scores + model.match_pairs(own, states[place], read.attention_mask[place]).float()
    if score != "match":
        scores = scores + model.caption_scores(own, read.input_ids[place], read.attention_mask[place]).float()
    return scores, read.input_ids.shape[1]
