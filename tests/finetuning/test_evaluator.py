"""Metrics of a classifier by hand, its table and picture."""

import csv
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch

from mm_utils import distributed
from mm_utils.finetuning import evaluator as classification
from mm_utils.finetuning.confusion import report_classes
from mm_utils.finetuning.evaluator import ClassificationEvaluator
from mm_utils.training.arguments import FinetuningArguments
from tests.kit.ranks import run_on_ranks
from tests.kit.truthful_model import ACCELERATOR

LABELS = [0, 1, 2, 2, -1]
GUESSES = [0, 2, 2, 2, 1]


class Oracle:
    """Its logits are the pixels."""

    def classify(self, pixel_values: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        return pixel_values


def batches(rows: range, size: int = 2, classes: int = 3) -> list[dict[str, Any]]:
    logits = 4 * torch.nn.functional.one_hot(torch.tensor(GUESSES), classes).float()
    rest = {"input_ids": None, "attention_mask": None, "skipped": []}
    parts = torch.arange(rows.start, rows.stop).split(size)
    return [{"rows": part, "pixel_values": logits[part], **rest} for part in parts]


def evaluated(
    classes: int = 3, rows: range = range(5), **columns: Any
) -> tuple[dict[str, float], ClassificationEvaluator]:
    evaluator = ClassificationEvaluator(datasets.Dataset.from_dict({"label": LABELS, **columns}))
    model: Any = Oracle()
    return evaluator(model, batches(rows, classes=classes), ACCELERATOR), evaluator


@pytest.fixture(autouse=True)
def _any_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(classification, "FusionDualEncoderForClassification", Oracle)


@pytest.fixture
def empty_pictures() -> None:
    """Here they are drawn."""


def test_metrics_by_hand() -> None:
    found, evaluator = evaluated()
    assert found["accuracy"] == 3 / 5
    assert found["accuracy_low"] < 0.6 < found["accuracy_high"]
    assert found["macro_f1"] == pytest.approx((1 + 0 + 4 / 5) / 3)
    assert found["majority"] == 2 / 5
    assert evaluator.guesses.tolist() == [list(pair) for pair in zip(LABELS, GUESSES, strict=True)]
    assert "soft_accuracy" not in found


def test_soft_accuracy_is_the_mean_share_of_the_answers() -> None:
    answers = [[{"label": 0, "share": 1.0}], [{"label": 1, "share": 1.0}, {"label": 2, "share": 2 / 3}], [], [], []]
    found, _ = evaluated(answers=answers)
    assert found["soft_accuracy"] == pytest.approx((1 + 2 / 3) / 5)


def test_an_unreadable_split_is_an_error() -> None:
    evaluator, model = ClassificationEvaluator(datasets.Dataset.from_dict({"label": LABELS})), Oracle()
    nothing = {
        **batches(range(0, 1))[0],
        "rows": torch.empty(0, dtype=torch.long),
        "skipped": ["row 0: it has 0 bytes"],
    }
    with pytest.raises(ValueError, match="no row could be read; the first reasons are: row 0"):
        evaluator(model, [nothing], ACCELERATOR)  # type: ignore[arg-type]


def on_this_rank() -> dict[str, float]:
    classification.FusionDualEncoderForClassification = Oracle  # type: ignore[misc,assignment]
    return evaluated(rows=range(0, 4) if distributed.rank() == 0 else range(4, 5))[0]


def test_the_number_of_processes_changes_nothing() -> None:
    alone = evaluated()[0]
    assert run_on_ranks(2, on_this_rank) == [alone, alone]


def test_table_and_picture_are_written(tmp_path: Path) -> None:
    predictions = torch.tensor([[0, 0], [0, 2], [0, 2], [0, 1], [1, 1], [1, 1], [-1, 1]])
    assert report_classes(predictions, ["cat", "dog", "owl", "yak"], tmp_path) == [
        ("cat", 4, 0.25, 1.0, "owl", 2),
        ("dog", 2, 1.0, 0.5, "", 0),
        ("owl", 0, None, 0.0, "", 0),
        ("yak", 0, None, None, "", 0),
    ]
    rows = list(csv.reader((tmp_path / "classes.csv").open()))
    assert rows[0] == ["name", "rows", "recall", "precision", "most_confused_with", "times"]
    assert rows[1] == ["cat", "4", "0.25", "1.0", "owl", "2"]
    assert (tmp_path / "confusion.png").stat().st_size > 1000


def test_the_defaults_differ_from_pre_training() -> None:
    assert FinetuningArguments().metric_for_best_model == "accuracy"
