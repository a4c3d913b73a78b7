"""The data of a run that trains from a stream; its validation split is on disk."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from transformers import ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.pairs import load_pairs
from mm_utils.data.paths import shard_kind
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.flags import StreamingArguments
from mm_utils.data.streams.loader import train_stream
from mm_utils.data.streams.stream import HELD_OUT, Stream, open_stream
from mm_utils.data.training_data import Schedule, TrainingData, open_loaders, processor_of

logger = logging.getLogger(__name__)


@dataclass
class StreamedData(TrainingData):
    """The data of a run whose training rows come from a stream, which is its `order`; `splits` has no `train`."""

    order: Stream  # type: ignore[assignment]

    def train_batches(self, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        return train_stream(self.loaders, self.order, self.processor.tokenizer, start, stop)


def open_streamed(
    accelerator: Accelerator,
    given: Parsed,
    schedule: Schedule,
    make_processor: Callable[..., ProcessorMixin],
    readers: Sequence[ColumnReader] = (),
) -> StreamedData:
    """Open the stream that the flags name; the arguments are those of `mm_utils.data.training_data.open_data`."""
    data_args, loader_args = given[DataArguments], given[LoaderArguments]
    with distributed.first_then_others():
        apart = load_validation_file(data_args)
        stream = open_stream(data_args, given[StreamingArguments], schedule.batch_sizes, schedule.seed, apart)
        processor = processor_of(make_processor, stream.captions(), stream.validation, loader_args)
        length, workers = loader_args.max_seq_length, data_args.preprocessing_num_workers
        total = {"train": stream.num_rows, "validation": len(stream.validation)}
        splits = DatasetDict(validation=stream.validation)
        splits = tokenize_splits(splits, processor.tokenizer, length, workers, readers)
    loaders = open_loaders(accelerator, splits, processor, loader_args, schedule, readers, streaming=True)
    identity = {"data": stream.fingerprint, **loaders.content(None, processor.tokenizer)}
    found = StreamedData(splits, processor, loaders, stream, identity, schedule.per_device_eval_batch_size, total)
    logger.info("%s", found)
    return found


def load_validation_file(args: DataArguments) -> Dataset | None:
    """Load the validation rows of a stream where they are in no shard."""
    if args.validation_file is None or shard_kind(args.validation_file) is not None:
        return None
    others: dict[str, Any] = dict.fromkeys(("dataset_name", "dataset_config_name", "validation_file", "test_file"))
    most = args.max_eval_samples or HELD_OUT
    file = replace(args, train_file=args.validation_file, max_train_samples=most, **others)
    return load_pairs(file, need_train=False)["train"]
