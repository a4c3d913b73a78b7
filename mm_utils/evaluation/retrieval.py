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
from mm_utils.evaluation.rerank_weights import Listed, fit_weights, helps
from mm_utils.evaluation.reranking import (
    FOLDS,
    Candidates,
    DirectionRanks,
    PairScores,
    combine,
    describe_weights,
    find_candidates,
    rank_directions,
    score_pairs,
    stored_weights,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

logger = logging.getLogger(__name__)

Evaluate = Callable[[FusionDualEncoderModel, Iterable, Accelerator], dict[str, float]]
VOICES = ("match", "caption")
IMAGES = 128  # images whose probes of the word order are encoded at a time


@dataclass
class EvaluationArguments:
    """Re-ranking in evaluations."""

    rerank_top_k: int = arg(
        10, "Also measure retrieval after the fusion head reorders the first K candidates of every query; 0 = do not."
    )
    rerank_weights: str = arg(
        "fitted",
        "What the head's scores of a pair are multiplied by before they are added to the scaled cosine, e.g. match:1,caption:0.5; "
        "fitted: as training found best on the validation split, 0 where a score did not help.",
    )
    rerank_cache_gb: float = arg(
        8.0, "Memory per process for the head's keys and values of images; images that do not fit are encoded twice."
    )

    def __post_init__(self) -> None:
        if self.rerank_top_k < 0:
            raise ValueError(f"--rerank_top_k is {self.rerank_top_k}; give a number of candidates, or 0 for none.")
        self.given_weights  # noqa: B018  (complain now, not after the data is loaded)
        if not self.rerank_cache_gb > 0:
            raise ValueError(f"--rerank_cache_gb is {self.rerank_cache_gb}; give gigabytes above 0.")

    @property
    def given_weights(self) -> dict[str, float] | None:
        """The weights of `--rerank_weights`; None for those that were fitted."""
        if self.rerank_weights == "fitted":
            return None
        try:
            given = [term.strip().partition(":") for term in self.rerank_weights.split(",")]
            weights = {name: float(weight) for name, _, weight in given}
        except ValueError:
            weights = {}
        if not weights or weights.keys() - VOICES or not all(0 <= weight < math.inf for weight in weights.values()):
            raise ValueError(
                f"--rerank_weights is {self.rerank_weights}; write name:weight with weights from 0 on, e.g. "
                f"match:1,caption:0.5, of {', '.join(VOICES)}, or fitted."
            )
        return weights


class RetrievalEvaluator:
    """Measure recall at 1, 5 and 10, mean and median rank, and the health of the embeddings; all ranks get the same metrics.

    With `rerank_top_k` and a model with a fusion head, also measure `rerank_*`, after the head has reordered the first K
    candidates of each query.

    Args:
        probes: texts of `word_order_probes`; with them, also measure `order_accuracy` and `rerank_order_accuracy`.
        fits: fit the weights of re-ranking on this split, cross-fitted (`mm_utils.evaluation.rerank_weights`), and write
            them into the model's config, unless the arguments give them.

    Attributes:
        split: embeddings of the last evaluation.
        directions: its ranks in each direction.
        scores: its pair scores; None without a head.
    """

    def __init__(self, args: EvaluationArguments | None = None, probes: Texts | None = None, fits: bool = False):
        self.args, self.probes = args or EvaluationArguments(rerank_top_k=0), probes
        self.fits = fits and self.args.rerank_weights == "fitted"
        self.split: Embeddings | None = None
        self.directions: dict[str, DirectionRanks] = {}
        self.scores: PairScores | None = None

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model` on the batches of `mm_utils.data.loading.loaders.Loaders.evaluation`."""
        weights = self._weights(model) if self.args.rerank_top_k > 0 and model.fusion is not None else {}
        device, reranks = accelerator.device, bool(weights)
        # On a GPU at most half of what is free.
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        room = min(1e9 * self.args.rerank_cache_gb, free / 2) if reranks else 0
        self.split = split = embed_split(model, loader, accelerator, room)
        if split.skipped:
            logger.warning("%d images were left out of the evaluation: %s", len(split.skipped), split.skipped[:3])
        probes = self.probes.to(device) if self.probes is not None else None
        scale = full_tensor(model.logit_scale.detach()).float().exp().item()
        cosine_M2 = None if probes is None else scale * probe_cosines(model, split, probes, accelerator)
        others: dict[str, float] = {}
        if cosine_M2 is not None:
            others |= share_with_interval("order_accuracy", cosine_M2[:, 0] > cosine_M2[:, 1])
        if not reranks:
            self.directions, self.scores = rank_directions(split), None
            return retrieval_metrics(split, self.directions) | others | embedding_health(split)
        texts = split.texts if probes is None else Texts.cat([split.texts, probes])
        candidates = find_candidates(split, self.args.rerank_top_k, len(texts))
        pairs = [found.pair.flatten() for found in candidates.values()]
        pair_M2 = probe_pairs(split, len(texts))
        pairs += [] if probes is None else [pair_M2.flatten()]
        scores = score_pairs(model, split, texts, torch.cat(pairs), loader, accelerator, list(weights))
        if "caption" in weights:
            voice = list(weights).index("caption")
            scores = scores.minus_priors(voice, candidates["text_to_image"].pair, len(texts))
        self.scores, weight_FV = scores, torch.tensor([list(weights.values())] * FOLDS)
        if self.fits:
            weight_FV = self._fit(model, split, candidates, scores, scale, list(weights))
        self.directions = rank_directions(split, candidates, scores, scale, weight_FV)
        if cosine_M2 is not None:
            score_M2 = combine(cosine_M2, scores(pair_M2), weight_FV, split.image_key_M)
            others |= share_with_interval("rerank_order_accuracy", score_M2[:, 0] > score_M2[:, 1])
        return retrieval_metrics(split, self.directions) | others | embedding_health(split)

    def _weights(self, model: FusionDualEncoderModel) -> dict[str, float]:
        """Return the voices to score pairs with, and their weights; those that are to be fitted have 1."""
        if self.fits:
            model.config.rerank_weights = dict.fromkeys(model.voices, 0.0)
            return dict.fromkeys(model.voices, 1.0)
        given = self.args.given_weights
        weights = stored_weights(model) if given is None else given
        if missing := [name for name in weights if name not in model.voices and given is not None]:
            raise ValueError(
                f"--rerank_weights has {missing[0]}; the model was not trained for it, only for {', '.join(model.voices)}. "
                "Train it with that term among --objectives, or drop it."
            )
        if not weights:
            logger.info(describe_weights(model))
        return weights

    def _fit(
        self,
        model: FusionDualEncoderModel,
        split: Embeddings,
        candidates: dict[str, Candidates],
        scores: PairScores,
        scale: float,
        voices: list[str],
    ) -> Tensor:
        """Write the weights fitted on the split into the model's config; return those of each fold, `[F, V]`."""
        listed = [
            Listed(
                scale * found.cosine, scores(found.pair), items.key[found.item] == queries.key[:, None], queries.key
            )
            for found, (queries, items) in zip(candidates.values(), split.directions.values(), strict=True)
        ]
        of_fold = [fit_weights([one.of_fold(1 - fold) for one in listed]) for fold in range(FOLDS)]
        weights, weight_FV = fit_weights(listed), torch.tensor(of_fold)
        if not helps(rank_directions(split, candidates, scores, scale, weight_FV)):
            weights, weight_FV = [0.0] * len(voices), torch.zeros_like(weight_FV)
        model.config.rerank_weights = dict(zip(voices, weights, strict=True))
        logger.info(describe_weights(model))
        return weight_FV


# -- word order ---------------------------------------------------------------------------------------------------------


def word_order_probes(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> Texts | None:
    """Return true and false caption of row r as texts 2r and 2r + 1; None without probes."""
    if not isinstance(rows.features.get("order_pair"), dict):
        return None
    captions = [caption for _, *pair in order_pairs(rows) for caption in pair]
    ids = encode_captions(tokenizer, captions, ["en"] * len(captions), max_seq_length)
    return Texts(*pad_captions(ids, tokenizer.pad_token_id))


@torch.no_grad()
def probe_cosines(model: FusionDualEncoderModel, split: Embeddings, probes: Texts, accelerator: Accelerator) -> Tensor:
    """Return the cosines of each image with its true and its false caption, `[M, 2]`."""
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
        found.append(cosine)
    return distributed.gather(torch.cat(found)[: len(mine)], list(map(len, shares)))


def probe_pairs(split: Embeddings, texts: int) -> Tensor:
    """Return the pair numbers of each image with its true and its false caption, `[M, 2]`.

    Pairs are numbered as `PairScores` needs it, among `texts` texts: first the captions of the split, then the probes.
    """
    image = torch.arange(len(split.rows_M), device=split.rows_M.device)
    true_M = image * texts + len(split.text_TE) + 2 * split.rows_M
    return torch.stack([true_M, true_M + 1], 1)
