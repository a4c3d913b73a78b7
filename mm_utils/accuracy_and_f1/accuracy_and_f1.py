"""A metric for `evaluate`: accuracy and macro F1 of a classifier.

    import evaluate
    metric = evaluate.load("mm_utils/accuracy_and_f1")
    metric.compute(predictions=[0, 1, 1, 0], references=[0, 1, 0, -1])
    {"accuracy": 0.5, "macro_f1": 0.5833333333333333}

It depends on `datasets` and `evaluate` alone, so it loads from a path without a network.
"""

import datasets
import evaluate
import numpy as np

_INPUTS = """
Args:
    predictions: the predicted class of each row, from 0.
    references: its class; -1 if it is of no class that can be predicted.
Returns:
    accuracy: share of rows whose class was predicted.
    macro_f1: mean F1 of the classes that occur, F1 = 2 x hits / (times predicted + times right).
"""


class AccuracyAndF1(evaluate.Metric):
    """Accuracy and macro F1, see the module's docstring."""

    def _info(self) -> evaluate.MetricInfo:
        number = datasets.Value("int64")
        return evaluate.MetricInfo(
            description="Accuracy, and the mean F1 of the classes that occur.",
            citation="",
            inputs_description=_INPUTS,
            features=datasets.Features({"predictions": number, "references": number}),
        )

    def _compute(self, predictions: list[int], references: list[int]) -> dict[str, float]:
        guess = np.array(predictions)
        label = np.array(references)
        classes = int(max(guess.max(), label.max())) + 1

        def count(values: np.ndarray) -> np.ndarray:
            return np.bincount(values[values >= 0], minlength=classes)

        hits = count(guess[guess == label])
        guessed = count(guess)
        occurs = count(label)
        known = guessed + occurs > 0
        f1 = 2 * hits[known] / (guessed + occurs)[known]
        return {"accuracy": float((guess == label).mean()), "macro_f1": float(f1.mean())}
