"""Accuracy, macro F1 and, given scores, the area under the ROC curve, as a metric for `evaluate`.

    import evaluate
    metric = evaluate.load("mm_utils/classification_scores")
    metric.compute(predictions=[0, 1, 1], references=[0, 1, 0], scores=[[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    {"accuracy": 0.667, "macro_f1": 0.667, "roc_auc": 1.0}

It depends on `datasets`, `evaluate` and numpy alone, so it loads from a path without network.
"""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = "Accuracy, macro F1 and area under the ROC curve of a classifier."
_CITATION = ""
_INPUTS = """
Args:
    predictions: the class of each example, from 0.
    references: the right one; a negative number is a class that the classifier does not know, and counts as wrong.
    scores: of each example one for every class, any that rise with its probability; without, no `roc_auc`.
Returns:
    accuracy: share of examples that are right.
    macro_f1: mean of the F1 of every class that occurs in references or predictions.
    roc_auc: of two classes the probability that an example of the second scores higher for it than one of the first, ties
        counting half; of more, the mean over the classes, each against the others, of those that have both.
"""


class ClassificationScores(evaluate.Metric):
    """See the module's docstring."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: list[int], references: list[int], scores: object = None) -> dict[str, float]:
        guesses, right = np.asarray(predictions), np.asarray(references)
        found = {"accuracy": float((guesses == right).mean()), "macro_f1": _macro_f1(guesses, right)}
        if scores is not None:
            auc = _roc_auc(np.asarray(scores, dtype=np.float64), right)
            found |= {} if auc is None else {"roc_auc": auc}
        return found


def _macro_f1(guesses: np.ndarray, right: np.ndarray) -> float:
    """A class has F1 = 2 x hits / (times guessed + times right)."""
    classes = int(max(guesses.max(), right.max())) + 1
    hits, guessed, occurs = (
        np.bincount(values[values >= 0], minlength=classes) for values in (guesses[guesses == right], guesses, right)
    )
    known = guessed + occurs > 0
    return float((2 * hits[known] / (guessed + occurs)[known]).mean())


def _roc_auc(scores: np.ndarray, right: np.ndarray) -> "float | None":
    classes = [1] if scores.shape[1] == 2 else range(scores.shape[1])
    found = [_area(scores[:, number], right == number) for number in classes]
    known = [area for area in found if area is not None]
    return float(np.mean(known)) if known else None


def _area(score: np.ndarray, positive: np.ndarray) -> "float | None":
    """By the ranks of the positive ones (Mann and Whitney), equal scores sharing their mean rank."""
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    _, place, times = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(times) - (times - 1) / 2
    return float((rank[place][positive].sum() - count * (count + 1) / 2) / (count * others))
