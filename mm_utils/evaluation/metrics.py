"""Recalls, nDCG, MRR from ranks, their intervals, and the health of the embeddings.

Shape letters: M images and T captions of the split, Q queries, R right items among the first ten, B rows of a block,
K different images, E embedding width.
"""

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from mm_utils.evaluation.embeddings import LISTED, Embeddings, Keyed, Places, cosine_places
from mm_utils.evaluation.reranking import DirectionRanks

CUTOFFS = (1, 5, 10)  # of recall
FEW_GROUPS = 20  # fewer clusters give intervals that are too narrow (Cameron and Miller, 2015)
BLOCK = 4096  # rows in double precision at a time: 16 MiB at a width of 512
_NORMAL_95 = 1.959964  # 97.5 % quantile of the normal distribution


# -- intervals ----------------------------------------------------------------------------------------------------------


def wilson_interval(right: float, total: int) -> tuple[float, float]:
    """Return the 95 % interval of a share, also for small counts and shares near 0 or 1.

    From Wilson 1927, doi 10.2307/2276774.
    """
    share, width = right / total, _NORMAL_95**2 / total
    half = _NORMAL_95 * math.sqrt(share * (1 - share) / total + width / (4 * total))
    low, high = (share + width / 2 - half) / (1 + width), (share + width / 2 + half) / (1 + width)
    return max(0.0, low), min(1.0, high)


def share_with_interval(name: str, right_N: Tensor) -> dict[str, float]:
    """Return the share of true values as `name`, and its interval as `name_low`, `name_high`."""
    low, high = wilson_interval(int(right_N.sum()), len(right_N))
    return {name: right_N.double().mean().item(), f"{name}_low": low, f"{name}_high": high}


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
    images, mean = len(group_M), (weight_Q * value_Q).sum() / weight_Q.sum()
    residual_M = weight_Q.new_zeros(images).index_add_(0, place_Q, weight_Q * (value_Q - mean))
    variance = ((residual_M / weight_Q.sum()) ** 2).sum().item() * images / max(1, images - 1)
    return mean.item(), _NORMAL_95 * math.sqrt(variance) if variance > 0 else min(1.0, 3 / images)


def half_width(value_Q: Tensor, queries: Keyed) -> float | None:
    """Return half the width of the interval of queries' mean value; None if equal captions leave fewer than `FEW_GROUPS` groups."""
    groups, images = len(queries.group.unique()), len(queries.key.unique())
    return None if groups < min(images, FEW_GROUPS) else mean_interval(value_Q, queries.group)[1]


# -- recall, nDCG, MRR --------------------------------------------------------------------------------------------------


def measures_of_queries(places: Places) -> dict[str, Tensor]:
    """Return, of each query `[Q]`, recall at 1, 5 and 10, nDCG@10 and MRR@10, from 0 to 1.

    With the places p of a query's right items, of which there are n:
        MRR@10: 1 / p of the first, 0 if p > 10.
        nDCG@10: the sum of 1 / log2(1 + p) over all p <= 10, divided by its highest value, that of p = 1, 2 ... min(n, 10).
    These are trec_eval's `recip_rank` cut at 10 and `ndcg_cut_10` (Järvelin and Kekäläinen, doi 10.1145/582415.582418) with gains
    of 0 and 1, as mteb has them; but trec_eval orders equal scores by name, and here wrong items come first.
    """
    rank_Q, gain_R = places.rank_Q, _gain(torch.arange(1, LISTED + 1, device=places.rank_Q.device))
    ideal_Q = gain_R.cumsum(0)[places.right_Q.clamp(1, LISTED) - 1]
    return {
        **{f"recall@{k}": (rank_Q <= k).double() for k in CUTOFFS},
        f"ndcg@{LISTED}": _gain(places.listed_QR).sum(1) / ideal_Q,
        f"mrr@{LISTED}": (rank_Q <= LISTED) / rank_Q.double(),
    }


def _gain(place: Tensor) -> Tensor:
    return (place <= LISTED) / (1 + place).double().log2()


