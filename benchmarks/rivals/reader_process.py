"""A contestant of `benchmarks/data/loading.py` at work: checked first, timed in turns.

The process reads what to do (`reader_bench.Task`) and prints what a pair takes on disk. `{"check": true}` makes it read an
epoch and say what is wrong with it; `{"open": true}`, start a fresh loader and say when its first batch was there; then
`{"batches": n}`, say what n batches took. `{"metadata_rows": n}` in place of all that concerns memory, see `memory_of`.

A batch's pixels are copied once, into memory that stays, as they are on their way to a device.
"""

import itertools
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import psutil
import torch
import transformers
from torch import Tensor
from torch.utils.benchmark import Timer

from benchmarks.harness import cpu_seconds, serve
from benchmarks.rivals import pair_stores
from benchmarks.rivals.reader_bench import SEED, Batches, Bench, Task
from benchmarks.rivals.readers import ENDLESS, READERS, bytes_per_pair
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import open_image
from mm_utils.data.media import Image
from mm_utils.data.media.medium import image_geometry
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import ModelArguments
from mm_utils.model.processor import load_processor
from mm_utils.model.reading import center_square

MEMORY_BATCHES = 50


class Consumer:
    """Takes batches as a training loop would, and counts.

    Attributes:
        images, moved, cpu: since `begin`, how many images came and how many bytes their pixels have; and when it was, in CPU
            seconds.
    """

    def __init__(self, batches: Batches):
        self.batches, self.place = batches, torch.empty(0)
        self.begin()

    def begin(self) -> None:
        """Count from here."""
        self.images = self.moved = 0
        self.cpu = cpu_seconds()

    def step(self) -> None:
        """Take a batch."""
        pixels = next(self.batches)["pixel_values"]
        if self.place.dtype != pixels.dtype or len(self.place) < len(pixels):
            self.place = torch.empty_like(pixels)
        self.place[: len(pixels)].copy_(pixels)
        self.images += len(pixels)
        self.moved += pixels.nbytes

    def turn(self, batches: int) -> dict[str, float]:
        """Return wall and CPU seconds of n batches, after two or more that do not count."""
        measured = Timer("consumer.step()", setup="consumer.begin()", globals={"consumer": self}).timeit(batches)
        cpu = cpu_seconds() - self.cpu
        return {"images": self.images, "moved": self.moved, "seconds": measured.raw_times[0], "cpu_seconds": cpu}


def epoch(batches: Batches, bench: Bench) -> tuple[list[int], np.ndarray]:
    """Numbers of an epoch's pairs in order, and each image's mean colour, `[pairs, 3]`."""
    mean, std = (torch.tensor(value) for value in bench.geometry[1:])
    rows: list[int] = []
    colours: list[Tensor] = []
    while len(rows) < bench.count:
        batch = next(batches)
        found = mean_colours(batch["pixel_values"])
        colours.append((found * std + mean) * 255 if batch["pixel_values"].is_floating_point() else found)
        rows += batch["rows"].tolist()
    return rows, torch.cat(colours).numpy()


def prepared_colours(bench: Bench) -> np.ndarray:
    """The mean colour of the central square of each image, as it was prepared."""
    size = bench.task.image_size
    squares = [center_square(open_image(image), size) for image in bench.rows["image"]]
    return mean_colours(torch.stack(squares)).numpy()


def mean_colours(pixels: Tensor) -> Tensor:
    """`[b, 3]`."""
    return pixels.float().mean((2, 3))


def fault(rows: list[int], colours: np.ndarray, expected: np.ndarray) -> str | None:
    """Why a reader is not compared: pairs left out or given twice, or other images.

    Colours may differ by a quarter of what they would if every pair had its neighbour's image, as crops differ.
    """
    if sorted(rows) != list(range(len(expected))):
        return f"of {len(expected)} pairs, {len(expected) - len(set(rows))} did not come in an epoch; not compared"
    error, other = (abs(right - expected).mean() for right in (colours[np.argsort(rows)], np.roll(expected, 1, 0)))
    return f"mean colours are {error:.1f} off; not compared" if error > other / 4 else None


def fresh(bench: Bench) -> tuple[Batches, float]:
    """Another loader, and the seconds from opening the store to the first batch."""
    start = time.perf_counter()
    batches = READERS[bench.task.contestant](bench)
    first = next(batches)
    return itertools.chain([first], batches), time.perf_counter() - start


class Process:
    """What this process says to a `Task`, and then to each question."""

    def __init__(self) -> None:
        self.bench: Bench | None = None
        self.consumer: Consumer | None = None

    def __call__(self, question: dict[str, Any]) -> dict[str, Any]:
        """Answer."""
        if "metadata_rows" in question:
            return memory_of(Path(question["cache_dir"]), question["metadata_rows"])
        if self.bench is None:
            if not pair_stores.is_installed(question["contestant"]):
                return {"missing": pair_stores.PACKAGES[question["contestant"]]}
            self.bench = Bench(Task(**question))
            size = bytes_per_pair(self.bench, self.bench.task.contestant)
            return {"bytes_per_pair": size, "pairs": self.bench.count}
        if "check" in question:
            return {"fault": fault(*epoch(fresh(self.bench)[0], self.bench), prepared_colours(self.bench))}
        if "open" in question or self.consumer is None:
            batches, seconds = fresh(self.bench)
            self.consumer = Consumer(batches)
            return {"first_batch": seconds}
        return self.consumer.turn(question["batches"])


def memory_of(folder: Path, count: int) -> dict[str, float]:
    """Bytes that memory grows by from opening `count` pairs until some batches are read.

    Workers are not counted. `private` is without the pages of mapped files that the system may drop at any time.
    """
    name = str(pair_stores.tiny_pairs(folder / f"tiny-{count}", count))
    processor = load_processor(ModelArguments(image_size=32), ("a photograph",))
    args = LoaderArguments(dataloader_num_workers="2")
    before = psutil.Process().memory_info()
    rows = tokenize_captions(load_pairs(DataArguments(dataset_name=name))["train"], processor.tokenizer, 16)
    order = GlobalOrder(len(rows), BatchSizes((0,), (64,)), SEED)
    loaders = Loaders(
        args,
        torch.device("cpu"),
        processor.tokenizer.pad_token_id,
        Image(*image_geometry(processor), args.min_crop_area, args.fixed_crop),
    )
    for _ in itertools.islice(loaders.train(rows, order, 0, ENDLESS), MEMORY_BATCHES):
        pass
    after = psutil.Process().memory_info()
    shared = getattr(after, "shared", 0) - getattr(before, "shared", 0)
    return {"rows": count, "resident": after.rss - before.rss, "private": after.rss - before.rss - shared}


if __name__ == "__main__":
    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
    transformers.logging.set_verbosity_error()
    datasets.disable_progress_bars()
    serve(Process())
