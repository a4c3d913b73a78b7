"""The rules between the flags of the scripts that train."""

from pathlib import Path

from mm_utils.arguments import Parsed, read_flat_yaml
from mm_utils.checkpointing.files import checkpoint_folders
from mm_utils.data.paths import shard_kind
from mm_utils.data.prepare.on_disk import is_prepared
from mm_utils.hub import check_repository
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.model.build import check_model
from mm_utils.objectives.build import check_terms, term_class
from mm_utils.training.teacher import FLAG
from mm_utils.training.trackers import tracker_names


def check_flags(given: Parsed) -> None:
    """Check the flags of a run against each other, before anything is read or written.

    Raises:
        ValueError: if one of them would have no effect, or two contradict each other.
    """
    whole = given["model_name_or_path"]
    vision = given["vision_model_name_or_path"]
    text = given["text_model_name_or_path"]
    if whole is not None:
        fusion_layers = getattr(check_model(whole), "fusion_layers", None)
        if given["objectives"] is not None and not (vision or text) and fusion_layers == 0:
            given.default(objectives="contrastive:1", fusion_layers=0)
    if given.config and given["resume_from_checkpoint"]:
        _check_place(Path(given.config), given["output_dir"])
    if vision:
        given.refuse("vision_config", "the vision backbone is a pretrained one")
    if text:
        given.refuse("text_config vocab_size", "the text backbone is a pretrained one")
    if given["fusion_layers"] == 0:
        given.refuse("rerank_top_k", "--fusion_layers is 0")
    if given["eval_steps"] == 0 and not given["wise_ft"]:
        given.refuse("metric_for_best_model", "--eval_steps is 0, so that no evaluation chooses")
    _check_features(given)
    _check_start(given)
    _check_reports(given)
    if given["objectives"] is not None:
        return _check_pairs(given)
    given.refuse("head_share", "no term is for the fusion head")


def _check_pairs(given: Parsed) -> None:
    """Check what only pre-training has."""
    args = given[ObjectiveArguments]
    name = given["dataset_name"]
    file = given["train_file"]
    if not any(term_class(term).pairs_per_image for term in args.weights):
        given.refuse("head_share", "no term of --objectives is for the fusion head")
    if not (name or file):
        known = "the data are the embedded scenes, whose columns are known"
        given.refuse("image_column caption_column image_root allow_outside_root", known)
    elif name and is_prepared(name):
        given.refuse("image_column caption_column image_root", "the data are a prepared set, whose columns are known")
    elif file and shard_kind(file) == "tar":
        given.refuse("image_root allow_outside_root", "tar shards hold what their captions describe")
    check_terms(args, given.settings)
    teacher = args.teacher_name_or_path
    if teacher is not None and not teacher.startswith("st:"):
        check_model(teacher, FLAG)  # complains before the data are loaded


def _check_features(given: Parsed) -> None:
    if not given["cache_features"]:
        return
    if given["streaming"]:
        raise ValueError("--cache_features is set; a stream may be larger than the disk. Drop it, or --streaming.")
    if given["freeze_vision"]:
        given.refuse(
            "min_crop_area horizontal_flip", "--cache_features keeps what the vision tower makes of centre squares"
        )


def _check_start(given: Parsed) -> None:
    joins = given["vision_model_name_or_path"] and given["text_model_name_or_path"]
    starts = given["model_name_or_path"] or (joins and not given["streaming"])
    if given["wise_ft"] and not starts:
        raise ValueError(
            "--wise_ft is set; the run does not start from a model that could be forgotten. Give --model_name_or_path, or "
            "--vision_model_name_or_path and --text_model_name_or_path without --streaming, or drop --wise_ft."
        )


def _check_reports(given: Parsed) -> None:
    tracker_names(given["report_to"])
    if given["push_to_hub"]:
        check_repository(given["hub_model_id"])
    else:
        given.refuse("hub_model_id hub_strategy", "there is no --push_to_hub")


def _check_place(config: Path, output_dir: str | None) -> None:
    """Refuse to resume a run that was moved or copied in its old place, which its own `config.yaml` still names."""
    entry = read_flat_yaml(str(config)).get("output_dir")
    place = config.resolve().parent
    moved = entry is not None and entry.value == output_dir and Path(str(output_dir)).resolve() != place
    if moved and checkpoint_folders(place):
        raise ValueError(
            f"--output_dir is {output_dir}, as {config} has it; the checkpoints of that run are in {place}, so it was moved or "
            f"copied. Add --output_dir {place} to go on with it there."
        )
