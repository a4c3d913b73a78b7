"""Finish a run: pictures, model card, push to the Hub, and a summary with the next commands."""

import csv
import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from torch import Tensor

from mm_utils.checkpointing.state import write_model
from mm_utils.data.labels import LabelledTask
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.classification import ClassificationEvaluator
from mm_utils.evaluation.reranking import describe_weights
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.evaluation.retrieval_report import draw_examples, report_sizes
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.reports.model_card import write_model_card
from mm_utils.reports.plots import draw_confusion, plot_training
from mm_utils.run.cards import (
    DIRECTIONS,
    MEASURED,
    chosen_on_validation,
    classification_card,
    classifier_input,
    retrieval_card,
)
from mm_utils.run.commands import commands_after_training, evaluation_command, longer_command, search_commands
from mm_utils.run.start import Run
from mm_utils.text import no_formula, printable

logger = logging.getLogger(__name__)

_WORDS = 12  # of a caption that stands for a text to search for


def finish_run(
    run: Run,
    model: FusionDualEncoderModel,
    data: TrainingData,
    evaluators: Mapping[str, RetrievalEvaluator],
    metrics: dict[str, float],
    argv: Sequence[str] | None,
) -> None:
    """Draw `training.png` and `retrieval.png`, write the card, push if asked, log a summary.

    The model of each medium but the first is written to `media/`, as a whole one with a card of its own.

    Args:
        run: the run.
        model: the trained model.
        data: the data of the run.
        evaluators: the evaluator of each medium, after the last evaluation.
        metrics: the metrics of the last evaluation.
        argv: the arguments that `main` was called with, None for those of the command line.
    """
    folder = run.output_dir
    if run.accelerator.is_main_process:
        plot_training(folder / "metrics.jsonl", folder / "training.png")
        saved = FusionDualEncoderModel.from_pretrained(folder) if model.media else model
        for own, part, found, remark in data.shares(run, metrics):
            of_medium, split = saved.of(part.medium), evaluators[part.medium].split
            if own.output_dir != folder:
                write_model(own.output_dir, of_medium, part.processor)
            if split is not None:
                draw_examples(part.splits["validation"], evaluators[part.medium], own.output_dir / "retrieval.png")
            report_sizes(run.accelerator, split, own.output_dir)
            card = retrieval_card(own, of_medium, part, split, found, argv)
            card.table_note += remark
            write_model_card(own.output_dir, card)
    pushed = _push(run)
    if run.accelerator.is_main_process:
        logger.info("%s", "\n".join(_retrieval_summary(run, model, metrics, data, pushed)))
    run.tracking.finish()


def finish_finetuning(
    run: Run,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    fingerprint: str,
    evaluator: ClassificationEvaluator,
    metrics: dict[str, float],
    argv: Sequence[str] | None,
) -> None:
    """Draw `training.png` and `confusion.png`, write results and card, push if asked to.

    Args:
        run: the run.
        model: the saved model.
        task: the labelled data.
        fingerprint: the hash of the training data.
        evaluator: holds the predictions that are shown, those on the last split that was measured.
        metrics: the metrics of all measured splits.
        argv: the arguments that `main` was called with, None for those of the command line.
    """
    folder = run.output_dir
    if run.accelerator.is_main_process:
        plot_training(folder / "metrics.jsonl", folder / "training.png")
        report_predictions(evaluator.guesses, task.classes, folder)
        (folder / "results.json").write_text(json.dumps(metrics, indent=2) + "\n", encoding="utf-8")
        write_model_card(folder, classification_card(run, model, task, fingerprint, metrics, argv))
    pushed = _push(run)
    if run.accelerator.is_main_process:
        logger.info("%s", "\n".join(_classification_summary(run, model, task, metrics, pushed)))
    run.tracking.finish()


