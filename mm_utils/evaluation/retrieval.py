"""Measure retrieval in both directions, text to image and image to text.

`mm_utils.evaluation.embeddings` says how ranks are counted, `mm_utils.evaluation.reranking` how the fusion head changes them.

If captions are in several languages, recalls of the ten most frequent ones are measured separately as well, as
`text_to_image_recall_de@1` and so on. Text to image, the queries are the captions of that language, among all images. Image to
text, the items are the captions of that language, and images without one are no queries.

Word order: does a true caption score above the same words in an order that is false? A model that reads captions as bags of
words is right for half of the images (Winoground, arXiv 2204.03162). Scenes have such a probe for every image
(`mm_utils.data.scenes.order_pairs`); mirror twins swap its two captions, so that a model which reads the caption alone is right
for half of them, too. Ties and NaN count against the model.
"""

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.loading.tokens import encode_captions, pad_captions
from mm_utils.data.scenes import order_pairs
from mm_utils.distributed import full_tensor
from mm_utils.evaluation.embeddings import Embeddings, Texts, embed_split
from mm_utils.evaluation.metrics import embedding_health, retrieval_metrics, share_with_interval
from mm_utils.evaluation.reranking import (
    SCORES,
    DirectionRanks,
    PairScores,
    find_candidates,
    rank_directions,
    score_pairs,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

logger = logging.getLogger(__name__)

Evaluate = Callable[[FusionDualEncoderModel, Iterable, Accelerator], dict[str, float]]
IMAGES = 128  # images whose probes of the word order are encoded at a time


@dataclass
class EvaluationArguments:
    """Re-ranking in evaluations."""

    rerank_top_k: int = arg(
        10, "Also measure retrieval after the fusion head reorders the first K candidates of every query; 0 = do not."
    )
    rerank_score: str = arg(
        "match",
        "The head's score of a pair: match (its match logit), caption (log probability of the caption, for a model trained "
        "with captioning), or both (their sum); the last two minus their mean over the caption's candidate images.",
    )
    rerank_weight: float = arg(
        1.0, "A pair's score is the head's score + weight x scaled cosine; 0 = the head's score alone."
    )
    rerank_cache_gb: float = arg(
        8.0, "Memory per process for the head's keys and values of images; images that do not fit are encoded twice."
    )

    def __post_init__(self) -> None:
        if self.rerank_top_k < 0:
            raise ValueError(f"--rerank_top_k is {self.rerank_top_k}; give a number of candidates, or 0 for none.")
        if self.rerank_score not in SCORES:
            raise ValueError(f"--rerank_score is {self.rerank_score}; choose one of {', '.join(SCORES)}.")
        if not 0 <= self.rerank_weight < math.inf:
            raise ValueError(f"--rerank_weight is {self.rerank_weight}; give a finite number from 0 on.")
        if not self.rerank_cache_gb > 0:
            raise ValueError(f"--rerank_cache_gb is {self.rerank_cache_gb}; give gigabytes above 0.")


class RetrievalEvaluator:
    """Measure recall at 1, 5 and 10, mean and median rank, and the health of the embeddings; all ranks get the same metrics.

    With `rerank_top_k` and a model with a fusion head, also measure `rerank_*`, after the head has reordered the first K
    candidates of each query.

    Args:
        probes: texts of `word_order_probes`; with them, also measure `order_accuracy` and `rerank_order_accuracy`.

    Attributes:
        split: embeddings of the last evaluation.
        directions: its ranks in each direction.
        scores: its pair scores; None without a head.
    """

    def __init__(self, args: EvaluationArguments | None = None, probes: Texts | None = None):
        self.args, self.probes = args or EvaluationArguments(rerank_top_k=0), probes
        self.split: Embeddings | None = None
        self.directions: dict[str, DirectionRanks] = {}
        self.scores: PairScores | None = None

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model` on the batches of `mm_utils.data.loading.loaders.Loaders.evaluation`."""
        device, reranks = accelerator.device, self.args.rerank_top_k > 0 and model.fusion is not None
        # On a GPU at most half of what is free.
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        room = min(1e9 * self.args.rerank_cache_gb, free / 2) if reranks else 0
        self.split = split = embed_split(model, loader, accelerator, room)
        if split.skipped:
            logger.warning("%d images were left out of the evaluation: %s", len(split.skipped), split.skipped[:3])
        probes = self.probes.to(device) if self.probes is not None else None
        others: dict[str, float] = {}
        if probes is not None:
            others |= share_with_interval("order_accuracy", prefers_true_caption(model, split, probes, accelerator))
        if reranks:
            others |= self._rerank(model, split, loader, accelerator, probes)
        else:
            self.directions = rank_directions(split)
        return retrieval_metrics(split, self.directions) | others | embedding_health(split)

    def _rerank(
        self,
        model: FusionDualEncoderModel,
        split: Embeddings,
        loader: Iterable,
        accelerator: Accelerator,
        probes: Texts | None,
    ) -> dict[str, float]:
        """Set `directions` and `scores`; return the metrics of the probes."""
        score = self.args.rerank_score
        if score != "match" and model.caption_adapter is None:
            raise ValueError(
                f"--rerank_score is {score}; the model was not trained to write captions. Train it with captioning among "
                "--objectives, or take match."
            )
        texts = split.texts if probes is None else Texts.cat([split.texts, probes])
        candidates = find_candidates(split, self.args.rerank_top_k, len(texts))
        wanted = [found.pair for found in candidates.values()]
        if probes is not None:
            wanted.append(probe_pairs(split, len(texts)))
        pairs = torch.cat([numbers.flatten() for numbers in wanted])
        scores = score_pairs(model, split, texts, pairs, loader, accelerator, score)
        if score != "match":
            scores = scores.minus_priors(candidates["text_to_image"].pair, len(texts))
        scale = full_tensor(model.logit_scale.detach()).float().exp().item()
        self.scores = scores
        self.directions = rank_directions(split, candidates, scores, self.args.rerank_weight * scale)
        if probes is None:
            return {}
        true, false = scores(wanted[-1]).unbind(1)
        return share_with_interval("rerank_order_accuracy", true > false)


# -- word order ---------------------------------------------------------------------------------------------------------


def word_order_probes(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Texts | None:
    """Return true and false caption of row r as texts 2r and 2r + 1; None without probes."""
    if not isinstance(rows.features.get("order_pair"), dict):
        return None
    captions = [caption for _, *pair in order_pairs(rows) for caption in pair]
    ids = encode_captions(tokenizer, captions, ["en"] * len(captions), max_seq_length)
    return Texts(*pad_captions(ids, tokenizer.pad_token_id))


@torch.no_grad()
def prefers_true_caption(
    model: FusionDualEncoderModel, split: Embeddings, probes: Texts, accelerator: Accelerator
) -> Tensor:
    """Return for each image whether the cosine of its true caption is higher, bool `[M]`."""
    images, device = len(split.rows_M), split.rows_M.device
    shares = [distributed.share(images, part, distributed.world_size()) for part in range(distributed.world_size())]
    mine, found = shares[distributed.rank()], []
    for low in range(0, max(map(len, shares)), IMAGES):  # FSDP needs the same number of forwards on every rank
        place = torch.arange(mine.start + low, mine.start + low + IMAGES, device=device).clamp(max=images - 1)
        row = split.rows_M[place]
        both = probes.take(torch.stack([2 * row, 2 * row + 1], 1).flatten())
        with accelerator.autocast():
            embeds = model.encode_text(both.input_ids, both.attention_mask)[0].float()
        cosine = torch.einsum("mpe,me->mp", embeds.unflatten(0, (-1, 2)), split.image_ME[place])
        found.append(cosine[:, 0] > cosine[:, 1])
    right = torch.cat(found)[: len(mine)].to(torch.uint8)
    return distributed.gather(right, list(map(len, shares))).bool()


def probe_pairs(split: Embeddings, texts: int) -> Tensor:
    """Return the pair numbers of each image with its true and its false caption, `[M, 2]`.

    Pairs are numbered as `PairScores` needs it, among `texts` texts: first the captions of the split, then the probes.
    """
    image = torch.arange(len(split.rows_M), device=split.rows_M.device)
    true_M = image * texts + len(split.text_TE) + 2 * split.rows_M
    return torch.stack([true_M, true_M + 1], 1)
