"""What training gained: recall after it, beside recall before it and beside chance."""

import json
import math
from collections import Counter
from pathlib import Path
from statistics import mean

import torch

from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.embeddings import Embeddings, count_right
from mm_utils.evaluation.metrics import CUTOFFS, FEW_GROUPS, mean_gain
from mm_utils.evaluation.retrieval import RetrievalEvaluator

NEVER = torch.iinfo(torch.long).max  # a rank that counts for no recall
_MORE_PAIRS = "More pairs help more than more epochs."


def gained(
    figure: str,
    after: float,
    half: float,
    floor_name: str,
    floor: float,
    log: Path,
    metric: str,
    difference: tuple[float, float] | None = None,
    advice: str = "",
) -> str:
    """Return in a sentence what training gained by a figure.

    Args:
        after, half: its value after training, and half the width of its interval.
        floor_name, floor: what a model without knowledge reaches, in words and as a number.
        log: the run's `metrics.jsonl`, which has the value before the first step, if it was measured.
        metric: the figure's name there.
        difference: the gain of the same rows and half the width of its interval; without it, `half` stands for that.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    starts: list[float] = [row[metric] for row in rows if metric in row and row.get("step") == 0]
    stated = f"{figure} {after:.3f} ± {half:.3f}, {floor_name} {floor:.3f}"
    if after - half <= floor:
        return f"{stated}: by this figure, nothing was learnt. {advice}".rstrip()
    if not starts:
        return f"{stated}."
    before = starts[0]  # of a whole model as it is; a second one is of what a closed form added to it
    saves_start = next((row["saved_step"] for row in reversed(rows) if "saved_step" in row), None) == 0
    if saves_start and len(starts) == 1:
        begin = f"{figure} {before:.3f} before the first step, {floor_name} {floor:.3f}, and no later step was better"
        return f"{begin}: training gained nothing over its start. {advice}".rstrip()
    gain, half = difference or (after - before, half)
    ends = f"{figure} {before:.3f} before training, {after:.3f} after: {gain:+.3f} ± {half:.3f}"
    if saves_start:
        ends += ", by the closed form alone, as no step was better"
    if gain > half:
        return f"{ends}."
    if gain < -half:
        return f"{ends}: training lost. Lower --learning_rate, or freeze the encoders."
    return f"{ends}, within noise. {advice}".rstrip()


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
    evaluator: RetrievalEvaluator, log: Path, medium: str, *, is_paired: bool, from_scratch: bool
) -> str:
    """Return in a sentence what training gained by mean recall.

    Args:
        evaluator: that of the validation split, whose last evaluation was of the saved model.
        is_paired: whether the evaluator's first evaluation was before the first step: then the interval is one of the
            difference of each query.
    """
    split, ranks = evaluator.split, evaluator.directions
    images = len(split.image_key_M)
    apart = len(split.group_M.unique())
    if apart < min(images, FEW_GROUPS):
        left = f"{apart} independent group{'s' * (apart > 1)} of {images:,} {medium}s"
        return f"recall says nothing of what was learnt: equal captions leave {left}."
    groups = {name: each.queries.group for name, each in ranks.items()}
    after = {name: each.cosine_Q if each.reranked_Q is None else each.reranked_Q for name, each in ranks.items()}
    by_head = (
        " after re-ranking" if any(not torch.equal(after[name], each.cosine_Q) for name, each in ranks.items()) else ""
    )
    never = {name: torch.full_like(rank_Q, NEVER) for name, rank_Q in after.items()}
    recall, half, _ = mean_gain((never[name], after[name], groups[name]) for name in ranks)
    by_chance = mean(value for name in ranks for value in chance(split, name))
    if too_few(len(split.image_key_M), medium):  # the summary says so
        return f"mean recall{by_head} {recall:.3f} ± {half:.3f}, by chance {by_chance:.3f}."
    earlier, difference = evaluator.first if is_paired else {}, None  # a resumed run has no ranks of the start
    if all(name in earlier and len(earlier[name]) == len(after[name]) for name in ranks):
        difference = mean_gain((earlier[name], after[name], groups[name]) for name in ranks)[:2]
    learns_little = recall - half <= by_chance
    advice = (
        "Encoders from scratch need many pairs, pretrained ones few."
        if from_scratch and learns_little
        else _MORE_PAIRS
    )
    figure = f"mean recall{by_head}"
    return gained(figure, recall, half, "by chance", by_chance, log, "eval_mean_recall", difference, advice)