def retrieval_metrics(split: Embeddings, directions: dict[str, DirectionRanks]) -> dict[str, float]:
    """Return recalls, nDCG, MRR and ranks by the towers, and re-ranked if there are such.

    `mean_recall`, of the towers at all cut-offs in both directions, varies least, and so it chooses checkpoints of theirs;
    `rerank_mean_recall` is the same after re-ranking.
    Where captions of different images are equal, `text_to_image_recall_own@1` and so on count only an image's own ones as right,
    as other code does: 1 / n is then the best that a caption of n images can reach.
    """
    metrics: dict[str, float] = {}
    for direction, ranks in directions.items():
        metrics |= summarise_places(ranks.cosine, f"{direction}_")
    metrics["mean_recall"] = mean_recall(ranks.cosine for ranks in directions.values())
    right_T = directions["text_to_image"].cosine.right_Q
    metrics["text_to_image_chance@1"] = right_T.double().mean().item() / len(split.image_ME)
    if split.text_key_T is not None:
        for direction, (queries, items) in split.directions.items():
            own = cosine_places(queries._replace(captions=None), items)
            metrics |= _recalls(own.rank_Q, f"{direction}_recall_own")
    reranked = {direction: ranks.reranked for direction, ranks in directions.items() if ranks.reranked is not None}
    for direction, places in reranked.items():
        metrics |= summarise_places(places, f"rerank_{direction}_")
    if reranked:
        metrics["rerank_mean_recall"] = mean_recall(reranked.values())
    return metrics


def mean_recall(directions: Iterable[Places]) -> float:
    """Return the mean of the recalls at all cut-offs, in all directions."""
    recalls = [value for places in directions for value in _recalls(places.rank_Q, "").values()]
    return sum(recalls) / len(recalls)


def summarise_places(places: Places, prefix: str = "") -> dict[str, float]:
    """Return the means of `measures_of_queries`, and mean and median of the ranks."""
    found = {f"{prefix}{name}": value_Q.mean().item() for name, value_Q in measures_of_queries(places).items()}
    rank_Q = places.rank_Q.double()
    return {
        **found,
        f"{prefix}mean_rank": rank_Q.mean().item(),
        f"{prefix}median_rank": rank_Q.quantile(0.5).item(),
    }


def _recalls(rank_Q: Tensor, name: str) -> dict[str, float]:
    return {f"{name}@{k}": (rank_Q <= k).double().mean().item() for k in CUTOFFS}


# -- health of the embeddings -------------------------------------------------------------------------------------------


def embedding_health(split: Embeddings) -> dict[str, float]:
    """Return how a split's embeddings fill their space; in blocks, the same on all ranks.

    Returns, for image and text each:
        effective_rank: exp of the entropy of the singular values of the centred embeddings, divided by their sum (Roy and
            Vetterli 2007; RankMe, arXiv 2210.02885, without the centring). 1 if there is but one point.
        rank_share: of the highest effective rank that the width and the number of rows allow.
        spread: mean squared distance from the centroid; one minus the mean cosine between any two rows.
    And for both:
        margin: mean cosine of true pairs minus mean cosine of all others.
        modality_gap: distance between the centroids of images and texts (arXiv 2203.02053).
    """
    figures: dict[str, float] = {}
    for name, rows in (("image", split.image_ME), ("text", split.text_TE)):
        rank, spread = _rank_and_spread(rows)
        limit = max(1, min(rows.shape[1], len(rows) - 1))
        figures |= {f"{name}_effective_rank": rank, f"{name}_rank_share": rank / limit, f"{name}_spread": spread}
    gap_E = _centroid(split.image_ME) - _centroid(split.text_TE)
    return {**figures, "margin": _margin(split), "modality_gap": gap_E.norm().item()}


def _blocks(rows: Tensor) -> Iterator[Tensor]:
    """Yield the rows in double precision, a block at a time, on the CPU if the device has none."""
    for block in rows.split(BLOCK):
        yield (block.cpu() if block.device.type == "mps" else block).double()


def _centroid(rows: Tensor) -> Tensor:
    return torch.stack([block_BE.sum(0) for block_BE in _blocks(rows)]).sum(0) / len(rows)


