"""In every batch each image has its own captions: from memory, from a prepared set, from a stream; on ranks, by workers, resumed.

A picture of one colour and its captions say the same number; a colour survives compression, resizing, crops and flips.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset
from PIL import Image

from mm_utils.data import media
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.pairs import load_pairs
from mm_utils.data.streams.stream import StreamLoader, open_stream
from mm_utils.model.processor import train_tokenizer
from scripts import prepare_data
from tests.kit.jsonl import write_lines

COUNT = 90
SIZE = 24
LEVELS = 6
GAP = 51
BATCH = 7
STEPS = 28  # two epochs
TOKENIZER = train_tokenizer([f"number {' '.join(f'{number:03d}')} again again" for number in range(COUNT)], 100)


def colour(number: int) -> tuple[int, int, int]:
    """Six levels a channel, which are too far apart for JPEG to mix up."""
    return (GAP * (number % 6), GAP * (number // 6 % 6), GAP * (number // 36))


def number_shown(pixels: torch.Tensor) -> int:
    levels = (pixels.float().mean((1, 2)) / GAP).round().long().tolist()
    return sum(level * LEVELS**place for place, level in enumerate(levels))


def caption_of(number: int, place: int) -> str:
    return f"number {' '.join(f'{number:03d}')}" + " again" * place


def number_said(text: str) -> int:
    return int("".join(letter for letter in text if letter.isdecimal()))


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A file of all captions of an image in a row, and a set prepared of half of it and a file of a caption a row, by store."""
    root = tmp_path_factory.mktemp("pairing")
    rows = []
    for number in range(COUNT):
        Image.new("RGB", (60 + number % 7, 40 + number % 5), colour(number)).save(root / f"{number}.png")
        rows.append({"image": f"{number}.png", "captions": [caption_of(number, at) for at in range(number % 3 + 1)]})
    for name, part in (("all.jsonl", rows), ("some.jsonl", rows[: COUNT // 2])):
        write_lines(root / name, part)
    rest = [(at, number) for number in range(COUNT // 2, COUNT) for at in range(number % 3 + 1)]
    lines = [f"{number}.png,{caption_of(number, at)}" for at, number in sorted(rest)]
    (root / "others.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    found = {"memory": str(root / "all.jsonl")}
    for store in ("jpeg", "raw"):
        flags = ["--output_dir", str(root / store), "--image_size", str(SIZE), "--store", store, "--num_proc", "2"]
        given = ["--sources", str(root / "some.jsonl"), str(root / "others.csv")]
        prepare_data.main([*given, *flags, "--validation_fraction", "0.1"])
        found[store] = str(root / store)
    return found


def rows_of(source: str) -> Dataset:
    return load_pairs(DataArguments(**{"train_file" if source.endswith("jsonl") else "dataset_name": source}))["train"]


def check(batch: dict[str, Any]) -> list[int]:
    """Return the numbers of a batch, after comparing those of captions and images."""
    assert not batch["skipped"]
    shown = [number_shown(pixels) for pixels in batch["pixel_values"]]
    texts = [TOKENIZER.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
    assert [shown[place] for place in batch["caption_image"]] == [number_said(text) for text in texts]
    return shown


def loaders(workers: int = 0) -> Loaders:
    medium = media.Image(SIZE, (0.0,) * 3, (1 / 255,) * 3, 0.8)
    return Loaders(LoaderArguments(16, str(workers)), torch.device("cpu"), 0, medium)


def on_each_rank(world: int, batches: Callable[[int, int], Any], start: int, stop: int) -> Iterator[list[Any]]:
    """Yield the batches of each rank."""
    for rank in range(world):
        with patch.multiple("mm_utils.distributed", rank=lambda: rank, world_size=lambda: world):  # noqa: B023
            yield list(batches(start, stop))


HOW = {"whole": (1, 0, 0), "on ranks": (3, 0, 0), "by workers": (1, 2, 0), "resumed": (2, 0, 11)}


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("source", "how"),
    [
        *((source, how) for source in ("memory", "stream of jpeg") for how in HOW),
        *((source, "resumed") for source in ("jpeg", "raw", "stream of raw")),
    ],
)
def test_each_image_has_its_captions_in_the_same_steps(source: str, how: str, sources: dict[str, str]) -> None:
    evaluated = []
    if source.startswith("stream"):
        args = DataArguments(dataset_name=sources[source.split()[-1]])
        stream = open_stream(args, BatchSizes((0,), (BATCH,)), 1, 3, 4)
        count = sum(shard.rows for shard in stream.shards)
        make = lambda workers, start, stop: StreamLoader(stream, loaders(workers), TOKENIZER, start, stop)  # noqa: E731
    else:
        rows = tokenize_captions(rows_of(sources[source]), TOKENIZER, 16)
        evaluated = [number for batch in loaders().evaluation(rows, 4) for number in check(batch)]
        order = GlobalOrder(len(rows), BatchSizes((0,), (BATCH,)), 1)
        count = len(rows)
        make = lambda workers, start, stop: loaders(workers).train(rows, order, start, stop)  # noqa: E731
    world, workers, stop_at = HOW[how]
    steps = [[] for _ in range(STEPS)]
    for start, stop in ((0, stop_at), (stop_at, STEPS)):
        for batches in on_each_rank(world, partial(make, workers), start, stop):
            for step, batch in enumerate(batches, start):
                steps[step] += check(batch)
    whole = [check(batch) for batch in make(0, 0, STEPS)]
    assert list(map(sorted, steps)) == list(map(sorted, whole))
    assert all(len(set(numbers)) == BATCH for numbers in steps)
    first = [number for numbers in steps for number in numbers][: count - BATCH]
    assert len(set(first)) == len(first)
    assert source.startswith("stream") or len(set(evaluated)) == len(evaluated) == count
