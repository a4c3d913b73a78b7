"""Collect what the model card of a run says."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from mm_utils.data.tasks import LabelledTask
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.evaluation.metrics import CUTOFFS
from mm_utils.evaluation.reranking import describe_weights, stored_weights
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderForClassification, FusionDualEncoderModel
from mm_utils.reports.model_card import CardInfo
from mm_utils.run.commands import SOURCES, own_command
from mm_utils.run.restarts import device_name
from mm_utils.run.start import Run

DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}
MEASURED = {"eval_": "encoders alone", "eval_rerank_": "re-ranked by the fusion head"}
CLASSIFIER_INPUTS = {
    "fused": "the fusion head's [CLS] on an image and a text",
    "pair": "the embeddings of an image and a text, side by side",
    "image": "the embedding of an image",
    "text": "the embedding of a text",
}


def retrieval_card(
    run: Run,
    model: FusionDualEncoderModel,
    data: TrainingData,
    split: Embeddings | None,
    metrics: dict[str, float],
    argv: Sequence[str] | None,
) -> CardInfo:
    """Return the card of a pre-trained model; `split` are the embeddings of the last evaluation."""
    whole = run.settings.get("model_name_or_path")
    bases = [whole or run.settings.get(f"{tower}_model_name_or_path") for tower in ("vision", "text")]
    towers = (model.vision_model.config.model_type, model.text_model.config.model_type)
    vision, text = (base or f"{tower}, from scratch" for base, tower in zip(bases, towers, strict=True))
    rows: list[list[str]] = []
    for direction, name in DIRECTIONS.items():
        for prefix, label in MEASURED.items():
            recalls = [metrics.get(f"{prefix}{direction}_recall@{k}") for k in CUTOFFS]
            if None not in recalls:
                rows.append([f"{name}, {label}", *(f"{recall:.3f}" for recall in recalls)])
        if split is not None:
            rows.append([f"{name}, by chance", *(f"{chance(split, direction, k):.3f}" for k in CUTOFFS)])
    images = len(data.splits["validation"])
    return _card(
        run,
        model,
        metrics,
        argv,
        table=(["recall among the first", *map(str, CUTOFFS)], rows),
        table_note=f"Measured on the {images:,} images of the validation split and their captions. "
        f"{describe_weights(model)}".rstrip(),
        vision_model=vision,
        text_model=text,
        dataset_name=next((run.settings[name] for name in SOURCES if run.settings.get(name)), "The embedded scenes"),
        dataset_rows={"train": data.num_rows, **{name: len(rows) for name, rows in data.splits.items()}},
        dataset_fingerprint=data.fingerprint,
        has_fusion=model.fusion is not None and bool(stored_weights(model)),
        dual_encoder=_class_in(run.output_dir / "dual_encoder"),
        base_models=[base for base in dict.fromkeys(bases) if base and not Path(base).exists()],
    )


def _class_in(folder: Path) -> str:
    """Return the name of the class whose model a folder holds; empty if there is no such folder."""
    return AutoConfig.from_pretrained(folder).architectures[0] if folder.is_dir() else ""


def chance(split: Embeddings, direction: str, k: int) -> float:
    """Return the recall at k of items in random order: the mean share of queries with a right one among the first k."""
    images, texts = len(split.image_key_M), len(split.caption_key_T)
    if direction == "text_to_image":
        return min(1.0, k / images)
    counts = split.caption_key_T.unique(return_counts=True)[1].tolist()
    return (
        sum(1 - math.comb(texts - count, k) / math.comb(texts, k) for count in counts) / len(counts)
        if texts > k
        else 1.0
    )


def classification_card(
    run: Run,
    model: FusionDualEncoderForClassification,
    task: LabelledTask,
    fingerprint: str,
    metrics: dict[str, float],
    argv: Sequence[str] | None,
) -> CardInfo:
    """Return the card of a fine-tuned model."""
    inputs, start = model.config.classifier_inputs, str(run.settings["model_name_or_path"])
    rows = []
    for split, prefix in (("validation", "eval_"), ("test", "test_")):
        if f"{prefix}accuracy" in metrics:
            accuracy, low, high, f1, majority = (
                f"{metrics[prefix + name]:.3f}"
                for name in ("accuracy", "accuracy_low", "accuracy_high", "macro_f1", "majority")
            )
            rows.append([split, accuracy, f"{low} to {high}", f1, majority])
    return _card(
        run,
        model,
        metrics,
        argv,
        table=(["split", "accuracy", "95 % interval", "macro F1", "always the most frequent class"], rows),
        vision_model=model.vision_model.config.model_type,
        text_model=model.text_model.config.model_type,
        dataset_name=task.title.rpartition(" is ")[2],
        dataset_rows={name: len(split) for name, split in task.splits.items()},
        dataset_fingerprint=fingerprint,
        base_models=[start] if not Path(start).exists() else [],
        # The other inputs have no pipeline that reads them with this class.
        pipeline_tag="text-classification" if inputs == "text" else None,
        tags=("classification", "dual-encoder"),
        summary=f"It classifies into {len(task.classes)} classes by {CLASSIFIER_INPUTS[inputs]}.",
        classifier_inputs=inputs,
    )


def _card(
    run: Run, model: FusionDualEncoderModel, metrics: dict[str, float], argv: Sequence[str] | None, **values: Any
) -> CardInfo:
    return CardInfo(
        name=run.output_dir.resolve().name,
        model=run.pusher.repo_id if run.pusher.args.push_to_hub else str(run.output_dir.resolve()),
        num_parameters=sum(parameter.numel() for parameter in model.parameters()),
        command=own_command(run.name, argv),
        metrics=metrics,
        hyperparameters={name: value for name, value in run.settings.items() if value is not None},
        hardware=device_name(run.accelerator.device),
        precision=run.accelerator.mixed_precision,
        num_processes=run.accelerator.num_processes,
        **values,
    )
