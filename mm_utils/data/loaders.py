"""From rows to batches on the device: decoded and augmented in workers, normalised on the device."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from mm_utils.arguments import arg
from mm_utils.data.batches import Batch, Collator, Pairs
from mm_utils.data.order import EvaluationBatches, GlobalOrder, RankBatches
from mm_utils.ranks import cores_per_process

logger = logging.getLogger(__name__)


@dataclass
class LoaderArguments:
    """How pairs become batches."""

    max_seq_length: int = arg(64, "Captions are cut to this many tokens.")
    length_bucket_window: int = arg(
        1,
        "Fill batches with captions of about one length, inside windows of this many steps; 1 = as they come. It saves "
        "little beyond what is saved anyway, and changes what is learnt: negatives are then alike in length.",
    )
    min_crop_area: float = arg(0.8, "Training crops cover at least this share of the image; 1 turns cropping off.")
    dataloader_num_workers: int = arg(
        -1, "Processes that decode images, per rank; -1 = one per spare core, at most 16."
    )

    def __post_init__(self) -> None:
        if self.max_seq_length < 3:
            raise ValueError(f"--max_seq_length is {self.max_seq_length}; give at least 3, two are special tokens.")
        if self.length_bucket_window < 1:
            raise ValueError(
                f"--length_bucket_window is {self.length_bucket_window}; give steps, or 1 for no buckets."
            )
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"--min_crop_area is {self.min_crop_area}; give a share of the image in (0, 1].")

    @property
    def num_workers(self) -> int:
        """Workers of this rank; a core is left to each rank's training process."""
        if self.dataloader_num_workers >= 0:
            return self.dataloader_num_workers
        return max(0, min(16, cores_per_process() - 1))


class DeviceLoader:
    """Iterate over a `DataLoader` with batches moved to `device` and images normalised there.

    Attributes:
        wait: seconds that the last batch made the caller wait.
    """

    def __init__(self, loader: DataLoader, device: torch.device, mean: Sequence[float], std: Sequence[float]):
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
        if "pixel_values" in moved:
            moved["pixel_values"] = (moved["pixel_values"] - self.mean) / self.std
        return moved


@dataclass
class Loaders:
    """Builds the loaders of one run: everything that training and evaluation share.

    Attributes:
        pad_token_id: from the tokenizer.
        image_size, mean, std: from the image processor.
    """

    arguments: LoaderArguments
    device: torch.device
    pad_token_id: int
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]

    def train(self, rows: datasets.Dataset, order: GlobalOrder, start: int, stop: int) -> DeviceLoader:
        """This rank's share of the global batches of steps `start` to `stop`."""
        pairs = Pairs(rows, self.image_size, train=True, min_crop_area=self.arguments.min_crop_area, seed=order.seed)
        return self._loader(pairs, RankBatches(order, start, stop))

    def evaluation(self, rows: datasets.Dataset, batch_size: int) -> DeviceLoader:
        """This rank's share of all rows, each with all its captions, in order."""
        return self._loader(Pairs(rows, self.image_size, train=False), EvaluationBatches(len(rows), batch_size))

    def _loader(self, pairs: Pairs, batches: RankBatches | EvaluationBatches) -> DeviceLoader:
        workers = min(self.arguments.num_workers, len(batches))
        loader = DataLoader(
            pairs,
            batch_sampler=batches,
            collate_fn=Collator(self.pad_token_id, self.image_size, pairs.train, pairs.cached.blank()),
            num_workers=workers,
            persistent_workers=bool(workers),
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if workers else None,
            worker_init_fn=_one_thread,
        )
        return DeviceLoader(loader, self.device, self.mean, self.std)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
