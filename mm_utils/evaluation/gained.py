"""What training gained: recall after it, beside recall before it and beside chance."""

import json
import math
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

import torch

from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.embeddings import Embeddings, count_right
from mm_utils.evaluation.metrics import CUTOFFS, mean_gain
from mm_utils.evaluation.retrieval import RetrievalEvaluator

NEVER = torch.iinfo(torch.long).max  # a rank that counts for no recall
_MORE_PAIRS = "More pairs help more than more epochs."


class Gained(NamedTuple):
    """What training gained, in a sentence; whether it gained anything beyond noise, and whether the result is at chance."""

    sentence: str
    gained: bool
    at_chance: bool = False


class Evaluations(NamedTuple):
    """The evaluations of a run, from its log: the judged figure by step, the first row, and the step that is saved."""

    values: dict[int, float]
    first: Mapping[str, Any]
    saved_step: int | None

    @property
    def starts(self) -> bool:
        """Whether the weights before the first step were evaluated."""
        return self.first.get("step") == 0


def read_evaluations(log: Path, names: tuple[str, ...]) -> Evaluations:
    """Read a run's `metrics.jsonl`; the first of `names` that the last evaluation has is the figure that is judged."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    saved = next((row["saved_step"] for row in reversed(rows) if "saved_step" in row), None)
    measured = [row for row in rows if names[-1] in row]
    if not measured:
        return Evaluations({}, {}, saved)
    judged = next(name for name in names if name in measured[-1])
    return Evaluations({row["step"]: row[judged] for row in measured if judged in row}, measured[0], saved)


def chance(split: Embeddings, direction: str) -> list[float]:
    """Return recall at each cut-off in random order: the mean share of queries with a right item there."""
    queries, items = split.directions[direction]
    total, counts = len(items.key), Counter(count_right(queries, items).tolist())
    return [
        1
        - sum(times * math.comb(total - count, min(k, total)) for count, times in counts.items())
        / (math.comb(total, min(k, total)) * len(queries.key))
        for k in CUTOFFS
    ]


def recall_gained(
    evaluator: RetrievalEvaluator, evaluations: Evaluations, medium: str, *, is_paired: bool, from_scratch: bool
) -> Gained | None:
    """Return what training gained by mean recall; None without an evaluation.

    Args:
        evaluator: that of the validation split, whose last evaluation was of the saved model.
        evaluations: those of the run.
        medium: the kind of media.
        is_paired: whether the evaluator's first evaluation was before the first step: then the interval is one of the
            difference of each query.
        from_scratch: whether an encoder began with random weights.
    """
    split, ranks = evaluator.split, evaluator.directions
    if split is None or not ranks:
        return None
    groups = {name: each.queries.group for name, each in ranks.items()}
    after = {name: each.cosine_Q if each.reranked_Q is None else each.reranked_Q for name, each in ranks.items()}
    by_head = ", re-ranked" if any(not torch.equal(after[name], each.cosine_Q) for name, each in ranks.items()) else ""
    never = {name: torch.full_like(rank_Q, NEVER) for name, rank_Q in after.items()}
    recall, half, _ = mean_gain((never[name], after[name], groups[name]) for name in ranks)
    by_chance = mean(value for name in ranks for value in chance(split, name))
    at_chance = recall - half <= by_chance
    stated = f"mean recall {recall:.3f} ± {half:.3f}{by_head}, by chance {by_chance:.3f}"
    if too_few(len(split.image_key_M), medium):  # the summary says so
        return Gained(f"{stated}.", False, at_chance)
    if at_chance:
        advice = "Encoders from scratch need many pairs, pretrained ones few." if from_scratch else _MORE_PAIRS
        return Gained(f"{stated}: at chance, nothing was learnt. {advice}", False, True)
    if not evaluations.starts:
        return Gained(f"{stated}.", True)
    before = evaluations.first["eval_mean_recall"]
    if evaluations.saved_step == 0:
        return Gained(
            f"mean recall {before:.3f} before training, and no later step was better: training gained nothing. {_MORE_PAIRS}",
            False,
        )
    ends = f"mean recall {before:.3f} before training, {recall:.3f} after{by_head}"
    earlier = evaluator.first if is_paired else {}
    if all(name in earlier and len(earlier[name]) == len(after[name]) for name in ranks):
        gain, half, _ = mean_gain((earlier[name], after[name], groups[name]) for name in ranks)
        ends += f": {gain:+.3f} ± {half:.3f}"
    else:  # a resumed run
        gain = recall - before
        ends += f" ± {half:.3f}"
    if gain > half:
        return Gained(f"{ends}.", True)
    if gain < -half:
        return Gained(f"{ends}: training lost recall. Lower --learning_rate, or freeze the encoders.", False)
    return Gained(f"{ends}, within noise. {_MORE_PAIRS}", False)
