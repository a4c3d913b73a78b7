"""The metric by hand, by counting pairs, and against scikit-learn if it is installed."""

from pathlib import Path

import evaluate
import numpy as np
import pytest

from mm_utils import finetuning as classes

PATH = str(Path(str(classes.__file__)).with_name("classification_scores"))


@pytest.fixture(scope="module")
def metric() -> evaluate.Metric:
    return evaluate.load(PATH, keep_in_memory=True)


def drawn(rows: int, classes: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Scores with ties, and labels correlated with them."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, classes, rows)
    scores = rng.normal(size=(rows, classes))
    scores[np.arange(rows), labels] += 1
    return scores.round(1), labels


def test_scores_by_hand(metric: evaluate.Metric) -> None:
    scores = [[0.9, 0.1], [0.2, 0.8], [0.4, 0.6], [0.3, 0.7]]
    found = metric.compute(predictions=[0, 1, 1, 1], references=[0, 1, 0, 0], scores=scores)
    assert found == pytest.approx({"accuracy": 0.5, "macro_f1": (0.5 + 0.5) / 2, "roc_auc": 1.0})


def test_an_unknown_class_is_wrong_and_a_single_class_has_no_area(metric: evaluate.Metric) -> None:
    found = metric.compute(predictions=[0, 0, 1], references=[0, -1, 1], scores=[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert found["accuracy"] == pytest.approx(2 / 3)
    assert found["macro_f1"] == pytest.approx((2 / 3 + 1) / 2)  # class 0 was guessed once too often
    assert "roc_auc" not in metric.compute(predictions=[1], references=[1], scores=[[0.1, 0.9]])
    assert set(metric.compute(predictions=[1, 0], references=[1, 1])) == {"accuracy", "macro_f1"}


@pytest.mark.parametrize("classes", [2, 5])
def test_the_area_is_the_share_of_ordered_pairs(metric: evaluate.Metric, classes: int) -> None:
    scores, labels = drawn(60, classes)
    areas = []
    for number in range(classes) if classes > 2 else [1]:
        own, others = scores[labels == number, number], scores[labels != number, number]
        areas.append(np.mean([(a > b) + 0.5 * (a == b) for a in own for b in others]))
    found = metric.compute(predictions=scores.argmax(1).tolist(), references=labels.tolist(), scores=scores.tolist())
    assert found["roc_auc"] == pytest.approx(np.mean(areas))


@pytest.mark.parametrize("classes", [2, 4])
def test_scikit_learn_agrees(metric: evaluate.Metric, classes: int) -> None:
    sklearn = pytest.importorskip("sklearn.metrics")
    scores, labels = drawn(80, classes, seed=1)
    scores = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
    guesses = scores.argmax(1)
    found = metric.compute(predictions=guesses.tolist(), references=labels.tolist(), scores=scores.tolist())
    area = sklearn.roc_auc_score(labels, scores[:, 1] if classes == 2 else scores, multi_class="ovr")
    expected = {"macro_f1": sklearn.f1_score(labels, guesses, average="macro"), "roc_auc": area}
    assert found == pytest.approx({"accuracy": (guesses == labels).mean(), **expected})
