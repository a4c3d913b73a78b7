"""Measure a classifier.

Shape letters: b rows of a batch, M of a split, C classes.
"""

import logging
from collections.abc import Iterable

import datasets
import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.evaluation.metrics import share_with_interval
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel

logger = logging.getLogger(__name__)

_MOST_CLASSES = 100  # with more, the scores of all rows take too much memory on the host, so there is no ROC AUC


class ClassificationEvaluator:
    """Measure accuracy with its 95 % interval, macro F1, and for up to 100 classes ROC AUC.

    All ranks get the same metrics. Also measured are `majority`, the share of the most frequent class, and for rows with several
    answers `soft_accuracy`, the mean share of the answers that equal the prediction. The interval treats rows as independent.

    Args:
        rows: the split to measure, from `mm_utils.finetuning.labels.LabelledTask`.
        classes: number of classes.

    Attributes:
        guesses: label and prediction of every row of the last evaluation that could be read, `[M, 2]`.
    """

    def __init__(self, rows: datasets.Dataset, classes: int):
        self.label_M, self.classes = torch.tensor(rows["label"][:]), classes
        self.answers = rows["answers"][:] if "answers" in rows.column_names else None
        self.guesses = torch.empty(0, 2, dtype=torch.long)

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify the batches of `mm_utils.data.batches.loaders.Loaders.evaluation`.

        Raises:
            ValueError: if no row can be read.
        """
        assert isinstance(model, FusionDualEncoderForClassification)
        rows, logits = self._classify(model, loader, accelerator)
        label_M, guess_M = self.label_M[rows], logits.argmax(1)
        self.guesses = torch.stack([label_M, guess_M], 1)
        metrics = share_with_interval("accuracy", label_M == guess_M)
        if self.answers is not None:
            shares = [
                sum(answer["share"] for answer in self.answers[row] if answer["label"] == guess)
                for row, guess in zip(rows.tolist(), guess_M.tolist(), strict=True)
            ]
            metrics["soft_accuracy"] = sum(shares) / len(shares)
        known = label_M[label_M >= 0]
        majority = known.bincount().max().item() / len(rows) if len(known) else 0.0
        metrics |= {"macro_f1": macro_f1(guess_M.numpy(), label_M.numpy()), "majority": majority}
        if self.classes <= _MOST_CLASSES:
            area = roc_auc(logits.softmax(1).double().numpy(), label_M.numpy())
            metrics |= {} if area is None else {"roc_auc": area}
        return metrics

    def _classify(
        self, model: FusionDualEncoderForClassification, loader: Iterable, accelerator: Accelerator
    ) -> tuple[Tensor, Tensor]:
        """Return the rows `[M]` of all ranks and their logits `[M, C]`, on the CPU."""
        device = accelerator.device
        rows = [torch.empty(0, dtype=torch.long, device=device)]
        logits = [torch.empty(0, self.classes, device=device)]
        skipped: list[str] = []
        for batch in tqdm(loader, desc="Classifying", leave=False, disable=not accelerator.is_main_process, delay=2):
            skipped += batch["skipped"]
            if len(batch["rows"]):
                with accelerator.autocast():
                    found_bC = model.classify(batch["pixel_values"], batch["input_ids"], batch["attention_mask"])
                rows.append(batch["rows"])
                logits.append(found_bC.float())
        if skipped:
            logger.warning("%d rows were left out: %s", len(skipped), skipped[:3])
        sizes = distributed.gather_sizes(sum(map(len, rows)), device)
        if not sum(sizes):
            raise ValueError("no row could be read; the first reasons are: " + "; ".join(skipped[:3]))
        return distributed.gather(torch.cat(rows), sizes).cpu(), distributed.gather(torch.cat(logits), sizes).cpu()


def macro_f1(guess_M: np.ndarray, label_M: np.ndarray) -> float:
    """Return the mean F1 of the classes that occur; F1 = 2 x hits / (times predicted + times right). A label of -1 is of none."""
    classes = int(max(guess_M.max(), label_M.max())) + 1
    hits, guessed, occurs = (
        np.bincount(values[values >= 0], minlength=classes)
        for values in (guess_M[guess_M == label_M], guess_M, label_M)
    )
    known = guessed + occurs > 0
    return float((2 * hits[known] / (guessed + occurs)[known]).mean())


def roc_auc(scores_MC: np.ndarray, label_M: np.ndarray) -> float | None:
    """Return the area under the ROC curve, ties count half; None if only one class occurs.

    For two classes it is the probability that a row of the second has a higher score for it than one of the first; for more, the
    mean over each class against the others, where both occur.
    """
    areas = []
    for number in [1] if scores_MC.shape[1] == 2 else range(scores_MC.shape[1]):
        positive = label_M == number
        count, others = int(positive.sum()), int((~positive).sum())
        if count and others:  # by the ranks of positive rows (Mann-Whitney); ties share ranks
            _, place, times = np.unique(scores_MC[:, number], return_inverse=True, return_counts=True)
            rank = np.cumsum(times) - (times - 1) / 2
            areas.append(float((rank[place][positive].sum() - count * (count + 1) / 2) / (count * others)))
    return float(np.mean(areas)) if areas else None
