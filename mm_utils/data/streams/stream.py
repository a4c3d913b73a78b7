"""Stream training pairs: sets larger than the disk are read shard by shard.

A stream reads Parquet and WebDataset tar shards, on disk or on a server, a data set on the Hub that is made of them, and
folders that `prepare_data` wrote. Images are embedded in the shards, and so are clips and sounds, as `prepare_data` keeps them;
paths are not followed.

`mm_utils.data.streams.order` decides the order and states its guarantees, which are weaker than those of a data set on
disk: step s always has the same rows, and every row comes once an epoch, but rows are shuffled in blocks alone. Besides:
  - Rows are known by their place. A row that turns out unusable (no caption, a broken image, a damaged shard) is counted as
    skipped, and another one of its block takes its place; the batch is smaller by it only where most of the block is
    unusable.
  - Rows of the same image are not merged. The loss sees by their ids, or their bytes where there are none, that they are
    the same image.
  - Without a validation split, the first rows of some shards are held out, 5 % of all and at most 1000. Wherever their
    images come again, by id or by bytes, they are left out of training too, and counted. The same is done, by bytes, with the
    images of a given validation split.
  - A shard that grows, shrinks, is added or written anew makes another stream: `Stream.fingerprint` changes.

Each of the interleaved shard groups keeps the encoded images of a block in memory: `--set stream_interleave` *
`--set shuffle_block_size` images, over all processes. With 64 * 256 images of 100 kB that is 1.6 GB.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset

from mm_utils import distributed
from mm_utils.data.batches.order import SHOWN_IN_VALIDATION, BatchSizes
from mm_utils.data.faults import Fault
from mm_utils.data.media.medium import cached_rows
from mm_utils.data.paths import SHARDS, shard_kind
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.rows.columns import SPLIT_NAMES, SPLITS, least_held_out
from mm_utils.data.rows.source import DataArguments, Source, is_embedded
from mm_utils.data.rows.stored import is_saved, load_splits, open_builder, remedy
from mm_utils.data.streams.flags import GROUPS, StreamingArguments
from mm_utils.data.streams.order import InterleavedOrder
from mm_utils.data.streams.rows import Row, check_columns, features_of
from mm_utils.data.streams.shards import Shard, ShardReader, count_shards, damage, expand, stamp_of
from mm_utils.text import one_line

logger = logging.getLogger(__name__)

SHARDS_PER_GROUP = 4  # a group of several shards reads them in another order in every epoch
HELD_OUT, HELD_OUT_SHARE, HELD_OUT_SHARDS = 1000, 0.05, 50  # rows; share of all rows; from how many files


@dataclass
class Stream:
    """A source that is read shard by shard.

    Attributes:
        shards: the files, or runs of rows in a file, that `order` counts.
        order: the rows of every step.
        source: names the columns of the shards.
        validation: rows with `features_of` their kind, on disk in the datasets cache.
        held_out: images of `validation`, which training must not show.
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

    def reader(self) -> ShardReader:
        """Return a new reader of the shards."""
        return ShardReader(self.shards, self.source)

    def check(self, row: Row, shard: int, number: int) -> Row:
        """Return a row of a shard unless its image is one of validation's, else the reason."""
        if isinstance(row, dict) and not self.held_out.isdisjoint((_by_id(row), _by_bytes(row))):
            return f"{self.place_of(shard, number)}: {SHOWN_IN_VALIDATION}"
        return row

    def place_of(self, shard: int, number: int) -> str:
        """Name a row without an id: its file, and its number there, from 0."""
        return f"shard {self.shards[shard].url}, row {self.shards[shard].first + number}"

    def rows(self, most: int) -> Iterator[dict[str, Any]]:
        """Read the first training rows of every shard, at most `most` in all."""
        reader = self.reader()
        each = -(-most // len(self.shards))
        for shard, cut in enumerate(self.shards):
            for number, read in enumerate(reader.read(shard, 0, min(each, most, cut.rows))):
                row = self.check(read, shard, number)
                if isinstance(row, dict):
                    most -= 1
                    yield row

    def captions(self, most: int = 20_000) -> Iterator[str]:
        """Read the first training captions of every shard, at most `most`, to train a tokenizer on."""
        return islice((caption for row in self.rows(most) for caption in row["captions"]), most)


def open_stream(
    data: DataArguments, args: StreamingArguments, sizes: BatchSizes, seed: int, validation: Dataset | None = None
) -> Stream:
    """Open the source that `data` names, without reading more of it than its validation split.

    Args:
        data: names the shards and their columns.
        args: the flags of streaming.
        sizes: the global batch size as a function of the step.
        seed: the run's random seed.
        validation: the rows of `--validation_file` where that is not a shard.

    Raises:
        ValueError: in one line, if there are no shards, they cannot be reached or have no column of images or captions, or
            there are too few rows or shards for `sizes` or `args`.
    """
    title, urls = _find_urls(data, need_validation=validation is None)
    source = Source(urls["train"][0], title=title, **data.columns)
    files = count_shards(urls["train"])
    if sum(file.rows for file in files) < 2:
        raise ValueError(
            f"{title}; its shards hold fewer than 2 rows. Give shards with one image and its caption per row."
        )
    medium = check_columns(files[0].url, source)
    if medium != "image":
        source = replace(source, medium=medium)
    if validation is not None and validation.features["image"] != features_of(medium)["image"]:
        raise ValueError(
            f"--validation_file is {data.validation_file}; it holds no {medium}s, and the stream does. Give one of the same kind."
        )
    held_out: set[str] = set()
    if validation is None and urls.get("validation"):
        heads = _first_rows(count_shards(urls["validation"]), data.max_eval_samples or HELD_OUT)
        validation = _read_all(heads, source)
    elif validation is None:
        heads, files = _hold_out(files)
        validation = _read_all(heads, source)
        held_out |= {_by_id(row) for row in validation}
    held_out |= {_by_bytes(row) for row in validation}
    if data.max_eval_samples is not None:
        validation = validation.select(range(min(data.max_eval_samples, len(validation))))
    files = _first_rows(files, data.max_train_samples)
    total = sum(file.rows for file in files)
    wanted = args.stream_interleave or GROUPS
    shards = _cut(files, max(args.shuffle_block_size, total // (wanted * SHARDS_PER_GROUP)))
    groups = args.stream_interleave or min(GROUPS, len(shards))
    order = InterleavedOrder([shard.rows for shard in shards], sizes, seed, groups, args.shuffle_block_size)
    names = json.dumps([[shard.url.rpartition("/")[2], shard.first, shard.rows, shard.content] for shard in shards])
    fingerprint = hashlib.blake2b(names.encode(), digest_size=8).hexdigest()
    logger.info(
        "Stream %s: %s rows, %d shards, %d interleaved", fingerprint, f"{order.num_rows:,}", len(shards), groups
    )
    return Stream(shards, order, source, validation, frozenset(held_out), fingerprint)


def _find_urls(data: DataArguments, need_validation: bool) -> tuple[str, dict[str, list[str]]]:
    """Return the beginning of error messages, and the files of each split."""
    if data.test_file is not None:
        raise ValueError(
            f"--test_file is {data.test_file}; a stream has no test split. Evaluate on it by eval_retrieval."
        )
    if is_embedded(data.dataset_name):
        raise ValueError(
            f"--streaming is set; {data.dataset_name} is made on this machine and has no shards. Drop --streaming."
        )
    if data.dataset_name is not None:
        title = f"--dataset_name is {data.dataset_name}"
        found = _urls_of_dataset(data, data.dataset_name, title)
    elif data.train_file is not None:
        title = f"--train_file is {data.train_file}"
        found = {"train": expand(data.train_file)}
    else:
        raise ValueError("--streaming is set; it needs shards. Name them by --train_file or --dataset_name.")
    if data.validation_file is not None and need_validation:
        found["validation"] = expand(data.validation_file)
    if not found.get("train"):
        raise ValueError(f"{title}; there are no such training shards. Check the path.")
    for url in (url for split in ("train", "validation") for url in found.get(split, ())):
        if shard_kind(url) is None:
            raise ValueError(
                f"{title}; {url} cannot be streamed, only {', '.join(SHARDS)}. Run prepare_data, or drop --streaming."
            )
    return title, found


def _urls_of_dataset(data: DataArguments, name: str, title: str) -> dict[str, list[str]]:
    if "://" in name and not name.startswith("hf://"):
        stamp_of(f"{name}/report.json")  # raises if there is no prepared set
        return {split: expand(f"{name}/{split}/*.arrow") for split in SPLITS}
    if is_saved(Path(name)):
        splits = load_splits(name, data.dataset_config_name, None, title, data.allow_outside_root)
        return {
            SPLIT_NAMES.get(split, split): [file["filename"] for file in splits[split].cache_files] for split in splits
        }
    try:
        data_files = open_builder(name, data.dataset_config_name, data.allow_outside_root).config.data_files
    except Fault as fault:
        raise ValueError(f"{title}; {fault.detail}. {remedy(fault, data.allow_outside_root)}") from fault
    except damage(RuntimeError) as error:
        raise ValueError(
            f"{title}; it could not be found ({one_line(error)}). Check its spelling, its configuration and the connection."
        ) from error
    return {
        SPLIT_NAMES.get(str(split).lower(), str(split)): list(files) for split, files in (data_files or {}).items()
    }


def _hold_out(files: list[Shard]) -> tuple[list[Shard], list[Shard]]:
    """Return the first rows of some files, spread over all of them, and the rest of all files."""
    total = sum(file.rows for file in files)
    count = min(HELD_OUT, max(1, least_held_out(total), round(HELD_OUT_SHARE * total)))
    sources = min(HELD_OUT_SHARDS, count, len(files))
    heads, rest, missing = [], list(files), 0
    for part in range(sources):
        place = len(files) * part // sources
        file = files[place]
        wanted = missing + len(distributed.share(count, part, sources))
        rows = min(wanted, max(1, file.rows // 2))
        missing = wanted - rows
        heads.append(replace(file, first=0, rows=rows))
        rest[place] = replace(file, first=rows, rows=file.rows - rows)
    return heads, [file for file in rest if file.rows]


def _first_rows(files: list[Shard], most: int | None) -> list[Shard]:
    if most is None:
        return files
    kept = []
    for file in files:
        if most > 0:
            kept.append(replace(file, rows=min(file.rows, most)))
        most -= file.rows
    return kept


def _cut(files: list[Shard], rows: int) -> list[Shard]:
    """Cut files that can be read from the middle into shards of about `rows` rows."""
    shards = []
    for file in files:
        parts = -(-file.rows // rows) if file.divisible else 1
        for part in range(parts):
            mine = distributed.share(file.rows, part, parts)
            shards.append(replace(file, first=file.first + mine.start, rows=len(mine)))
    return shards


def _read_all(shards: list[Shard], source: Source) -> Dataset:
    """Read whole shards once, into the datasets cache."""
    if next(_usable_rows((shards, source)), None) is None:
        raise ValueError(
            f"shard {shards[0].url}; no row of validation can be used. Check --image_column and --caption_column."
        )
    # As a tuple, for a list would be shared out among processes.
    return cached_rows(_usable_rows, features_of(source.medium), {"whole": (shards, source)})


def _usable_rows(whole: tuple[Sequence[Shard], Source]) -> Iterator[dict[str, Any]]:
    reader = ShardReader(*whole)
    for number, shard in enumerate(reader.shards):
        for start in range(0, shard.rows, 64):
            rows = reader.read(number, start, min(start + 64, shard.rows))
            yield from (row for row in rows if isinstance(row, dict))


def _by_id(row: dict[str, Any]) -> str:
    return f"id {row['id']}"


def _by_bytes(row: dict[str, Any]) -> str:
    image = row["image"]
    return f"bytes {stored_hash(image['bytes'] or Path(image['path']).read_bytes())}"
