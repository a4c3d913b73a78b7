"""Training pairs that are streamed: data sets larger than the disk, read shard by shard while training goes on.

What may be streamed: Parquet and WebDataset tar shards, on disk or on a server, a data set on the Hub that is made of them,
and folders that `prepare_data` wrote. Images are embedded in the shards; paths are not followed.

`mm_utils.data.stream.lanes` decides the order and says what it guarantees, which is less than that of a data set on disk:
briefly, step s always has the same rows, and every row comes once an epoch, but rows are shuffled in blocks alone.
Besides:
  - Rows are known by their place. A row that turns out unusable (no caption, a broken image, a damaged shard) is counted as
    skipped, and another one of its block takes its place; the batch is smaller by it only where most of the block is
    unusable.
  - Rows of the same image are not merged. The loss sees by their ids, or their bytes where there are none, that they are
    the same image.
  - Without a validation split, the first rows of some shards are held out, 5 % of all and at most 1000. Wherever their
    images come again, by id or by bytes, they are left out of training too, and counted. The same is done, by bytes, with the
    images of a given validation split.
  - A shard that grows, shrinks or is added makes another stream: `Stream.fingerprint` changes.

A lane keeps the encoded images of a block in memory: `--stream_lanes` * `--shuffle_block_size` images, over all processes. With
64 * 256 images of 100 kB that is 1.6 GB.
"""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
from datasets import Dataset, DatasetDict, Features, load_dataset_builder

from mm_utils import ranks
from mm_utils.arguments import arg
from mm_utils.data.order import BatchSizes
from mm_utils.data.raw.columns import SPLIT_NAMES, Columns, find_columns
from mm_utils.data.sources import DataArguments, load_pairs
from mm_utils.data.stream.files import Shard, ShardReader, count_shards, expand
from mm_utils.data.stream.formats import DAMAGE, SUFFIXES, Record, column_names, kind_of, one_line
from mm_utils.data.stream.lanes import LaneOrder
from mm_utils.data.stream.rows import features_of, make_row, name_by_bytes, name_by_id, needed_columns
from mm_utils.data.substitutes import SHOWN_IN_VALIDATION

logger = logging.getLogger(__name__)

LANES, SHARDS_PER_LANE = 64, 4  # a lane with several shards reads them in another order in every epoch
HELD_OUT, HELD_OUT_SHARE, HELD_OUT_SHARDS = 1000, 0.05, 50  # rows; share of all rows; from how many files


@dataclass
class StreamingArguments:
    """How a source larger than the disk is read."""

    streaming: bool = arg(False, "Read shards while training instead of loading the data set first.")
    stream_lanes: int = arg(
        0, f"Shards read side by side, over all processes; 0 = {LANES}, or as many as there are. It decides the order."
    )
    shuffle_block_size: int = arg(
        256, "Rows of a shard that are shuffled among themselves; each lane holds as many encoded images in memory."
    )

    def __post_init__(self) -> None:
        if self.stream_lanes < 0:
            raise ValueError(f"--stream_lanes is {self.stream_lanes}; give a number of shards, or 0 to leave it open.")
        if self.shuffle_block_size < 1:
            raise ValueError(f"--shuffle_block_size is {self.shuffle_block_size}; give at least 1 row.")

    def check(self, length_bucket_window: int, look_alikes: int, cache_features: bool) -> None:
        """Refuse what needs all rows at hand.

        Raises:
            ValueError: of one line.
        """
        if self.streaming and length_bucket_window > 1:
            raise ValueError(
                f"--length_bucket_window is {length_bucket_window}; a stream's captions are not known ahead. Drop it, or "
                "--streaming."
            )
        if self.streaming and look_alikes > 1:
            raise ValueError(
                f"--look_alikes is {look_alikes}; a stream's captions are not known ahead. Drop it, or --streaming."
            )
        if self.streaming and cache_features:
            raise ValueError("--cache_features is set; a stream may be larger than the disk. Drop it, or --streaming.")


