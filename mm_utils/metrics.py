"""Measure retrieval: text to image and image to text, with several captions per image counted right.

How a rank is counted says `mm_utils.ranking`, how the fusion head orders candidates anew `mm_utils.reranking`.

Captions in several languages are also measured one language at a time, `text_to_image_recall_de@1` and so on, the ten most
frequent ones. Text to image: only its captions ask, among all images. Image to text: only its captions are there to be
found, and an image without one does not ask.

Shape letters: M images and T captions of the whole split.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils.arguments import arg
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.ranking import Keyed, cosine_ranks, recalls, summarise_ranks
from mm_utils.reranking import SCORES, DirectionRanks, MatchScores, Reranking, cosine_directions, match_logits
from mm_utils.sharding import whole
from mm_utils.split_embeddings import Embeddings, Texts, embed_split
from mm_utils.word_order import order_accuracy, order_by_cosine, order_by_match, order_numbers

logger = logging.getLogger(__name__)

Evaluate = Callable[[FusionDualEncoderModel, Iterable, Accelerator], dict[str, float]]


@dataclass
class EvaluationArguments:
    """What is measured."""

    rerank_top_k: int = arg(
        10, "Also measure with the fusion head ordering the first K of every query anew; 0 = do not."
    )
    rerank_score: str = arg(
        "match",
        "What the head says of a pair: its match logit, or, of a model trained with captioning, how likely the caption is; or "
        "both, summed.",
    )
    rerank_weight: float = arg(
        1.0, "The score is what the head says + weight x scaled cosine; 0 = what the head says alone."
    )
    rerank_cache_gb: float = arg(
        8.0, "Keys and values of images kept for the head, per process; those of further images are computed twice."
    )

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, with a ValueError of one line."""
        if self.rerank_top_k < 0:
            raise ValueError(f"--rerank_top_k is {self.rerank_top_k}; give a number of candidates, or 0 for none.")
        if self.rerank_score not in SCORES:
            raise ValueError(f"--rerank_score is {self.rerank_score}; choose one of {', '.join(SCORES)}.")
        if not 0 <= self.rerank_weight < math.inf:
            raise ValueError(f"--rerank_weight is {self.rerank_weight}; give a finite number from 0 on.")
        if not self.rerank_cache_gb > 0:
            raise ValueError(f"--rerank_cache_gb is {self.rerank_cache_gb}; give gigabytes above 0.")


