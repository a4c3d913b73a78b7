"""Re-ranking: the fusion head orders the first K candidates of every query anew, and the others keep their place.

The score is what the head says + weight x inverse temperature x cosine. The head says a match logit: with weight 1 this is
BLIP's sum (arXiv 2201.12086, section 4.2) with the learned temperature, with weight 0 the logit alone (ALBEF, arXiv
2107.07651, section 3.2). Or, of a model trained to write captions, the log probability of the caption (arXiv 2306.01879), less
that of the caption without an image, which is estimated by its mean over the images that are the caption's candidates. A
pair that was not scored counts as minus infinity. Each pair is scored once, however many queries and cut-offs ask for it, on the rank that
owns its image; texts are encoded once for all their candidates of a share of images (`mm_utils.split_embeddings`).

Shape letters: M images, T texts, Q queries, K candidates, P pairs.
"""

import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel, KeysValues
from mm_utils.ranking import Candidates, Keyed, cosine_ranks, reranked, top_candidates
from mm_utils.split_embeddings import Embeddings, Texts, image_shares, size_in_bytes

PAIRS = 256  # pairs scored by the head at a time
SCORES = ("match", "caption", "both")  # what the head says of a pair


@dataclass
class DirectionRanks:
    """The ranks of all queries of one direction, from 1, the same on all ranks.

    Attributes:
        image_key_Q: the image that each query is, or belongs to.
        cosine_Q: by the two towers alone.
        by_first: after re-ranking the first 1, 2, 4 ... K candidates, by that number; empty without a head.
    """

    image_key_Q: Tensor
    cosine_Q: Tensor
    by_first: dict[int, Tensor] = field(default_factory=dict)

    @property
    def reranked_Q(self) -> Tensor:
        """After re-ranking all K candidates."""
        return self.by_first[max(self.by_first)]


class MatchScores:
    """What the head says of pairs `[P]`, each given as image x T + text: a look-up by that number.

    Attributes:
        seconds: that scoring took, with encoding the texts and, of a split that does not fit, the images.
        length: mean padded length of the texts, in tokens.
        image_bytes: keys and values of one image.
    """

    def __init__(self, pairs: Tensor, logits: Tensor, seconds: float, length: float, image_bytes: int):
        order = pairs.argsort()
        self.pairs, self.logits = pairs[order], logits[order]
        self.seconds, self.length, self.image_bytes = seconds, length, image_bytes

    def less_priors(self, text_pairs_TK: Tensor, texts: int) -> "MatchScores":
        """Less the log of the mean probability of each text over K images; texts beyond the T have no prior taken off."""
        prior_T = self(text_pairs_TK).logsumexp(1) - math.log(text_pairs_TK.shape[1])
        prior = prior_T.new_zeros(texts)
        prior[: len(prior_T)] = prior_T
        return MatchScores(
            self.pairs, self.logits - prior[self.pairs % texts], self.seconds, self.length, self.image_bytes
        )

    def __call__(self, wanted: Tensor) -> Tensor:
        """The scores of these pairs, in their shape; minus infinity for one that was not scored."""
        place = torch.searchsorted(self.pairs, wanted).clamp(max=len(self.pairs) - 1)
        return self.logits[place].where(self.pairs[place] == wanted, -torch.inf)


@dataclass
class Reranking:
    """What is scored of a split: the first K candidates of every caption and every image.

    Attributes:
        images_TK, texts_MK: the candidates.
        text_pairs_TK, image_pairs_MK: their numbers for `MatchScores`.
    """

    images_TK: Candidates
    texts_MK: Candidates
    text_pairs_TK: Tensor
    image_pairs_MK: Tensor

    @classmethod
    def plan(cls, split: Embeddings, top_k: int, texts: int) -> "Reranking":
        """The candidates of a split, whose pairs are numbered among `texts` texts, the captions first."""
        images_TK = top_candidates(split.captions, split.images, top_k)
        texts_MK = top_candidates(split.images, split.captions, top_k)
        device = images_TK.item.device
        text_T1, image_M1 = (
            torch.arange(len(rows.key), device=device)[:, None] for rows in (split.captions, split.images)
        )
        return cls(images_TK, texts_MK, images_TK.item * texts + text_T1, image_M1 * texts + texts_MK.item)

    @property
    def pairs(self) -> Tensor:
        """All that is to be scored, some of it twice."""
        return torch.cat([self.text_pairs_TK.flatten(), self.image_pairs_MK.flatten()])

    def ranks(self, split: Embeddings, match: MatchScores, scale: float) -> dict[str, DirectionRanks]:
        """Ranks by match logit plus `scale` times cosine, for every number of candidates up to K, in both directions."""
        texts, images = split.captions, split.images
        return {
            "text_to_image": _direction(texts, images, self.images_TK, match(self.text_pairs_TK), scale),
            "image_to_text": _direction(images, texts, self.texts_MK, match(self.image_pairs_MK), scale),
        }


