"""Recalls from ranks, their intervals, and the spread of the embeddings.

Shape letters: M images of the split, Q queries, N rows, E embedding width.
"""

import math
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mm_utils.evaluation.embeddings import Embeddings, Keyed, cosine_ranks, count_right
from mm_utils.evaluation.reranking import DirectionRanks

CUTOFFS = (1, 5, 10)  # of recall
FEW_GROUPS = 20  # fewer clusters give intervals that are too narrow (Cameron and Miller, 2015)
_NORMAL_95 = 1.959964  # 97.5 % quantile of the normal distribution


@cache
def evaluation_module(name: str, config: str | None = None) -> Any:
    """Return an `evaluate.EvaluationModule` of this package, read from its folder without a network; it writes no files."""
    import evaluate  # costs a second, which no --help should wait for

    return evaluate.load(str(Path(__file__).parents[1] / name), config, keep_in_memory=True)


# -- intervals ----------------------------------------------------------------------------------------------------------


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, also for small counts and shares near 0 or 1.

    From Wilson 1927, doi 10.2307/2276774.
    """
    share = right / total
    width = _NORMAL_95**2 / total
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / total + width / (4 * total))
    low = (share + width / 2 - half) / (1 + width)
    high = (share + width / 2 + half) / (1 + width)
    return max(0.0, low), min(1.0, high)


def share_with_interval(name: str, share: float, total: int) -> dict[str, float]:
    """Return a share of `total` rows as `name`, and its interval as `name_low`, `name_high`."""
    low, high = wilson_interval(round(share * total), total)
    return {name: share, f"{name}_low": low, f"{name}_high": high}


def mean_interval(value_Q: Tensor, group_Q: Tensor, weight_Q: Tensor | None = None) -> tuple[float, float]:
    """Return the mean of Q values in [-1, 1], by default of equal weight, and half the width of its 95 % interval.

    Captions of one image are not independent, nor are images with equal captions, so the interval is one over groups of them
    (`Keyed.group`): the variance is that of a ratio of sums over M groups (Cochran, Sampling Techniques, 1977, section 6.3). A
    bootstrap over groups finds the same, with noise. If all values are equal, the variance is 0; half the width is then 3 / M
    (the rule of three).
    """
    value_Q = value_Q.double()
    weight_Q = torch.ones_like(value_Q) if weight_Q is None else weight_Q.double()
    group_M, place_Q = group_Q.unique(return_inverse=True)
    images = len(group_M)
    mean = (weight_Q * value_Q).sum() / weight_Q.sum()
    residual_M = weight_Q.new_zeros(images).index_add_(0, place_Q, weight_Q * (value_Q - mean))
    # images / (images - 1), as the mean was estimated from the same groups (Bessel)
    variance = ((residual_M / weight_Q.sum()) ** 2).sum().item() * images / max(1, images - 1)
    return mean.item(), _NORMAL_95 * math.sqrt(variance) if variance > 0 else min(1.0, 3 / images)


def half_width(value_Q: Tensor, queries: Keyed) -> float | None:
    """Return half the width of the interval of queries' mean value; None if equal captions leave fewer than `FEW_GROUPS` groups."""
    groups = len(queries.group.unique())
    images = len(queries.key.unique())
    return None if groups < min(images, FEW_GROUPS) else mean_interval(value_Q, queries.group)[1]


# -- recall -------------------------------------------------------------------------------------------------------------


def retrieval_metrics(split: Embeddings, directions: dict[str, DirectionRanks]) -> dict[str, float]:
    """Return recalls and ranks by the towers, and re-ranked if there are such.

    `mean_recall`, of the towers at all cut-offs in both directions, varies least, and so it chooses checkpoints of theirs;
    `rerank_mean_recall` is the same after re-ranking.
    Where captions of different images are equal, `text_to_image_recall_own@1` and so on count only an image's own ones as right,
    as other code does: 1 / n is then the best that a caption of n images can reach.
    """
    metrics: dict[str, float] = {}
    for direction, ranks in directions.items():
        metrics |= summarise_ranks(ranks.cosine_Q, f"{direction}_")
    metrics["mean_recall"] = mean_recall(ranks.cosine_Q for ranks in directions.values())
    right_T = count_right(*split.directions["text_to_image"])
    metrics["text_to_image_chance@1"] = right_T.double().mean().item() / len(split.image_ME)
    if split.text_key_T is not None:
        for direction, (queries, items) in split.directions.items():
            own_Q = cosine_ranks(queries._replace(captions=None), items)
            metrics |= _recalls(own_Q, f"{direction}_recall_own")
    reranked = {name: ranks.reranked_Q for name, ranks in directions.items() if ranks.reranked_Q is not None}
    for direction, rank_Q in reranked.items():
        metrics |= summarise_ranks(rank_Q, f"rerank_{direction}_")
    if reranked:
        metrics["rerank_mean_recall"] = mean_recall(reranked.values())
    return metrics


