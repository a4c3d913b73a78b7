"""Features of frozen towers and of a teacher, put beside the rows before training."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from mm_utils.arguments import Parsed, arg
from mm_utils.run.checks import check_model
from mm_utils.training.callbacks import RunCallback


@dataclass
class FeatureCacheArguments:
    """Feature cache of frozen towers."""

    cache_features: bool = arg(
        False,
        "Run the towers frozen by --freeze_vision or --freeze_text once, and train from their stored output. Images are "
        "then seen as their centre square, without crops.",
    )


class CacheFeatures(RunCallback):
    """Run frozen towers once over the training data, and train from their stored output."""

    scripts = ("pretrain",)
    flag = "cache_features"
    arguments = FeatureCacheArguments

    @classmethod
    def attach(cls, given: Parsed) -> "CacheFeatures":
        """Return the callback, unless the data are a stream."""
        if given["streaming"]:
            raise ValueError("--cache_features is set; a stream may be larger than the disk. Drop it, or --streaming.")
        if given["freeze_vision"]:
            unread = "min_crop_area fixed_crop color_jitter horizontal_flip sound_jitter patch_dropout"
            given.refuse(unread, "--cache_features keeps what the vision tower makes of centre squares")
        return cls()

    def on_start(self, run: Any) -> None:
        """Compute the features, or open those that are stored."""
        from mm_utils.extras.frozen.feature_cache import cache_features

        rows = run.data.num_rows
        run.timed_pass("features", rows, rows, partial(cache_features, run.data, run.objective, run.run.accelerator))


class CacheTeacher(RunCallback):
    """Embed the training data with the teacher of `distillation`."""

    scripts = ("pretrain",)
    flag = "teacher_name_or_path"

    def __init__(self, name: str):
        self.name = name

    @classmethod
    def attach(cls, given: Parsed) -> "CacheTeacher":
        """Return the callback of a teacher that exists."""
        from mm_utils.extras.frozen.sentence_teacher import Embedder

        name = given["teacher_name_or_path"]
        if name.startswith("st:"):
            Embedder(name)  # which complains now, not after the data are loaded
        else:
            check_model(name, "--teacher_name_or_path")
        return cls(name)

    def on_start(self, run: Any) -> None:
        """Compute the embeddings, or open those that are stored."""
        from mm_utils.extras.frozen.teacher import cache_teacher

        rows, work = run.data.num_rows, partial(cache_teacher, self.name, run.data, run.objective)
        run.timed_pass("the teacher", rows, rows, partial(work, run.run.accelerator))
