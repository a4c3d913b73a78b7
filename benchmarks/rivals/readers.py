"""The contestants of `benchmarks/data/loading.py`: readers of one set, each a process.

A contestant builds a fresh loader and yields training batches without end: `pixel_values`, `input_ids`, `attention_mask` and
`rows`, the numbers of their pairs.

- `datasets`: the normal way. The `Image` feature of `datasets` decodes the original files, `with_transform` resizes, takes
  the centre and normalises in fp32 with torchvision, a stock `DataLoader` stacks. All ratios are to it.
- `tandem_originals`, `tandem_jpeg`, `tandem_raw`: this project's loader, over the original files and over what
  `scripts/prepare_data.py` makes of them; `_fixed`: with `--fixed_crop`. `tandem_stream`: its streaming, over tar shards of the prepared images.
- `lmdb`, `memmap`: the prepared JPEG bytes in LMDB, the prepared raw pixels in a NumPy memory map; stock `DataLoader`.
- `webdataset`, `litdata`, `mosaic`: the prepared JPEG bytes in these libraries' formats and loaders, shuffled.

Equal for all but `datasets` and `_fixed`: decoder, random crop, uint8 pixels (`Bench.square`). Equal for all: batch size, number of
workers. The peers are given the captions' tokens ready, in memory; this project reads them from its table, and its stream
tokenises. Nothing is prefetched beyond what each loader does by itself.
"""

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler
from torchvision.transforms import CenterCrop, Compose, InterpolationMode, Normalize, Resize, ToTensor

from benchmarks.rivals import pair_stores
from benchmarks.rivals.reader_bench import SEED, Batches, Bench, original_paths, originals
from mm_utils.data.batches.dataset import Batch
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.order import BatchSizes, Draw, GlobalOrder, RankBatches
from mm_utils.data.media import Image
from mm_utils.data.rows.source import DataArguments
from mm_utils.extras.streams.flags import StreamingArguments
from mm_utils.extras.streams.loader import train_stream
from mm_utils.extras.streams.stream import open_stream

ENDLESS = 10**6
"""Steps of a loader, more than a benchmark takes."""


# -- this project -----------------------------------------------------------------------------------------------------


def tandem(bench: Bench, rows: datasets.Dataset) -> Batches:
    """`Loaders.train`, without what `DeviceLoader` does on the device."""
    loaders = Loaders(
        bench.args,
        torch.device("cpu"),
        bench.tokenizer.pad_token_id,
        Image(*bench.geometry, bench.args.min_crop_area, bench.args.fixed_crop),
    )
    order = GlobalOrder(len(rows), BatchSizes((0,), (bench.task.batch_size,)), SEED)
    return bench.numbered(loaders.train(rows, order, 0, ENDLESS).loader)


def tandem_originals(bench: Bench) -> Batches:
    """The original files."""
    return tandem(bench, bench.tokenized(originals(bench)))


def tandem_raw(bench: Bench) -> Batches:
    """The prepared pixels."""
    return tandem(bench, bench.tokenized(bench.load("raw")["train"].select(range(bench.count))))


def tandem_stream(bench: Bench) -> Batches:
    """Tar shards."""
    folder, task = bench.store("tar"), bench.task
    shards = f"{{000000..{pair_stores.SHARDS - 1:06d}}}.tar"
    data = DataArguments(train_file=str(folder / shards), validation_file=str(folder / "validation.tar"))
    stream = open_stream(data, StreamingArguments(True), BatchSizes((0,), (task.batch_size,)), SEED)
    loaders = Loaders(
        bench.args,
        torch.device("cpu"),
        bench.tokenizer.pad_token_id,
        Image(*bench.geometry, bench.args.min_crop_area, bench.args.fixed_crop),
    )
    return bench.numbered(train_stream(loaders, stream, bench.tokenizer, 0, ENDLESS).loader)


# -- the normal way ---------------------------------------------------------------------------------------------------


class RowBatches(Sampler[list[int]]):
    """The project's batches without their epochs, as plain data sets are asked."""

    def __init__(self, bench: Bench):
        self.batches = RankBatches(bench.order, 0, ENDLESS)

    def __iter__(self) -> Iterator[list[int]]:
        return ([row for row, _ in batch] for batch in self.batches)

    def __len__(self) -> int:
        return ENDLESS


def plain_datasets(bench: Bench) -> Batches:
    """Every image is decoded whole, resized with torchvision and normalised in fp32."""
    size, mean, std = bench.geometry
    steps = [Resize(size, InterpolationMode.BICUBIC), CenterCrop(size), ToTensor(), Normalize(mean, std)]
    transform = Compose(steps)
    columns = {"image": original_paths(bench), "row": list(range(bench.count))}
    rows = datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())

    def transformed(batch: dict[str, list[Any]]) -> dict[str, list[Any]]:
        return {"pixels": [transform(image.convert("RGB")) for image in batch["image"]], "row": batch["row"]}

    def collate(examples: list[dict[str, Any]]) -> Batch:
        return bench.collate([(example["pixels"], example["row"]) for example in examples])

    return bench.stock_loader(rows.with_transform(transformed), RowBatches(bench), collate)


