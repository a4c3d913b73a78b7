"""Load rows as batches: decoded and augmented in workers, normalised on the device."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import arg
from mm_utils.data.loading.column_cache import empty_features
from mm_utils.data.loading.dataset import Batch, Collator, EvaluationTransform, Pairs, TrainingPairs, TrainingTransform
from mm_utils.data.loading.order import EvaluationBatches, GlobalOrder, RankBatches
from mm_utils.data.loading.tokens import NEGATIVE_IDS
from mm_utils.data.loading.workers import (
    PREFETCH,
    RestartingLoader,
    choose_workers,
    free_shared_memory,
    loading_rate,
    worker_options,
)
from mm_utils.files import MAX_OPEN_FILES, allow_open_files
from mm_utils.text import byte_size

_MAX_WORKERS = 16
_MIN_STEPS_TO_MEASURE = 100  # a shorter run is over before the best number of workers has paid for its search
_FEWEST_OPEN_FILES = 128  # with which data workers have been seen to begin
_SHOWN = 8  # images of a batch in a message


@dataclass
class LoaderArguments:
    """Settings of captions, augmentation and workers."""

    max_seq_length: int = arg(64, "Captions are cut to this many tokens.")
    min_crop_area: float = arg(0.8, "Training crops cover at least this share of the image; 1 turns cropping off.")
    fixed_crop: bool = arg(
        False,
        "Cut training squares at the input's own size, not resized, where an image is stored at up to 1.5 times that: the "
        "least work for a loader that is too slow; --min_crop_area is then for other images alone.",
    )
    dataloader_num_workers: str = arg(
        "auto",
        "Processes that decode images, per rank, 0 for none; auto = tried out where there is a choice, at most one per spare "
        "core and 16.",
    )
    color_jitter: float = arg(
        0.0, "Brightness, contrast and saturation of training images vary by up to this share; captions name colours."
    )
    horizontal_flip: bool = arg(
        False,
        "Mirror half of the training images, except those with boxes or with a caption that mentions a direction or "
        "writing.",
    )
    similar_captions_per_batch: int = arg(
        1,
        "Put this many rows with similar captions together in a batch, as each other's hard negatives; 1 = any rows.",
    )

    def __post_init__(self) -> None:
        if self.max_seq_length < 3:
            raise ValueError(f"--max_seq_length is {self.max_seq_length}; give at least 3, two are special tokens.")
        if self.similar_captions_per_batch < 1:
            raise ValueError(
                f"--similar_captions_per_batch is {self.similar_captions_per_batch}; give a number of rows from 1 on."
            )
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"--min_crop_area is {self.min_crop_area}; give a share of the image in (0, 1].")
        workers = str(self.dataloader_num_workers)
        if workers != "auto" and not workers.isdecimal():
            raise ValueError(f"--dataloader_num_workers is {workers}; give a number of processes from 0 on, or auto.")
        if not 0 <= self.color_jitter <= 1:
            raise ValueError(f"--color_jitter is {self.color_jitter}; give a share in [0, 1].")

    @property
    def order(self) -> dict[str, int]:
        """Settings that decide which rows form a step, besides data, seed and batch sizes."""
        return {"similar_captions_per_batch": self.similar_captions_per_batch}

    @property
    def num_workers(self) -> int:
        """Workers of this rank, at most if `auto`; each training process keeps a core."""
        if self.dataloader_num_workers != "auto":
            return int(self.dataloader_num_workers)
        return max(0, min(_MAX_WORKERS, distributed.cores_per_process() - 1))


class DeviceLoader:
    """Iterate over a loader with batches moved to `device` and images normalised there.

    Args:
        loader: batches of `Collator`; it has a length.
        device: where batches go.
        mean, std: mean and standard deviation of each colour in [0, 1].

    Attributes:
        wait: seconds that the caller waited for the last batch.
    """

    def __init__(self, loader: Any, device: torch.device, mean: Sequence[float], std: Sequence[float]):
        self.loader, self.device, self.wait = loader, device, 0.0
        self.mean, self.std = (torch.tensor(v, device=device).view(3, 1, 1) * 255 for v in (mean, std))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait = time.perf_counter() - start
            if batch is None:
                return
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        moved = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        if "pixel_values" in moved:  # converted first: subtracting mixed types takes 3 times as long
            moved["pixel_values"] = moved["pixel_values"].float().sub_(self.mean).div_(self.std)
        return moved


@dataclass
class Loaders:
    """Build the loaders of a run, with everything that training and evaluation share.

    Attributes:
        pad_token_id: the tokenizer's.
        image_size, mean, std: the image processor's.
        regions: whether batches have the regions of their images, see `mm_utils.data.loading.regions`.
    """

    arguments: LoaderArguments
    device: torch.device
    pad_token_id: int
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]
    regions: bool = False
    _measured: int | None = field(default=None, init=False)

    def train(self, rows: datasets.Dataset, order: GlobalOrder, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        pairs, batches = TrainingPairs(rows, self.training_transform(order.seed)), RankBatches(order, start, stop)
        kinds = empty_features(rows), self.regions, NEGATIVE_IDS in rows.column_names
        collate = Collator(self.pad_token_id, self.image_size, True, *kinds)
        has_choice = self.arguments.dataloader_num_workers == "auto" and self.arguments.num_workers > 2
        if not has_choice or "vision_pooled" in collate.cached:
            return self._loader(pairs, batches, collate, self.arguments.num_workers)
        if self._measured is None and len(batches) >= _MIN_STEPS_TO_MEASURE:

            def rate(workers: int) -> float:
                return loading_rate(self._data_loader(pairs, batches, collate, workers))

            self._measured = choose_workers(self.arguments.num_workers, rate)
        return self._loader(pairs, batches, collate, self.workers)

    def evaluation(self, rows: datasets.Dataset, batch_size: int) -> DeviceLoader:
        """Return this rank's share of all rows, each with all its captions, in order."""
        pairs = Pairs(rows, EvaluationTransform(self.image_size, self.regions))
        collate = Collator(self.pad_token_id, self.image_size, regions=self.regions)
        return self._loader(pairs, EvaluationBatches(len(rows), batch_size), collate, self.arguments.num_workers)

    def training_transform(self, seed: int) -> TrainingTransform:
        """Return what makes training examples of rows."""
        args = self.arguments
        return TrainingTransform(
            self.image_size,
            self.regions,
            seed,
            args.min_crop_area,
            args.fixed_crop,
            args.color_jitter,
            args.horizontal_flip,
        )

    @property
    def workers(self) -> int:
        """Workers of this rank's training loader, as far as is known."""
        return self.arguments.num_workers if self._measured is None else self._measured

    def _loader(
        self, pairs: Pairs, batches: RankBatches | EvaluationBatches, collate: Collator, workers: int
    ) -> DeviceLoader:
        workers = min(workers, len(batches))

        def make(number: int) -> DataLoader:
            return self._data_loader(pairs, batches.after(number), collate, workers)

        def name(number: int) -> str:
            rows = [row for row, _ in batches[number]]
            shown = ", ".join(map(str, pairs.rows[rows[:_SHOWN]]["id"].to_pylist()))
            return f"{batches.name(number)} ({len(rows)} images: {shown}{', ...' if len(rows) > _SHOWN else ''})"

        return DeviceLoader(RestartingLoader(make, len(batches), name, workers), self.device, self.mean, self.std)

    def _data_loader(
        self, pairs: Pairs, batches: RankBatches | EvaluationBatches, collate: Collator, workers: int
    ) -> DataLoader:
        return DataLoader(
            pairs,
            batch_sampler=batches,
            collate_fn=collate,
            pin_memory=self.device.type == "cuda",
            persistent_workers=bool(workers),
            **worker_options(workers),
        )


