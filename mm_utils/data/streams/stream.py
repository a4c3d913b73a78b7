"""Stream training pairs: sets larger than the disk are read shard by shard, Parquet, tars and prepared folders.

`mm_utils.data.streams.order` decides the order and states its guarantees. Besides:
  - Rows are known by their place. A row that turns out unusable (no caption, a broken image, a damaged shard) is counted as
    skipped, and another one of its block takes its place, as long as the block has any.
  - Rows of the same image are not merged. The loss sees by their ids, or bytes where there are none, that they are the same.
  - Without a validation split, the first rows of some shards are held out. A later row with the id or the bytes of one of
    their images is not trained on, and is counted; nor is one with the bytes of an image of a given validation split.
  - A shard that grows, shrinks, is added or written anew makes another stream: `Stream.fingerprint` changes.

Each of the interleaved shard groups keeps the encoded images of a block in memory: `GROUPS` * `BLOCK` images, over all
processes. With 100 kB an image that is 1.6 GB.
"""

import hashlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from datasets import Dataset, DatasetDict, Features, Value, config
from torch import Tensor
from torch.utils.data import IterableDataset, default_collate, get_worker_info
from transformers import PreTrainedTokenizerBase, ProcessorMixin

from mm_utils import distributed
from mm_utils.arguments import Parsed, arg
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.dataset import Batch, Collator, Example, TrainingTransform
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments, Loaders
from mm_utils.data.batches.order import SHOWN_IN_VALIDATION, BatchSizes, replacement_rows
from mm_utils.data.batches.tokens import tokenize_rows, tokenize_splits
from mm_utils.data.batches.workers import worker_loader
from mm_utils.data.paths import SHARDS, check_own_file, shard_kind
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import SPLIT_NAMES, SPLITS, least_held_out
from mm_utils.data.rows.folders import Unread, files_below, split_of_path
from mm_utils.data.rows.source import DataArguments, Source, is_embedded
from mm_utils.data.rows.stored import blamed_on, is_saved, load_splits, open_builder
from mm_utils.data.streams.order import InterleavedOrder, Reader, Slot
from mm_utils.data.streams.shards import (
    Row,
    Shard,
    ShardReader,
    count_shards,
    expand,
    features_of,
    find_medium,
    info_of,
)
from mm_utils.data.training_data import Schedule, TrainingData, open_loaders, processor_of

logger = logging.getLogger(__name__)

GROUPS, BLOCK = 64, 256  # rows of a shard are shuffled among themselves in blocks
SHARDS_PER_GROUP = 4  # a group of several shards reads them in another order in every epoch
HELD_OUT, HELD_OUT_SHARE, HELD_OUT_SHARDS = 1000, 0.05, 50  # rows; share of all rows; from how many files
_PREPARE = (
    "A stream reads sounds and clips as prepared sets keep them, without a codec. Run scripts/prepare_data.py, and stream its "
    "folder by --dataset_name."
)


@dataclass
class StreamingArguments:
    """Reading of a source larger than the disk."""

    streaming: bool = arg(False, "Read shards while training instead of loading the data set first.")


