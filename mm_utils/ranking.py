"""Ranks of right items among all, by cosine or by any score of the first candidates.

A query's rank is one plus the number of wrong items that score at least as high as its best right item: ties, and
scores that are no number, count against the model, and with five captions per image a perfect model scores 1.0 in both
directions. Similarities are computed in blocks, each rank ranks its own queries, and no Q x N matrix is ever held.

Shape letters: Q queries, N items, K candidates, E embedding width.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from mm_utils import ranks

BLOCK = 2048  # queries per block: 2048 x 100,000 similarities are 0.8 GB
CUTOFFS = (1, 5, 10)


class Keyed(NamedTuple):
    """Unit embeddings `[N, E]` and the id `[N]` of the image that each belongs to."""

    embeds: Tensor
    key: Tensor


class Candidates(NamedTuple):
    """The first items of every query by cosine, best first: their cosines and which they are, both `[Q, K]`."""

    cosine: Tensor
    item: Tensor


def cosine_ranks(queries: Keyed, items: Keyed) -> Tensor:
    """Rank `[Q]` of the best right item of every query, from 1; the same on all ranks."""

    def block_ranks(part: slice) -> tuple[Tensor, ...]:
        score_QN = queries.embeds[part] @ items.embeds.T
        return (_rank(score_QN, queries.key[part, None] == items.key),)

    [rank_Q] = _by_block(len(queries.embeds), block_ranks)
    return rank_Q


def top_candidates(queries: Keyed, items: Keyed, top_k: int) -> Candidates:
    """The `top_k` items of highest cosine for every query, or all items if there are fewer."""
    top_k = min(top_k, len(items.embeds))
    return Candidates(
        *_by_block(len(queries.embeds), lambda part: (queries.embeds[part] @ items.embeds.T).topk(top_k, 1))
    )


def reranked(score_QK: Tensor, right_QK: Tensor, cosine_rank_Q: Tensor, first: int) -> Tensor:
    """Ranks `[Q]` after the `first` candidates of each query are ordered by `score_QK` and the others stay in place.

    A right item is among the first k exactly where its rank by cosine is at most k, because ties count against it. With
    one candidate nothing changes.
    """
    rank_Q = _rank(score_QK[:, :first], right_QK[:, :first])
    return torch.where(cosine_rank_Q <= first, rank_Q, cosine_rank_Q)


def summarise_ranks(rank_Q: Tensor, prefix: str = "") -> dict[str, float]:
    """Recall at 1, 5 and 10, mean and median of ranks that start at 1."""
    rank_Q = rank_Q.double()
    mean, median = rank_Q.mean().item(), rank_Q.quantile(0.5).item()
    return {**recalls(rank_Q, f"{prefix}recall"), f"{prefix}mean_rank": mean, f"{prefix}median_rank": median}


def recalls(rank_Q: Tensor, name: str) -> dict[str, float]:
    """Shares of ranks up to 1, 5 and 10, as `name@1` and so on."""
    return {f"{name}@{k}": (rank_Q <= k).double().mean().item() for k in CUTOFFS}


def _rank(score_QN: Tensor, right_QN: Tensor) -> Tensor:
    best_Q1 = score_QN.masked_fill(~right_QN, -torch.inf).amax(1, keepdim=True)
    return 1 + (~(score_QN < best_Q1) & ~right_QN).sum(1)


def _by_block(queries: int, function: Callable[[slice], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
    """Apply `function` to this rank's queries a block at a time, and gather the rows of all ranks, column by column."""
    shares = [ranks.share(queries, part, ranks.world_size()) for part in range(ranks.world_size())]
    mine = shares[ranks.rank()]
    starts = range(mine.start, mine.stop, BLOCK) or (mine.start,)
    blocks = [function(slice(low, min(low + BLOCK, mine.stop))) for low in starts]
    sizes = [len(share) for share in shares]
    return tuple(ranks.gather(torch.cat(column), sizes) for column in zip(*blocks, strict=True))
