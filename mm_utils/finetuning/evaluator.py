"""Measure a classifier.

Shape letters: b rows of a batch, M of a split, C classes.
"""

import csv
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import datasets
import torch
from accelerate import Accelerator
from torch import Tensor

from mm_utils import distributed
from mm_utils.evaluation.metrics import evaluation_module, share_with_interval
from mm_utils.finetuning.classifier import classify
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.text import no_formula

logger = logging.getLogger(__name__)


def gather_rows(
    loader: Iterable, accelerator: Accelerator, classify: Callable[[dict[str, Any]], list[Tensor]], columns: int
) -> Tensor:
    """Return the rows of all ranks, and beside them what `classify` returns for a batch: int64 `[columns, M]`.

    Rows that cannot be read are logged and left out.

    Raises:
        ValueError: if no row can be read.
    """
    parts = [torch.empty(0, columns, dtype=torch.long, device=accelerator.device)]
    skipped = list[str]()
    for batch in distributed.progress(loader, "Classifying"):
        skipped += batch["skipped"]
        if len(batch["rows"]):
            parts.append(torch.stack([batch["rows"], *classify(batch)], 1))
    if skipped:
        logger.warning("%d rows were left out: %s", len(skipped), skipped[:3])
    sizes = distributed.gather_sizes(sum(map(len, parts)), accelerator.device)
    if not sum(sizes):
        raise ValueError("no row could be read; the first reasons are: " + "; ".join(skipped[:3]))
    return distributed.gather(torch.cat(parts), sizes).T


class ClassificationEvaluator:
    """Measure accuracy with its 95 % interval, and macro F1; all ranks get the same metrics.

    Also measured is `majority`, the share of the most frequent class. The interval treats rows as independent.
    """

    reads_features = True

    def __init__(self, rows: datasets.Dataset):
        self.label_M = torch.tensor(rows["label"][:])
        self.guesses = torch.empty(0, 2, dtype=torch.long)  # label and prediction of every row of the last evaluation

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify the batches of `mm_utils.data.batches.loaders.Loaders.evaluation`."""
        assert isinstance(model, FusionDualEncoderForClassification)

        def guess(batch: dict[str, Any]) -> list[Tensor]:
            with accelerator.autocast():
                logits_bC = classify(model, batch)
            return [logits_bC.float().argmax(1)]

        rows, guess_M = gather_rows(loader, accelerator, guess, 2).cpu()  # [2, M]
        label_M = self.label_M[rows]
        self.guesses = torch.stack([label_M, guess_M], 1)
        found = evaluation_module("accuracy_and_f1").compute(predictions=guess_M.numpy(), references=label_M.numpy())
        metrics = share_with_interval("accuracy", found["accuracy"], len(rows))
        known = label_M[label_M >= 0]
        majority = known.bincount().max().item() / len(rows) if len(known) else 0.0
        return metrics | {"macro_f1": found["macro_f1"], "majority": majority}


def report_classes(predictions: Tensor, classes: Sequence[str], folder: str | Path) -> None:
    """Write the figures of every class as `classes.csv` into a folder.

    `predictions` are class and predicted class of every row, `[M, 2]`; a class of -1 is none of the known ones.
    """
    pairs, times = predictions.unique(dim=0, return_counts=True)
    counts = {(label, guess): count for (label, guess), count in zip(pairs.tolist(), times.tolist(), strict=True)}
    rows = [0] * len(classes)
    guessed = [0] * len(classes)
    mistakes = [(0, "")] * len(classes)
    for (label, guess), count in counts.items():
        guessed[guess] += count
        if label >= 0:
            rows[label] += count
        if label >= 0 and label != guess and count > mistakes[label][0]:
            mistakes[label] = (count, classes[guess])
    with open(Path(folder, "classes.csv"), "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("name", "rows", "recall", "precision", "most_confused_with", "times"))
        for number, name in enumerate(classes):
            right = counts.get((number, number), 0)
            count, other = mistakes[number]
            recall = round(right / rows[number], 4) if rows[number] else None  # empty without rows
            precision = round(right / guessed[number], 4) if guessed[number] else None
            figures = (name, rows[number], recall, precision, other, count)
            # a spreadsheet would compute a name such as '=1+1'
            table.writerow([no_formula(cell) for cell in figures])
