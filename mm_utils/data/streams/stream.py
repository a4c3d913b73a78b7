"""Stream training pairs: sets larger than the disk are read shard by shard, Parquet, tars and prepared folders.

`mm_utils.data.streams.order` decides the order and states its guarantees. Besides:
  - A row that turns out unusable (no caption, a broken image, a damaged shard) is counted as skipped, and another one of its
    block takes its place, as long as the block has any.
  - Rows of the same image are not merged. The loss sees by their ids, or bytes where there are none, that they are the same.
  - Without a validation split, the first rows of some shards are held out. A later row with the id or the bytes of one of
    their images is not trained on, and is counted; nor is one with the bytes of an image of a given validation split.

Each of the interleaved shard groups keeps the encoded images of a block in memory: `GROUPS` * `BLOCK` images, over all
processes. With 100 kB an image that is 1.6 GB.
"""

import logging
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, islice
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict, Features, Value, config
from torch import Tensor
from torch.utils.data import default_collate
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.data.arguments import SPLIT_NAMES, SPLITS, DataArguments, LoaderArguments
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.dataset import Batch, Collator, Example
from mm_utils.data.batches.loaders import DeviceLoader, Loaders, make_loaders
from mm_utils.data.batches.order import replacement_rows
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import fingerprint, tokenize_rows, tokenize_splits
from mm_utils.data.batches.workers import worker_loader
from mm_utils.data.faults import REASONS
from mm_utils.data.paths import SHARDS, shard_kind
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import count_held_out, split_of_path
from mm_utils.data.rows.detect import refuse_unread
from mm_utils.data.rows.folders import Unread, own_files
from mm_utils.data.rows.source import Source
from mm_utils.data.rows.stored import blamed_on, is_saved, load_splits, open_builder
from mm_utils.data.streams.order import InterleavedOrder, Slot
from mm_utils.data.streams.shards import FEATURES, Row, Shard, ShardReader, check_columns, count_shards, expand
from mm_utils.data.training_data import TrainingData, processor_of
from mm_utils.model.pretrained import cut_texts_at
from mm_utils.stored import key_of

logger = logging.getLogger(__name__)

GROUPS = 64
BLOCK = 256  # rows of a shard are shuffled among themselves in blocks
SHARDS_PER_GROUP = 4  # a group of several shards reads them in another order in every epoch
HELD_OUT = 1000  # rows at most
HELD_OUT_SHARDS = 50  # files that they are from, at most


