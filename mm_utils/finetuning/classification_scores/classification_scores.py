"""A metric for `evaluate`: accuracy, macro F1 and, given scores, the area under the curve.

    import evaluate
    metric = evaluate.load("mm_utils/finetuning/classification_scores")
    metric.compute(predictions=[0, 1, 1], references=[0, 1, 0], scores=[[0.9, 0.1], [0.2, 0.8], [0.4, 0.6]])
    {"accuracy": 0.667, "macro_f1": 0.667, "roc_auc": 1.0}

It depends on `datasets`, `evaluate` and numpy alone, so it loads from a path without a network.
"""

import datasets
import evaluate
import numpy as np

_DESCRIPTION = "Accuracy, macro F1 and area under the ROC curve of a classifier."
_CITATION = ""
_INPUTS = """
Args:
    predictions: predicted class of each example, from 0.
    references: right class of each example; a negative number is a class unknown to the classifier, and counts as wrong.
    scores: for each example a score per class that rises with the class's probability; without scores, no `roc_auc`.
Returns:
    accuracy: share of right predictions.
    macro_f1: mean F1 of the classes that occur in references or predictions.
    roc_auc: for two classes, the probability that an example of the second has a higher score for it than an example of the
        first; ties count half. For more classes, the mean over each class against the others, if both occur.
"""


class ClassificationScores(evaluate.Metric):
    """Scores of a classifier, see the module's docstring."""

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
    """Return the mean F1 of the classes; F1 = 2 x hits / (times predicted + times right)."""
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
    """Return the area by the ranks of positive examples (Mann-Whitney); ties share ranks."""
    count, others = int(positive.sum()), int((~positive).sum())
    if not count or not others:
        return None
    _, place, times = np.unique(score, return_inverse=True, return_counts=True)
    rank = np.cumsum(times) - (times - 1) / 2
    return float((rank[place][positive].sum() - count * (count + 1) / 2) / (count * others))
