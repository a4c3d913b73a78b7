"""Load rows as batches: decoded and augmented in workers, normalised on the device."""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import datasets
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mm_utils.data.arguments import ReadingArguments
from mm_utils.data.batches.column_cache import OF_TEACHER, column_digest, empty_features, image_digest
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.dataset import Batch, Collator, EvaluationTransform, Pairs, TrainingPairs, TrainingTransform
from mm_utils.data.batches.order import Draw, GlobalOrder, RankBatches, evaluation_batches
from mm_utils.data.batches.tokens import Reach, tokenizer_digest
from mm_utils.data.batches.workers import worker_loader
from mm_utils.data.media.medium import Medium, kind_of, read_by
from mm_utils.data.rows.columns import NEGATIVES

EVALUATION_BATCH = 64  # rows per process and forward pass; it does not change the result


class DeviceLoader:
    """Iterate over a loader with batches moved to `device` and images normalised there.

    To a GPU they are copied on a stream of their own, beside the step before; from pinned memory, the host does not wait.
    `check` is called before each batch, of which every rank has as many. `wait` are the seconds that the caller waited for the
    last batch.
    """

    def __init__(self, loader: Any, device: torch.device, medium: Medium, check: Callable[[], None] | None = None):
        self.loader = loader
        self.device = device
        self.medium = medium
        self.check = check
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.wait = 0.0

    def with_check(self, check: Callable[[], None] | None) -> "DeviceLoader":
        """Return the same batches with another check."""
        return DeviceLoader(self.loader, self.device, self.medium, check)

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
            if self.check is not None:
                self.check()
            with nullcontext() if self.stream is None else torch.cuda.stream(self.stream):  # None would set up CUDA
                moved = {
                    name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                    for name, value in batch.items()
                }
            if self.stream is not None:
                computing = torch.cuda.current_stream(self.device)
                computing.wait_stream(self.stream)
                for value in moved.values():
                    if isinstance(value, Tensor):
                        value.record_stream(computing)  # or its memory would be taken for the next batch too early
            if "pixel_values" in moved:
                moved["pixel_values"] = self.medium.features(moved["pixel_values"])
            yield moved


@dataclass
class Loaders:
    """Build the loaders of a run, with everything that training and evaluation share."""

    arguments: ReadingArguments
    device: torch.device
    pad_token_id: int
    medium: Medium
    readers: Sequence[ColumnReader] = ()
    reach: Reach | None = None

    def content(self, rows: datasets.Dataset | None, tokenizer: PreTrainedTokenizerBase) -> dict[str, Any]:
        """Return by name what decides a training row besides ids and captions."""
        found = {
            "tokenizer": tokenizer_digest(tokenizer),
            "max_seq_length": self.arguments.max_seq_length,
            **self.medium.key,
        }
        if rows is not None:
            found["images"] = image_digest(rows)
            columns = {NEGATIVES, *(reader.source(rows) for reader in self.readers)} & set(rows.column_names)
            found |= {column: column_digest(rows, column) for column in sorted(columns)}
        return found

    def blank(self, count: int) -> Tensor:
        """Return black or silent media `[count, ...]`, as the tower takes them."""
        [batch] = self.on_device([{"pixel_values": self.medium.blank(count)}])
        return batch["pixel_values"]

    def on_device(self, loader: Any) -> DeviceLoader:
        """Return batches moved to the device and normalised there."""
        return DeviceLoader(loader, self.device, self.medium)

    def train(self, rows: datasets.Dataset, order: GlobalOrder, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        self.check_medium(rows)
        readers = self._readers(rows)
        pairs = TrainingPairs(rows, self.training_transform(order.seed, readers))
        batches = RankBatches(order, start, stop)
        collate = Collator(self.pad_token_id, self.medium, True, empty_features(rows), readers)
        return self._loader(pairs, batches, collate)

    def evaluation(self, rows: datasets.Dataset, batch_size: int) -> DeviceLoader:
        """Return this rank's share of all rows, each with all its captions, in order."""
        self.check_medium(rows)
        # a teacher says nothing in evaluation
        rows = rows.remove_columns([name for name in rows.column_names if name.startswith(OF_TEACHER)])
        readers = [reader for reader in self._readers(rows) if reader.in_evaluation]
        pairs = Pairs(rows, EvaluationTransform(self.medium, readers))
        collate = Collator(self.pad_token_id, self.medium, cached=empty_features(rows), readers=readers)
        return self._loader(pairs, evaluation_batches(len(rows), batch_size), collate)

    def _readers(self, rows: datasets.Dataset) -> list[ColumnReader]:
        return [reader for reader in self.readers if reader.columns <= set(rows.column_names)]

    def training_transform(self, seed: int, readers: Sequence[ColumnReader] = ()) -> TrainingTransform:
        """Return what makes training examples of rows."""
        args = self.arguments
        return TrainingTransform(self.medium, readers, seed, args.horizontal_flip, self.reach)

    def check_medium(self, rows: datasets.Dataset) -> None:
        """Raise ValueError if the rows hold other media than the model is for."""
        found = kind_of(rows.features)
        if found != self.medium.kind and "image" in rows.features:  # else cached features stand for the media
            raise ValueError(
                f"the data are {found}s, and the model is for {self.medium.kind}s. Give data or model of the same kind."
            )

    def _loader(self, pairs: Pairs, batches: RankBatches | list[list[Draw]], collate: Collator) -> DeviceLoader:
        workers = min(self.arguments.num_workers, len(batches))
        pins = self.device.type == "cuda"
        return self.on_device(
            worker_loader(pairs, workers, batch_sampler=batches, collate_fn=collate, pin_memory=pins)
        )


def make_loaders(
    arguments: ReadingArguments, device: torch.device, processor: ProcessorMixin, readers: Sequence[ColumnReader] = ()
) -> Loaders:
    """Return the loaders of a model's media, whose kind, size and window its processor knows.

    Raises:
        ValueError: if a flag asks for another window than the model's, or of images for sounds.
    """
    medium = read_by(processor, arguments.min_crop_area)
    for name in medium.unused:
        if getattr(arguments, name):
            raise ValueError(f"--{name} is {getattr(arguments, name)}; these are {medium.kind}s. Drop it.")
    frames = getattr(medium, "frames", None)
    if arguments.clip_frames not in (None, frames):
        raise ValueError(f"--clip_frames is {arguments.clip_frames}; the model takes {frames}. Drop it.")
    reach = Reach.of(processor.tokenizer, arguments.max_seq_length)
    return Loaders(arguments, device, processor.tokenizer.pad_token_id, medium, readers, reach)
