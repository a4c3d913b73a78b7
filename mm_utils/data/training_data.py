"""Open a run's data: files, prepared sets, embedded scenes, labelled rows."""

import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import datasets
from accelerate import Accelerator
from datasets import DatasetDict
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.loaders import EVALUATION_BATCH, DeviceLoader, Loaders, make_loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.tokens import fingerprint, tokenize_splits
from mm_utils.data.media.medium import default_seconds, kind_of
from mm_utils.data.pairs import first_rows, iterate_captions, load_pairs
from mm_utils.model.pretrained import cut_texts_at

logger = logging.getLogger(__name__)


@dataclass
class TrainingData:
    """The tokenised splits of a run, with the order of training and the loaders.

    Attributes:
        identity: the fingerprints of the rows and the settings that affect batch order; a resumed run must have the
            same.
        eval_batch_size: images per process and forward pass in evaluation.
        total_rows: the rows of every split before `--max_train_samples` and `--max_eval_samples`.
        features: rows with the stored output of frozen towers, by split, in place of those of `splits`.
        passes: passes over training rows before the first step: seconds, rows, and the most rows that one takes.
    """

    splits: DatasetDict
    processor: ProcessorMixin
    loaders: Loaders
    order: GlobalOrder
    identity: dict[str, Any]
    eval_batch_size: int = EVALUATION_BATCH
    total_rows: dict[str, int] = field(default_factory=dict)
    features: dict[str, datasets.Dataset] = field(default_factory=dict)
    passes: list[tuple[float, int, int]] = field(default_factory=list)

    @property
    def medium(self) -> str:
        """The kind of media: `image`, `clip` or `sound`."""
        return self.loaders.medium.kind

    @property
    def num_rows(self) -> int:
        """Number of training images."""
        return self.order.num_rows

    @property
    def fingerprint(self) -> str:
        """Hash of the training data."""
        return self.identity["data"]

    @property
    def max_seq_length(self) -> int:
        """The longest possible caption in tokens."""
        return self.loaders.arguments.max_seq_length

    @cached_property
    def eval_loader(self) -> DeviceLoader | None:
        """This rank's share of the validation split, each image with all its captions."""
        return self.evaluation("validation") if "validation" in self.splits else None

    def rows(self, split: str) -> datasets.Dataset:
        """Return the rows of a split, with what frozen towers have returned where that is stored."""
        return self.features.get(split) or self.splits[split]

    @contextmanager
    def timed_pass(self, most: int = sys.maxsize) -> Iterator[None]:
        """Note how long a pass over at most this number of training rows takes."""
        began = time.monotonic()
        yield
        self.passes.append((time.monotonic() - began, min(self.num_rows, most), most))

    def evaluation(self, split: str) -> DeviceLoader:
        """Return this rank's share of a split, each image with all its captions, in order."""
        return self.loaders.evaluation(self.rows(split), self.eval_batch_size)

    def train_batches(self, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        return self.loaders.train(self.rows("train"), self.order, start, stop)

    def __str__(self) -> str:
        counts = {"train": self.num_rows, **{name: len(rows) for name, rows in self.splits.items()}}
        shown = []
        for name, rows in counts.items():
            total = self.total_rows.get(name, rows)
            of_all = "" if rows == total else f" of {total:,}"
            shown.append(f"{name}: {rows:,}{of_all} {self.medium}s")
        return ", ".join(shown)


def open_data(
    accelerator: Accelerator,
    data_args: DataArguments,
    loader_args: LoaderArguments,
    schedule: Any,
    make_processor: Callable[..., ProcessorMixin],
    readers: Sequence[ColumnReader] = (),
    fits_batch: bool = True,
) -> TrainingData:
    """Open the pairs that the arguments name, tokenised, with their loaders.

    The main process fills the caches first, the others read them.

    Args:
        schedule: the training arguments, of which `seed` and `batch_sizes` decide the order and the size of batches.
        make_processor: builds the processor, given the training captions and, unless it is of images, `medium` and the
            `seconds` and `frames` of its window.
        fits_batch: whether nobody named the size of a batch, so that it is at most all rows.
    """
    with distributed.first_then_others():
        splits = load_pairs(replace(data_args, max_train_samples=None, max_eval_samples=None))
        total = {name: len(rows) for name, rows in splits.items()}
        splits = first_rows(splits, data_args, f"--max_train_samples is {data_args.max_train_samples}")
        processor = processor_of(make_processor, iterate_captions(splits["train"]), splits["train"], loader_args)
        splits = tokenize_splits(splits, processor.tokenizer, loader_args.max_seq_length, readers=readers)
    return make_data(accelerator, splits, processor, loader_args, schedule, readers, total, fits_batch)


def processor_of(
    make: Callable[..., ProcessorMixin], captions: Iterator[str], known: datasets.Dataset, args: LoaderArguments
) -> ProcessorMixin:
    """Return the processor of the rows' media, with the window that is asked for; see `open_data`."""
    medium = kind_of(known.features)
    seconds = None if medium != "sound" else default_seconds(known)
    timed = {} if medium == "image" else {"medium": medium, "seconds": seconds, "frames": args.clip_frames}
    return make(captions, **timed)


def make_data(
    accelerator: Accelerator,
    splits: DatasetDict,
    processor: ProcessorMixin,
    loader_args: LoaderArguments,
    schedule: Any,
    readers: Sequence[ColumnReader] = (),
    total_rows: dict[str, int] | None = None,
    fits_batch: bool = True,
) -> TrainingData:
    """Put tokenised splits into batches, of at most all rows where nobody named their size."""
    rows = splits["train"]
    sizes = schedule.batch_sizes.at_most(len(rows)) if fits_batch else schedule.batch_sizes
    if sizes != schedule.batch_sizes:
        logger.info("A step takes all %d training rows, fewer than --global_batch_size", len(rows))
    # Saved with the model, so that all who load it read as much of a text.
    cut_texts_at(processor.tokenizer, loader_args.max_seq_length)
    loaders = make_loaders(loader_args, accelerator.device, processor, readers)
    order = GlobalOrder(len(rows), sizes, schedule.seed)
    total = total_rows or {name: len(rows) for name, rows in splits.items()}
    identity = {"data": fingerprint(rows), **loaders.content(rows, processor.tokenizer)}
    if "validation" in splits:
        identity["validation split"] = fingerprint(splits["validation"])
    found = TrainingData(splits, processor, loaders, order, identity, total_rows=total)
    logger.info("%s", found)
    return found
