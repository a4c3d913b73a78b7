"""Features of frozen towers, put beside the rows before training."""

from dataclasses import dataclass
from functools import partial
from typing import Any

from mm_utils.arguments import Parsed, arg
from mm_utils.model.checks import has_no_head
from mm_utils.training.callbacks import RunCallback

_AUGMENTS = "min_crop_area horizontal_flip"
_OF_HEAD = "head_share rerank_top_k"
_OTHERS = "streaming batch_size_schedule lora_rank teacher_name_or_path"

FROZEN_DEFAULTS = {
    "cache_features": True,
    "objectives": "contrastive:1",
    "fusion_layers": 0,
    "global_batch_size": 512,
    "backbone_learning_rate": 3e-4,
    "num_train_epochs": 40.0,
}
"""Defaults of a run that trains only the projections between two pretrained towers (docs/training.md has what they earn)."""
MLP_RATE = 3e-3  # in place of that of linear projections


@dataclass
class FeatureCacheArguments:
    """Feature cache of frozen towers."""

    cache_features: bool = arg(
        False,
        "Run the towers frozen by --freeze_vision or --freeze_text once, and train from their stored output. Images are "
        "then seen as their centre square, without crops. Between two pretrained towers that are both frozen it is the default, "
        "with contrastive:1 and no fusion head, a batch of 512, a rate of 3e-4 for the projections, and 40 epochs.",
    )


class CacheFeatures(RunCallback):
    """Run frozen towers once over the training data, and train from their stored output."""

    scripts = ("pretrain",)
    flag = "cache_features freeze_vision"
    arguments = FeatureCacheArguments

    @classmethod
    def attach(cls, given: Parsed) -> "CacheFeatures | None":
        """Return the callback, unless the data are a stream."""
        cls._settle(given)
        if not given["cache_features"]:
            return None
        if given["streaming"]:
            raise ValueError("--cache_features is set; a stream may be larger than the disk. Drop it, or --streaming.")
        if given["freeze_vision"]:
            given.refuse(_AUGMENTS, "--cache_features keeps what the vision tower makes of centre squares")
        return cls()

    @staticmethod
    def _settle(given: Parsed) -> None:
        """Change what is not given, where only projections between two pretrained towers are trained (docs/training.md)."""
        whole, *towers = (given[f"{part}model_name_or_path"] for part in ("", "vision_", "text_"))
        if headless := whole is not None and not any(towers) and has_no_head(whole):
            given.default(objectives="contrastive:1", fusion_layers=0)
        if not (given["freeze_vision"] and given["freeze_text"] and (headless or (whole is None and all(towers)))):
            return
        of_head = [name for name in given.settings if name.startswith("fusion_")]
        if given.is_given("objectives", *of_head, *_OF_HEAD.split(), *_OTHERS.split(), *_AUGMENTS.split()):
            return
        if not given.is_given("cache_features") or given["cache_features"]:
            given.default(**FROZEN_DEFAULTS)
            if given["projection"] == "mlp":
                given.default(backbone_learning_rate=MLP_RATE)

    def on_start(self, run: Any) -> None:
        """Compute the features, or open those that are stored."""
        from mm_utils.training.feature_cache import cache_features

        from_features = all(getattr(each, "reads_features", False) for each in run.evaluators)
        splits = [
            split
            for split in ("train", "validation")
            if split in run.data.splits and (split == "train" or from_features)
        ]
        rows, work = run.data.num_rows, partial(cache_features, run.data, run.objective)
        run.timed_pass("features", rows, rows, partial(work, run.run.accelerator, splits))
