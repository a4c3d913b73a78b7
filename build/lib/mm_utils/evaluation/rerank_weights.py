"""Weights of the fusion head's voices beside the cosine: fitted, 0 where one does not help.

A voice's weight on the training pairs says nothing, because the towers rank those right already. So weights are fitted on the
validation split. Its own figures are cross-fitted: the images, those with equal captions together, are cut into two folds, and each fold is ranked with the weights
fitted on the other. If that does not gain beyond its interval of 95 %, all weights are 0. The weights that the model keeps are
then fitted on both folds together; other splits play no part.

Shape letters: V voices, Q queries, K candidates.
"""

import math
from typing import NamedTuple

import torch
from torch import Tensor

from mm_utils.evaluation.metrics import mean_interval
from mm_utils.evaluation.reranking import FOLDS, DirectionRanks

SMALLEST = 0.01  # a weight below it is 0, and its voice need not be computed


class Listed(NamedTuple):
    """The candidates of the queries of one direction."""

    cosine_QK: Tensor  # scaled cosines
    voices_VQK: Tensor
    right_QK: Tensor  # whether the candidate is right
    group_Q: Tensor  # images with equal captions are one group, see `Keyed`

    def of_fold(self, fold: int) -> "Listed":
        """Return the queries of one fold."""
        mine = self.group_Q % FOLDS == fold
        return Listed(self.cosine_QK[mine], self.voices_VQK[:, mine], self.right_QK[mine], self.group_Q[mine])


def fit_weights(directions: list[Listed]) -> list[float]:
    """Return the weights of the voices by which the right candidates are most likely, from 0 on.

    They maximise the mean log likelihood of the right candidates under softmax_k(a cosine_k + sum_v b_v voice_vk), the
    conditional logit (McFadden 1974), over queries with a right and a wrong candidate; the weights are b / a.
    """
    listed = [
        (torch.cat([one.cosine_QK[None], one.voices_VQK])[:, some].double().cpu(), one.right_QK[some].cpu())
        for one in directions
        for some in [one.right_QK.any(1) & ~one.right_QK.all(1)]
    ]
    listed = [(score, right) for score, right in listed if len(right) and score.isfinite().all()]
    voices = len(directions[0].voices_VQK)
    if len(listed) < len(directions):
        return [0.0] * voices
    log_weight = torch.zeros(1 + voices, dtype=torch.double, requires_grad=True)
    optimizer = torch.optim.LBFGS([log_weight], max_iter=100, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        optimizer.zero_grad()
        total = log_weight.new_zeros(())
        for score, right in listed:
            logits = torch.einsum("v,vqk->qk", log_weight.exp(), score)
            total = total + (logits.logsumexp(1) - logits.masked_fill(~right, -torch.inf).logsumexp(1)).mean()
        total.backward()
        return total

    optimizer.step(loss)
    found = (log_weight[1:] - log_weight[0]).detach().exp()
    return [round(value, 3) if SMALLEST <= value < math.inf else 0.0 for value in found.tolist()]


def helps(ranks: dict[str, DirectionRanks]) -> bool:
    """Return whether re-ranking gains recall@1 beyond its interval, and loses in no direction."""
    gains = [
        mean_interval((each.reranked_Q <= 1).double() - (each.cosine_Q <= 1).double(), each.queries.group)
        for each in ranks.values()
    ]
    return min(gain for gain, _ in gains) >= 0 and sum(gain - half_width for gain, half_width in gains) > 0