def _rank_and_spread(rows: Tensor) -> tuple[float, float]:
    """Return effective rank and spread, from the eigenvalues of the E x E Gram matrix."""
    centroid_E = _centroid(rows)
    gram_EE = torch.zeros(len(centroid_E), len(centroid_E), dtype=centroid_E.dtype, device=centroid_E.device)
    for block_BE in _blocks(rows):
        centred_BE = block_BE - centroid_E
        gram_EE.addmm_(centred_BE.T, centred_BE)
    spread = gram_EE.trace().item() / len(rows)
    if not math.isfinite(spread):  # there are no eigenvalues
        return math.nan, math.nan
    values_E = torch.linalg.eigvalsh(gram_EE).clamp(min=0).sqrt()
    # Rows that are equal but for their rounding to fp32 would have noise of full rank.
    values_E = values_E[values_E > torch.finfo(torch.float32).eps * math.sqrt(len(rows))]
    shares_E = values_E / values_E.sum()
    return math.exp(-(shares_E * shares_E.log()).sum().item()), spread


def _margin(split: Embeddings) -> float:
    """Return the margin, from sums of embeddings: of all pairs, and of those of an image's id."""
    keys_K, place = torch.cat([split.image_key_M, split.caption_key_T]).unique(return_inverse=True)
    sums, counts = [], []
    for rows, at in ((split.image_ME, place[: len(split.image_ME)]), (split.text_TE, place[len(split.image_ME) :])):
        sums.append(rows.new_zeros(len(keys_K), rows.shape[1]).index_add_(0, at, rows))
        counts.append(at.bincount(minlength=len(keys_K)))
    true_cosines = sum((one_BE * other_BE).sum().item() for one_BE, other_BE in zip(*map(_blocks, sums), strict=True))
    true, pairs = int((counts[0] * counts[1]).sum()), len(split.image_ME) * len(split.text_TE)
    cosines = pairs * (_centroid(split.image_ME) @ _centroid(split.text_TE)).item()
    return true_cosines / max(1, true) - (cosines - true_cosines) / max(1, pairs - true)


def half_widths(directions: dict[str, DirectionRanks]) -> dict[str, float]:
    """Return half the width of the interval of each recall, nDCG and MRR, as `NAME_half_width_95`, where there is one.

    After re-ranking also by how much each is higher, `rerank_gain_NAME`, with the interval of the difference of each query.
    """
    found: dict[str, float | None] = {}
    for direction, ranks in directions.items():
        measured = {"": measures_of_queries(ranks.cosine)}
        if ranks.reranked is not None:
            after = measured["rerank_"] = measures_of_queries(ranks.reranked)
            gains = {name: value_Q - measured[""][name] for name, value_Q in after.items()}
            found |= {f"rerank_gain_{direction}_{name}": gain_Q.mean().item() for name, gain_Q in gains.items()}
            measured["rerank_gain_"] = gains
        for prefix, values in measured.items():
            for name, value_Q in values.items():
                found[f"{prefix}{direction}_{name}_half_width_95"] = half_width(value_Q, ranks.queries)
    return {name: value for name, value in found.items() if value is not None}


def mean_gain(directions: Iterable[tuple[Tensor, Tensor, Tensor]]) -> tuple[float, float, float]:
    """Return the gain of mean recall, half the width of its interval, and the smaller gain of a direction.

    All directions have the same groups, and their mean one interval. Recall at one cut-off or in one direction is too coarse a
    figure to tell a small gain from noise.

    Args:
        directions: of each, the queries' ranks before and after, and their groups.
    """
    gains, groups = [], []
    for before_Q, after_Q, group_Q in directions:
        gains.append(torch.stack([(after_Q <= k).double() - (before_Q <= k).double() for k in CUTOFFS]).mean(0))
        groups.append(group_Q)
    weights = [torch.full_like(gain_Q, 1 / len(gain_Q)) for gain_Q in gains]
    mean, half_width = mean_interval(torch.cat(gains), torch.cat(groups), torch.cat(weights))
    return mean, half_width, min(gain_Q.mean().item() for gain_Q in gains)


def helps(ranks: dict[str, DirectionRanks]) -> bool:
    """Return whether re-ranking gains mean recall beyond its interval, and loses in no direction."""
    mean, half_width, least = mean_gain(
        (each.cosine_Q, each.reranked_Q, each.queries.group) for each in ranks.values()
    )
    return least >= 0 and mean > half_width
