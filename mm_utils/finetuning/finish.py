"""Finish a run that learnt classes: picture, table, model card, summary."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

from mm_utils.arguments import launch_command, to_words
from mm_utils.data.arguments import EvaluatedDataArguments
from mm_utils.data.rows.columns import too_few
from mm_utils.evaluation.recall_gain import BEFORE, Gain, read_log
from mm_utils.files import write_json
from mm_utils.finetuning.arguments import LabelArguments
from mm_utils.finetuning.evaluator import ClassificationEvaluator, report_classes
from mm_utils.finetuning.labels import LabelledTask
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification
from mm_utils.reports.model_card import EXAMPLES, CardInfo, an, quoted
from mm_utils.run.finish import (
    SOURCES,
    Trained,
    chosen_on_validation,
    closing_lines,
    describe_sizes,
    describe_towers,
    finish,
    run_card,
)
from mm_utils.text import markdown_text, sentence_case
from mm_utils.training.arguments import METRICS_FILE

logger = logging.getLogger(__name__)

_NAMED = 10  # classes, in a sentence
_INPUTS = {
    "fused": "the fusion head's [CLS] on an image and a text",
    "pair": "the embeddings of an image and a text, side by side",
    "image": "the embedding of an image",
}


def finish_finetuning(
    trained: Trained,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    evaluator: ClassificationEvaluator,
    argv: Sequence[str] | None,
) -> None:
    """Finish a fine-tuning: also write `classes.csv` of the last split that was measured, and `results.json`.

    `argv` are the arguments that `main` was called with, None for those of the command line.
    """

    def write(folder: Path) -> None:
        report_classes(evaluator.guesses, task.classes, folder)
        write_json(folder / "results.json", trained.metrics)

    gain = _accuracy_gained(trained)
    finish(
        trained,
        gain,
        write,
        card=lambda: classification_card(trained, model, task, argv),
        summary=lambda: _summary(trained, model, task, gain),
    )


def _accuracy_gained(trained: Trained) -> Gain | None:
    """Return what training gained by the accuracy on the validation split; None if it was not measured."""
    metrics = trained.metrics
    name = "eval_accuracy"
    if name not in metrics:
        return None
    low = metrics[f"{name}_low"]
    high = metrics[f"{name}_high"]
    starts, saved_step = read_log(trained.run.output_dir / METRICS_FILE, name)
    return Gain(
        figure="accuracy",
        metric=name,
        after=metrics[name],
        half=(high - low) / 2,
        interval=(low, high),
        floor_name="by always the most frequent class",
        floor=metrics["eval_majority"],
        starts=starts,
        saved_step=saved_step,
        start_name=BEFORE if starts else "",  # a new classifier knows nothing
    )


def classification_card(
    trained: Trained, model: FusionDualEncoderForClassification, task: LabelledTask, argv: Sequence[str] | None
) -> CardInfo:
    """Return the card of a fine-tuned model."""
    medium = model.config.medium
    what = f"It classifies into {markdown_text(named_classes(task))} by {classifier_input(model)}."
    text = task.splits["validation"]["captions"][0][0] if task.has_texts else None
    return run_card(
        trained,
        argv,
        about=f"{what} {describe_towers(trained, model)}: {describe_sizes(trained, model)}.",
        usage=usage(trained.name, medium, model.config.classifier_inputs, text),
        medium=medium,
        table=(
            ["split", "accuracy", "95 % interval", "macro F1", "always the most frequent class"],
            _rows(trained.metrics),
        ),
        table_note=chosen_on_validation(trained),
        dataset_rows={name: len(split) for name, split in task.splits.items()},
        dataset_fingerprint=trained.data.fingerprint,
        tags=("classification", "dual-encoder"),
        limits="Its probabilities are not calibrated: of its answers at 0.9, more or fewer than nine in ten may be right.",
        pipeline_tag=None,  # no pipeline reads such inputs with this class
    )


def _rows(metrics: Mapping[str, float]) -> list[list[str]]:
    """Return each split with its accuracy, the interval of that, macro F1 and the share of the most frequent class."""
    rows = []
    for split, prefix in (("validation", "eval_"), ("test", "test_")):
        if f"{prefix}accuracy" in metrics:
            names = ("accuracy", "accuracy_low", "accuracy_high", "macro_f1", "majority")
            accuracy, low, high, f1, majority = [f"{metrics[prefix + name]:.3f}" for name in names]
            rows.append([split, accuracy, f"{low} to {high}", f1, majority])
    return rows


def named_classes(task: LabelledTask) -> str:
    """Return how many classes there are, and the names of some."""
    shown = ", ".join(task.classes[:_NAMED])
    return f"{len(task.classes)} classes ({shown}{', ...' if len(task.classes) > _NAMED else ''})"


def usage(name: str, medium: str, inputs: str, text: str | None = None) -> str:
    """Return code that classifies and runs as pasted, in any folder; `text` is one of those that it was trained on."""
    media, files = EXAMPLES[medium]
    texts = "" if inputs == "image" else f", [{quoted(text or 'a text')}] * len({media})"
    return f"""\
from pathlib import Path

from transformers import AutoModelForSequenceClassification

folder = {quoted(name)}  # where this card lies, or a name of the Hub
model = AutoModelForSequenceClassification.from_pretrained(folder, trust_remote_code=True)

# Take your own {media}{", and a text for each" if texts else ""}.
{media} = sorted(Path("my_{media}").glob("{files}"))
for share in model.predict({media}{texts}):
    print(f"{{share.max():.3f}}  {{model.config.id2label[share.argmax().item()]}}")"""


def classifier_input(model: FusionDualEncoderForClassification) -> str:
    """Return in words what the classifier reads."""
    return _INPUTS[model.config.classifier_inputs].replace("an image", an(model.config.medium))


def _summary(
    trained: Trained, model: FusionDualEncoderForClassification, task: LabelledTask, gain: Gain | None
) -> list[str]:
    run = trained.run
    lines = ["", f"{named_classes(task)}, predicted from {classifier_input(model)}:"]
    for split, accuracy, interval, f1, majority in _rows(trained.metrics):
        shown = f"accuracy {accuracy} ({interval})   macro F1 {f1}   most frequent class {majority}"
        lines.append(f"  {split:<12}{shown}")
    commands = []
    if gain:
        few = too_few(len(task.splits["validation"]), "row", figure="accuracy")
        lines.append(f"  {few or sentence_case(gain.sentence)}")
    if model.config.classifier_inputs == "image" and any(run.settings[name] for name in SOURCES):
        # What the start does without training.
        words = ["--model_name_or_path", str(run.settings["model_name_or_path"])]
        words += to_words(EvaluatedDataArguments, run.settings, ["max_train_samples", "caption_column"])
        words += [*to_words(LabelArguments, run.settings), "--split", "validation"]
        commands.append(launch_command("eval_zero_shot", words))
        new = f"FOLDER_OF_NEW_{model.config.medium.upper()}S"
        words = ["--model_name_or_path", str(run.output_dir), "--images", new]
        commands.append(launch_command("embed", [*words, "--output_file", f"{run.output_dir}-classes.csv"]))
    return [*lines, *closing_lines(trained, commands)]
