"""Run a frozen tower once over the training data, store its output, and train from that.

The output of a frozen tower never changes. All processes compute it before the first step, of training rows and, unless an
evaluator asks for the media themselves, of those that are evaluated, and keep it in the datasets cache
under a fingerprint of everything it depends on: weights and config of the tower, preprocessing, precision and data, but not
the number of processes or the batch size. A later run with the same tower and data reads it. A step then runs only what is
trained, and decodes no image. The price is cropping: every epoch sees the centre square of an image, as evaluation does.

`mm_utils.stored` describes the store, `mm_utils.data.batches.column_cache` its columns. Two runs that begin at once both compute
it, as none may keep its ranks waiting for another's; the first that ends wins.
"""

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import torch
from accelerate import Accelerator
from datasets.arrow_writer import ArrowWriter
from torch import Tensor, nn
from tqdm.auto import tqdm

from mm_utils import distributed
from mm_utils.arguments import Parsed, arg
from mm_utils.data.batches.column_cache import SKIPPED, add_weights, column_digest, image_digest, to_arrow
from mm_utils.data.batches.order import EvaluationBatches
from mm_utils.data.batches.tokens import fingerprint, pad_captions
from mm_utils.data.training_data import TrainingData
from mm_utils.model.build import has_no_head
from mm_utils.model.encoding import length_groups
from mm_utils.model.modeling_fusion_dual_encoder import is_trained
from mm_utils.objectives.joint import Objective
from mm_utils.stored import discard, is_whole, key_of, open_rows, place_of, storing
from mm_utils.training.callbacks import RunCallback

logger = logging.getLogger(__name__)

Block = tuple[dict[str, tuple[Any, ...]], dict[str, pa.Array]]
"""Some rows: the arguments of `to_arrow` for every column of features, and further columns."""

DTYPES = (torch.float16, torch.float32)
ROUNDING = 1e-3  # largest error of a stored value, as a share of its row's largest; float16's own is 5e-4

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
        from_features = all(getattr(each, "reads_features", False) for each in run.evaluators)
        splits = [split for split in ("train", *["validation"] * from_features) if split in run.data.splits]
        rows, work = run.data.num_rows, partial(cache_features, run.data, run.objective)
        run.timed_pass(rows, rows, partial(work, run.run.accelerator, splits))


def cache_features(
    data: TrainingData, objective: Objective, accelerator: Accelerator, splits: Sequence[str] = ("train",)
) -> None:
    """Put frozen towers' output beside the rows of splits, as `data.features`.

    Called on all ranks, before the model is prepared.

    Raises:
        ValueError: if no tower is frozen, if a tower's output is not finite, or if processes share no cache.
    """
    for split in splits:
        sources = [kind(split, data, objective, accelerator) for kind in (_Vision, _Text)]
        frozen = [source for source in sources if not is_trained(source.tower)]
        if not frozen:
            raise ValueError(
                "--cache_features is set, and both towers are trained; only the output of a frozen tower can be kept. Set "
                "--freeze_vision or --freeze_text, or drop --cache_features."
            )
        rows = data.splits[split]
        for source in frozen:
            features = source.open_or_compute()
            if source.name == "vision":
                if len(skipped := features.data.column(SKIPPED).drop_null()):
                    text = "%d images of the %s split cannot be decoded: %s"
                    logger.warning(text, len(skipped), split, skipped[:3].to_pylist())
                rows = rows.remove_columns("image")
            rows = datasets.concatenate_datasets([rows, features], axis=1)
        data.features[split] = rows
    vars(data).pop("eval_loader", None)  # it may have been made of the rows before


