"""What training gained: recall after it, beside recall before it and beside chance."""

import json
import math
from collections import Counter
from pathlib import Path
from statistics import mean

import torch

from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.embeddings import Embeddings, count_right
from mm_utils.evaluation.metrics import CUTOFFS, mean_gain
from mm_utils.evaluation.retrieval import RetrievalEvaluator

NEVER = torch.iinfo(torch.long).max  # a rank that counts for no recall
_MORE_PAIRS = "More pairs help more than more epochs."


def read_start(log: Path, name: str) -> tuple[float | None, bool]:
    """Return a figure before the first step, None if it was not measured, and whether these weights are those saved at the end.

    Args:
        log: a run's `metrics.jsonl`.
        name: the figure's.
    """
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    first: dict[str, float] = next((row for row in rows if name in row), {})
    saved = next((row["saved_step"] for row in reversed(rows) if "saved_step" in row), None)
    return first[name] if first.get("step") == 0 else None, saved == 0


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
) -> str | None:
    """Return in a sentence what training gained by mean recall; None without an evaluation.

    Args:
        evaluator: that of the validation split, whose last evaluation was of the saved model.
        log: the run's `metrics.jsonl`.
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
    stated = f"mean recall {recall:.3f} ± {half:.3f}{by_head}, by chance {by_chance:.3f}"
    if too_few(len(split.image_key_M), medium):  # the summary says so
        return f"{stated}."
    if recall - half <= by_chance:
        advice = "Encoders from scratch need many pairs, pretrained ones few." if from_scratch else _MORE_PAIRS
        return f"{stated}: at chance, nothing was learnt. {advice}"
    before, keeps_start = read_start(log, "eval_mean_recall")
    if before is None:
        return f"{stated}."
    if keeps_start:
        return f"mean recall {before:.3f} before training, and no later step was better: training gained nothing. {_MORE_PAIRS}"
    ends = f"mean recall {before:.3f} before training, {recall:.3f} after{by_head}"
    earlier = evaluator.first if is_paired else {}
    if all(name in earlier and len(earlier[name]) == len(after[name]) for name in ranks):
        gain, half, _ = mean_gain((earlier[name], after[name], groups[name]) for name in ranks)
        ends += f": {gain:+.3f} ± {half:.3f}"
    else:  # a resumed run
        gain = recall - before
        ends += f" ± {half:.3f}"
    if gain > half:
        return f"{ends}."
    if gain < -half:
        return f"{ends}: training lost recall. Lower --learning_rate, or freeze the encoders."
    return f"{ends}, within noise. {_MORE_PAIRS}"
