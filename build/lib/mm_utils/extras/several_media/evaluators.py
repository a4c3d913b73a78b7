"""Measure retrieval for each medium, and between media, which only texts connect.

Two media that share a caption belong together: a photograph and a sound of "a dog barks". That images find such sounds is
never trained, but follows where both lie near their texts (LanguageBind, arXiv 2310.01852).

Shape letters: A queries of one medium, B items of another, C captions that both media have, E embedding width.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils.data.batches.workers import CheckedLoader
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.embeddings import Embeddings, best_rank
from mm_utils.evaluation.metrics import CUTOFFS
from mm_utils.evaluation.retrieval import Evaluate, EvaluationArguments, RetrievalEvaluator, in_turn
from mm_utils.evaluation.train_recall import train_recall, validation_evaluator
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

logger = logging.getLogger(__name__)

MEANS = ("mean_recall", "train_mean_recall")  # of all media; the first chooses checkpoints
_BLOCK = 1024  # queries at a time


def make_evaluators(args: EvaluationArguments, data: TrainingData) -> dict[str, RetrievalEvaluator]:
    """Return an evaluator of the validation split of each medium."""
    return {medium: validation_evaluator(args, part) for medium, part in data.media.items()}


def list_evaluators(
    evaluators: Mapping[str, RetrievalEvaluator], data: TrainingData, seed: int, others: Sequence[Evaluate] = ()
) -> list[Evaluate]:
    """Return what measures each medium's validation retrieval, with its own evaluator.

    Metrics begin with their medium, as `sound_mean_recall`, those of `others` and the recall of training images too;
    `mean_recall` is the mean over media.
    """
    measures = {
        medium: in_turn(evaluator, *others, *train_recall(data.media[medium], seed))
        for medium, evaluator in evaluators.items()
    }

    def measure(model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for medium, evaluate in measures.items():
            own = data.media[medium].eval_loader
            assert own is not None
            checked = loader.beside(own) if isinstance(loader, CheckedLoader) else own
            found = evaluate(model.of(medium), checked, accelerator)
            metrics |= {f"{medium}_{name}": value for name, value in found.items()}
        for name in MEANS:
            values = [metrics[f"{medium}_{name}"] for medium in measures if f"{medium}_{name}" in metrics]
            metrics |= {name: sum(values) / len(values)} if values else {}
        splits = {medium: each.split for medium, each in evaluators.items() if each.split is not None}
        rows = {medium: part.splits["validation"] for medium, part in data.media.items()}
        return metrics | between_media(splits, rows)

    return [measure]


def between_media(splits: Mapping[str, Embeddings], rows: Mapping[str, datasets.Dataset]) -> dict[str, float]:
    """Return how often a medium of one kind finds one of another kind with a caption of its own.

    Metrics are named `between_sound_to_image_recall@1` and so on.

    Queries are the media with such a partner; candidates are all of the other kind. Beside it stands chance: the mean share of
    right ones. Two kinds without a common caption have no figure. Captions are compared without regard to case and spaces.

    Args:
        splits: embeddings of each medium's split.
        rows: the rows of these splits.
    """
    captions = {
        medium: [
            {" ".join(text.casefold().split()) for text in each}
            for each in rows[medium].select(split.rows_M.tolist())["captions"]
        ]
        for medium, split in splits.items()
    }
    metrics: dict[str, float] = {}
    for one, other in permutations(splits, 2):
        shared = sorted(set().union(*captions[one]) & set().union(*captions[other]))
        if not shared:
            continue
        device = splits[one].image_ME.device
        one_AC, other_BC = (_has_caption(captions[medium], shared).to(device) for medium in (one, other))
        is_query_A = one_AC.any(1)
        rank_A, right_A = _ranks(
            splits[one].image_ME[is_query_A], splits[other].image_ME, one_AC[is_query_A], other_BC
        )
        name = f"between_{one}_to_{other}"
        metrics |= {f"{name}_recall@{k}": (rank_A <= k).double().mean().item() for k in CUTOFFS}
        metrics |= {f"{name}_chance@1": right_A.double().mean().item() / len(other_BC), f"{name}_queries": len(rank_A)}
    return metrics


def _has_caption(captions: list[set[str]], shared: list[str]) -> Tensor:
    """Return which of the shared captions each medium has, bool `[A, C]`."""
    place = {text: at for at, text in enumerate(shared)}
    found = torch.zeros(len(captions), len(shared), dtype=torch.bool)
    for row, texts in enumerate(captions):
        found[row, [place[text] for text in texts if text in place]] = True
    return found


def _ranks(query_AE: Tensor, item_BE: Tensor, query_AC: Tensor, item_BC: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rank `[A]`, from 1, of each query's best right item, and their number."""
    ranks, rights = [], []
    for start in range(0, len(query_AE), _BLOCK):
        part = slice(start, start + _BLOCK)
        right_AB = query_AC[part].float() @ item_BC.float().T > 0
        ranks.append(best_rank(query_AE[part] @ item_BE.T, right_AB))
        rights.append(right_AB.sum(1))
    return torch.cat(ranks), torch.cat(rights)