class Source:
    """A model whose tower computes features, and the rows that it runs over."""

    name: str  # what the store is of
    flag = "--cache_features"  # that asks for it
    dtypes: Sequence[torch.dtype] = DTYPES  # features are stored in the first that holds all of them

    def __init__(self, data: TrainingData, split: str, model: Any, tower: Any, accelerator: Accelerator):
        self.rows, self.loaders, self.batch_size = data.splits[split], data.loaders, data.eval_batch_size
        self.model, self.tower, self.accelerator = model, tower, accelerator
        self.batches = EvaluationBatches(len(self.rows), self.batch_size)

    def depends_on(self) -> tuple:
        """Return everything that the features depend on besides tower and precision."""
        raise NotImplementedError

    def blocks(self) -> Iterator[Block]:
        """Yield the features of this rank's rows, one block for each of `batches`."""
        raise NotImplementedError

    def open_or_compute(self) -> datasets.Dataset:
        """Return the stored features, one row per training row; compute them if there is no store."""
        with ExitStack() as writing:

            def place() -> tuple[Path, Path | None]:
                parts = (weights_digest(self.tower), self.accelerator.mixed_precision, self.dtypes, self.depends_on())
                folder = place_of("features", key_of(self.name, *parts))
                if is_whole(folder):
                    return folder, None
                discard(folder)
                return folder, writing.enter_context(storing(folder))

            folder, temporary = distributed.on_first(place)
            # All ranks look only now: a network file system may remember for a while that a folder was missing.
            if distributed.any_rank(not (temporary or folder).is_dir(), self.accelerator.device):
                raise ValueError(
                    f"HF_DATASETS_CACHE is {datasets.config.HF_DATASETS_CACHE}; not every process sees there what another "
                    f"one writes, and {self.flag} shares the work. Set it to a folder that all machines see."
                )
            if temporary is not None:
                self._compute(temporary)
                self.accelerator.wait_for_everyone()
            distributed.on_first(writing.close)
        logger.info("%s features are in %s", self.name.capitalize(), folder)
        return open_rows(folder)

    def _compute(self, folder: Path) -> None:
        was_training, home = self.model.training, next(self.tower.parameters()).device
        self.model.eval()
        self.tower.to(self.accelerator.device)
        if not any(self._write(folder, dtype) for dtype in self.dtypes):
            raise ValueError(
                f"{self.flag} is set, and the frozen {self.name} tower computes values that are not finite. Train in bf16 or "
                f"fp32, take another tower, or drop {self.flag}."
            )
        self.tower.to(home)
        self.model.train(was_training)

    def _write(self, folder: Path, dtype: torch.dtype) -> bool:
        """Write this rank's shard; False on all ranks at once, if `dtype` cannot hold any's."""
        title, others = f"Caching {self.name} features", not self.accelerator.is_main_process
        progress = tqdm(self.blocks(), total=len(self.batches), desc=title, leave=False, disable=others, delay=2)
        with ExitStack() as stack:
            writer = None
            for draws, (features, more) in zip(self.batches, progress, strict=True):
                fits = all(_fits(values, dtype) for values, *_ in features.values())
                if not fits:
                    text = "%s cannot hold the %s features of training rows %d to %d; a wider type is tried"
                    logger.warning(text, dtype, self.name, draws[0][0], draws[-1][0])
                if distributed.any_rank(not fits, self.accelerator.device):
                    return False
                columns = {name: to_arrow(values.to(dtype), *counts) for name, (values, *counts) in features.items()}
                table = pa.table({**columns, **more})
                if writer is None:
                    writer = ArrowWriter(path=str(folder / f"{distributed.rank():05d}.arrow"), schema=table.schema)
                    stack.callback(writer.finalize)
                writer.write_table(table)
        return True


class _Tower(Source):
    """A frozen tower of the model that is trained.

    Of rows that are evaluated features are exact, for the figures are those of the saved model, with image taps for a head that
    re-ranks. States of captions are computed there, for the chosen pairs alone.
    """

    def __init__(self, split: str, data: TrainingData, objective: Objective, accelerator: Accelerator):
        tower = objective.model.get_submodule(f"{self.name}_model")
        super().__init__(data, split, objective.model, tower, accelerator)
        trains = split == "train"
        self.reads_pairs = objective.reads_pairs and trains
        self.reads_taps = objective.reads_taps or (not trains and bool(self.model.voices))
        self.dtypes = DTYPES if trains else DTYPES[-1:]


