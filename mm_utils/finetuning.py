"""Fine-tuning on classes: what is measured, and what a finished run leaves behind.

Shape letters: b rows of a batch, M of a split, C classes.
"""

import csv
import json
import logging
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import evaluate
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.data.labelled_pairs import LabelledTask
from mm_utils.data.tokens import fingerprint
from mm_utils.finish import push_at_the_end, what_is_in
from mm_utils.hub import HubPusher
from mm_utils.intervals import wilson_interval
from mm_utils.model_card import CardInfo, write_model_card
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.reporting import draw_confusion, plot_training
from mm_utils.safe_text import no_formula
from mm_utils.training_arguments import TrainingArguments

logger = logging.getLogger(__name__)

_METRIC = Path(__file__).with_name("classification_scores")
_MOST_CLASSES = 100  # of more, all scores of all rows are not gathered, and there is no ROC AUC
_READS = {
    "fused": "the fusion head's [CLS] on an image and a text",
    "pair": "the embeddings of an image and a text, side by side",
    "image": "the embedding of an image",
    "text": "the embedding of a text",
}


@dataclass
class FinetuningArguments(TrainingArguments):
    """As for pre-training, with other defaults."""

    num_train_epochs: float = arg(3.0, "Passes over the training rows.")
    metric_for_best_model: str = arg("accuracy", "Decides early stopping, and which checkpoint and alpha are best.")
    report_to: str | None = arg(
        None, "A tracker that accelerate knows and that is installed, e.g. tensorboard or wandb."
    )


