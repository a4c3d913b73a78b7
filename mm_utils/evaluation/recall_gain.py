"""What training gained: recall after it, beside recall before it and beside chance."""

import json
import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from statistics import mean

import torch

from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.embeddings import Embeddings, count_right
from mm_utils.evaluation.metrics import CUTOFFS, FEW_GROUPS, mean_gain
from mm_utils.evaluation.retrieval import RetrievalEvaluator

NEVER = torch.iinfo(torch.long).max  # a rank that counts for no recall
_MORE_PAIRS = "More pairs help more than more epochs."


BEFORE = "before training"
CLOSED_FORM = "by the closed form"


@dataclass(frozen=True)
class Gain:
    """What training gained by a figure.

    Attributes:
        figure, metric: its name in words and in the run's log.
        after, half: its value of the saved model, and half the width of its interval; 0 if there is no interval.
        floor_name, floor: what a model without knowledge reaches, in words and as a number.
        starts: the log's rows before the first step: of a whole model as it is, then of what a closed form added to it.
        saved_step: the step whose weights are saved; None for those of the end.
        interval: that of `after` where it is not as wide on both sides.
        difference: the gain of the same rows and half the width of its interval; without it, `half` stands for that.
        note: a sentence in place of that on the gain.
        start_name: what `starts` are called: of two encoders that never met, all of it is the closed form.
    """

    figure: str
    metric: str
    after: float
    half: float
    floor_name: str
    floor: float
    starts: list[dict[str, float]]
    saved_step: int | None
    interval: tuple[float, float] | None = None
    difference: tuple[float, float] | None = None
    advice: str = ""
    note: str = ""
    start_name: str = BEFORE

    @property
    def bounds(self) -> tuple[float, float]:
        """The ends of the interval of `after`."""
        return self.interval or (self.after - self.half, min(1.0, self.after + self.half))

    @property
    def start(self) -> str:
        """What the first step began with, in words."""
        return "the closed form" if self.start_name == CLOSED_FORM or len(self.starts) > 1 else "the model"

    @property
    def before(self) -> float | None:
        """The figure before training, re-ranked by a head that the model had; None if it was not measured."""
        row = self.starts[0] if self.starts else {}
        return row.get("eval_rerank_mean_recall", row.get(self.metric))

    def _over(self, other: float) -> str:
        """Return the gain over a figure, with its interval."""
        gain = self.after - other
        if self.interval:
            low, high = self.interval
            return f"{gain:+.3f} ({low - other:+.3f} to {high - other:+.3f})"
        if self.difference and other == self.before:
            gain, half = self.difference
            return f"{gain:+.3f} ± {half:.3f}"
        return f"{gain:+.3f} ± {self.half:.3f}"

    @property
    def sentence(self) -> str:
        """What was gained, for logs and the card."""
        figure = self.figure
        after = f"{self.after:.3f}"
        floor = f"{self.floor_name} {self.floor:.3f}"
        if self.note:
            return self.note
        if self.after - self.half <= self.floor:
            learnt = f"{figure} {after} ± {self.half:.3f}, {floor}: by this figure, nothing was learnt."
            return f"{learnt} {self.advice}".rstrip()
        if self.before is None:
            found = f"{figure} {after}, {floor}: {self._over(self.floor)}."
            if self.start_name:
                found += f" What it was {self.start_name} was not measured (--eval_steps 0), and may be most of that."
            return found
        begin = f"{figure} {self.before:.3f} {self.start_name}"
        if self.saved_step == 0 and len(self.starts) == 1:
            nothing = f"{begin}, {floor}; nothing later was better: training added nothing, and {self.start} is saved as it was."
            return f"{nothing} {self.advice}".rstrip()
        if self.start_name == CLOSED_FORM:
            begin = f"{begin} ({floor})"
        gain, half = self.difference or (self.after - self.before, self.half)
        ends = f"{begin}, {after} after: {self._over(self.before)}"
        if self.saved_step == 0:
            ends += ", by the closed form alone, as no step was better"
        if gain > half:
            return f"{ends}."
        if gain < -half:
            return f"{ends}: training lost. Lower --learning_rate, or freeze the encoders."
        return f"{ends}, within noise. {self.advice}".rstrip()


def read_log(log: Path, metric: str) -> tuple[list[dict[str, float]], int | None]:
    """Return the rows of a `metrics.jsonl` that measure a figure before the first step, and the step that is saved, if it says so."""
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()] if log.is_file() else []
    starts = [row for row in rows if metric in row and row.get("step") == 0]
    return starts, next((row["saved_step"] for row in reversed(rows) if "saved_step" in row), None)


def chance(split: Embeddings, direction: str) -> list[float]:
    """Return recall at each cut-off in random order: the mean share of queries with a right item there."""
    queries, items = split.directions[direction]
    total = len(items.key)
    counts = Counter(count_right(queries, items).tolist())
    found = []
    for k in CUTOFFS:
        shown = min(k, total)
        # of C(total, shown) draws, those without any right item
        misses = sum(times * math.comb(total - count, shown) for count, times in counts.items())
        found.append(1 - misses / (math.comb(total, shown) * len(queries.key)))
    return found


def recall_gained(evaluator: RetrievalEvaluator, log: Path, medium: str, *, is_paired: bool, start_name: str) -> Gain:
    """Return what training gained by mean recall.

    Args:
        evaluator: that of the validation split, whose last evaluation was of the saved model.
        log: the run's `metrics.jsonl`.
        start_name: what the weights before the first step are called; "" from scratch.
        is_paired: whether the evaluator's first evaluation was before the first step: then the interval is one of the
            difference of each query.
    """
    split = evaluator.split
    ranks = evaluator.directions
    images = len(split.image_key_M)
    apart = len(split.group_M.unique())
    groups = {name: each.queries.group for name, each in ranks.items()}
    after = {name: each.best_Q for name, each in ranks.items()}
    reranks = any(not torch.equal(after[name], each.cosine_Q) for name, each in ranks.items())
    figure = "mean recall after re-ranking" if reranks else "mean recall"
    never = {name: torch.full_like(rank_Q, NEVER) for name, rank_Q in after.items()}
    # beside a model that finds nothing, the gain is the recall itself, with its interval
    recall, half, _ = mean_gain((never[name], after[name], groups[name]) for name in ranks)
    by_chance = mean(value for name in ranks for value in chance(split, name))
    note = ""
    if apart < min(images, FEW_GROUPS):
        half = 0.0
        note = f"{figure} {recall:.3f}, by chance {by_chance:.3f}."
    elif too_few(images, medium):  # the summary says so
        note = f"{figure} {recall:.3f} ± {half:.3f}, by chance {by_chance:.3f}."
    starts, saved_step = read_log(log, "eval_mean_recall")
    earlier = evaluator.first if is_paired and starts else {}  # a resumed run has no ranks of the start
    difference = None
    if all(name in earlier and len(earlier[name]) == len(after[name]) for name in ranks):
        difference = mean_gain((earlier[name], after[name], groups[name]) for name in ranks)[:2]
    learns_little = recall - half <= by_chance
    few = "Encoders from scratch need many pairs, pretrained ones few."
    advice = few if learns_little and not start_name else _MORE_PAIRS
    return Gain(
        figure=figure,
        metric="eval_mean_recall",
        after=recall,
        half=half,
        floor_name="by chance",
        floor=by_chance,
        starts=starts,
        saved_step=saved_step,
        difference=difference,
        start_name=start_name,
        advice=advice,
        note=note,
    )