def cosine_directions(split: Embeddings) -> dict[str, DirectionRanks]:
    """Ranks by the two towers alone, in both directions."""
    texts, images = split.captions, split.images
    return {
        "text_to_image": DirectionRanks(texts.key, cosine_ranks(texts, images)),
        "image_to_text": DirectionRanks(images.key, cosine_ranks(images, texts)),
    }


def numbers_of_candidates(top_k: int) -> list[int]:
    """1, 2, 4 ... and `top_k` itself."""
    return [*(2**power for power in range(top_k.bit_length()) if 2**power < top_k), top_k]


def _direction(queries: Keyed, items: Keyed, found: Candidates, match_QK: Tensor, scale: float) -> DirectionRanks:
    cosine_Q = cosine_ranks(queries, items)
    score_QK = match_QK + scale * found.cosine if scale else match_QK
    right_QK = items.key[found.item] == queries.key[:, None]
    firsts = numbers_of_candidates(found.item.shape[1])
    by_first = {first: reranked(score_QK, right_QK, cosine_Q, first) for first in firsts}
    return DirectionRanks(queries.key, cosine_Q, by_first)


@torch.no_grad()
def match_logits(
    model: FusionDualEncoderModel,
    split: Embeddings,
    texts: Texts,
    pairs: Tensor,
    loader: Iterable,
    accelerator: Accelerator,
    score: str = "match",
) -> MatchScores:
    """Score pairs given as image x T + text, each once, for all ranks; `score` is one of `SCORES`.

    Every rank scores the pairs of its own images, a share of them at a time; pairs are sorted by text, so that a text is
    encoded once for all its candidates in a share. `split` gives up its keys and values.
    """
    begin, tokens, image_bytes = time.perf_counter(), 0, 0
    pairs = pairs.unique()
    found, logits = [pairs[:0]], [torch.empty(0, device=pairs.device)]
    progress = tqdm(desc="Re-ranking", unit="pair", leave=False, disable=not accelerator.is_main_process, delay=2)
    for images, keys_values in image_shares(model, split, loader, accelerator):
        image = pairs // len(texts)
        mine = pairs[(image >= images.start) & (image < images.stop)]
        mine = mine[(mine % len(texts)).argsort(stable=True)]
        if keys_values:
            image_bytes = size_in_bytes(keys_values) // len(images)
        steps = range(0, max(ranks.gather_sizes(len(mine), mine.device)), PAIRS)  # as many on every rank, for FSDP
        scored = []
        for low in steps:
            block = mine[low : low + PAIRS] if low < len(mine) else mine[:1]
            with accelerator.autocast():
                logits_P, length = _score_block(model, texts, block, keys_values, images.start, score)
            scored.append(logits_P)
            if low < len(mine):
                tokens += length * len(block)
            progress.update(len(block))
        found.append(mine)
        logits.append(torch.cat([*scored, logits[0]])[: len(mine)])
        del keys_values  # before the next share is made
    mine = torch.cat(found)
    sizes = ranks.gather_sizes(len(mine), mine.device)
    all_pairs, all_logits = ranks.gather(mine, sizes), ranks.gather(torch.cat(logits), sizes)
    seconds = time.perf_counter() - begin
    return MatchScores(all_pairs, all_logits, seconds, tokens / max(1, len(mine)), image_bytes)


def _score_block(
    model: FusionDualEncoderModel, texts: Texts, block: Tensor, keys_values: KeysValues, first_image: int, score: str
) -> tuple[Tensor, int]:
    """Scores of pairs of images held here, and the padded length of their texts."""
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