class RetrievalEvaluator:
    """Recall at 1, 5, 10, mean and median rank in both directions; all ranks get the same figures.

    With `rerank_top_k`, and a model with a fusion head, also `rerank_*`, after the head has ordered the first K of each
    query anew, and `match_image_choice`: how often its match logit is higher for a caption's own image than for another
    one, which a head that does not look gets right in half of all cases. With the texts of
    `mm_utils.word_order.order_texts`, `order_accuracy` and `rerank_order_accuracy`.

    Attributes:
        split: the embeddings of the last evaluation.
        directions: its ranks, by direction.
        match: its match scores; None without a head.
    """

    def __init__(self, args: EvaluationArguments | None = None, order: Texts | None = None):
        self.args, self.order = args or EvaluationArguments(rerank_top_k=0), order
        self.split: Embeddings | None = None
        self.directions: dict[str, DirectionRanks] = {}
        self.match: MatchScores | None = None

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model` on what `loader` yields (see `mm_utils.data.loaders.Loaders.evaluation`)."""
        reranks = self.args.rerank_top_k > 0 and model.fusion is not None
        room = cache_bytes(self.args.rerank_cache_gb, accelerator.device) if reranks else 0
        self.split = split = embed_split(model, loader, accelerator, room)
        if split.skipped:
            logger.warning("%d images were left out of the evaluation: %s", len(split.skipped), split.skipped[:3])
        order = self.order.to(accelerator.device) if self.order is not None else None
        metrics = order_accuracy(order_by_cosine(model, split, order, accelerator)) if order is not None else {}
        if reranks:
            metrics |= self._rerank(model, loader, accelerator, order)
        else:
            self.directions = cosine_directions(split)
        return {**figures(split, self.directions), **metrics}

    def _rerank(
        self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator, order: Texts | None
    ) -> dict[str, float]:
        """Ranks of both kinds into `directions`; returns what else the head's scores tell."""
        split = self.split
        assert split is not None
        texts = split.texts.followed_by(order) if order is not None else split.texts
        plan = Reranking.plan(split, self.args.rerank_top_k, len(texts))
        choices = image_choices(split, len(texts))
        asked = [plan.pairs, choices.flatten()]
        if order is not None:
            asked.append(order_numbers(split, len(texts)).flatten())
        score = self.args.rerank_score
        if score != "match" and model.caption_adapter is None:
            raise ValueError(
                f"--rerank_score is {score}; the model was not trained to write captions. Train it with captioning among "
                "--objectives, or take match."
            )
        match = match_logits(model, split, texts, torch.cat(asked), loader, accelerator, score)
        if score != "match":
            match = match.less_priors(plan.text_pairs_TK, len(texts))
        self.match = match
        scale = whole(model.logit_scale.detach()).float().exp().item()
        self.directions = plan.ranks(split, match, self.args.rerank_weight * scale)
        found = {}
        if len(choices):
            own, other = match(choices).unbind(1)
            found["match_image_choice"] = (own > other).double().mean().item()
        if order is not None:
            found |= order_accuracy(order_by_match(match, order_numbers(split, len(texts))), "rerank_")
        return found


def cache_bytes(gigabytes: float, device: torch.device) -> float:
    """So many, but on a GPU at most half of what is free."""
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
    return min(1e9 * gigabytes, free / 2)


def image_choices(split: Embeddings, texts: int) -> Tensor:
    """Pairs of each image's first caption with it and with another image, `[C, 2]`, numbered as for `MatchScores`.

    The other one is half the split away in the order of the ids, so by chance; one that has the same id is left out.
    """
    keys_M, images = split.image_key_M, len(split.image_key_M)
    key_T, text_T = split.caption_key_T.sort(stable=True)
    text_M = text_T[torch.searchsorted(key_T, keys_M)]
    own_M = keys_M.argsort(stable=True)
    other_M = own_M.roll(-(images // 2))
    numbers_M2 = torch.stack([own_M, other_M], 1) * texts + text_M[own_M, None]
    return numbers_M2[keys_M[own_M] != keys_M[other_M]]


def retrieval_metrics(split: Embeddings) -> dict[str, float]:
    """Recalls and ranks of the cosine similarity alone; recalls also of each language, if there are several."""
    return figures(split, cosine_directions(split))


def figures(split: Embeddings, found: dict[str, DirectionRanks]) -> dict[str, float]:
    """Recalls and ranks by the towers and, where there are some, after re-ranking.

    Of each language, re-ranking is measured from text to image: its captions alone as candidates would be other pairs.
    """
    metrics: dict[str, float] = {}
    for direction, of in found.items():
        metrics |= summarise_ranks(of.cosine_Q, f"{direction}_")
    metrics["text_to_image_chance@1"] = 1 / len(split.image_ME)
    metrics |= _by_language(split, found["text_to_image"].cosine_Q, "text_to_image_")
    metrics |= _images_by_language(split)
    reranked = {direction: of for direction, of in found.items() if of.by_first}
    for direction, of in reranked.items():
        metrics |= summarise_ranks(of.reranked_Q, f"rerank_{direction}_")
    if reranked:
        metrics |= _by_language(split, reranked["text_to_image"].reranked_Q, "rerank_text_to_image_")
    return metrics


def _by_language(split: Embeddings, rank_T: Tensor, prefix: str) -> dict[str, float]:
    """Recalls of the captions of each language, whose ranks are among `rank_T`."""
    parts = (recalls(rank_T[is_in_T], f"{prefix}recall_{name}") for name, is_in_T in split.languages.items())
    return {name: value for part in parts for name, value in part.items()}


def _images_by_language(split: Embeddings) -> dict[str, float]:
    """Recalls of images among the captions of each language alone; T times M similarities, once more, for all of them."""
    found: dict[str, float] = {}
    for name, is_in_T in split.languages.items():
        texts = Keyed(split.text_TE[is_in_T], split.caption_key_T[is_in_T])
        asks_M = torch.isin(split.image_key_M, texts.key)
        rank_Q = cosine_ranks(Keyed(split.image_ME[asks_M], split.image_key_M[asks_M]), texts)
        found |= recalls(rank_Q, f"image_to_text_recall_{name}")
    return found
