"""Rows whose images show their number as a colour, and whose captions say it: whatever is paired wrongly is seen."""

from collections.abc import Sequence
from typing import Any

import datasets
import pytest
import torch
from datasets import Dataset, DatasetDict, Features, Value
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from mm_utils.data import media
from mm_utils.data.arguments import LoaderArguments
from mm_utils.data.batches.dataset import TrainingPairs, TrainingTransform
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.training_data import TrainingData
from mm_utils.model.processor import train_tokenizer
from tests.kit.fault_images import save

CPU = torch.device("cpu")
FEATURES = Features(
    {"id": Value("string"), "image": datasets.Image(decode=False), "captions": datasets.Sequence(Value("string"))}
)
WORDS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
SIZE = 16


def new_tokenizer(extra: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    return train_tokenizer([f"picture {word} says it once more" for word in WORDS] + list(extra), 300)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def colour(index: int) -> tuple[int, int, int]:
    """Each image has its own colour, which survives any crop."""
    return (20 * index, 255 - 20 * index, 7 * index)


def png(index: int) -> bytes:
    return save(Image.new("RGB", (20 + index, 30), colour(index)), "PNG")


def rows_of(count: int = 12, broken: Sequence[int] = ()) -> Dataset:
    """Image i has i % 4 + 1 captions, all of which say its number."""
    rows = [
        {
            "id": f"id-{index}",
            "image": {"bytes": png(index)[: 50 if index in broken else None], "path": None},
            "captions": [f"picture {WORDS[index]}" + " once more" * extra for extra in range(index % 4 + 1)],
        }
        for index in range(count)
    ]
    return Dataset.from_list(rows, features=FEATURES)


def loaders(
    num_workers: int = 0, min_crop_area: float = 0.5, max_seq_length: int = 16, size: int = SIZE, mean: float = 0.5
) -> Loaders:
    arguments = LoaderArguments(max_seq_length, min_crop_area=min_crop_area, dataloader_num_workers=str(num_workers))
    return Loaders(arguments, CPU, 0, media.Image(size, (mean, 0.4, 0.3), (0.2, 0.3, 0.4), min_crop_area))


def training_data(
    rows: Dataset, eval_batch_size: int = 5, pairs: int = 2, processor: Any = None, **options: Any
) -> TrainingData:
    """A train split alone, in batches of some pairs, whose images are seen as a whole."""
    order = GlobalOrder(len(rows), BatchSizes((0,), (pairs,)), seed=0)
    loader = loaders(**{"min_crop_area": 1.0} | options)
    return TrainingData(DatasetDict(train=rows), processor, loader, order, {}, eval_batch_size)


def training_pairs(rows: Dataset, min_crop_area: float = 1.0, **options: Any) -> TrainingPairs:
    medium = media.Image(SIZE, min_crop_area=min_crop_area)
    return TrainingPairs(rows, TrainingTransform(medium, **options))


def number_said(ids: Tensor, tokenizer: PreTrainedTokenizerFast) -> int:
    return next(WORDS.index(word) for word in tokenizer.decode(ids).split() if word in WORDS)


def number_shown(pixels: Tensor) -> int:
    red = pixels[0].mean() * 0.2 + 0.5
    return round(float(red * 255 / 20))


def equal(batch: dict[str, Any], other: dict[str, Any]) -> bool:
    return batch.keys() == other.keys() and all(
        torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        for name, value in batch.items()
    )


def pairs_of(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Return each pair of a training batch by itself, without padding."""
    return [
        (row, image_id, ids, tokens[:length], pixels)
        for row, image_id, ids, tokens, length, pixels in zip(
            batch["rows"].tolist(),
            batch["image_ids"],
            batch["ids"].tolist(),
            batch["input_ids"].tolist(),
            batch["lengths"],
            batch["pixel_values"].flatten(1).tolist(),
            strict=True,
        )
    ]