@dataclass
class Stream:
    """A source that is read shard by shard.

    Attributes:
        shards: the files, or runs of rows in a file, that `order` counts.
        validation: rows, on disk in the datasets cache.
        held_out: ids and bytes, hashed, of images that training must not show.
        fingerprint: 16 hexadecimal digits that depend on the shards' names, numbers of rows and content.
    """

    shards: list[Shard]
    order: InterleavedOrder
    source: Source
    validation: Dataset
    held_out: frozenset[str]
    fingerprint: str

    def captions(self, most: int = 20_000) -> Iterator[str]:
        """Read the first training captions of every shard, at most `most`, to train a tokenizer on."""
        each = -(-most // len(self.shards))
        first = [replace(cut, rows=min(each, cut.rows)) for cut in self.shards]
        rows = _usable_rows((first, self.source, self.held_out))
        return islice((caption for row in rows for caption in row["captions"]), most)


def open_stream(data: DataArguments, sizes: BatchSizes, seed: int, groups: int = GROUPS, block: int = BLOCK) -> Stream:
    """Open the source that `data` names, reading only its validation split; raise ValueError if it cannot be streamed."""
    title, urls = _find_urls(data)
    if data.image_root is not None:
        raise ValueError(f"--image_root is {data.image_root}; images are read from the shards. Leave it out.")
    source = Source(urls["train"][0], title=title, file_split="train", **data.columns)
    for kind in {shard_kind(url) for url in (*urls["train"], *urls.get("validation", ()))}:
        refuse_unread(replace(source, format={"tar": "webdataset"}.get(str(kind), "parquet")))
    files = count_shards(urls["train"])
    if sum(file.rows for file in files) < 2:
        raise ValueError(f"{title}; its shards hold fewer than 2 rows. Give some with an image and its caption a row.")
    check_columns(files[0].url, source)
    source = replace(source, medium="image")
    most = data.max_eval_samples
    held_out = set[str]()
    if urls.get("validation"):
        shown = replace(source, file_split="validation")
        validation = _read_all(_first_rows(count_shards(urls["validation"]), most or HELD_OUT), shown)
    else:
        heads, files = _hold_out(files)
        validation = _read_all(heads, source)
        held_out = set(validation["id"])
    held_out |= {stored_hash(row["image"]["bytes"]) for row in validation}
    validation = validation.take(min(most or len(validation), len(validation)))
    files = _first_rows(files, data.max_train_samples or sys.maxsize)
    # of 1 M rows 3,906, so that 64 groups have four shards each
    size = max(block, sum(file.rows for file in files) // (groups * SHARDS_PER_GROUP))
    shards = []
    for file in files:  # one that can be read from the middle is cut, so that distant rows meet
        parts = -(-file.rows // size) if file.divisible else 1
        cuts = (distributed.share(file.rows, part, parts) for part in range(parts))
        shards += [replace(file, first=file.first + rows.start, rows=len(rows)) for rows in cuts]
    order = InterleavedOrder([cut.rows for cut in shards], sizes, seed, min(groups, len(shards)), block)
    fingerprint = key_of([(cut.url.rpartition("/")[2], cut.first, cut.rows, cut.content) for cut in shards])[:16]
    logger.info("Stream %s: %d shards, %d interleaved", fingerprint, len(shards), order.groups)
    return Stream(shards, order, source, validation, frozenset(held_out), fingerprint)


def _find_urls(data: DataArguments) -> tuple[str, dict[str, list[str]]]:
    """Return the beginning of error messages, and the files of each split."""
    name = data.dataset_name
    title = f"--dataset_name is {data.dataset_name}"
    if data.train_file is not None:
        title = f"--train_file is {data.train_file}"
        named = {"train": expand(data.train_file)}
    elif name is None:
        raise ValueError("--streaming is set; the embedded scenes have no shards. Name some by --train_file.")
    else:
        named = _urls_of_dataset(data, name, title)
    if data.validation_file is not None:
        named["validation"] = expand(data.validation_file)
    urls: dict[str, list[str]] = {}
    for split, part in named.items():  # train and restval are one split, and so are val and dev
        urls.setdefault(SPLIT_NAMES.get(split.lower(), split), []).extend(part)
    if not urls.get("train"):
        raise ValueError(
            f"{title}; it has no training shards ({', '.join(SHARDS)}). Check the path, or drop --streaming."
        )
    for split in urls.keys() - {*SPLITS}:
        logger.warning("%s; its split %s is none of %s, and is not read", title, split, ", ".join(SPLITS))
    if other := next((url for url in (*urls["train"], *urls.get("validation", ())) if shard_kind(url) is None), None):
        known = f"{other} cannot be streamed, only {', '.join(SHARDS)}"
        raise ValueError(f"{title}; {known}. Run prepare_data, or drop --streaming.")
    return title, urls


def _urls_of_dataset(data: DataArguments, name: str, title: str) -> dict[str, list[str]]:
    if "://" in name and not name.startswith("hf://"):
        found = {split: expand(f"{name}/{split}/*.arrow") for split in SPLITS}
        return {split: files for split, files in found.items() if "*" not in files[0]}  # else there are none
    if is_saved(Path(name)):
        splits = load_splits(name, title, data.allow_outside_root)
        return {split: list(map(itemgetter("filename"), rows.cache_files)) for split, rows in splits.items()}
    folder = Path(name)
    if folder.is_dir():
        found = {}
        unread = Unread()
        for file in own_files(name, tuple(SHARDS), data.allow_outside_root, title, unread):
            found.setdefault(split_of_path(file, by_words=True) or "train", []).append(str(folder / file))
        for fault in unread.faults:
            logger.warning("%s; %s", title, fault)
        for reason in unread.passed:
            logger.warning("%s; %s. %s", title, unread.says(reason), REASONS[reason])
        return found
    with blamed_on(title):
        data_files = open_builder(name).config.data_files
    return {str(split): list(files) for split, files in (data_files or {}).items()}


def _hold_out(files: list[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Return the first rows of some files, spread over all of them, and the rest of all files."""
    total = sum(file.rows for file in files)
    count = count_held_out(total, HELD_OUT)
    sources = min(HELD_OUT_SHARDS, count, len(files))
    held = [0] * len(files)
    for part in range(sources):
        place = len(files) * part // sources
        # of a file with several rows at most half, so that the rest is trained on
        held[place] = min(count * (part + 1) // sources - sum(held), max(1, files[place].rows // 2))
    heads = [replace(file, rows=rows) for file, rows in zip(files, held, strict=True) if rows]
    rest = [replace(file, first=rows, rows=file.rows - rows) for file, rows in zip(files, held, strict=True)]
    return heads, [file for file in rest if file.rows]


def _first_rows(files: list[Shard], most: int) -> list[Shard]:
    starts = accumulate((file.rows for file in files), initial=0)
    return [
        replace(file, rows=min(file.rows, most - at)) for file, at in zip(files, starts, strict=False) if at < most
    ]


def _read_all(shards: list[Shard], source: Source) -> Dataset:
    """Read whole shards once, into the datasets cache."""
    lost = (row for row in _rows(shards, source) if isinstance(row, str))
    whole = shards, source  # a tuple, for a list would be shared out among processes
    if next(_usable_rows(whole), None) is None:
        said = next(lost, "there is none")
        raise ValueError(f"{source.title}; no row of validation can be used ({said}). Write the files anew.")
    cache = str(config.HF_DATASETS_CACHE)
    # As a struct: `datasets` drops the bytes of an image whose path is a file here, whoever wrote the path.
    stored = Features({**FEATURES, "image": {"bytes": Value("binary"), "path": Value("string")}})
    rows = Dataset.from_generator(_usable_rows, stored, cache, gen_kwargs={"whole": whole})
    assert isinstance(rows, Dataset)
    rows = rows.cast_column("image", FEATURES["image"])
    if count := sum(shard.rows for shard in shards) - len(rows):
        logger.warning("%s; %d rows of validation cannot be used, such as %s", source.title, count, next(lost))
    return rows


def _usable_rows(whole: tuple[Any, ...]) -> Iterator[dict[str, Any]]:
    return (row for row in _rows(*whole) if isinstance(row, dict))


def _rows(shards: Sequence[Shard], source: Source, held_out: Collection[str] = ()) -> Iterator[Row]:
    reader = ShardReader(shards, source, held_out)
    for number, shard in enumerate(shards):
        for start in range(0, shard.rows, 64):
            yield from reader.read(number, start, min(start + 64, shard.rows))


@dataclass(kw_only=True)
class StreamedData(TrainingData):
    """The data of a run whose training rows come from a stream; `splits` has no `train`."""

    stream: Stream

    def train_batches(self, start: int, stop: int) -> DeviceLoader:
        """Return this rank's share of the global batches of steps `start` to `stop`."""
        return self.loaders.on_device(StreamLoader(self.stream, self.loaders, self.processor.tokenizer, start, stop))


def open_streamed(
    accelerator: Accelerator,
    given: Parsed,
    schedule: Any,
    make_processor: Callable[..., ProcessorMixin],
    readers: Sequence[ColumnReader] = (),
) -> StreamedData:
    """Open the stream that the flags name; the arguments are those of `mm_utils.data.training_data.open_data`."""
    args = given[LoaderArguments]
    with distributed.first_then_others():
        stream = open_stream(given[DataArguments], schedule.batch_sizes, schedule.seed)
        processor = processor_of(make_processor, stream.captions(), stream.validation, args)
        splits = DatasetDict(validation=stream.validation)
        splits = tokenize_splits(splits, processor.tokenizer, args.max_seq_length, readers=readers)
    cut_texts_at(processor.tokenizer, args.max_seq_length)  # as `make_data` does
    loaders = make_loaders(args, accelerator.device, processor, readers)
    identity = {"data": stream.fingerprint, **loaders.content(None, processor.tokenizer)}
    identity["validation split"] = fingerprint(splits["validation"])
    total = {"train": stream.order.num_rows, "validation": len(stream.validation)}
    order: Any = stream.order
    data = StreamedData(splits, processor, loaders, order, identity, total_rows=total, stream=stream)
    logger.info("%s", data)
    return data


@dataclass
class StreamLoader(torch.utils.data.Dataset[list[Example]]):
    """This rank's share of the global batches of steps `start` to `stop`.

    To its data workers it is a data set of parts of steps, as many a step as there are workers, at most one for each of the rank's
    groups of shards. An example's `row` is the row's position in the stream.
    """

    stream: Stream
    loaders: Loaders
    tokenizer: PreTrainedTokenizerBase
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.rank = distributed.rank()
        self.ranks = distributed.world_size()  # which a worker process does not know
        groups = self.stream.order.groups
        self.readers = dict[tuple[int, int], ShardReader]()
        if self.ranks > groups:
            short = f"the stream has {groups} groups of shards, and {self.ranks} processes train"
            raise ValueError(f"{short}; each reads groups of its own. Write more shards, or start fewer processes.")
        self.transform = self.loaders.training_transform(self.stream.order.seed)
        self.workers = min(self.loaders.arguments.num_workers, groups // self.ranks)
        self.parts = max(1, self.workers)

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[Batch]:
        collate = Collator(self.loaders.pad_token_id, self.loaders.medium, longest_first=True)
        # torch deals them to the workers in turn: each worker reads the same groups in every step
        items = range(len(self) * self.parts)
        loader = worker_loader(self, self.workers, batch_size=None, sampler=items, collate_fn=pack)
        packed = iter(loader)
        while of_step := list(islice(packed, self.parts)):  # workers take turns, and each makes one part of a step
            yield collate(merge(of_step))

    def __getitem__(self, number: int) -> list[Example]:
        step, worker = divmod(number, self.parts)
        # of 2 ranks with 3 workers each, rank 1 makes the parts 1, 3 and 5 of 6
        return self.examples(self.start + step, self.rank + self.ranks * worker, self.ranks * self.parts)

    def examples(self, step: int, part: int = 0, parts: int = 1) -> list[Example]:
        """Return the examples of a part of a step, in the stream's order; steps in their order are read fastest.

        An unusable row is named in `skipped`, and another one of its block takes its place, if any of those that
        `replacement_rows` names can be used.
        """
        stream = self.stream
        order = self.stream.order
        slots = order.batch(step, part, parts)
        drawn = []
        # readers of an epoch that is over, each with a block of images, are dropped
        self.readers = {key: kept for key, kept in self.readers.items() if not slots or key[0] >= slots[0].epoch}
        for slot in slots:
            unopened = ShardReader(stream.shards, stream.source, stream.held_out)
            opened = self.readers.setdefault((slot.epoch, slot.group), unopened)
            drawn.append((slot, slot.row, opened.read(slot.shard, slot.first, slot.last)))
        examples = self._examples(drawn)
        for example, (slot, _, block) in zip(examples, drawn, strict=True):
            for other in replacement_rows(order.seed, slot.epoch, slot.position, len(block)):
                if "row" in example:
                    break
                [found] = self._examples([(slot, slot.first + other, block)])
                example |= found if "row" in found else {}
        return examples

    def _examples(self, drawn: list[tuple[Slot, int, list[Row]]]) -> list[Example]:
        """Return each slot's example of a row of its shard, by the number there, or why there is none."""
        examples: list[Example] = []
        good: dict[int, dict[str, Any]] = {}
        for at, (slot, number, block) in enumerate(drawn):
            row = block[number - slot.first]
            cut = self.stream.shards[slot.shard]
            place = f"shard {cut.url}, row {cut.first + number}"
            examples.append({"skipped": row, "skipped_id": place, "position": slot.position})
            if isinstance(row, dict):
                good[at] = {**row, "epoch": slot.epoch}
        if not good:
            return examples
        batch = {name: list(map(itemgetter(name), good.values())) for name in next(iter(good.values()))}
        batch |= tokenize_rows(batch, None, self.tokenizer, self.loaders.arguments.max_seq_length)
        for at, example in zip(good, self.transform.examples(batch), strict=True):
            position = drawn[at][0].position
            examples[at] = {**example, "position": position, **({} if "skipped" in example else {"row": position})}
        return examples


def pack(examples: list[Example]) -> tuple[list[Example], Tensor | None]:
    """Stack the media of a part of a step, so that a worker sends one tensor and not one a row."""
    media = [example.pop("pixel_values") for example in examples if "row" in example]
    return examples, default_collate(media) if media else None


def merge(parts: list[tuple[list[Example], Tensor | None]]) -> list[Example]:
    """Return the examples of a step whose parts were packed, in the stream's order."""
    for examples, media in parts:
        good = (example for example in examples if "row" in example)
        for example, medium in zip(good, () if media is None else media, strict=True):
            example["pixel_values"] = medium
    return sorted((example for examples, _ in parts for example in examples), key=lambda example: example["position"])
