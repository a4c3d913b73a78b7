"""The embedded scenes: rows are fixed by a digest, and splits share nothing."""

import hashlib
import io
import json
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from mm_utils.data import scenes as scenes_module
from mm_utils.data.scenes import load_scenes

COUNTS = {"train": 2000, "validation": 200, "test": 200}


def pixels_of(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    return load_scenes(300, 60, tmp_path_factory.mktemp("scenes"))


def test_scenes_change_only_with_their_version(scenes: datasets.DatasetDict) -> None:
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
    assert all(len(set(row["captions"])) == 4 and pixels_of(row).shape == (64, 64, 3) for row in rows)


def test_splits_share_no_content_and_twins_are_neighbours() -> None:
    drawn = [scenes_module._draw_scenes(COUNTS, seed) for seed in ("0", "1")]
    assert {split: len(contents) for split, contents in drawn[0].items()} == COUNTS
    groups = {split: {content.group() for one in drawn for content in one[split]} for split in COUNTS}
    assert not groups["train"] & (groups["validation"] | groups["test"])
    assert not groups["validation"] & groups["test"]
    for contents in drawn[0].values():
        places: dict[str, list[int]] = {}
        for place, content in enumerate(contents):
            places.setdefault(content.group(), []).append(place)
        assert max(map(len, places.values())) == 2
        assert all(max(each) - min(each) < 2 for each in places.values())
