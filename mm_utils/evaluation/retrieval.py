"""Measure retrieval in both directions, text to image and image to text.

`mm_utils.evaluation.embeddings` says how ranks are counted, and `mm_utils.evaluation.reranking` how the fusion head changes them.
"""

import logging
import math
from collections.abc import Callable, Iterable, Mapping

import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils.evaluation.arguments import EvaluationArguments
from mm_utils.evaluation.embeddings import Embeddings, embed_split
from mm_utils.evaluation.metrics import helps, mean_recall, retrieval_metrics, spread
from mm_utils.evaluation.reranking import (
    FOLDS,
    DirectionRanks,
    Listed,
    describe_weights,
    find_candidates,
    fit_weights,
    rank_directions,
    stored_weights,
    with_voices,
)
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.sharding import full_tensor
from mm_utils.text import own_name

logger = logging.getLogger(__name__)

Evaluate = Callable[[FusionDualEncoderModel, Iterable, Accelerator], dict[str, float]]
CACHE_GB = 8.0  # per process, for the head's keys and values of images; images that do not fit are encoded twice


class RetrievalEvaluator:
    """Measure recall, ranks and the embeddings' spread; equal on all ranks.

    With `rerank_top_k` and a model with a fusion head, also measure `rerank_*`, after the head has reordered the first K
    candidates of each query.

    Args:
        fits: fit the weights of re-ranking on this split, cross-fitted, for `keep_weights`.
    """

    split: Embeddings  # of the last evaluation
    # Of each voice of the head, as the last evaluation has fitted them; None if it has not.
    weights: dict[str, float] | None = None
    reads_features = True  # it reads batches with the output of frozen towers in place of the media

    def __init__(self, args: EvaluationArguments | None = None, fits: bool = False):
        self.args = args or EvaluationArguments(rerank_top_k=0)
        self.fits = fits
        self.directions: dict[str, DirectionRanks] = {}  # its ranks
        self.first: dict[str, Tensor] = {}  # the ranks of the first evaluation

    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Evaluate `model` on the batches of `mm_utils.data.batches.loaders.Loaders.evaluation`."""
        weights: dict[str, float] = {}
        if self.args.rerank_top_k > 0 and model.fusion is not None:
            weights = dict.fromkeys(model.voices, 1.0) if self.fits else stored_weights(model)
            if self.fits:
                self.weights = dict.fromkeys(weights, 0.0)
            elif not weights:
                logger.info(describe_weights(model))
        device = accelerator.device
        # On a GPU at most half of what is free.
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else math.inf
        room = min(1e9 * CACHE_GB, free / 2) if weights else 0
        self.split = split = embed_split(model, loader, accelerator, room)
        if split.skipped:
            logger.warning("%d images were left out of the evaluation: %s", len(split.skipped), split.skipped[:3])
        head = {}
        if weights:
            voices = list(weights)
            scale = full_tensor(model.logit_scale.detach()).float().exp().item()
            candidates = find_candidates(split, self.args.rerank_top_k, scale)
            candidates = with_voices(model, split, candidates, loader, accelerator, voices)
            weight_FV = torch.tensor([list(weights.values())] * FOLDS)  # both folds alike: nothing is fitted
            if self.fits:
                weight_FV = self._fit(list(candidates.values()), voices)
            of_head = self.directions = rank_directions(split, candidates, weight_FV)
            if self.fits and not helps(of_head):
                self.weights = dict.fromkeys(voices, 0.0)
                self.directions = rank_directions(split, candidates, torch.zeros_like(weight_FV))
            # Heads are compared by what they add, also where that is within noise and re-ranking stays off.
            head = {"head_mean_recall": mean_recall(ranks.best_Q for ranks in of_head.values())}
        else:
            self.directions = rank_directions(split)
        self.first = self.first or {name: ranks.best_Q for name, ranks in self.directions.items()}
        others = {"image_spread": spread(split.image_ME), "text_spread": spread(split.text_TE)}
        return retrieval_metrics(split, self.directions) | head | others

    def _fit(self, listed: list[Listed], voices: list[str]) -> Tensor:
        """Fit the weights on all of the split; return those of each fold, which are fitted on the others, `[F, V]`."""
        of_fold = []
        for fold in range(FOLDS):
            others = [one.of_fold(1 - fold) for one in listed]
            of_fold.append(fit_weights(others))
        self.weights = dict(zip(voices, fit_weights(listed), strict=True))
        return torch.tensor(of_fold)


def keep_weights(model: FusionDualEncoderModel, evaluators: Iterable[Evaluate]) -> None:
    """Write the weights of re-ranking that evaluators have fitted last, if one has, into the model's config."""
    for evaluator in evaluators:
        if isinstance(evaluator, RetrievalEvaluator) and evaluator.weights is not None:
            model.config.rerank_weights = evaluator.weights
            logger.info(describe_weights(model))


def in_turn(*evaluators: Evaluate) -> Evaluate:
    """Return an evaluator with the metrics of all of these; it raises ValueError if two have one name, or one is not a number."""

    def measure(model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        found: dict[str, float] = {}
        for evaluate in evaluators:
            figures = evaluate(model, loader, accelerator)
            if not isinstance(figures, Mapping):
                raise ValueError(
                    f"{own_name(evaluate)} returns {figures!r}; figures are a dict of numbers by name. Return one."
                )
            for name, value in figures.items():
                if name in found:
                    raise ValueError(
                        f"{own_name(evaluate)} returns {name}, as an evaluator before it does; one would replace the other. Rename one."
                    )
                try:
                    found[name] = value if isinstance(value, int) else float(value)
                except (TypeError, ValueError) as error:
                    raise ValueError(
                        f"{own_name(evaluate)} returns {name} = {value!r}; a metric is a number. Return one."
                    ) from error
            if figures and not own_name(evaluate).startswith("mm_utils."):
                shown = ", ".join(f"{name} {found[name]:.4g}" for name in figures)
                logger.info("%s: %s", own_name(evaluate), shown)
        return found

    return measure
