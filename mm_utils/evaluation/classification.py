"""Measure a classifier, and interpolate between its weights before and after fine-tuning (WiSE-FT, arXiv 2109.01903).

Fine-tuning often loses what the model knew before; interpolated weights keep some of both, at no cost when the model is used.
The classifier is new and has no weights before, so it is never interpolated.

Shape letters: b rows of a batch, M of a split, C classes.
"""

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import datasets
import evaluate
import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.evaluation.metrics import share_with_interval
from mm_utils.evaluation.retrieval import Evaluate
from mm_utils.files import write_atomic
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.reports.plots import BLUE, MUTED, ORANGE, new_figure, save_figure, set_title, small_legend, style_axes

logger = logging.getLogger(__name__)

_METRIC = Path(__file__).parents[1] / "classification_scores"
ALPHAS = tuple(step / 10 for step in range(11))
_MOST_CLASSES = 100  # with more, the scores of all rows take too much memory on the host, so there is no ROC AUC


class ClassificationEvaluator:
    """Measure accuracy with its 95 % interval, macro F1, and for up to 100 classes ROC AUC.

    All ranks get the same metrics. Also measured are `majority`, the share of the most frequent class, and for rows with several
    answers `soft_accuracy`, the mean share of the answers that equal the prediction. The interval treats rows as independent.

    Args:
        rows: the split to measure, from `mm_utils.data.tasks.LabelledTask`.
        classes: number of classes.

    Attributes:
        guesses: label and prediction of every row of the last evaluation that could be read, `[M, 2]`.
    """

    def __init__(self, rows: datasets.Dataset, classes: int):
        self.label_M, self.classes = torch.tensor(rows["label"][:]), classes
        self.answers = rows["answers"][:] if "answers" in rows.column_names else None
        self.metric = evaluate.load(str(_METRIC), keep_in_memory=True)
        self.guesses = torch.empty(0, 2, dtype=torch.long)

    @torch.no_grad()
    def __call__(self, model: FusionDualEncoderModel, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Classify the batches of `mm_utils.data.loading.loaders.Loaders.evaluation`.

        Raises:
            ValueError: if no row can be read.
        """
        assert isinstance(model, FusionDualEncoderForClassification)
        rows, logits = self._classify(model, loader, accelerator)
        label_M, guess_M = self.label_M[rows], logits.argmax(1)
        self.guesses = torch.stack([label_M, guess_M], 1)
        scores = logits.softmax(1).tolist() if self.classes <= _MOST_CLASSES else None
        others = self.metric.compute(predictions=guess_M.tolist(), references=label_M.tolist(), scores=scores)
        metrics = share_with_interval("accuracy", label_M == guess_M)
        if self.answers is not None:
            shares = [
                sum(answer["share"] for answer in self.answers[row] if answer["label"] == guess)
                for row, guess in zip(rows.tolist(), guess_M.tolist(), strict=True)
            ]
            metrics["soft_accuracy"] = sum(shares) / len(shares)
        known = label_M[label_M >= 0]
        majority = known.bincount().max().item() / len(rows) if len(known) else 0.0
        return {**metrics, **others, "majority": majority}

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


# -- WiSE-FT ------------------------------------------------------------------------------------------------------------


@dataclass
class InterpolationArguments:
    """Interpolation between the weights before and after fine-tuning."""

    wise_ft: bool = arg(
        False,
        "Measure weights between the start (alpha 0) and the end (alpha 1) on the validation split, and save the best.",
    )
    wise_ft_alpha: float | None = arg(
        None,
        "Save the weights of this alpha, even if another is better on validation; 0.5 suits data that has shifted.",
    )

    def __post_init__(self) -> None:
        if self.wise_ft_alpha is not None and not 0 <= self.wise_ft_alpha <= 1:
            raise ValueError(f"--wise_ft_alpha is {self.wise_ft_alpha}; give a number in [0, 1].")
        if self.wise_ft_alpha is not None and not self.wise_ft:
            raise ValueError(f"--wise_ft_alpha is {self.wise_ft_alpha}; it goes with --wise_ft. Give both.")


def interpolate(start: Mapping[str, Tensor], end: Mapping[str, Tensor], alpha: float) -> dict[str, Tensor]:
    """Return (1 - alpha) start + alpha end, but integers, new weights and classifier of `end`."""
    return {
        name: value.detach().clone()
        if name.startswith("classifier.") or name not in start or not value.is_floating_point()
        else torch.lerp(start[name].to(value), value.detach(), alpha)
        for name, value in end.items()
    }


def choose_between(
    args: InterpolationArguments,
    start: Mapping[str, Tensor],
    model: FusionDualEncoderForClassification,
    evaluate: Evaluate,
    loader: Iterable,
    accelerator: Accelerator,
    metric: str,
    folder: Path,
) -> dict[str, float]:
    """Measure weights between `start` and those in `model`; load and save the chosen ones.

    Writes the model, `wise_ft.json` and `wise_ft.png`. Called on all ranks, which all get the metrics of the chosen weights,
    with `wise_ft_alpha`.

    Args:
        start: the state dict before fine-tuning.
        metric: the metric of `evaluate` to maximise; among equals, the highest alpha wins.
    """
    end = {name: value.detach().clone() for name, value in model.state_dict().items()}
    alphas = sorted({*ALPHAS, *([args.wise_ft_alpha] if args.wise_ft_alpha is not None else [])})
    measured: dict[float, dict[str, float]] = {}
    for alpha in alphas:
        model.load_state_dict(interpolate(start, end, alpha))
        measured[alpha] = evaluate(model, loader, accelerator)
        logger.info("alpha %.2f: %s %.4f", alpha, metric, measured[alpha][metric])
    best = max(alphas, key=lambda alpha: (measured[alpha][metric], alpha))
    chosen = best if args.wise_ft_alpha is None else args.wise_ft_alpha
    model.load_state_dict(interpolate(start, end, chosen))
    evaluate(model, loader, accelerator)  # so that the evaluator holds the predictions of the chosen weights
    if accelerator.is_main_process:
        model.save_pretrained(folder)
        rows = [{"alpha": alpha, **metrics} for alpha, metrics in measured.items()]
        report = {"metric": metric, "best_alpha": best, "saved_alpha": chosen, "measured": rows}
        write_atomic(folder / "wise_ft.json", json.dumps(report, indent=2) + "\n")
        _draw({alpha: metrics[metric] for alpha, metrics in measured.items()}, chosen, metric, folder / "wise_ft.png")
    accelerator.wait_for_everyone()
    return {**measured[chosen], "wise_ft_alpha": chosen}


def _draw(values: Mapping[float, float], chosen: float, metric: str, out_path: Path) -> None:
    figure = new_figure(5.2, 3.4)
    ax = figure.add_subplot()
    style_axes(ax)
    ax.plot(list(values), list(values.values()), color=BLUE, linewidth=1.8, marker="o", markersize=3.5)
    ax.plot([chosen], [values[chosen]], color=ORANGE, marker="o", markersize=8, linestyle="", label="saved")
    ax.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0, the start", "0.25", "0.5", "0.75", "1, the end"])
    ax.set_xlabel("alpha", fontsize=8, color=MUTED)
    title = metric.replace("_", " ").capitalize()
    set_title(ax, f"{title} between start and end")
    small_legend(ax, loc="best")
    save_figure(figure, out_path)
