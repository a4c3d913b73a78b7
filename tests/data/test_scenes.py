"""The embedded scenes: the rows are fixed by a digest, splits share nothing, and false captions have the words of true ones."""

import hashlib
import io
import json
import logging
from collections import Counter
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from mm_utils.data import scenes as scenes_module
from mm_utils.data.scenes import load_scenes, order_pairs

SMALL = {"num_train": 300, "num_eval": 60}
TINY = {"num_train": 12, "num_eval": 2}


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    return load_scenes(**SMALL, cache_dir=tmp_path_factory.mktemp("scenes"))


def pixels_of(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))


def group_of(row: dict[str, Any]) -> tuple[Any, ...]:
    """Content up to exchanging the first two objects, from the regions alone."""
    boxes = [np.array(region["box"]) for region in row["regions"]]
    first, second, *third = (box[:2] + box[2:] / 2 for box in boxes)
    axis = int(np.argmax(abs(first - second)))
    phrases = [region["phrase"] for region in row["regions"]]
    return (
        axis,
        [bool(each[1 - axis] > first[1 - axis]) for each in third] == [True],
        *sorted(phrases[:2]),
        *phrases[2:],
    )


def test_rows_change_only_with_the_generator_version(scenes: datasets.DatasetDict) -> None:
    """Guards old caches: where the digest changes on purpose, GENERATOR_VERSION must be raised with it."""
    digest = hashlib.sha256()
    for row in scenes["train"].select(range(40)):
        digest.update(pixels_of(row).tobytes())
        digest.update(json.dumps([row["captions"], row["regions"], row["order_pair"]]).encode())
    assert (scenes_module.GENERATOR_VERSION, digest.hexdigest()[:16]) == ("1", "c486fbda89eb1af0")
    rows = [row for split in scenes.values() for row in split]
    assert {name: len(split) for name, split in scenes.items()} == {"train": 300, "validation": 60, "test": 60}
    assert (scenes["train"][7]["id"], len({row["id"] for row in rows})) == ("scene-train-00007", len(rows))
    assert scenes["train"].features["image"] == datasets.Image(decode=False)
    assert scenes["train"].cache_files, "the rows should be memory-mapped"
    assert all(row["languages"] in (["en", "en", "de", "de"], ["en", "en", "en", "de"]) for row in rows)
    assert all(len(set(row["captions"])) == 4 and pixels_of(row).shape == (64, 64, 3) for row in rows)


def test_splits_share_no_content(scenes: datasets.DatasetDict) -> None:
    train, validation, test = ({group_of(row) for row in split} for split in scenes.values())
    assert not train & validation | train & test | validation & test


def test_order_pairs_differ_only_in_order(scenes: datasets.DatasetDict) -> None:
    for row, (_, true, false) in zip(scenes["test"], order_pairs(scenes["test"]), strict=True):
        assert true in row["captions"]
        assert false not in row["captions"]
        words = (Counter(text.replace(",", "").split()) for text in (true, false))
        assert next(words) == next(words)


def test_a_seed_decides_the_rows_which_are_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=scenes_module.__name__)
    first = load_scenes(**TINY, cache_dir=tmp_path)
    again, other = load_scenes(**TINY, cache_dir=tmp_path / "b"), load_scenes(**TINY, seed=1, cache_dir=tmp_path)
    assert first["train"].to_list() == again["train"].to_list()
    assert first["train"][0]["captions"] != other["train"][0]["captions"]
    monkeypatch.delattr(scenes_module, "_row")
    assert load_scenes(**TINY, cache_dir=tmp_path)["train"].to_list() == first["train"].to_list()
    assert len(caplog.records) == 3


@pytest.mark.parametrize(("name", "value"), [("image_size", 32), ("num_train", 0), ("num_eval", -1)])
def test_numbers_out_of_range(name: str, value: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is {value}; "):
        load_scenes(**{name: value}, cache_dir=tmp_path)
