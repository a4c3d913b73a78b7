"""The flags of the scripts that train, and the rules between them."""

from pathlib import Path
from typing import Any

from mm_utils.arguments import Parsed, read_flat_yaml
from mm_utils.checkpointing.files import checkpoint_folders
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.paths import shard_kind
from mm_utils.data.prepare.on_disk import is_prepared
from mm_utils.data.rows.source import COLUMNS, DataArguments, is_embedded
from mm_utils.data.streams.stream import StreamingArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.checks import check_model
from mm_utils.objectives.build import ObjectiveArguments, term_class
from mm_utils.run.start import RunArguments
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments

PRETRAINING = (
    *(DataArguments, LoaderArguments, ModelArguments, LoraArguments, ObjectiveArguments),
    *(OptimizerArguments, TrainingArguments, EvaluationArguments, RunArguments, StreamingArguments),
)


def unread(given: Parsed) -> list[tuple[str, Any, str]]:
    """Return names of flags, whether the run leaves these unread, and why."""
    vision, text = given["vision_model_name_or_path"], given["text_model_name_or_path"]
    head, pairs = given["fusion_layers"] != 0, given["objectives"] is not None
    prepared = pairs and given["dataset_name"] and is_prepared(given["dataset_name"])
    tars = pairs and given["train_file"] and shard_kind(given["train_file"]) == "tar"
    others = any((given["model_name_or_path"], vision, text))
    trial = given.is_trial  # it turns off what reads them, by flags behind the user's
    return [
        ("vision_config", vision, "the vision backbone is a pretrained one"),
        ("text_config", text, "the text backbone is a pretrained one"),
        ("fusion_taps rerank_top_k", not head, "--fusion_layers is 0"),
        ("head_share", not _trains_head(given), "no term of --objectives is for the fusion head"),
        (
            f"{COLUMNS} allow_outside_root",
            pairs and _is_embedded(given),
            "the data are an embedded set, whose columns are known",
        ),
        ("image_root allow_outside_root", tars, "tar shards hold what their captions describe"),
        (COLUMNS, prepared, "the data are a prepared set, whose columns are known"),
        ("trust_remote_code", not others, "nothing of others is loaded"),
        (
            "metric_for_best_model",
            given["eval_steps"] == 0 and not given["wise_ft"] and not trial,
            "--eval_steps is 0, so that no evaluation chooses",
        ),
    ]


def check_flags(given: Parsed) -> None:
    """Check the flags of a run against each other, before anything is read or written.

    Raises:
        ValueError: if one of them would have no effect, or two contradict each other.
    """
    if given["model_name_or_path"] is not None:
        check_model(given["model_name_or_path"])
    if given.config and given["resume_from_checkpoint"]:
        _check_place(Path(given.config), given["output_dir"])
    for names, is_unread, reason in unread(given):
        if is_unread:
            given.refuse(names, reason)
    if given["objectives"] is not None:
        given[ObjectiveArguments].check(given.settings)


def _trains_head(given: Parsed) -> bool:
    weights = {} if given["objectives"] is None else given[ObjectiveArguments].weights
    return any(term_class(name).pairs_per_image for name in weights)


def _is_embedded(given: Parsed) -> bool:
    sources = [given[name] for name in ("dataset_name", "train_file") if given[name]]
    return not sources or is_embedded(sources[0])


def _check_place(config: Path, output_dir: str | None) -> None:
    """Refuse to resume a run that was moved or copied in its old place, which its own `config.yaml` still names."""
    entry, place = read_flat_yaml(str(config)).get("output_dir"), config.resolve().parent
    moved = entry is not None and entry.value == output_dir and Path(str(output_dir)).resolve() != place
    if moved and checkpoint_folders(place):
        raise ValueError(
            f"--output_dir is {output_dir}, as {config} has it; the checkpoints of that run are in {place}, so it was moved or "
            f"copied. Add --output_dir {place} to go on with it there."
        )