class _Vision(_Tower):
    """The vision tower, run on the centre square of every image."""

    name = "vision"

    def depends_on(self) -> tuple:
        loaders, config = self.loaders, self.model.config
        head = (config.fusion_vision_taps, config.fusion_tokens_per_tap) if self.reads_taps else None
        images = (*loaders.input_key, config.vision_pooling)
        return *images, head, fingerprint(self.rows), image_digest(self.rows)

    def blocks(self) -> Iterator[Block]:
        blank = self._run(self.loaders.blank(1))  # for the shapes
        loader = self.loaders.evaluation(self.rows, self.batch_size)
        for draws, batch in zip(self.batches, loader, strict=True):
            rows = {row: place for place, (row, _) in enumerate(draws)}
            there = torch.tensor([rows.pop(row) for row in batch["rows"].tolist()], device=blank[0].device).long()
            found = self._run(batch["pixel_values"]) if len(there) else [value[:0] for value in blank]
            values = [
                none.new_zeros(len(draws), *none.shape[1:]).index_copy(0, there, value)
                for none, value in zip(blank, found, strict=True)
            ]
            reasons = dict(zip(rows.values(), batch["skipped"], strict=True))
            skipped = pa.array([reasons.get(place) for place in range(len(draws))], pa.string())
            names = ["vision_pooled", *(f"vision_taps_{place}" for place in range(len(values) - 1))]
            yield {name: (value,) for name, value in zip(names, values, strict=True)}, {SKIPPED: skipped}

    @torch.no_grad()
    def _run(self, pixel_values: Tensor) -> list[Tensor]:
        with self.accelerator.autocast():
            pooled, taps = self.model.vision_features(pixel_values, with_taps=self.reads_taps)
        return [value.float() for value in (pooled, *taps)]


class _Text(_Tower):
    """The text tower, run on all captions of every image."""

    name = "text"

    def depends_on(self) -> tuple:
        config = self.model.config
        taps = config.fusion_text_taps if self.reads_pairs else None
        return config.text_pooling, taps, column_digest(self.rows, "input_ids")

    def blocks(self) -> Iterator[Block]:
        tokens = self.rows.select_columns(["input_ids"])
        for draws in self.batches:
            captions = tokens[[row for row, _ in draws]]["input_ids"] if draws else []
            pooled, states, lengths = self._run([ids for row in captions for ids in row])
            counts = [len(row) for row in captions]
            features: dict[str, tuple[Any, ...]] = {"text_pooled": (pooled, counts)}
            if self.reads_pairs:
                features["text_states"] = (states, lengths, counts)
            yield features, {}

    @torch.no_grad()
    def _run(self, captions: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, list[int]]:
        """Return pooled captions `[t, C]`, all tokens' states `[sum of L, C]`, and lengths L.

        They run in groups of about one length, without which half of the tokens are padding.
        """
        device, lengths, width = self.accelerator.device, [len(ids) for ids in captions], self.model.config.text_width
        order = sorted(range(len(captions)), key=lambda place: -lengths[place])
        pooled, none = (
            torch.zeros(len(captions), width),
            torch.zeros(0, len(self.model.config.fusion_text_taps) * width),
        )
        states = [none] * len(captions)
        for group in length_groups([lengths[place] for place in order], device.type) if captions else ():
            places = order[group.start : group.stop]
            padded = pad_captions([captions[place] for place in places], self.loaders.pad_token_id)
            input_ids, mask = (part.to(device) for part in padded)
            with self.accelerator.autocast():
                pooled_tC, states_tLC = self.model.text_features(input_ids, mask, with_taps=self.reads_pairs)
            pooled[places] = pooled_tC.float().cpu()
            for place, state_LC in zip(places, states_tLC if self.reads_pairs else (), strict=False):
                states[place] = state_LC[: lengths[place]].float().cpu()
        return pooled, torch.cat([none, *states]), lengths


def _fits(values: Tensor, dtype: torch.dtype) -> bool:
    """Return whether all values are finite and hardly change as `dtype`, relative to their row."""
    exact = values.flatten(1)
    error = (exact.to(dtype).to(exact) - exact).abs()
    return bool((error.amax(1) <= ROUNDING * exact.abs().amax(1)).all())


def weights_digest(tower: nn.Module) -> str:
    """Return a hash of the weights and the config, without the place they were loaded from."""
    digest = hashlib.blake2b(digest_size=16)
    config = tower.config.to_dict()  # type: ignore[operator, union-attr]
    passing = ("transformers_version", "dtype", "torch_dtype")
    kept = sorted((name, value) for name, value in config.items() if name[0] != "_" and name not in passing)
    digest.update(f"{type(tower).__name__} {kept}".encode())
    add_weights(digest, tower.state_dict())
    return digest.hexdigest()
