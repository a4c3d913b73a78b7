"""Eight things, each as pictures of a colour and as tones of a pitch, under the same captions."""

import contextlib
import io
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
from datasets import Dataset, DatasetDict, Features
from PIL import Image

from mm_utils.data.media import FEATURES
from mm_utils.data.media.riff import write_wav
from mm_utils.data.rows.source import DataArguments

THINGS = ("fox", "owl", "bear", "wolf", "lynx", "goat", "hare", "crow")
RATE, SECONDS = 4000, 0.5
VISION = {"model_type": "convnext", "hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2, "image_size": 16}
SOUND = {**VISION, "num_channels": 1, "image_size": [40, 16]}
TEXT = {"model_type": "bert", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "intermediate_size": 32, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # fmt: skip


def picture(thing: int, number: int) -> bytes:
    """One colour, with some noise."""
    colour = np.array([thing & 1, thing >> 1 & 1, thing >> 2 & 1]) * 160 + 40
    noise = np.random.default_rng(number).integers(-30, 30, (24, 24, 3))
    file = io.BytesIO()
    Image.fromarray((colour + noise).clip(0, 255).astype(np.uint8)).save(file, "JPEG")
    return file.getvalue()


def tone(thing: int, number: int) -> bytes:
    """One pitch, with some noise."""
    time = np.arange(int(RATE * SECONDS)) / RATE
    noise = np.random.default_rng(number).normal(0, 0.02, len(time))
    return write_wav(((0.5 * np.sin(2 * np.pi * 150 * 1.4**thing * time) + noise) * 20_000).astype(np.int16), RATE)


def split_of(medium: str, numbers: range) -> Dataset:
    """So many rows; thing and look follow from their number."""
    make = {"image": picture, "sound": tone}[medium]
    media = [{"bytes": make(number % len(THINGS), number), "path": None} for number in numbers]
    table = pa.table(
        {
            "id": [f"{medium}{number}" for number in numbers],
            "image": pa.array(media, pa.struct({"bytes": pa.binary(), "path": pa.string()})),
            "captions": [
                [f"a {THINGS[number % len(THINGS)]}", f"{medium} of a {THINGS[number % len(THINGS)]}"]
                for number in numbers
            ],
            **({"seconds": [SECONDS] * len(media)} if medium == "sound" else {}),
        }
    )
    features = Features.from_arrow_schema(table.schema)
    features["image"] = FEATURES[medium]
    return Dataset(table.cast(features.arrow_schema))


def load(args: DataArguments, **_: Any) -> DatasetDict:
    """Stand in for `load_pairs`: the data sets `images` of 40 rows and `sounds` of 24."""
    medium = str(args.dataset_name).removesuffix("s")
    train = {"image": 40, "sound": 24}[medium]
    return DatasetDict(train=split_of(medium, range(train)), validation=split_of(medium, range(100, 116)))


@contextlib.contextmanager
def small_media() -> Iterator[None]:
    """Let `--dataset_name images` and `--dataset_name sounds` name these sets."""
    with mock.patch("mm_utils.data.training_data.load_pairs", load):
        yield
