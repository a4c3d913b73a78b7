"""The flags of a run on several media, and what such a run refuses."""

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm_utils.arguments import arg
from mm_utils.data.training_data import TrainingData

_TERMS = ("contrastive", "sigmoid")  # of the embeddings alone
_SINGLE = {
    "streaming": "A stream has one source. Read prepared sets, without it.",
    "dataset_config_name": "It is of one data set. Prepare that one first, and drop it.",
    "cache_features": "Features are kept for one tower of media. Drop it.",
    "wise_ft": "It is for a model that is trained on. Drop it.",
    "model_name_or_path": "It has the towers of its own media. Give --vision_model_name_or_path and --text_model_name_or_path.",
    "teacher_name_or_path": "A teacher reads one medium. Drop it.",
    "lora_rank": "Adapters are for one tower of media. Drop it.",
    "fusion_layers": "The fusion head reads the tower of one medium. Set --fusion_layers 0 --objectives contrastive.",
}
"""Flags of what is for one medium, and what to do."""


@dataclass
class MediaArguments:
    """Several media in one run, by --dataset_name, each with its tower, and one text tower."""

    media_share: str | None = arg(
        None,
        "Steps of each data set of --dataset_name data/photos,data/sounds, or scenes,sounds for embedded ones, in that order, "
        "e.g. 3,1: each step has one medium. Default: as the numbers of training rows.",
    )

    def names(self, dataset_name: str | None) -> list[str]:
        """Return the data sets that `--dataset_name` names; none or one for a run on one medium.

        Raises:
            ValueError: if there are not as many shares as names.
        """
        single = dataset_name is None or Path(dataset_name).exists()
        names = [] if single or dataset_name is None else [name.strip() for name in dataset_name.split(",")]
        if self.media_share is not None and len(self.media_share.split(",")) != max(1, len(names)) * (len(names) > 1):
            raise ValueError(
                f"--media_share is {self.media_share}, and --dataset_name is {dataset_name}; each name has one share. Give "
                "as many of one as of the other, separated by commas, at least 2."
            )
        return names if len(names) > 1 else []

    def check(self, settings: Mapping[str, Any]) -> None:
        """Raise ValueError if a run on several media is asked for what needs a single one.

        Args:
            settings: all arguments, by name.
        """
        if not self.names(settings["dataset_name"]):
            return
        title = f"--dataset_name is {settings['dataset_name']}, of several media"
        for flag, remedy in _SINGLE.items():
            if settings[flag]:
                raise ValueError(f"{title}, and --{flag} is {settings[flag]}. {remedy}")
        terms = [term.partition(":")[0].strip() for term in settings["objectives"].split(",")]
        if other := [term for term in terms if term not in _TERMS]:
            raise ValueError(
                f"{title}, and --objectives has {other[0]}, which reads more than embeddings. Give one of "
                f"{', '.join(_TERMS)}, with --fusion_layers 0."
            )

    def shares(self, rows: list[int]) -> list[int]:
        """Return the share of each data set, given their numbers of training rows."""
        if self.media_share is None:
            return [max(1, round(100 * count / sum(rows))) for count in rows]
        try:
            return [int(share) for share in self.media_share.split(",")]
        except ValueError:
            raise ValueError(f"--media_share is {self.media_share}; give whole numbers from 1 on, e.g. 3,1.") from None

    def shares_of(self, data: TrainingData, most: int | None) -> dict[str, int]:
        """Return the share of each medium in a run on all the rows, or the first `most` of each, of which `data` has some."""
        rows = [min(part.total_rows["train"], most or sys.maxsize) for part in data.media.values()]
        return dict(zip(data.media, self.shares(rows), strict=True))
