"""The embedded sets: rows are fixed by a digest, splits share nothing, captions and spans say what is shown."""

import hashlib
import io
import json
import random
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
from PIL import Image

from mm_utils.data import pairs as source_pairs
from mm_utils.data import scenes as scenes_module
from mm_utils.data.media import kind_of
from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets.events import CLIPS, FPS, FRAMES, SIZE, draw_frames, load_clips
from mm_utils.data.sets.generate import Content, Recipe, draw_contents
from mm_utils.data.sets.tones import RATE, SECONDS, SOUNDS, load_sounds, make_samples

COUNTS = {"train": 2000, "validation": 200, "test": 200}
RECIPES = pytest.mark.parametrize("recipe", [CLIPS, SOUNDS], ids=lambda recipe: recipe.name)


def pixels_of(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(row["image"]["bytes"])))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    return load_scenes(300, 60, tmp_path_factory.mktemp("scenes"))


@pytest.fixture(scope="module")
def made() -> dict[str, list[tuple[Content, np.ndarray, list[tuple[int, int]]]]]:
    """Contents of clips and sounds, their frames or samples, and the spans of their events in these."""
    found = {}
    for recipe, render, rate in ((CLIPS, draw_frames, FPS), (SOUNDS, make_samples, RATE)):
        contents = draw_contents(recipe.draw, {"train": 60, "validation": 1, "test": 1}, f"0 {recipe.name}")["train"]
        found[recipe.name] = []
        for number, content in enumerate(contents):
            values, spans = render(content, random.Random(f"0 train {number}"))
            within = [(round(begin * rate), round(end * rate)) for begin, end in spans]
            found[recipe.name].append((content, values.astype(int), within))
    return found


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


@RECIPES
def test_clips_and_sounds_change_only_with_their_version(recipe: Recipe, made: dict[str, Any]) -> None:
    digest = hashlib.sha256()
    for content, values, within in made[recipe.name][:20]:
        digest.update(values.astype(np.uint8 if recipe is CLIPS else "<i2").tobytes())
        style = [content.style] if recipe is CLIPS else []
        digest.update(json.dumps([*style, recipe.captions(content), within]).encode())
    expected = {"clips": "80fd85910a5ee225", "sounds": "195201fcb662e263"}
    assert (recipe.version, digest.hexdigest()[:16]) == ("1", expected[recipe.name])


@pytest.mark.parametrize("name", ["scenes", "clips", "sounds"])
def test_splits_share_no_content_and_twins_are_neighbours(name: str) -> None:
    draw = {"scenes": scenes_module._draw_scene, "clips": CLIPS.draw, "sounds": SOUNDS.draw}[name]
    drawn = [draw_contents(draw, COUNTS, seed) for seed in ("0", "1")]
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


@RECIPES
def test_stored_clips_and_sounds_hold_what_was_made(recipe: Recipe, made: dict[str, Any], tmp_path: Path) -> None:
    loaded, rate = recipe.load(16, 4, tmp_path), FPS if recipe is CLIPS else RATE
    assert loaded["train"].cache_files, "the rows should be memory-mapped"
    assert kind_of(loaded["train"].features) == recipe.kind
    for row, (content, values, within) in zip(loaded["train"], made[recipe.name], strict=False):
        if recipe is CLIPS:
            files, fps = read_avi(row["image"]["bytes"])
            pixels = np.stack([np.asarray(Image.open(io.BytesIO(bytes(file)))) for file in files])
            assert (fps, pixels.shape, row["seconds"]) == (FPS, (FRAMES, SIZE, SIZE, 3), FRAMES / FPS)
            assert np.abs(pixels - values).mean() < 2
        else:
            samples, stored_rate = read_wav(row["image"]["bytes"])
            assert (stored_rate, len(samples), row["seconds"]) == (RATE, SECONDS * RATE, SECONDS)
            assert np.array_equal(samples, values)
        assert row["id"].startswith(content.style)
        assert [moment["span"] for moment in row["moments"]] == [[a / rate, b / rate] for a, b in within]


@pytest.mark.parametrize(("name", "load"), [("clips", load_clips), ("sounds", load_sounds)])
def test_the_name_of_a_set_loads_it_and_its_rows_are_made_once(
    name: str, load: Any, own_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source_pairs, f"load_{name}", lambda: load(num_train=6, num_eval=3))
    args = DataArguments(dataset_name=name, max_train_samples=4, max_eval_samples=2)
    pairs = load_pairs(args)
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 4, "validation": 2, "test": 2}
    monkeypatch.setattr(Recipe, "row", None)
    assert load_pairs(args)["train"].to_list() == pairs["train"].to_list()
    assert len(list(own_cache.glob(f"tandem_{name}/v*"))) == 1
