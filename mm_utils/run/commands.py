"""Build the commands that a run prints and writes, quoted for a shell."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mm_utils.arguments import launch_command, launcher, to_words
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.paths import shard_kind
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.training.arguments import CONFIG_FILE

SOURCES = ("dataset_name", "train_file")
PRETRAINED = {"vision": "google/mobilenet_v2_1.0_224", "text": "sentence-transformers/all-MiniLM-L6-v2"}


def own_command(script: str, argv: Sequence[str] | None) -> str:
    """Return this run's command; `argv` was given to `main`, None for the process's own."""
    return launch_command(script, sys.argv[1:] if argv is None else argv, launcher())


def again_command(script: str, folder: Path) -> str:
    """Return the command that repeats the run of this output folder, in another folder."""
    words = ["--config", str(folder / CONFIG_FILE), "--output_dir", _beside(folder, "again")]
    return launch_command(script, words, launcher())


def longer_command(script: str, folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the command that repeats a folder's run for twice as long, in another one."""
    name = "max_steps" if settings["max_steps"] > 0 else "num_train_epochs"
    words = ["--config", str(folder / CONFIG_FILE), "--output_dir", _beside(folder, "longer")]
    return launch_command(script, [*words, f"--{name}", f"{2 * settings[name]:.10g}"], launcher())


def pretrained_command(folder: Path, settings: Mapping[str, Any]) -> str:
    """Return the command that trains on the same pairs between frozen pretrained encoders, in another folder."""
    words = to_words(DataArguments, settings)
    encoders = [word for tower, name in PRETRAINED.items() for word in (f"--{tower}_model_name_or_path", name)]
    return launch_command(
        "pretrain",
        [*words, *encoders, "--freeze_vision", "--freeze_text", "--output_dir", _beside(folder, "pretrained")],
        launcher(),
    )


def commands_after_training(
    folder: Path,
    settings: Mapping[str, Any],
    *,
    has_test: bool,
    has_fusion: bool,
    rises: bool,
    wants_pretrained: bool,
    query: str,
) -> list[str]:
    """Return what to try after pre-training: the test split, another start or a longer run, a task, a search.

    Args:
        rises: whether training gained something, and its last evaluation was the best one.
        wants_pretrained: whether encoders that started from scratch learnt nothing.
    """
    named = any(settings.get(name) for name in SOURCES)
    commands = [evaluation_command(folder, settings, "test") if has_test else None]
    if wants_pretrained and named:
        commands.append(pretrained_command(folder, settings))
    elif rises:
        commands.append(longer_command("pretrain", folder, settings))
    if has_fusion and not named:
        commands.append(launch_command("finetune", ["--model_name_or_path", str(folder)]))
    return [*filter(None, commands), *search_commands(folder, settings, query)]


def search_commands(folder: Path, settings: Mapping[str, Any], query: str) -> list[str]:
    """Return what embeds and searches the images of the run's data; of streams, those of tar shards alone."""
    index = _beside(folder, "index")
    data = to_words(DataArguments, settings, ["max_train_samples", "max_eval_samples"])
    if settings.get("streaming"):
        shards = str(settings.get("train_file"))
        if not shards.lower().endswith(".tar"):
            return []
        data = ["--images", shards]
    words = ["--model_name_or_path", str(folder), *data, "--index_dir", index]
    found = ["--index_dir", index, "--query", query]
    return [launch_command("embed", words), launch_command("search", found, launcher="python")]


def evaluation_command(folder: Path, settings: Mapping[str, Any], split: str) -> str | None:
    """Return what measures retrieval on a split; None if only training can read the data.

    Args:
        folder: the run's output folder.
        settings: the run's arguments, by name.
        split: the name of the split.
    """
    without = ["max_train_samples"]
    if settings.get("streaming"):  # the validation rows of shards are held out of the stream
        file = settings.get("validation_file")
        if not file or shard_kind(file) is not None:
            return None
        without += ["train_file", "dataset_name"]
    words = ["--model_name_or_path", str(folder), *to_words(DataArguments, settings, without)]
    if settings["max_seq_length"] != LoaderArguments.max_seq_length:
        words += ["--max_seq_length", str(settings["max_seq_length"])]
    words += to_words(EvaluationArguments, settings, ["rerank_top_k"])
    return launch_command("eval_retrieval", [*words, "--split", split])


def _beside(folder: Path, word: str) -> str:
    """Return the path of a folder beside this one, such as `outputs/mine-longer`."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    return f"{folder}-{word}"
