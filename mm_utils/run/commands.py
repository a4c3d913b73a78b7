"""Build the commands that a run prints and writes, quoted for a shell."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mm_utils.arguments import launch_command, to_words
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.training.arguments import CONFIG_FILE

SOURCES = ("dataset_name", "train_file")


def again_command(script: str, folder: Path) -> str:
    """Return the command that repeats the run of this output folder, in another folder."""
    return launch_command(script, ["--config", str(folder / CONFIG_FILE), "--output_dir", _beside(folder, "again")])


def search_commands(folder: Path, settings: Mapping[str, Any], query: str) -> list[str]:
    """Return what embeds and searches the images of the run's data, unless they were streamed."""
    if settings.get("streaming"):
        return []
    index = _beside(folder, "index")
    data = to_words(DataArguments, settings, ["max_train_samples", "max_eval_samples"])
    words = ["--model_name_or_path", str(folder), *data, "--index_dir", index]
    found = ["--index_dir", index, "--query", query]
    return [launch_command("embed", words), launch_command("search", found, "python")]


def evaluation_command(folder: Path, settings: Mapping[str, Any], split: str) -> str | None:
    """Return what measures retrieval on a split of a run's data; None of a stream, which training alone reads."""
    if settings.get("streaming"):
        return None
    words = ["--model_name_or_path", str(folder), *to_words(DataArguments, settings, ["max_train_samples"])]
    if settings["max_seq_length"] != LoaderArguments.max_seq_length:
        words += ["--max_seq_length", str(settings["max_seq_length"])]
    words += to_words(EvaluationArguments, settings, ["rerank_top_k"])
    return launch_command("eval_retrieval", [*words, "--split", split])


def _beside(folder: Path, word: str) -> str:
    """Return the path of a folder beside this one, such as `outputs/mine-again`."""
    folder = folder if folder.name not in ("", "..") else folder.resolve()
    return f"{folder}-{word}"
