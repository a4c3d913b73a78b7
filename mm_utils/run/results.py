"""Put what was measured of a trained model into the card of its folder."""

import logging
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from huggingface_hub import EvalResult, ModelCard
from yaml import YAMLError

from mm_utils.data.media import COLUMNS
from mm_utils.data.rows.columns import SPLIT_NAMES
from mm_utils.evaluation.embeddings import Embeddings
from mm_utils.files import write_atomic
from mm_utils.reports.model_card import RETRIEVAL_TAGS, STAGES, EvaluatedData, data_names, retrieval_results
from mm_utils.run.finish import EMBEDDED
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

ACCURACIES = {"accuracy@1": "accuracy", "macro_accuracy@1": "mean accuracy of the classes", "accuracy@5": "accuracy@5"}


def record_retrieval(
    accelerator: Accelerator,
    folder: str,
    settings: Mapping[str, Any],
    split_name: str,
    split: Embeddings | None,
    metrics: Mapping[str, float],
    medium: str,
) -> None:
    """Put an evaluation, of the data that `settings` name, into the card of a folder that a run wrote."""
    if split is not None:
        counts = {f"{medium}s": len(split.image_key_M), "captions": len(split.caption_key_T)}
        data = EvaluatedData(*data_names(settings, EMBEDDED), split_name, counts, medium)
        _record(accelerator, folder, data, retrieval_results(metrics, data))


def record_zero_shot(accelerator: Accelerator, folder: str, data: EvaluatedData, metrics: Mapping[str, float]) -> None:
    """Put the accuracies of zero-shot classification into the card of a folder that a run wrote."""
    task = f"zero-shot-{COLUMNS[data.medium]}-classification"
    results = [
        data.result(task, "accuracy", metrics[name], f"{title}, {STAGES['']}")
        for name, title in ACCURACIES.items()
        if name in metrics
    ]
    _record(accelerator, folder, data, results)


def _record(accelerator: Accelerator, folder: str, data: EvaluatedData, results: Sequence[EvalResult]) -> None:
    if not accelerator.is_main_process:
        return
    if SPLIT_NAMES.get(data.split.lower()) == "train":
        logger.warning(
            "The split is %s; of a model that was trained on these rows, the figures say nothing about others, so they do not enter "
            "its card. Set --split, or name other data.",
            data.split,
        )
    elif update_results(Path(folder), results):
        logger.info("%s/README.md: its model-index now has these figures of %s, %s", folder, data.name, data.split)


def update_results(folder: Path, results: Sequence[EvalResult]) -> bool:
    """Replace a card's results on the same data; return whether that was done.

    A folder without a card stays as it is, and so does a card that is read-only or that no run of this project wrote.
    """
    path = folder / "README.md"
    try:
        if not path.is_file() or not path.stat().st_mode & stat.S_IWUSR:
            return False
        card = ModelCard.load(path)
        if not set(RETRIEVAL_TAGS) <= set(card.data.tags or ()):
            return False
        measured = {result.unique_identifier for result in results}
        others = [each for each in card.data.eval_results or [] if each.unique_identifier not in measured]
        card.data.model_name = card.data.model_name or folder.resolve().name
        card.data.eval_results = [*others, *results]
        write_atomic(path, str(card))
    except (OSError, ValueError, YAMLError) as error:
        logger.warning("The card %s was left as it is: %s", path, one_line(error))
        return False
    return True