class ClassificationEvaluator:
    """Accuracy with its 95 % interval, macro F1, up to 100 classes ROC AUC; all ranks get the same figures.

    Beside them stands the share of the most frequent class, `majority`. The interval takes rows for independent. Where rows
    have several answers, `soft_accuracy` is the mean of what the guesses earn. `guesses` keeps label and guess of every row that could be read, `[M, 2]`.

    Args:
        rows: the split that is measured, of `mm_utils.data.labelled_pairs.LabelledTask`.
        classes: how many.
    """

    def __init__(self, rows: datasets.Dataset, classes: int):
        self.label_M, self.classes = torch.tensor(rows["label"][:]), classes
        self.answers = rows["answers"][:] if "answers" in rows.column_names else None
        self.metric = evaluate.load(str(_METRIC), keep_in_memory=True)
        self.guesses = torch.empty(0, 2, dtype=torch.long)

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify what `loader` yields (see `mm_utils.data.loaders.Loaders.evaluation`).

        Raises:
            ValueError: if no row can be read.
        """
        assert isinstance(model, FusionDualEncoderForClassification)
        rows, logits = self._classify(model, loader, accelerator)
        label_M, guess_M = self.label_M[rows], logits.argmax(1)
        self.guesses = torch.stack([label_M, guess_M], 1)
        scores = logits.softmax(1).tolist() if self.classes <= _MOST_CLASSES else None
        figures = self.metric.compute(predictions=guess_M.tolist(), references=label_M.tolist(), scores=scores)
        low, high = wilson_interval(int((label_M == guess_M).sum()), len(rows))
        accuracy = {"accuracy": figures.pop("accuracy"), "accuracy_low": low, "accuracy_high": high}
        if self.answers is not None:
            accuracy["soft_accuracy"] = self._soft_accuracy(rows, guess_M)
        known = label_M[label_M >= 0]
        majority = known.bincount().max().item() / len(rows) if len(known) else 0.0
        return {**accuracy, **figures, "majority": majority}

    def _classify(
        self, model: FusionDualEncoderForClassification, loader: Iterable, accelerator: Accelerator
    ) -> tuple[Tensor, Tensor]:
        """Rows `[M]` and their logits `[M, C]`, on the CPU."""
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
        sizes = ranks.gather_sizes(sum(map(len, rows)), device)
        if not sum(sizes):
            raise ValueError("no row could be read; the first reasons are: " + "; ".join(skipped[:3]))
        return ranks.gather(torch.cat(rows), sizes).cpu(), ranks.gather(torch.cat(logits), sizes).cpu()

    def _soft_accuracy(self, rows: Tensor, guess_M: Tensor) -> float:
        assert self.answers is not None
        earned = [
            sum(answer["share"] for answer in self.answers[row] if answer["label"] == guess)
            for row, guess in zip(rows.tolist(), guess_M.tolist(), strict=True)
        ]
        return sum(earned) / len(earned)


def finish_finetuning(
    accelerator: Accelerator,
    folder: Path,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    evaluator: ClassificationEvaluator,
    metrics: dict[str, float],
    settings: dict[str, Any],
    pusher: HubPusher,
) -> None:
    """Draw `training.png` and `confusion.png`, write `results.json`, `classes.csv` and the model card, push if asked to.

    `evaluator` holds the guesses that are shown, those on the last split that was measured.
    """
    if accelerator.is_main_process:
        plot_training(folder / "metrics.jsonl", folder / "training.png")
        report_guesses(evaluator.guesses, task.classes, folder)
        (folder / "results.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        write_model_card(folder, _card(accelerator, folder, model, task, metrics, settings, pusher))
    accelerator.wait_for_everyone()
    pushed = push_at_the_end(accelerator, pusher)
    if accelerator.is_main_process:
        _say_what_is_where(folder, model, task, metrics, pushed)


def report_guesses(guesses: Tensor, classes: list[str], folder: Path) -> None:
    """Write `classes.csv`, precision and recall of every class, and `confusion.png`; rows of no known class are not in it."""
    known = guesses[guesses[:, 0] >= 0]
    right_C = known[known[:, 0] == known[:, 1], 0].bincount(minlength=len(classes)).tolist()
    label_C, guess_C = (guesses[guesses[:, at] >= 0, at].bincount(minlength=len(classes)).tolist() for at in (0, 1))
    with open(folder / "classes.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("class", "rows", "recall", "precision"))
        for name, right, rows, guessed in zip(classes, right_C, label_C, guess_C, strict=True):
            table.writerow(
                (no_formula(name), rows, right / rows if rows else None, right / guessed if guessed else None)
            )
    pairs, times = known.unique(dim=0, return_counts=True)
    counts = {(label, guess): count for (label, guess), count in zip(pairs.tolist(), times.tolist(), strict=True)}
    draw_confusion(counts, classes, folder / "confusion.png")


def _card(
    accelerator: Accelerator,
    folder: Path,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    metrics: dict[str, float],
    settings: dict[str, Any],
    pusher: HubPusher,
) -> CardInfo:
    shown = [name for name in metrics if not name.endswith(("_low", "_high", "_majority"))]
    start = str(settings["model_name_or_path"])
    device = accelerator.device
    return CardInfo(
        name=folder.resolve().name,
        vision_model=model.vision_model.config.model_type,
        text_model=model.text_model.config.model_type,
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        dataset_name=task.title.rpartition(" is ")[2],
        dataset_rows={name: len(split) for name, split in task.splits.items()},
        dataset_fingerprint=fingerprint(task.splits["train"]),
        command=f"accelerate launch {shlex.join(sys.argv)}",
        metrics={name: metrics[name] for name in shown},
        chance={
            name: metrics[f"{name.partition('_')[0]}_majority"]
            for name in shown
            if name.endswith("_accuracy") and f"{name.partition('_')[0]}_majority" in metrics
        },
        hyperparameters={name: value for name, value in settings.items() if value is not None},
        hardware=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type.upper(),
        precision=accelerator.mixed_precision,
        num_processes=accelerator.num_processes,
        repo_id=pusher.repo_id if pusher.args.push_to_hub else None,
        has_dual_encoder=False,
        base_models=[start] if not Path(start).exists() else [],
        pipeline_tag="text-classification" if model.config.classifier_inputs == "text" else "image-classification",
        tags=("classification", "dual-encoder"),
        summary=f"It tells {len(task.classes)} classes apart by {_READS[model.config.classifier_inputs]}.",
        auto_class="AutoModelForSequenceClassification",
    )


def _say_what_is_where(
    folder: Path,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    metrics: dict[str, float],
    pushed: str | None,
) -> None:
    lines = ["", f"{len(task.classes)} classes, told by {_READS[model.config.classifier_inputs]}:"]
    for split, prefix in (("validation", "eval_"), ("test", "test_")):
        if f"{prefix}accuracy" in metrics:
            found = {name: metrics[f"{prefix}{name}"] for name in ("accuracy", "accuracy_low", "accuracy_high")}
            line = f"  {split:<12}accuracy {found['accuracy']:.3f} ({found['accuracy_low']:.3f} to "
            line += f"{found['accuracy_high']:.3f})   macro F1 {metrics[f'{prefix}macro_f1']:.3f}"
            if f"{prefix}roc_auc" in metrics:
                line += f"   ROC AUC {metrics[f'{prefix}roc_auc']:.3f}"
            lines.append(f"{line}   most frequent class {metrics[f'{prefix}majority']:.3f}")
    if "eval_wise_ft_alpha" in metrics:
        lines.append(f"  saved with alpha {metrics['eval_wise_ft_alpha']:g} between the start and the end")
    contents = (
        ("model.safetensors", "the model, with config.json and its processor"),
        ("README.md", "the model card"),
        ("training.png", "curves"),
        ("confusion.png", "which classes are taken for which"),
        ("classes.csv", "recall and precision of every class"),
        ("wise_ft.png", "weights between the start and the end"),
        ("results.json", "the figures above"),
        ("config.yaml", "the arguments, to run it again"),
    )
    lines += what_is_in(folder, contents, pushed)
    logger.info("\n".join(lines))
