"""What a run on several media does in place of one on a single medium."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from mm_utils.arguments import Parsed
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.retrieval import EvaluationArguments
from mm_utils.extras.several_media.flags import MediaArguments
from mm_utils.model.adapt import LoraArguments
from mm_utils.model.build import ModelArguments
from mm_utils.training.callbacks import RunCallback


class SeveralMedia(RunCallback):
    """Open, build and measure several media, and log the latest loss of each, as `sound_loss`."""

    scripts = ("pretrain",)
    flag = "dataset_name media_share"
    arguments = MediaArguments
    losses: dict[str, torch.Tensor]

    @classmethod
    def attach(cls, given: Parsed) -> "SeveralMedia | None":
        """Return the callback where --dataset_name names several data sets."""
        given[MediaArguments].check(given.settings)
        if not given[MediaArguments].names(given["dataset_name"]):
            return None
        given.refuse("peak_tflops", "the operations of several media are not counted")
        return cls()

    def open_data(self, accelerator: Accelerator, given: Parsed, *more: Any) -> TrainingData:
        """Open the data sets as one run's data."""
        from mm_utils.extras.several_media.mixture import open_media

        return open_media(accelerator, given[DataArguments], given[MediaArguments], given[LoaderArguments], *more)

    def build_model(self, given: Parsed, data: TrainingData, resume_from: Path | None) -> Any:
        """Build a tower for each medium, beside one text tower."""
        from mm_utils.extras.several_media.per_medium import build_media

        args, tokenizer = given[ModelArguments], data.processor.tokenizer
        return build_media(args, tokenizer, given[LoraArguments], list(data.media), resume_from)

    def evaluators(self, given: Parsed, data: TrainingData, others: Sequence[Any]) -> Any:
        """Measure each medium's validation split, and what lies between media."""
        from mm_utils.extras.several_media.evaluators import list_evaluators, make_evaluators

        retrieval = make_evaluators(given[EvaluationArguments], data)
        return retrieval, list_evaluators(retrieval, data, given["seed"], others)

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        """Forget the losses of an earlier run."""
        self.losses = {}

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Keep the loss of the step."""
        self.losses[f"{kwargs['batch']['medium']}_loss"] = kwargs["report"]["loss"]

    def on_log(self, *args: Any, **kwargs: Any) -> None:
        """Add the losses."""
        if "loss" in kwargs["logs"]:
            kwargs["logs"].update({name: loss.item() for name, loss in self.losses.items()})