def image_geometry(processor: ProcessorMixin) -> tuple[int, list[float], list[float]]:
    """Return the side of the processor's square images, and the mean and std of its normalisation."""
    images = processor.image_processor
    return images.crop_size["height"], list(images.image_mean), list(images.image_std)


def check_loading(loaders: Loaders, global_batch_size: int, eval_batch_size: int, *, streaming: bool = False) -> None:
    """Check that shared memory and open files suffice for all workers of this machine.

    Called on all ranks. With `--dataloader_num_workers auto`, the loaders' arguments are changed to as many workers as fit.

    Args:
        loaders: the run's loaders.
        global_batch_size: pairs of the largest step, over all processes.
        eval_batch_size: images per process.
        streaming: whether each worker makes a part of every batch, instead of whole batches.

    Raises:
        ValueError: on every rank, if a machine has too little.
    """
    args, workers, warnings, error = loaders.arguments, loaders.arguments.num_workers, [], None
    limit = allow_open_files()
    if limit is not None and limit < 1_024 and (workers or streaming):
        text = (
            f"ulimit -n is {limit}; data workers and shards may need more open files. Set ulimit -n {MAX_OPEN_FILES}, or pass "
            "--dataloader_num_workers 0."
        )
        if workers and limit < _FEWEST_OPEN_FILES:
            error = text
        else:
            warnings.append(text)
    processes, free = distributed.processes_here(), free_shared_memory()
    image = processes * PREFETCH * 3 * loaders.image_size**2
    parts = distributed.world_size() * (max(1, workers) if streaming else 1)
    train = -(-global_batch_size // parts)
    per_worker = image * (train + eval_batch_size)  # an evaluation begins while training batches wait
    if free is not None and workers * per_worker > free:
        fitting = free // per_worker
        text = (
            f"/dev/shm has {byte_size(free)} free; {workers} data workers in each of {processes} processes may put "
            f"{byte_size(workers * per_worker)} there"
        )
        remedy = f"Start the container with --shm-size={-(-workers * per_worker * 5 // (2**30 * 4))}g"
        if args.dataloader_num_workers == "auto":
            args.dataloader_num_workers = str(fitting)
            warnings.append(f"{text}, so there will be {fitting}. {remedy} for more.")
        elif workers * image * max(train, eval_batch_size) > free:
            error = f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}."
        else:
            warnings.append(f"{text}. {remedy}, or pass --dataloader_num_workers {fitting}.")
    distributed.raise_everywhere(error, warnings)