# -- other stores and loaders -----------------------------------------------------------------------------------------


class LmdbPairs(Dataset):
    """Opened in the worker that reads it."""

    def __init__(self, bench: Bench):
        self.bench, self.folder = bench, bench.store("lmdb")
        self.transaction: Any = None

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        if self.transaction is None:
            import lmdb

            self.transaction = lmdb.open(str(self.folder), readonly=True, lock=False, readahead=False).begin(
                buffers=True
            )
        return self.bench.example(*draw, self.transaction.get(f"{draw[0]:08d}".encode()))


class MemmapPairs(Dataset):
    """Raw pixels."""

    def __init__(self, bench: Bench):
        self.bench, folder = bench, bench.store("memmap")
        self.pixels = np.memmap(folder / "pixels.bin", np.uint8, "r")
        self.index = np.load(folder / "index.npy").tolist()

    def __getitem__(self, draw: Draw) -> tuple[Tensor, int]:
        start, height, width, channels = self.index[draw[0]]
        pixels = self.pixels[start : start + height * width * channels].reshape(height, width, channels)
        return self.bench.square(*draw, pixels), draw[0]


def map_style(bench: Bench, rows: Dataset) -> Batches:
    """A stock loader in the project's order."""
    return bench.stock_loader(rows, RankBatches(bench.order, 0, ENDLESS), bench.collate)


def webdataset(bench: Bench) -> Batches:
    """Each worker reads its shards through a buffer of 1000 shuffled samples, again and again."""
    import webdataset as wds

    urls = [str(bench.store("tar") / f"{part:06d}.tar") for part in range(pair_stores.SHARDS)]
    samples = wds.WebDataset(urls, shardshuffle=len(urls), seed=SEED).shuffle(1000)
    examples = samples.map(lambda sample: bench.example(int(sample["__key__"]), 0, sample["jpg"]))
    batches = examples.batched(bench.task.batch_size, collation_fn=bench.collate).repeat()
    workers = bench.task.num_workers
    return iter(wds.WebLoader(batches, batch_size=None, num_workers=workers, persistent_workers=bool(workers)))


def litdata(bench: Bench) -> Batches:
    """`StreamingDataLoader`; epoch follows epoch."""
    from litdata import StreamingDataLoader, StreamingDataset

    class Rows(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            sample = super().__getitem__(index)
            return bench.example(sample["row"], 0, sample["image"])

    rows, task = Rows(str(bench.store("litdata")), shuffle=True, seed=SEED), bench.task
    loader = StreamingDataLoader(
        rows,
        batch_size=task.batch_size,
        num_workers=task.num_workers,
        collate_fn=bench.collate,
        multiprocessing_context="fork" if task.num_workers else None,
        persistent_workers=bool(task.num_workers),
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


def mosaic(bench: Bench) -> Batches:
    """`StreamingDataset` in its default order; epoch follows epoch."""
    from streaming import StreamingDataLoader, StreamingDataset

    class Rows(StreamingDataset):
        def __getitem__(self, index: Any) -> tuple[Tensor, int]:
            sample = super().__getitem__(index)
            return bench.example(int(sample["row"]), 0, sample["image"])

    task = bench.task
    rows = Rows(local=str(bench.store("mosaic")), shuffle=True, shuffle_seed=SEED, batch_size=task.batch_size)
    loader = StreamingDataLoader(
        rows,
        batch_size=task.batch_size,
        num_workers=task.num_workers,
        collate_fn=bench.collate,
        persistent_workers=bool(task.num_workers),
    )
    return itertools.chain.from_iterable(itertools.repeat(loader))


# -- all of them ------------------------------------------------------------------------------------------------------

READERS: dict[str, Callable[[Bench], Batches]] = {
    "datasets": plain_datasets,
    "tandem_originals": tandem_originals,
    "tandem_jpeg": lambda bench: tandem(bench, bench.rows),
    "tandem_jpeg_fixed": lambda bench: tandem(bench.with_fixed_crop(), bench.rows),
    "tandem_raw": tandem_raw,
    "tandem_raw_fixed": lambda bench: tandem_raw(bench.with_fixed_crop()),
    "tandem_stream": tandem_stream,
    "lmdb": lambda bench: map_style(bench, LmdbPairs(bench)),
    "memmap": lambda bench: map_style(bench, MemmapPairs(bench)),
    "webdataset": webdataset,
    "litdata": litdata,
    "mosaic": mosaic,
}
"""Contestant -> its batches."""

_TARS = ("tandem_stream", "webdataset")


def bytes_per_pair(bench: Bench, contestant: str) -> float:
    """What a pair takes on disk; of the prepared sets, with all columns."""
    if contestant in ("datasets", "tandem_originals"):
        paths = original_paths(bench)
        return sum(Path(path).stat().st_size for path in paths) / len(paths)
    if contestant.startswith(("tandem_jpeg", "tandem_raw")):
        pairs = bench.load(contestant.removeprefix("tandem_").removesuffix("_fixed"))["train"]
        return sum(Path(file["filename"]).stat().st_size for file in pairs.cache_files) / len(pairs)
    return pair_stores.bytes_below(bench.store("tar" if contestant in _TARS else contestant)) / bench.count