def report_predictions(predictions: Tensor, classes: list[str], folder: Path) -> None:
    """Write `classes.csv`, recall and precision of every class, and `confusion.png`.

    Args:
        predictions: label and predicted class of every row, `[M, 2]`; rows with a label of -1 are left out.
        classes: the names of the classes.
        folder: the folder to write to.
    """
    known = predictions[predictions[:, 0] >= 0]
    correct_C = known[known[:, 0] == known[:, 1], 0].bincount(minlength=len(classes)).tolist()
    label_C, predicted_C = (
        predictions[predictions[:, at] >= 0, at].bincount(minlength=len(classes)).tolist() for at in (0, 1)
    )
    with open(folder / "classes.csv", "w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("class", "rows", "recall", "precision"))
        for name, correct, rows, predicted in zip(classes, correct_C, label_C, predicted_C, strict=True):
            recall, precision = correct / rows if rows else None, correct / predicted if predicted else None
            table.writerow((no_formula(name), rows, recall, precision))
    pairs, times = known.unique(dim=0, return_counts=True)
    counts = {(label, guess): count for (label, guess), count in zip(pairs.tolist(), times.tolist(), strict=True)}
    draw_confusion(counts, classes, folder / "confusion.png")


def _push(run: Run) -> str | None:
    """Push the model if asked to; return the repository if all is there. On all ranks.

    The process group ends first: other ranks would wait for the Hub in a collective, whose timeout ends a run.
    """
    run.accelerator.wait_for_everyone()
    if not run.pusher.args.push_to_hub:
        return None
    run.accelerator.end_training()
    return run.pusher.repo_id if run.accelerator.is_main_process and run.pusher.push_model() else None


# -- summaries ----------------------------------------------------------------------------------------------------------


def _retrieval_summary(
    run: Run, model: FusionDualEncoderModel, metrics: dict[str, float], data: TrainingData, pushed: str | None
) -> list[str]:
    folder, lines = run.output_dir, []
    for share in data.shares(run, metrics):
        medium = share.data.medium
        title = f"Retrieval on the {medium}s of the validation split, which were not trained on:"
        lines += ["", title, *_recalls(share.metrics, medium)]
    lines += [f"  {name.removeprefix('eval_')}: {value:.3f}" for name, value in metrics.items() if "_between_" in name]
    lines += [f"  {described}" for described in [describe_weights(model)] if described]
    if "eval_moment_iou0.5" in metrics:
        found, fixed = metrics["eval_moment_iou0.5"], metrics["eval_moment_iou0.5_fixed"]
        lines.append(f"  {'moments found (IoU of at least 0.5):':<46}{found:.3f}   the best fixed span: {fixed:.3f}")
    lines += _choices(run, metrics, model)
    contents = {
        "model.safetensors": "the model, with config.json and its processor",
        "dual_encoder": "the two towers for stock transformers",
        "media": "the models of the other media, each whole, with the same text tower",
        "README.md": "the model card, with code to use the model",
        "training.png": "curves",
        "retrieval.png": "what some captions find",
        "embedding_sizes.png": "recall over the bytes of an embedding",
        "regions.png": "where some phrases point",
        "moments.png": "when some phrases happen, as predicted",
        "wise_ft.png": "weights between the start and the end",
        "metrics.jsonl": "every figure that was logged",
        "config.yaml": "the arguments, to run it again",
    }
    commands = []
    for own, part, *_ in data.shares(run, metrics):
        query = printable(" ".join(part.splits["validation"][0]["captions"][0].split()[:_WORDS])).lstrip("-")
        has_test = "test" in part.splits
        if own.output_dir == folder:
            flags = {"has_test": has_test, "has_fusion": model.fusion is not None}
            commands += commands_after_training(folder, own.settings, **flags, query=query)
        else:
            command = evaluation_command(own.output_dir, own.settings, "test" if has_test else "validation")
            commands += [*filter(None, [command]), *search_commands(own.output_dir, own.settings, query)]
    return [*lines, *_listing(folder, contents, pushed), "", "Next:", *(f"  {command}" for command in commands)]


def _recalls(metrics: dict[str, float], medium: str) -> list[str]:
    lines = []
    for direction, name in DIRECTIONS.items():
        for prefix, label in MEASURED.items():
            recalls = [metrics.get(f"{prefix}{direction}_recall@{k}") for k in (1, 5, 10)]
            if None not in recalls:
                title = f"  {name.replace('image', medium)}, {label}:"
                lines.append(f"{title:<48}R@1 {recalls[0]:.3f}   R@5 {recalls[1]:.3f}   R@10 {recalls[2]:.3f}")
    if "eval_text_to_image_chance@1" in metrics:
        lines.append(f"  {f'text to {medium}, by chance:':<46}R@1 {metrics['eval_text_to_image_chance@1']:.3f}")
    return lines


def _classification_summary(
    run: Run,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    metrics: dict[str, float],
    pushed: str | None,
) -> list[str]:
    lines = ["", f"{len(task.classes)} classes, predicted from {classifier_input(model)}:"]
    for split, prefix in (("validation", "eval_"), ("test", "test_")):
        found = {name.removeprefix(prefix): value for name, value in metrics.items() if name.startswith(prefix)}
        if "accuracy" in found:
            line = f"  {split:<12}accuracy {found['accuracy']:.3f} ({found['accuracy_low']:.3f} to "
            line += f"{found['accuracy_high']:.3f})   macro F1 {found['macro_f1']:.3f}"
            if "roc_auc" in found:
                line += f"   ROC AUC {found['roc_auc']:.3f}"
            lines.append(f"{line}   most frequent class {found['majority']:.3f}")
    lines += _choices(run, metrics)
    contents = {
        "model.safetensors": "the model, with config.json and its processor",
        "README.md": "the model card, with code to use the model",
        "training.png": "curves",
        "confusion.png": "which classes are mistaken for which",
        "classes.csv": "recall and precision of every class",
        "wise_ft.png": "weights between the start and the end",
        "results.json": "the metrics above",
        "config.yaml": "the arguments, to run it again",
    }
    longer = longer_command(run.name, run.output_dir, run.settings)
    return [*lines, *_listing(run.output_dir, contents, pushed), "", "Next:", f"  {longer}"]


def _choices(run: Run, metrics: dict[str, float], model: FusionDualEncoderModel | None = None) -> list[str]:
    alpha, sentence = metrics.get("eval_wise_ft_alpha"), chosen_on_validation(run, metrics, model)
    lines = [] if alpha is None else [f"  saved with alpha {alpha:g} between the start and the end"]
    return [*lines, f"  {sentence.rstrip()}"] if sentence else lines


def _listing(folder: Path, contents: dict[str, str], pushed: str | None) -> list[str]:
    """Return lines that name the folder, what exists in it, and the Hub's repository."""
    lines = ["", f"Everything is in {folder}:"]
    lines += [f"  {name:<20}{text}" for name, text in contents.items() if (folder / name).exists()]
    return [*lines, f"  pushed to {pushed}"] if pushed else lines
