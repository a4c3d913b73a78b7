"""The flags of the scripts that train, and the rules between them."""

from pathlib import Path

from mm_utils.arguments import Parsed, read_flat_yaml
from mm_utils.checkpointing.files import checkpoint_folders
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments
from mm_utils.objectives import ObjectiveArguments
from mm_utils.run.checks import check_model
from mm_utils.run.start import RunArguments
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments

__all__ = [
    *(
        "DataArguments",
        "EvaluationArguments",
        "LoaderArguments",
        "LoraArguments",
        "ModelArguments",
        "ObjectiveArguments",
    ),
    *("OptimizerArguments", "RunArguments", "TrainingArguments"),
]

OF_NEW_MODELS = (
    *(
        "vision_model_name_or_path",
        "text_model_name_or_path",
        "vision_config",
        "text_config",
        "tokenizer_name_or_path",
    ),
    *("vocab_size", "image_size", "projection_dim", "vision_pooling", "text_pooling"),
)
"""Flags of a model that is built: a whole one has them in its configuration."""

PRETRAINING = (
    *(DataArguments, LoaderArguments, ModelArguments, LoraArguments, ObjectiveArguments),
    *(OptimizerArguments, TrainingArguments, EvaluationArguments, RunArguments),
)


def check_flags(given: Parsed) -> None:
    """Check the flags of a run against each other, before anything is read or written.

    Raises:
        ValueError: if one of them would have no effect, or two contradict each other.
    """
    check_model(given["model_name_or_path"])
    if given.config and given["resume_from_checkpoint"]:
        _check_place(Path(given.config), given["output_dir"])
    if given["model_name_or_path"] is not None and given["fusion_layers"] is not None:
        for name in OF_NEW_MODELS:
            if given[name] != getattr(ModelArguments, name):
                raise ValueError(
                    f"--{name} is {given[name]}, and --model_name_or_path is {given['model_name_or_path']}; a whole model has its "
                    "own, and the flag would change nothing. Drop one of the two."
                )
    if given["objectives"] is not None:
        given[ObjectiveArguments].check(given.settings)


def _check_place(config: Path, output_dir: str | None) -> None:
    """Refuse to resume a run that was moved or copied in its old place, which its own `config.yaml` still names."""
    entry, place = read_flat_yaml(str(config)).get("output_dir"), config.resolve().parent
    moved = entry is not None and entry.value == output_dir and Path(str(output_dir)).resolve() != place
    if moved and checkpoint_folders(place):
        raise ValueError(
            f"--output_dir is {output_dir}, as {config} has it; the checkpoints of that run are in {place}, so it was moved or "
            f"copied. Add --output_dir {place} to go on with it there."
        )