@dataclass
class Stream:
    """A source that is read shard by shard.

    Attributes:
        shards: the files, or runs of rows in a file, that `order` counts.
        order: the rows of every step.
        source: names the columns of the shards, and the medium.
        validation: rows with `features_of` their kind, on disk in the datasets cache.
        held_out: ids and bytes, hashed, of images that training must not show.
        fingerprint: 16 hexadecimal digits that depend on the shards' names, numbers of rows, sizes and 128 KiB of content.
    """

    shards: list[Shard]
    order: InterleavedOrder
    source: Source
    validation: Dataset
    held_out: frozenset[str]
    fingerprint: str

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.order.num_rows

    @property
    def sizes(self) -> BatchSizes:
        """Rows of a step."""
        return self.order.sizes

    def check(self, row: Row, shard: int, number: int) -> Row:
        """Return a row of a shard unless its image is one of validation's, else the reason."""
        if isinstance(row, dict) and not self.held_out.isdisjoint((row["id"], stored_hash(row["image"]["bytes"]))):
            return f"{self.place_of(shard, number)}: {SHOWN_IN_VALIDATION}"
        return row

    def place_of(self, shard: int, number: int) -> str:
        """Name a row by its file, and its number there, from 0."""
        return f"shard {self.shards[shard].url}, row {self.shards[shard].first + number}"

    def captions(self, most: int = 20_000) -> Iterator[str]:
        """Read the first training captions of every shard, at most `most`, to train a tokenizer on."""
        reader, each = ShardReader(self.shards, self.source), -(-most // len(self.shards))
        rows = (
            self.check(row, shard, number)
            for shard, cut in enumerate(self.shards)
            for number, row in enumerate(reader.read(shard, 0, min(each, cut.rows)))
        )
        return islice((caption for row in rows if isinstance(row, dict) for caption in row["captions"]), most)


def open_stream(data: DataArguments, sizes: BatchSizes, seed: int, groups: int = GROUPS, block: int = BLOCK) -> Stream:
    """Open the source that `data` names, without reading more of it than its validation split.

    Rows of up to `groups` groups of shards are interleaved, and rows of a shard are shuffled in blocks.

    Raises:
        ValueError: in one line, if there are no shards, they cannot be reached or have no column of images or captions, or
            there are too few rows for `sizes`.
    """
    title, urls = _find_urls(data)
    files = count_shards(urls["train"])
    if sum(file.rows for file in files) < 2:
        raise ValueError(
            f"{title}; its shards hold fewer than 2 rows. Give shards with one image and its caption per row."
        )
    source = Source(urls["train"][0], title=title, split="train", **data.columns)
    source = replace(source, medium=find_medium(files[0].url, source))
    most, held_out = data.max_eval_samples, set[str]()
    if urls.get("validation"):
        validation = _read_all(_first_rows(count_shards(urls["validation"]), most or HELD_OUT), source)
    else:
        heads, files = _hold_out(files)
        validation = _read_all(heads, source)
        held_out = set(validation["id"])
    held_out |= {stored_hash(row["image"]["bytes"]) for row in validation}
    validation = validation.take(min(most or len(validation), len(validation)))
    files = _first_rows(files, data.max_train_samples or sys.maxsize)
    size, shards = max(block, sum(file.rows for file in files) // (groups * SHARDS_PER_GROUP)), []
    for file in files:  # one that can be read from the middle is cut, so that distant rows meet
        parts = -(-file.rows // size) if file.divisible else 1
        cuts = (distributed.share(file.rows, part, parts) for part in range(parts))
        shards += [replace(file, first=file.first + rows.start, rows=len(rows)) for rows in cuts]
    order = InterleavedOrder([cut.rows for cut in shards], sizes, seed, min(groups, len(shards)), block)
    names = json.dumps([[cut.url.rpartition("/")[2], cut.first, cut.rows, cut.content] for cut in shards])
    fingerprint = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    logger.info(
        "Stream %s: %d rows, %d shards, %d interleaved", fingerprint, order.num_rows, len(shards), order.groups
    )
    return Stream(shards, order, source, validation, frozenset(held_out), fingerprint)


def _find_urls(data: DataArguments) -> tuple[str, dict[str, list[str]]]:
    """Return the beginning of error messages, and the files of each split."""
    name, title = data.dataset_name, f"--dataset_name is {data.dataset_name}"
    if data.train_file is not None:
        title, named = f"--train_file is {data.train_file}", {"train": expand(data.train_file)}
    elif name is None or is_embedded(name):
        raise ValueError(
            f"--streaming is set; {name or 'the embedded set'} has no shards. Name some by --train_file or --dataset_name."
        )
    else:
        named = _urls_of_dataset(data, name, title)
    if data.validation_file is not None:
        named["validation"] = expand(data.validation_file)
    urls: dict[str, list[str]] = {}
    for split, part in named.items():  # train and restval are one split, and so are val and dev
        urls.setdefault(SPLIT_NAMES.get(split.lower(), split), []).extend(part)
    if not urls.get("train"):
        raise ValueError(f"{title}; there are no such training shards. Check the path.")
    for split in urls.keys() - {*SPLITS}:
        logger.warning("%s; its split %s is none of %s, and is not read", title, split, ", ".join(SPLITS))
    for url in (*urls["train"], *urls.get("validation", ())):
        if shard_kind(url) is None:
            known = ", ".join(SHARDS)
            raise ValueError(
                f"{title}; {url} cannot be streamed, only {known}. Run prepare_data, or drop --streaming."
            )
    return title, urls


def _urls_of_dataset(data: DataArguments, name: str, title: str) -> dict[str, list[str]]:
    if "://" in name and not name.startswith("hf://"):
        info_of(f"{name}/report.json")  # raises if there is no prepared set
        return {split: expand(f"{name}/{split}/*.arrow") for split in SPLITS}
    if is_saved(Path(name)):
        splits = load_splits(name, title, data.allow_outside_root)
        return {split: [file["filename"] for file in splits[split].cache_files] for split in splits}
    folder = Path(name)
    if folder.is_dir() and not (folder / "README.md").is_file():  # whose card may name the files
        found, unread = dict[str, list[str]](), Unread()
        for file in sorted(files_below(folder, tuple(SHARDS), unread)):
            check_own_file(folder / file, folder, data.allow_outside_root, title)
            found.setdefault(split_of_path(file, by_words=True) or "train", []).append(str(folder / file))
        for fault in (*unread.faults, *map(unread.says, unread.passed)):
            logger.warning("%s; %s", title, fault)
        return found
    with blamed_on(title):
        data_files = open_builder(name, None, data.allow_outside_root).config.data_files
    return {str(split): list(files) for split, files in (data_files or {}).items()}


def _hold_out(files: list[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Return the first rows of some files, spread over all of them, and the rest of all files."""
    total = sum(file.rows for file in files)
    count = min(HELD_OUT, max(1, least_held_out(total), round(HELD_OUT_SHARE * total)))
    sources = min(HELD_OUT_SHARDS, count, len(files))
    heads, rest, held = [], list(files), 0
    for part in range(sources):
        place = len(files) * part // sources
        file = files[place]
        rows = min(count * (part + 1) // sources - held, max(1, file.rows // 2))
        held += rows
        heads.append(replace(file, first=0, rows=rows))
        rest[place] = replace(file, first=rows, rows=file.rows - rows)
    return heads, [file for file in rest if file.rows]


def _first_rows(files: list[Shard], most: int) -> list[Shard]:
    kept = []
    for file in files:
        kept.append(replace(file, rows=min(file.rows, most)))
        most -= kept[-1].rows
    return [file for file in kept if file.rows]


def _read_all(shards: list[Shard], source: Source) -> Dataset:
    """Read whole shards once, into the datasets cache."""
    if next(_usable_rows((shards, source)), None) is None:
        reason = ShardReader(shards, source).read(0, 0, 1)[0] if shards else "there is none"
        remedy = "Write the files anew." if source.medium == "image" else _PREPARE
        raise ValueError(f"{source.title}; no row of validation can be used ({reason}). {remedy}")
    features = features_of(source.medium)
    bare = {**features, "image": {"bytes": Value("binary"), "path": Value("string")}}  # encoding `Audio` takes a codec
    rows = Dataset.from_generator(
        _usable_rows,
        features=Features(bare),
        cache_dir=str(config.HF_DATASETS_CACHE),
        gen_kwargs={"whole": (shards, source)},  # a tuple, for a list would be shared out among processes
    )
    assert isinstance(rows, Dataset)
    if lost := sum(shard.rows for shard in shards) - len(rows):
        reason = next((row for row in _rows(shards, source) if isinstance(row, str)), "")
        logger.warning("%s; %d rows of validation cannot be used, such as %s", source.title, lost, reason)
    return rows.cast_column("image", features["image"])


def _usable_rows(whole: tuple[Sequence[Shard], Source]) -> Iterator[dict[str, Any]]:
    yield from (row for row in _rows(*whole) if isinstance(row, dict))


def _rows(shards: Sequence[Shard], source: Source) -> Iterator[Row]:
    reader = ShardReader(shards, source)
    for number, shard in enumerate(shards):
        for start in range(0, shard.rows, 64):
            yield from reader.read(number, start, min(start + 64, shard.rows))


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
    data_args, args = given[DataArguments], given[LoaderArguments]
    with distributed.first_then_others():
        stream = open_stream(data_args, schedule.batch_sizes, schedule.seed)
        processor = processor_of(make_processor, stream.captions(), stream.validation, args)
        total, splits = {"train": stream.num_rows}, DatasetDict(validation=stream.validation)
        splits = tokenize_splits(splits, processor.tokenizer, args.max_seq_length, readers=readers)
    loaders = open_loaders(accelerator, splits, processor, args, readers)
    identity = {"data": stream.fingerprint, **loaders.content(None, processor.tokenizer)}
    total["validation"] = len(stream.validation)
    data = StreamedData(splits, processor, loaders, stream, identity, total_rows=total)
    logger.info("%s", data)
    return data


def train_stream(
    loaders: Loaders, stream: Stream, tokenizer: PreTrainedTokenizerBase, start: int, stop: int
) -> DeviceLoader:
    """Return this rank's share of the global batches of steps `start` to `stop` of a stream."""
    transform = loaders.training_transform(stream.order.seed)
    collate = Collator(loaders.pad_token_id, loaders.medium, longest_first=True)
    steps = StreamSteps(stream, tokenizer, loaders.arguments.max_seq_length, transform, start, stop)
    return loaders.on_device(StreamLoader(steps, collate, loaders.arguments.num_workers))


@dataclass
class StreamSteps(IterableDataset[list[Example]]):
    """Turns steps of a stream into examples; iterated, in a data worker, into this worker's part of every step.

    An example is a pure function of (seed, epoch, image id); its `row` is the row's position in the stream.
    """

    stream: Stream
    tokenizer: PreTrainedTokenizerBase
    max_seq_length: int
    transform: TrainingTransform
    start: int
    stop: int

    def __post_init__(self) -> None:
        self.rank = distributed.rank(), distributed.world_size()  # which a worker process does not know

    def __iter__(self) -> Iterator[list[Example]]:
        worker = get_worker_info()
        part = (worker.id, worker.num_workers) if worker is not None else (0, 1)
        return self.examples(self.start, self.stop, Reader(*self.rank, *part))

    def examples(self, start: int, stop: int, reader: Reader) -> Iterator[list[Example]]:
        """Yield the examples of steps `start` to `stop` that `reader` reads, in the stream's order.

        An unusable row is named in `skipped`, and another one of its block takes its place, if any of those that
        `replacement_rows` names can be used.
        """
        order, readers = self.stream.order, dict[tuple[int, int], ShardReader]()
        for step in range(start, stop):
            slots = order.batch(step, reader)
            readers = {key: opened for key, opened in readers.items() if not slots or key[0] >= slots[0].epoch}
            runs = []  # of each slot: the first row of its block, and all rows
            for slot in slots:
                opened = readers.setdefault(slot[1:3], ShardReader(self.stream.shards, self.stream.source))
                first, last = order.span_of(slot.shard, slot.block)
                runs.append((slot, first, opened.read(slot.shard, first, last)))
            examples = self._examples([(slot, slot.row, rows[slot.row - first]) for slot, first, rows in runs])
            for example, (slot, first, rows) in zip(examples, runs, strict=True):
                for other in replacement_rows(order.seed, slot.epoch, slot.position, len(rows)):
                    if "row" in example:
                        break
                    [found] = self._examples([(slot, first + other, rows[other])])
                    example |= found if "row" in found else {}
            yield examples

    def _examples(self, drawn: list[tuple[Slot, int, Row]]) -> list[Example]:
        """Return each slot's example of a row of its shard, by the number there, or why there is none."""
        examples: list[Example] = []
        good: dict[int, dict[str, Any]] = {}
        for at, (slot, number, row) in enumerate(drawn):
            checked, place = self.stream.check(row, slot.shard, number), self.stream.place_of(slot.shard, number)
            examples.append({"skipped": checked, "skipped_id": place, "position": slot.position})
            if isinstance(checked, dict):
                good[at] = {**checked, "epoch": slot.epoch}
        if not good:
            return examples
        batch = {name: [row[name] for row in good.values()] for name in next(iter(good.values()))}
        batch |= tokenize_rows(batch, None, self.tokenizer, self.max_seq_length)
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
        for example, medium in zip(
            (each for each in examples if "row" in each), () if media is None else media, strict=True
        ):
            example["pixel_values"] = medium
    return sorted((example for examples, _ in parts for example in examples), key=lambda example: example["position"])


class StreamLoader:
    """This rank's share of the global batches of the steps.

    Args:
        steps: reads and makes examples.
        collate: stacks them.
        workers: processes that read and decode; no more than this rank has shard groups are started.
    """

    def __init__(self, steps: StreamSteps, collate: Collator, workers: int):
        self.steps, self.collate = steps, collate
        self.num_workers = min(workers, steps.stream.order.groups // steps.rank[1])

    def __len__(self) -> int:
        return self.steps.stop - self.steps.start

    def __iter__(self) -> Iterator[Batch]:
        parts = max(1, self.num_workers)
        packed = iter(worker_loader(self.steps, self.num_workers, batch_size=None, collate_fn=pack))
        while of_step := list(islice(packed, parts)):  # workers take turns, and each yields one part per step
            yield self.collate(merge(of_step))
