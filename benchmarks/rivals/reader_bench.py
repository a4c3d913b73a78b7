"""What the readers of `benchmarks/data/loading.py` share: pairs, stores, transforms."""

import copy
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from benchmarks.rivals import pair_stores
from mm_utils.data.batches.dataset import Batch
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import pad_captions, tokenize_captions
from mm_utils.data.images import read_pixels
from mm_utils.data.media.medium import image_geometry, random_square
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import ModelArguments
from mm_utils.model.processor import load_processor

Batches = Iterator[Batch]

SEED = 42


@dataclass
class Task:
    """One contestant.

    Attributes:
        contestant: a name in `READERS`.
        train_file: the source; None for synthetic photographs.
        cache_dir: where they and all stores are made, once.
        images: how many are read at most, a multiple of `batch_size * num_workers`.
        batch_size, num_workers, image_size: of the loader.
    """

    contestant: str
    train_file: str | None
    cache_dir: str
    images: int
    batch_size: int
    num_workers: int
    image_size: int


class Bench:
    """What all contestants share: the pairs of the prepared JPEGs, and the transforms."""

    def __init__(self, task: Task):
        self.task, self.args = task, LoaderArguments(dataloader_num_workers=str(task.num_workers))
        self.folder = Path(task.cache_dir)
        self.source = Path(task.train_file or pair_stores.photographs(self.folder / "photographs", task.images))
        self.pairs = self.load("jpeg")
        processor = load_processor(ModelArguments(image_size=task.image_size), ("a photograph",))
        self.tokenizer, self.geometry = processor.tokenizer, image_geometry(processor)
        whole = task.batch_size * max(1, task.num_workers)
        self.count = min(task.images, len(self.pairs["train"])) // whole * whole
        if not self.count:
            raise ValueError(
                f"--train_file is {task.train_file}; {len(self.pairs['train'])} of its pairs are for training, and a "
                f"batch for each worker takes {whole}. Give more, or lower --batch_size."
            )
        self.rows = self.tokenized(self.pairs["train"].select(range(self.count)))
        self.ids: list[str] = self.rows["id"][:]
        self.number = {name: row for row, name in enumerate(self.ids)}
        self.tokens: list[list[int]] = [captions[0] for captions in self.rows["input_ids"]]
        self.order = GlobalOrder(len(self.rows), BatchSizes((0,), (task.batch_size,)), SEED)

    def with_fixed_crop(self) -> "Bench":
        """The same, with squares that are cut and not resized."""
        other = copy.copy(self)
        other.args = replace(self.args, fixed_crop=True)
        return other

    def load(self, store: str) -> datasets.DatasetDict:
        """The prepared set in which images are stored so."""
        folder = pair_stores.prepared(self.folder / store, self.source, store, self.task.image_size)
        return load_pairs(DataArguments(dataset_name=str(folder)))

    def tokenized(self, rows: datasets.Dataset) -> datasets.Dataset:
        """Tokenise the captions as training does."""
        return tokenize_captions(rows, self.tokenizer, self.args.max_seq_length)

    def store(self, name: str) -> Path:
        """The folder of a format, written from the prepared set if it is not there."""
        folder = self.folder / f"{name}-{self.count}"
        with pair_stores.written(folder) as new:
            if new is not None:
                WRITERS[name](self, new)
        return folder

    def contents(self) -> list[bytes]:
        """All encoded images."""
        return [image["bytes"] for image in self.rows["image"]]

    def raw(self) -> list[np.ndarray]:
        """The pixels of all images."""
        return [read_pixels(image)[0] for image in self.load("raw")["train"].select(range(self.count))["image"]]

    def square(self, row: int, epoch: int, pixels: np.ndarray) -> Tensor:
        """What this project does to the pixels of an image: the same crop, wherever they come from."""
        rng = random.Random(f"{SEED} {epoch} {self.ids[row]}")
        return random_square(pixels, self.task.image_size, self.args.min_crop_area, rng)[0]

    def example(self, row: int, epoch: int, content: bytes) -> tuple[Tensor, int]:
        """Return the square of an encoded image and its row, decoded as this project does it."""
        least = int(self.task.image_size * self.args.min_crop_area**-0.5) + 1
        return self.square(row, epoch, read_pixels({"bytes": content, "path": None}, least)[0]), row

    def collate(self, examples: Sequence[tuple[Tensor, int]]) -> Batch:
        """As default collating, with captions padded to the longest."""
        pixels, rows = zip(*examples, strict=True)
        input_ids, mask = pad_captions([self.tokens[row] for row in rows], self.tokenizer.pad_token_id)
        return {
            "pixel_values": torch.stack(pixels),
            "input_ids": input_ids,
            "attention_mask": mask,
            "rows": torch.tensor(rows),
        }

    def numbered(self, batches: Iterable[Batch]) -> Batches:
        """This project's batches, with the numbers that the pairs have here."""
        for batch in batches:
            yield {**batch, "rows": torch.tensor([self.number[name] for name in batch["image_ids"]])}

    def stock_loader(self, rows: Dataset | datasets.Dataset, batches: Sampler, collate: Callable) -> Batches:
        """A `DataLoader` with its defaults, and workers that stay."""
        workers = self.task.num_workers
        return iter(
            DataLoader(
                rows,  # type: ignore[arg-type]
                batch_sampler=batches,
                num_workers=workers,
                collate_fn=collate,
                persistent_workers=bool(workers),
            )
        )


def originals(bench: Bench) -> datasets.Dataset:
    """The source's pairs, in the order of the prepared set; held-out ones included."""
    found = load_pairs(DataArguments(train_file=str(bench.source)))
    rows = datasets.concatenate_datasets(list(found.values()))
    here = {name: row for row, name in enumerate(rows["id"])}
    return rows.select([here[name] for name in bench.ids])


def original_paths(bench: Bench) -> list[str]:
    """The original files."""
    return [image["path"] for image in originals(bench)["image"]]


WRITERS: dict[str, Callable[[Bench, Path], None]] = {
    "lmdb": lambda bench, folder: pair_stores.lmdb(folder, bench.contents()),
    "memmap": lambda bench, folder: pair_stores.memmap(folder, bench.raw()),
    "tar": lambda bench, folder: pair_stores.tar_shards(folder, bench.rows, bench.pairs["validation"]),
    "litdata": lambda bench, folder: pair_stores.litdata(folder, bench.contents()),
    "mosaic": lambda bench, folder: pair_stores.mosaic(folder, bench.contents()),
}