@dataclass
class Stream:
    """A source that is read shard by shard.

    Attributes:
        shards: what `order` counts, files or runs of rows in a file.
        order: which rows form which step.
        columns: of the shards.
        features: of the rows that `row` gives, in the schema of `mm_utils.data.sources`.
        validation: rows in that schema, on disk in the datasets cache.
        held_out: images of `validation`, which training must not show.
        fingerprint: 16 hexadecimal digits that depend on which shards there are, and on their rows' number.
    """

    shards: list[Shard]
    order: LaneOrder
    columns: Columns
    features: Features
    validation: Dataset
    held_out: frozenset[str]
    fingerprint: str

    @property
    def num_rows(self) -> int:
        """Rows of an epoch."""
        return self.order.num_rows

    def reader(self) -> ShardReader:
        """Reads the columns that are needed."""
        return ShardReader(self.shards, needed_columns(self.columns))

    def row(self, record: Record, shard: int, row: int) -> dict[str, Any] | str:
        """The training row that a record makes, or why it makes none."""
        where = self.place_of(shard, row)
        made = make_row(record, self.columns, self.features, where)
        if isinstance(made, dict) and not self.held_out.isdisjoint((name_by_id(made), name_by_bytes(made))):
            return f"{where}: {SHOWN_IN_VALIDATION}"
        return made

    def place_of(self, shard: int, row: int) -> str:
        """What a row without an id is called: its file, and its number there, from 0."""
        return f"shard {self.shards[shard].url}, row {self.shards[shard].first + row}"

    def rows(self, most: int) -> Iterator[dict[str, Any]]:
        """The first training rows, some of every shard, at most so many."""
        reader = ShardReader(self.shards, needed_columns(self.columns))
        each = -(-most // len(self.shards))
        for number, shard in enumerate(self.shards):
            for row, record in enumerate(reader.read(number, 0, min(each, most, shard.rows))):
                made = self.row(record, number, row)
                if isinstance(made, dict):
                    most -= 1
                    yield made

    def captions(self, most: int = 20_000) -> Iterator[str]:
        """The first captions of training, some of every shard, at most so many: what a tokenizer is trained on."""
        return islice((caption for row in self.rows(most) for caption in row["captions"]), most)

    def sample(self, most: int) -> DatasetDict:
        """At most so many training rows as an ordinary data set, and the validation split."""
        train = Dataset.from_list(list(self.rows(most)), features=self.features)
        return DatasetDict({"train": train, "validation": self.validation})


def open_stream(data: DataArguments, args: StreamingArguments, sizes: BatchSizes, seed: int) -> Stream:
    """Open the source that `data` names, without reading more of it than its validation split.

    Raises:
        ValueError: of one line, if there are no shards, they cannot be reached or have no column of images or captions, or
            there are too few rows or shards for `sizes` or `args`.
    """
    title, urls = _find_urls(data)
    files = count_shards(urls["train"])
    if sum(file.rows for file in files) < 2:
        raise ValueError(
            f"{title}; its shards hold fewer than 2 rows. Give shards with one image and its caption per row."
        )
    columns = _find_columns(files, data, title)
    features = features_of(columns)
    given = _given_validation(data, urls, title)
    heads, files = ([], files) if given is not None else _hold_out(files)
    validation = given if given is not None else _read_all(heads, columns)
    held_out = {name_by_bytes(row) for row in validation} | (
        {name_by_id(row) for row in validation} if given is None else set()
    )
    if data.max_eval_samples is not None:
        validation = validation.select(range(min(data.max_eval_samples, len(validation))))
    files = _first_rows(files, data.max_train_samples)
    total = sum(file.rows for file in files)
    wanted = args.stream_lanes or LANES
    shards = _cut(files, max(args.shuffle_block_size, total // (wanted * SHARDS_PER_LANE)))
    lanes = args.stream_lanes or min(LANES, len(shards))
    order = LaneOrder([shard.rows for shard in shards], sizes, seed, lanes, args.shuffle_block_size)
    known = json.dumps([[shard.url.rpartition("/")[2], shard.first, shard.rows] for shard in shards])
    fingerprint = hashlib.blake2b(known.encode(), digest_size=8).hexdigest()
    logger.info("Stream %s: %s rows, %d shards, %d lanes", fingerprint, f"{order.num_rows:,}", len(shards), lanes)
    return Stream(shards, order, columns, features, validation, frozenset(held_out), fingerprint)


def _find_urls(data: DataArguments) -> tuple[str, dict[str, list[str]]]:
    """How errors begin, and the files of each split."""
    if data.test_file is not None:
        raise ValueError(
            f"--test_file is {data.test_file}; a stream has no test split. Evaluate on it by eval_retrieval."
        )
    if data.dataset_name is not None:
        title = f"--dataset_name is {data.dataset_name}"
        found = _urls_of_dataset(data.dataset_name, data.dataset_config_name, title)
    elif data.train_file is not None:
        title = f"--train_file is {data.train_file}"
        found = {"train": expand(data.train_file)}
    else:
        raise ValueError("--streaming is set; it needs shards. Name them by --train_file or --dataset_name.")
    if data.validation_file is not None and kind_of(data.validation_file) is not None:
        found["validation"] = expand(data.validation_file)
    if not found.get("train"):
        raise ValueError(f"{title}; there are no such training shards. Check the path.")
    for url in (url for split in ("train", "validation") for url in found.get(split, ())):
        if kind_of(url) is None:
            raise ValueError(
                f"{title}; {url} cannot be streamed, only {', '.join(SUFFIXES)}. Run prepare_data, or drop --streaming."
            )
    return title, found


def _urls_of_dataset(name: str, config: str | None, title: str) -> dict[str, list[str]]:
    folder = Path(name)
    if (folder / "dataset_dict.json").is_file():
        splits = json.loads((folder / "dataset_dict.json").read_text())["splits"]
        return {SPLIT_NAMES.get(split, split): _arrow_files(folder / split) for split in splits}
    if (folder / "state.json").is_file():
        return {"train": _arrow_files(folder)}
    try:
        data_files = load_dataset_builder(name, config).config.data_files
    except (*DAMAGE, RuntimeError) as error:
        raise ValueError(
            f"{title}; it could not be found ({one_line(error)}). Check its spelling, its configuration and the connection."
        ) from error
    return {
        SPLIT_NAMES.get(str(split).lower(), str(split)): list(files) for split, files in (data_files or {}).items()
    }


def _arrow_files(folder: Path) -> list[str]:
    state = json.loads((folder / "state.json").read_text())
    return [str(folder / file["filename"]) for file in state["_data_files"]]


def _hold_out(files: list[Shard]) -> tuple[list[Shard], list[Shard]]:
    """The first rows of some files, spread over all of them; and what is left."""
    total = sum(file.rows for file in files)
    count = min(HELD_OUT, max(1, round(HELD_OUT_SHARE * total)))
    sources = min(HELD_OUT_SHARDS, count, len(files))
    heads, rest = [], list(files)
    for part in range(sources):
        place = len(files) * part // sources
        file = files[place]
        rows = min(len(ranks.share(count, part, sources)), max(1, file.rows // 2))
        heads.append(Shard(file.url, 0, rows))
        rest[place] = Shard(file.url, rows, file.rows - rows)
    return heads, [file for file in rest if file.rows]


def _first_rows(files: list[Shard], most: int | None) -> list[Shard]:
    if most is None:
        return files
    kept = []
    for file in files:
        if most > 0:
            kept.append(Shard(file.url, file.first, min(file.rows, most)))
        most -= file.rows
    return kept


def _cut(files: list[Shard], rows: int) -> list[Shard]:
    """Cut files that can be read from the middle into shards of about so many rows."""
    shards = []
    for file in files:
        parts = -(-file.rows // rows) if file.divisible else 1
        for part in range(parts):
            mine = ranks.share(file.rows, part, parts)
            shards.append(Shard(file.url, file.first + mine.start, len(mine)))
    return shards


def _find_columns(files: list[Shard], data: DataArguments, title: str) -> Columns:
    wanted = Columns(data.image_column, data.caption_column, data.id_column, data.language_column)
    return find_columns(column_names(files[0].url), title, wanted)


def _given_validation(data: DataArguments, urls: dict[str, list[str]], title: str) -> Dataset | None:
    """The validation split that the source has, as far as it is read; None if it has none."""
    most = data.max_eval_samples or HELD_OUT
    if urls.get("validation"):
        files = _first_rows(count_shards(urls["validation"]), most)
        return _read_all(files, _find_columns(files, data, title))
    if data.validation_file is None:
        return None
    nothing: dict[str, Any] = dict.fromkeys(("dataset_name", "dataset_config_name", "validation_file"))
    file = replace(data, train_file=data.validation_file, max_train_samples=most, **nothing)
    return load_pairs(file, need_train=False)["train"]


def _read_all(shards: list[Shard], columns: Columns) -> Dataset:
    """Read whole shards once, into the datasets cache."""
    if next(_usable_rows((shards, columns)), None) is None:
        raise ValueError(
            f"shard {shards[0].url}; no row of validation can be used. Check --image_column and --caption_column."
        )
    return Dataset.from_generator(
        _usable_rows,
        features=features_of(columns),
        cache_dir=str(datasets.config.HF_DATASETS_CACHE),
        gen_kwargs={"whole": (shards, columns)},  # as a tuple, for a list would be shared out among processes
    )


def _usable_rows(whole: tuple[Sequence[Shard], Columns]) -> Iterator[dict[str, Any]]:
    shards, columns = whole
    reader, features = ShardReader(shards, needed_columns(columns)), features_of(columns)
    for number, shard in enumerate(shards):
        for start in range(0, shard.rows, 64):
            for record in reader.read(number, start, min(start + 64, shard.rows)):
                row = make_row(record, columns, features, shard.url)
                if isinstance(row, dict):
                    yield row
