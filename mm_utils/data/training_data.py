"""Open a run's data: files, prepared sets, embedded scenes, streams, cached features."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import datasets
from accelerate import Accelerator
from datasets import DatasetDict
from transformers import ProcessorMixin

from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments, Loaders, make_loaders
from mm_utils.data.batches.machine_limits import check_loading
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import fingerprint, global_order, tokenize_splits
from mm_utils.data.labels import LabelledTask, TaskArguments, load_task
from mm_utils.data.media.medium import kind_of
from mm_utils.data.media.of_processor import default_seconds, kind_of_processor, settle_window
from mm_utils.data.pairs import first_rows, iterate_captions, load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.loader import train_stream
from mm_utils.data.streams.rows import shard_kind
from mm_utils.data.streams.stream import HELD_OUT, Stream, StreamingArguments, open_stream
from mm_utils.doors import entries

logger = logging.getLogger(__name__)


class Schedule(Protocol):
    """The training arguments that decide the order and the size of batches."""

    seed: int
    per_device_eval_batch_size: int

    @property
    def batch_sizes(self) -> BatchSizes:
        """The global batch size as a function of the step."""


class Share(NamedTuple):
    """What a run has learnt of one medium.

    Attributes:
        run: the run, as if it were on this medium alone: its folder and its settings.
        data: its data.
        metrics: of the last evaluation, named as in a run on it alone.
        remark: a sentence for its card.
    """

    run: Any
    data: "TrainingData"
    metrics: dict[str, float]
    remark: str = ""


@dataclass
class TrainingData:
    """The tokenised splits of a run, with the order of training and the loaders.

    Attributes:
        splits: the rows of every split; a stream has no `train` here.
        processor: the tokenizer and the image processor.
        loaders: the loaders of the run.
        order: the order of the training rows, or the stream that they come from.
        identity: the fingerprint of the training data and the settings that affect batch order; a resumed run must have the
            same.
        eval_batch_size: images per process and forward pass in evaluation.
        total_rows: the rows of every split before `--max_train_samples` and `--max_eval_samples`.
        features: the training rows with the stored output of frozen towers, in place of `splits["train"]`.
        name: what `--dataset_name` calls them, if it names several data sets.
    """

    splits: DatasetDict
    processor: ProcessorMixin
    loaders: Loaders
    order: GlobalOrder | Stream
    identity: dict[str, Any]
    eval_batch_size: int
    total_rows: dict[str, int] = field(default_factory=dict)
    features: datasets.Dataset | None = None
    name: str | None = None

    @property
    def media(self) -> dict[str, "TrainingData"]:
        """The data of each medium, here one; `mm_utils.extras.several_media` has several."""
        return {self.medium: self}

    def shares(self, run: Any, metrics: dict[str, float]) -> list[Share]:
        """Return what the run has learnt of each medium, the first one in the run's own folder."""
        return [Share(run, self, metrics)]

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

    def evaluation(self, split: str) -> DeviceLoader:
        """Return this rank's share of a split, each image with all its captions, in order."""
        return self.loaders.evaluation(self.splits[split], self.eval_batch_size)

    def train_batches(self, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        if isinstance(self.order, Stream):
            return train_stream(self.loaders, self.order, self.processor.tokenizer, start, stop)
        return self.loaders.train(self.features or self.splits["train"], self.order, start, stop)

    def __str__(self) -> str:
        counts = {"train": self.num_rows, **{name: len(rows) for name, rows in self.splits.items()}}
        return ", ".join(f"{name}: {rows:,} {self.medium}s" for name, rows in counts.items())


def open_data(
    accelerator: Accelerator,
    data_args: DataArguments,
    stream_args: StreamingArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    make_processor: Callable[..., ProcessorMixin],
    readers: Sequence[ColumnReader] = (),
) -> TrainingData:
    """Open the pairs that the arguments name, tokenised, with their loaders.

    The main process fills the caches first, the others read them.

    Args:
        accelerator: the run's accelerator.
        data_args, stream_args, loader_args: the source, and how it is read.
        schedule: the arguments that decide the order and the size of batches.
        make_processor: builds the processor, given the training captions and, unless it is of images, `medium` and the
            `seconds` of its window.
        readers: what terms read besides media and captions.

    Raises:
        ValueError: if the source cannot be read, with file, line or column and what to do.
    """
    with accelerator.main_process_first():
        stream = None
        if stream_args.streaming:
            given = load_validation_file(data_args)
            stream = open_stream(data_args, stream_args, schedule.batch_sizes, schedule.seed, given)
            splits, captions = DatasetDict(validation=stream.validation), stream.captions()
            total = {"train": stream.num_rows, "validation": len(stream.validation)}
        else:
            splits = load_pairs(replace(data_args, max_train_samples=None, max_eval_samples=None))
            total = {name: len(rows) for name, rows in splits.items()}
            splits = first_rows(splits, data_args, f"--max_train_samples is {data_args.max_train_samples}")
            captions = iterate_captions(splits["train"])
        processor = _processor(make_processor, captions, splits, loader_args)
        length, workers = loader_args.max_seq_length, data_args.preprocessing_num_workers
        splits = tokenize_splits(splits, processor.tokenizer, length, workers, readers)
    rows = splits["validation"]
    for column in entries("UNREAD").keys() & set(rows.column_names) - {reader.source(rows) for reader in readers}:
        logger.info("The rows have %s that no term reads; %s", column, entries("UNREAD")[column])
    return make_data(accelerator, splits, stream, processor, loader_args, schedule, readers, total)


def _processor(
    make: Callable[..., ProcessorMixin], captions: Iterator[str], splits: DatasetDict, args: LoaderArguments
) -> ProcessorMixin:
    """Return the processor of all splits' media, with the window that is asked for."""
    medium = kind_of(splits["validation"].features)
    known = splits.get("train", splits["validation"])  # a stream has no split of all its training rows
    default = None if medium == "image" else default_seconds(medium, known)
    timed = {} if medium == "image" else {"medium": medium, "seconds": args.medium_seconds or default}
    processor = make(captions, **timed)
    settle_window(processor, medium, args.medium_seconds, args.clip_frames, default)
    return processor


def load_validation_file(args: DataArguments) -> datasets.Dataset | None:
    """Load the validation rows of a stream where they are in no shard."""
    if args.validation_file is None or shard_kind(args.validation_file) is not None:
        return None
    others: dict[str, Any] = dict.fromkeys(("dataset_name", "dataset_config_name", "validation_file", "test_file"))
    most = args.max_eval_samples or HELD_OUT
    file = replace(args, train_file=args.validation_file, max_train_samples=most, **others)
    return load_pairs(file, need_train=False)["train"]


def open_task(
    accelerator: Accelerator,
    task_args: TaskArguments,
    loader_args: LoaderArguments,
    schedule: Schedule,
    processor: ProcessorMixin,
) -> tuple[LabelledTask, TrainingData]:
    """Open the labelled rows that the arguments name, with loaders; see `open_data`."""
    with accelerator.main_process_first():
        task = load_task(task_args, kind_of_processor(processor))
        length, workers = loader_args.max_seq_length, task_args.preprocessing_num_workers
        task.splits = tokenize_splits(task.splits, processor.tokenizer, length, workers)
    return task, make_data(accelerator, task.splits, None, processor, loader_args, schedule)


def make_data(
    accelerator: Accelerator,
    splits: DatasetDict,
    stream: Stream | None,
    processor: ProcessorMixin,
    loader_args: LoaderArguments,
    schedule: Schedule,
    readers: Sequence[ColumnReader] = (),
    total_rows: dict[str, int] | None = None,
) -> TrainingData:
    """Put tokenised splits, or a stream and its validation split, into batches."""
    # Saved with the model, so that all who load it read as much of a text.
    processor.tokenizer.model_max_length = loader_args.max_seq_length
    loaders = make_loaders(loader_args, accelerator.device, processor, readers)
    sizes, eval_batch_size = schedule.batch_sizes, schedule.per_device_eval_batch_size
    check_loading(loaders, sizes.sizes[-1], eval_batch_size, streaming=stream is not None)
    order: GlobalOrder | Stream
    if stream is not None:
        order, data = stream, stream.fingerprint
    else:
        rows = splits["train"]
        order = global_order(rows, sizes, schedule.seed, loader_args.similar_captions_per_batch)
        data = fingerprint(rows)
    total = total_rows or {name: len(rows) for name, rows in splits.items()}
    content = loaders.content(splits["train"] if stream is None else None, processor.tokenizer)
    identity = {"data": data, **content, **loader_args.order}
    found = TrainingData(splits, processor, loaders, order, identity, eval_batch_size, total)
    logger.info("%s", found)
    return found
