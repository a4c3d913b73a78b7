"""Evaluation results in a model card's `model-index`, of which the Hub makes a table."""

import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import EvalResult

from mm_utils.data.media import COLUMNS
from mm_utils.data.rows.source import is_embedded
from mm_utils.text import printable, publishable

logger = logging.getLogger(__name__)

RETRIEVAL_TAGS = ("dual-encoder", "contrastive-learning")
DIRECTIONS = {"text_to_image": "text to image", "image_to_text": "image to text"}
STAGES = {"": "the two encoders", "rerank_": "re-ranked by the fusion head"}
MEASURES = ("recall@1", "recall@5", "recall@10", "ndcg@10", "mrr@10")


class EvaluatedData(NamedTuple):
    """What a model was measured on.

    Attributes:
        name: for people.
        repository: the data set of the Hub, or a word of its own where it is none: by it the Hub tells data sets apart.
        split: train, validation or test.
        counts: what was measured, by name, such as the number of images.
        medium: the kind of media, of `mm_utils.data.media.COLUMNS`.
    """

    name: str
    repository: str
    split: str
    counts: Mapping[str, int]
    medium: str = "image"

    def result(self, task: str, measure: str, value: float, title: str) -> EvalResult:
        """Return a figure, under a title."""
        name, repository = (" ".join(printable(publishable(text)).split()) for text in (self.name, self.repository))
        return EvalResult(
            task_type=task,
            dataset_type=repository,
            dataset_name=name,
            dataset_split=self.split,
            dataset_args=dict(self.counts),
            metric_type=measure,
            metric_value=round(value, 4),
            metric_name=title,
        )


def data_names(settings: Mapping[str, Any], embedded: str) -> tuple[str, str]:
    """Return name and repository of the named data, `embedded` where none is named.

    A path is shortened to its last two parts.
    """
    flags = ("dataset_name", "train_file", "dataset_dir", "validation_file", "test_file")
    given = next((settings[flag] for flag in flags if settings.get(flag)), None)
    if given is None:
        return embedded, f"embedded-{_slug(embedded)}"
    if is_embedded(given):
        return f"The embedded {given}", f"embedded-{given}"
    if given == settings.get("dataset_name") and is_on_hub(given):
        return given, given
    name = "/".join(Path(given).parts[-2:])
    return name, f"local-{_slug(name)}"


def is_on_hub(dataset_name: str) -> bool:
    """Return whether --dataset_name means a data set on the Hub."""
    return not is_embedded(dataset_name) and not Path(dataset_name).exists()


def _slug(name: str) -> str:
    return re.sub(r"[^A-Za-z0-9._]+", "-", name).strip("-").lower()


def retrieval_results(metrics: Mapping[str, float], data: EvaluatedData, prefix: str = "") -> list[EvalResult]:
    """Return both directions' recall, nDCG, MRR, and re-ranked ones, named by `prefix`."""
    return [
        data.result(
            f"{COLUMNS[data.medium]}-text-retrieval",
            measure,
            metrics[name],
            f"{measure}, {title.replace('image', data.medium)}, {STAGES[stage]}",
        )
        for direction, title in DIRECTIONS.items()
        for stage in STAGES
        for measure in MEASURES
        if (name := f"{prefix}{stage}{direction}_{measure}") in metrics
    ]