def mean_recall(directions: Iterable[Tensor]) -> float:
    """Return the mean of the recalls at all cut-offs, in all directions."""
    recalls = [value for rank_Q in directions for value in _recalls(rank_Q, "").values()]
    return sum(recalls) / len(recalls)


def summarise_ranks(rank_Q: Tensor, prefix: str = "") -> dict[str, float]:
    """Return recalls, and mean and median of the ranks, as `mm_utils/retrieval_recall` defines them."""
    found = evaluation_module("retrieval_recall", "ranks").compute(ranks=rank_Q.cpu().numpy(), k=CUTOFFS)
    return {f"{prefix}{name}": value for name, value in found.items()}


def _recalls(rank_Q: Tensor, name: str) -> dict[str, float]:
    found = summarise_ranks(rank_Q)
    return {f"{name}@{k}": found[f"recall@{k}"] for k in CUTOFFS}


def half_widths(directions: dict[str, DirectionRanks]) -> dict[str, float]:
    """Return half the width of the interval of each recall, as `NAME_half_width_95`, where there is one.

    After re-ranking also by how much each is higher, `rerank_gain_NAME`, with the interval of the difference of each query.
    """
    found: dict[str, float | None] = {}
    for direction, ranks in directions.items():
        for k in CUTOFFS:
            name = f"{direction}_recall@{k}"
            hit_Q = (ranks.cosine_Q <= k).double()
            measured = {name: hit_Q}
            if ranks.reranked_Q is not None:
                measured[f"rerank_{name}"] = (ranks.reranked_Q <= k).double()
                gain_Q = measured[f"rerank_gain_{name}"] = measured[f"rerank_{name}"] - hit_Q
                found[f"rerank_gain_{name}"] = gain_Q.mean().item()
            found |= {
                f"{each}_half_width_95": half_width(value_Q, ranks.queries) for each, value_Q in measured.items()
            }
    return {name: value for name, value in found.items() if value is not None}


def mean_gain(directions: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float, float]:
    """Return the gain of mean recall, half the width of its interval, and the smaller gain of a direction.

    All directions have the same groups, and their mean one interval. Recall at one cut-off or in one direction is too coarse a
    figure to tell a small gain from noise.

    Args:
        directions: of each, the queries' ranks before and after, and their groups.
    """
    gains = []
    groups = []
    for before_Q, after_Q, group_Q in directions:
        gains.append(torch.stack([(after_Q <= k).double() - (before_Q <= k).double() for k in CUTOFFS]).mean(0))
        groups.append(group_Q)
    # both directions weigh the same, whatever their numbers of queries
    weights = [torch.full_like(gain_Q, 1 / len(gain_Q)) for gain_Q in gains]
    mean, half_width = mean_interval(torch.cat(gains), torch.cat(groups), torch.cat(weights))
    return mean, half_width, min(gain_Q.mean().item() for gain_Q in gains)


def helps(ranks: dict[str, DirectionRanks]) -> bool:
    """Return whether re-ranking gains mean recall beyond its interval, and loses in no direction."""
    mean, half_width, least = mean_gain(
        (each.cosine_Q, each.reranked_Q, each.queries.group) for each in ranks.values() if each.reranked_Q is not None
    )
    return least >= 0 and mean > half_width


# -- health of the embeddings -------------------------------------------------------------------------------------------


def spread(embeds_NE: Tensor) -> float:
    """Return the mean squared distance of unit embeddings from their centroid: one minus the mean cosine of any two rows."""
    rows_NE = embeds_NE.cpu() if embeds_NE.device.type == "mps" else embeds_NE  # which has no double precision
    return 1 - rows_NE.mean(0, dtype=torch.double).square().sum().item()
