"""From rows to batches on the device: decoded and augmented in workers, normalised on the device."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import datasets
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerBase

from mm_utils.arguments import arg
from mm_utils.data.batches import Batch, Collator, Pairs
from mm_utils.data.order import EvaluationBatches, GlobalOrder, RankBatches
from mm_utils.data.restarts import RestartingLoader
from mm_utils.data.ring import PixelRing
from mm_utils.data.stream.loader import StreamBatches, StreamSteps
from mm_utils.data.stream.stream import Stream
from mm_utils.ranks import cores_per_process

logger = logging.getLogger(__name__)

_PREFETCH = 4  # batches that each worker has ready or in the making
_MOST_WORKERS = 16
_WORTH_MEASURING = 100  # batches; a shorter run is over before the best number of workers has paid for its search
_SHOWN = 8  # of a batch's images, in a message
_SECONDS = 0.8  # that each number of workers is tried for, five of them at most


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
        "Mirror half of the training images, but none of which a caption names a side, quotes writing, or has boxes.",
    )
    look_alikes: int = arg(
        1,
        "Let rows whose captions look alike meet in a batch, so many at a time, as each other's hard negatives; 1 = as they "
        "come.",
    )

    def __post_init__(self) -> None:
        if self.max_seq_length < 3:
            raise ValueError(f"--max_seq_length is {self.max_seq_length}; give at least 3, two are special tokens.")
        if self.length_bucket_window < 1:
            raise ValueError(
                f"--length_bucket_window is {self.length_bucket_window}; give steps, or 1 for no buckets."
            )
        if self.look_alikes < 1:
            raise ValueError(f"--look_alikes is {self.look_alikes}; give rows that meet in a batch, or 1.")
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"--min_crop_area is {self.min_crop_area}; give a share of the image in (0, 1].")

        workers = str(self.dataloader_num_workers)
        if workers != "auto" and not workers.isdecimal():
            raise ValueError(f"--dataloader_num_workers is {workers}; give a number of processes from 0 on, or auto.")
        if not 0 <= self.color_jitter <= 1:
            raise ValueError(f"--color_jitter is {self.color_jitter}; give a share in [0, 1].")

    @property
    def order(self) -> dict[str, int]:
        """What else than data, seed and batch sizes decides which rows form a step."""
        return {"length_bucket_window": self.length_bucket_window, "look_alikes": self.look_alikes}

    @property
    def num_workers(self) -> int:
        """Workers of this rank, or the most that `auto` takes: a core is left to each rank's training process."""
        if self.dataloader_num_workers != "auto":
            return int(self.dataloader_num_workers)
        return max(0, min(_MOST_WORKERS, cores_per_process() - 1))


class DeviceLoader:
    """Iterate over a loader with batches moved to `device` and images normalised there.

    Attributes:
        wait: seconds that the last batch made the caller wait.
    """

    def __init__(
        self,
        loader: DataLoader | RestartingLoader | StreamBatches,
        device: torch.device,
        mean: Sequence[float],
        std: Sequence[float],
    ):
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
            # Converted first, as mixed types are subtracted 3 times slower. A copy: the loader uses its memory again.
            moved["pixel_values"] = moved["pixel_values"].float().sub_(self.mean).div_(self.std)
        return moved


