"""In every batch on every rank, each image has its own captions, after any change of a prepared data set.

A picture of one colour and its captions say the same number; a colour survives compression, resizing, crops and flips.
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils.data import media
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.prepare.on_disk import content_id
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.stream import open_stream, train_stream
from mm_utils.model.processor import train_tokenizer
from scripts import prepare_data

COUNT, SIZE, LEVELS, GAP = 90, 24, 6, 51
CPU = torch.device("cpu")


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


def write_raw(folder: Path) -> list[str]:
    """A JSONL file with all captions of an image in a row, and a CSV file with a caption a row, in another order."""
    folder.mkdir()
    for number in range(COUNT):
        Image.new("RGB", (60 + number % 7, 40 + number % 5), colour(number)).save(folder / f"{number}.png")
    few = [
        {"image": f"{n}.png", "captions": [caption_of(n, at) for at in range(n % 3 + 1)]} for n in range(COUNT // 2)
    ]
    (folder / "some.jsonl").write_text("".join(json.dumps(row) + "\n" for row in few))
    rest = [(n, at) for at in range(2) for n in reversed(range(COUNT // 2, COUNT))]
    lines = [f"{n}.png,{caption_of(n, at)}" for n, at in rest]
    (folder / "others.csv").write_text("\n".join(["image,caption", *lines]) + "\n")
    return [str(folder / "some.jsonl"), str(folder / "others.csv")]


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A folder for each store."""
    root = tmp_path_factory.mktemp("pairing")
    sources = write_raw(root / "sources")
    for store in ("jpeg", "png", "raw"):
        flags = ["--output_dir", str(root / store), "--image_size", str(SIZE), "--store", store, "--num_proc", "2"]
        prepare_data.main(["--sources", *sources, *flags, "--validation_fraction", "0.1"])
    return {store: str(root / store) for store in ("jpeg", "png", "raw")}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([caption_of(number, 2) for number in range(COUNT)], 100)


CHANGES: dict[str, Callable[[Dataset], Dataset]] = {
    "shuffle": lambda rows: rows.shuffle(seed=7),
    "filter": lambda rows: rows.filter(lambda row: row["width"] % 2 == 0),
    "shard": lambda rows: rows.shard(2, 1, contiguous=False),
    "slice": lambda rows: rows.select(range(3, len(rows))),
    "join": lambda rows: concatenate_datasets([rows.select(range(len(rows) // 2, len(rows))), rows.select(range(5))]),
    "sort": lambda rows: rows.sort("image_hash"),
}


def check(batch: dict[str, Any], tokenizer: PreTrainedTokenizerFast) -> list[int]:
    """Return the numbers of a batch, after comparing those of captions and images."""
    assert not batch["skipped"]
    shown = [number_shown(pixels) for pixels in batch["pixel_values"]]
    texts = [tokenizer.decode(ids, skip_special_tokens=True) for ids in batch["input_ids"]]
    assert [shown[place] for place in batch["caption_image"]] == [number_said(text) for text in texts]
    return shown


def loaders(image_size: int, workers: int, **arguments: Any) -> Loaders:
    args = LoaderArguments(max_seq_length=16, dataloader_num_workers=str(workers), **arguments)
    return Loaders(args, CPU, 0, media.Image(image_size, (0.0,) * 3, (1 / 255,) * 3, args.min_crop_area))


def on_each_rank(world: int, batches: Callable[[int, int], Any], start: int, stop: int) -> Iterator[list[Any]]:
    """Yield the batches of each rank."""
    for rank in range(world):
        with patch.multiple("mm_utils.distributed", rank=lambda: rank, world_size=lambda: world):  # noqa: B023
            yield list(batches(start, stop))


def test_prepared_rows_pair_images_with_their_captions(prepared: dict[str, str]) -> None:
    for folder in prepared.values():
        numbers = []
        for rows in load_pairs(DataArguments(dataset_name=folder)).values():
            for row in rows:
                numbers.append(number_said(row["captions"][0]))
                assert {number_said(caption) for caption in row["captions"]} == {numbers[-1]}
                assert row["content_id"] == content_id(stored_hash(row["image"]["bytes"]), row["captions"])
        assert sorted(numbers) == list(range(COUNT))


@given(
    store=st.sampled_from(["jpeg", "png", "raw"]),
    changes=st.lists(st.sampled_from(sorted(CHANGES)), max_size=3),
    world=st.integers(1, 3),
    batch=st.integers(2, 9),
    image_size=st.sampled_from([16, SIZE, 40]),
    seed=st.integers(0, 3),
    augmentation=st.sampled_from([{}, {"min_crop_area": 0.5}]),
)
@settings(max_examples=12)
def test_pairs_survive_shuffles_filters_slices_and_ranks(
    store: str,
    changes: list[str],
    world: int,
    batch: int,
    image_size: int,
    seed: int,
    augmentation: dict[str, Any],
    prepared: dict[str, str],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    rows = load_pairs(DataArguments(dataset_name=prepared[store]))["train"]
    for change in changes:
        rows = CHANGES[change](rows)
    expected = Counter(number_said(captions[0]) for captions in rows["captions"])
    rows = tokenize_captions(rows, tokenizer, 16)
    order = GlobalOrder(len(rows), BatchSizes((0,), (min(batch, len(rows)),)), seed)
    steps = -(-len(rows) // order.sizes.at(0))
    made = loaders(image_size, 0, **augmentation)
    seen: list[int] = []
    for start, stop in ((0, steps // 2), (steps // 2, steps)):  # interrupted, and resumed
        for batches in on_each_rank(world, partial(made.train, rows, order), start, stop):
            seen += [number for one in batches for number in check(one, tokenizer)]
    assert not expected - Counter(seen)
    for batches in on_each_rank(world, lambda *_: made.evaluation(rows, 4), 0, 0):
        for one in batches:
            check(one, tokenizer)


@given(
    store=st.sampled_from(["jpeg", "raw"]),
    world=st.integers(1, 3),
    batch=st.integers(2, 9),
    seed=st.integers(0, 3),
    stop_at=st.integers(0, 9),
    block=st.sampled_from([1, 4, 20]),
)
@settings(max_examples=12)
def test_pairs_survive_streaming_and_resuming(
    store: str,
    world: int,
    batch: int,
    seed: int,
    stop_at: int,
    block: int,
    prepared: dict[str, str],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    stream = open_stream(DataArguments(dataset_name=prepared[store]), BatchSizes((0,), (batch,)), seed, 3, block)
    steps = -(-stream.order.num_rows // batch)
    stop_at = min(stop_at, steps)
    made = loaders(SIZE, 0)
    whole = [check(one, tokenizer) for one in train_stream(made, stream, tokenizer, 0, steps)]
    parts: list[list[int]] = [[] for _ in range(steps)]
    for start, stop in ((0, stop_at), (stop_at, steps)):
        for batches in on_each_rank(world, partial(train_stream, made, stream, tokenizer), start, stop):
            for step, one in enumerate(batches, start):
                parts[step] += check(one, tokenizer)
    assert list(map(sorted, parts)) == list(map(sorted, whole))
