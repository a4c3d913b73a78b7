"""What a run on several media builds, writes and says for each of them."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from mm_utils.checkpointing.state import write_model
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.retrieval import RetrievalEvaluator
from mm_utils.evaluation.retrieval_report import draw_examples, report_sizes
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.modeling_fusion_dual_encoder import (
    MEDIA_FOLDER,
    FusionDualEncoderConfig,
    FusionDualEncoderModel,
)
from mm_utils.run.start import Run


def build_media(
    args: ModelArguments,
    tokenizer: PreTrainedTokenizerBase,
    lora_args: LoraArguments | None = None,
    media: Sequence[str] = ("image",),
    resume_from: Path | None = None,
) -> FusionDualEncoderModel:
    """Build the model of one medium, or several with a tower each; see `build_model`.

    Args:
        resume_from: the checkpoint whose weights it will get, if any: its pooling of sounds is kept under `--vision_pooling
            auto`, which was the pooler for towers from scratch before there was `timed`.
    """
    if len(media) == 1:
        return build_model(_with_pooling(args, media[0], resume_from), tokenizer, lora_args, media[0])
    models = []
    for at, medium in enumerate(media):
        own = args.of(at)
        own = replace(own, image_size=None) if medium == "sound" else own
        models.append(build_model(_with_pooling(own, medium, resume_from), tokenizer, lora_args, medium))
    model, *others = models
    for other in others:
        model.add_medium(other)
    return model


def _with_pooling(args: ModelArguments, medium: str, resume_from: Path | None) -> ModelArguments:
    """Return the arguments with a checkpoint's pooling of sounds, where none is asked for."""
    if resume_from is None or medium != "sound" or args.vision_pooling != "auto":
        return args
    config = FusionDualEncoderConfig.from_pretrained(resume_from)
    pooling = (config.media or {}).get(medium, {}).get("vision_pooling", config.vision_pooling)
    return args if pooling == "timed" else replace(args, vision_pooling=pooling)  # which no flag says


def write_medium(
    run: Run, saved: FusionDualEncoderModel, data: TrainingData, medium: str, evaluator: RetrievalEvaluator
) -> Run:
    """Write a medium's pictures and, but for the first, its model; return its run (`of_medium`).

    Args:
        run: the run.
        saved: the saved model.
        data: the data of the run.
        medium: the medium.
        evaluator: holds its last evaluation.
    """
    own, part = of_medium(run, data, medium), data.media[medium]
    if medium != data.medium:
        write_model(own.output_dir, saved.of(medium), part.processor)
    if evaluator.split is not None:
        draw_examples(part.splits["validation"], evaluator, own.output_dir / "retrieval.png")
    report_sizes(run.accelerator, evaluator.split, own.output_dir)
    return own


def of_medium(run: Run, data: TrainingData, medium: str) -> Run:
    """Return the run as if it were on one medium: its folder and its data set are that medium's."""
    if len(data.media) == 1:
        return run
    folder = run.output_dir if medium == data.medium else run.output_dir / MEDIA_FOLDER / medium
    towers = (run.settings["vision_model_name_or_path"] or "").split(",")
    tower = towers[list(data.media).index(medium) % len(towers)].strip() or None
    own = {"dataset_name": data.media[medium].name, "vision_model_name_or_path": tower}
    return replace(run, output_dir=folder, settings={**run.settings, **own})


def metrics_of(metrics: dict[str, float], data: TrainingData, medium: str) -> dict[str, float]:
    """Return the metrics of one medium, named as in a run on it alone."""
    if len(data.media) == 1:
        return metrics
    prefix = f"eval_{medium}_"
    own = {f"eval_{name.removeprefix(prefix)}": value for name, value in metrics.items() if name.startswith(prefix)}
    return own | {name: value for name, value in metrics.items() if name.startswith("eval_between_")}


def note_of_others(data: TrainingData, medium: str) -> str:
    """Return what the card of one medium says of the others; empty if there are none."""
    others = " and ".join(f"{other}s" for other in data.media if other != medium)
    where = f"`{MEDIA_FOLDER}/`" if medium == data.medium else "the folder above"
    return f" The same run trained a tower for {others}, on this text encoder: see {where}." if others else ""