@dataclass
class Loaders:
    """Builds the loaders of one run: everything that training and evaluation share.

    Attributes:
        pad_token_id: from the tokenizer.
        image_size, mean, std: from the image processor.
        regions: batches hold the regions of their images, see `mm_utils.data.regions`.
    """

    arguments: LoaderArguments
    device: torch.device
    pad_token_id: int
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]
    regions: bool = False
    _best: int | None = field(default=None, init=False)

    def train(self, rows: datasets.Dataset, order: GlobalOrder, start: int, stop: int) -> DeviceLoader:
        """This rank's share of the global batches of steps `start` to `stop`."""
        pairs = self._training_pairs(order.seed)(rows)
        batches = RankBatches(order, start, stop)
        return self._loader(pairs, batches, self._workers(pairs, batches))

    def stream(self, stream: Stream, tokenizer: PreTrainedTokenizerBase, start: int, stop: int) -> DeviceLoader:
        """This rank's share of the global batches of steps `start` to `stop` of a stream.

        Raises:
            ValueError: if regions are asked for.
        """
        if self.regions:
            raise ValueError("--objectives asks for regions, and --streaming reads none. Drop one of them.")
        collate = Collator(self.pad_token_id, self.image_size, longest_first=True)
        pairs = self._training_pairs(stream.order.seed)
        steps = StreamSteps(stream, tokenizer, self.arguments.max_seq_length, pairs, collate)
        batches = StreamBatches(steps, start, stop, self.arguments.num_workers, self.device.type == "cuda")
        return DeviceLoader(batches, self.device, self.mean, self.std)

    def evaluation(self, rows: datasets.Dataset, batch_size: int) -> DeviceLoader:
        """This rank's share of all rows, each with all its captions, in order."""
        batches = EvaluationBatches(len(rows), batch_size)
        pairs = Pairs(rows, self.image_size, train=False, regions=self.regions)
        return self._loader(pairs, batches, self.arguments.num_workers)

    @property
    def workers(self) -> int:
        """Workers of this rank's training loader, as far as is known."""
        return self.arguments.num_workers if self._best is None else self._best

    def _training_pairs(self, seed: int) -> Callable[[datasets.Dataset], Pairs]:
        args = self.arguments
        return partial(
            Pairs,
            image_size=self.image_size,
            train=True,
            min_crop_area=args.min_crop_area,
            fixed_crop=args.fixed_crop,
            color_jitter=args.color_jitter,
            horizontal_flip=args.horizontal_flip,
            regions=self.regions,
            seed=seed,
        )

    def _workers(self, pairs: Pairs, batches: RankBatches) -> int:
        most = self.arguments.num_workers
        if self.arguments.dataloader_num_workers != "auto" or most <= 2 or pairs.cached.has_vision:
            return most
        if self._best is None and len(batches) >= _WORTH_MEASURING:
            self._best = choose_workers(most, lambda workers: _rate(self._data_loader(pairs, batches, workers)))
        return self.workers

    def _loader(self, pairs: Pairs, batches: RankBatches | EvaluationBatches, workers: int) -> DeviceLoader:
        def make(number: int) -> DataLoader:
            return self._data_loader(pairs, batches.after(number), workers)

        def name(number: int) -> str:
            rows = [row for row, _ in batches[number]]
            shown = ", ".join(str(pairs.rows.value("id", row)) for row in rows[:_SHOWN])
            return f"{batches.name(number)} ({len(rows)} images: {shown}{', ...' if len(rows) > _SHOWN else ''})"

        return DeviceLoader(RestartingLoader(make, len(batches), name), self.device, self.mean, self.std)

    def _data_loader(self, pairs: Pairs, batches: RankBatches | EvaluationBatches, workers: int) -> DataLoader:
        workers = min(workers, len(batches))
        collate = Collator(self.pad_token_id, self.image_size, pairs.train, pairs.cached.blank(), regions=self.regions)
        if "vision_pooled" not in collate.cached:
            collate.ring = PixelRing.make(workers, _PREFETCH, batches.largest, self.image_size)
        return DataLoader(
            pairs,
            batch_sampler=batches,
            collate_fn=collate,
            num_workers=workers,
            persistent_workers=bool(workers),
            pin_memory=self.device.type == "cuda",
            prefetch_factor=_PREFETCH if workers else None,
            worker_init_fn=_one_thread,
        )


def choose_workers(most: int, rate: Callable[[int], float]) -> int:
    """The smallest of 1, 2, 4 ... `most` workers whose `rate`, in images per second, is within 10 % of the best.

    Logs the rates. A number that is no faster than the one before ends the search.
    """
    rates: dict[int, float] = {}
    for workers in [*(2**power for power in range(most.bit_length()) if 2**power < most), most]:
        rates[workers] = rate(workers)
        if rates[workers] < 1.1 * max([value for other, value in rates.items() if other != workers], default=0.0):
            break
    chosen = min(workers for workers, value in rates.items() if value >= 0.9 * max(rates.values()))
    shown = ", ".join(f"{value:,.0f} with {workers}" for workers, value in rates.items())
    logger.info("Loader workers: %d; images per second: %s.", chosen, shown)
    return chosen


def _rate(loader: DataLoader) -> float:
    """Images per second of the first batches, once every worker is at work; of all workers equally many."""
    batches = iter(loader)
    for _ in islice(batches, loader.num_workers):
        pass
    images, begin = 0, time.perf_counter()
    for number, batch in enumerate(batches, 1):
        images += len(batch["rows"])
        if time.perf_counter() - begin > _SECONDS and number % loader.num_workers == 0:
            break
    return images / (time.perf_counter() - begin)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
