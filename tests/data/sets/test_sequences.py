"""What the embedded clips and sounds share: splits, twins, captions, the cache, and --dataset_name."""

from collections import Counter
from pathlib import Path

import datasets
import pytest

from mm_utils.data.media import kind_of
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.scenes import order_pairs
from mm_utils.data.sets import SETS, sequences
from mm_utils.data.sets.events import CLIPS, load_clips
from mm_utils.data.sets.sequences import Recipe, draw_contents, load_sequences
from mm_utils.data.sets.tones import SOUNDS, load_sounds

COUNTS = {"train": 2000, "validation": 200, "test": 200}
RECIPES = pytest.mark.parametrize("recipe", [CLIPS, SOUNDS], ids=lambda recipe: recipe.name)


@pytest.fixture(scope="module", params=["clips", "sounds"])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    load = load_clips if request.param == "clips" else load_sounds
    return load(num_train=16, num_eval=4, cache_dir=tmp_path_factory.mktemp(request.param))


def test_schema(loaded: datasets.DatasetDict) -> None:
    rows = [row for split in loaded.values() for row in split]
    kind = kind_of(loaded["train"].features)
    assert {name: len(split) for name, split in loaded.items()} == {"train": 16, "validation": 4, "test": 4}
    assert len({row["id"] for row in rows}) == len(rows)
    assert loaded["train"][7]["id"].endswith("-train-00007")
    assert loaded["train"].cache_files, "the rows should be memory-mapped"
    for row in rows:
        assert row["image"]["path"] is None
        assert len(set(row["captions"])) == len(row["languages"]) == sequences.CAPTIONS
        assert (row["width"], row["height"]) == ((64, 64) if kind == "clip" else (None, None))
        assert len(row["moments"]) in (2, 3)
        ends = [0.0, *(second for moment in row["moments"] for second in moment["span"]), row["seconds"]]
        assert ends == sorted(ends), "events come one after the other"
        assert all(moment["phrase"] in caption for moment in row["moments"] for caption in row["captions"])


@RECIPES
def test_splits_share_no_set_of_events_whatever_the_seed(recipe: Recipe) -> None:
    one, other = (draw_contents(recipe, COUNTS, seed) for seed in (0, 1))
    assert {split: len(contents) for split, contents in one.items()} == COUNTS
    groups = {split: {content.group() for content in one[split] + other[split]} for split in COUNTS}
    assert not groups["train"] & (groups["validation"] | groups["test"])
    assert not groups["validation"] & groups["test"]
    assert all(Counter(content.group() for content in contents).most_common(1)[0][1] <= 2 for contents in one.values())
    styles = [{content.group(): content.style for content in drawn["train"]} for drawn in (one, other)]
    assert all(styles[0][group] == style for group, style in styles[1].items() if group in styles[0])


def test_order_pairs_differ_only_in_order(loaded: datasets.DatasetDict) -> None:
    for index, true, false in order_pairs(loaded["train"]):
        row = loaded["train"][index]
        first, second = (moment["phrase"] for moment in row["moments"][:2])
        assert true in row["captions"]
        assert false not in row["captions"]
        assert false == true.replace(first, "#").replace(second, first).replace("#", second)


def test_the_same_seed_makes_the_same_bytes_and_another_seed_others(
    loaded: datasets.DatasetDict, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = CLIPS if kind_of(loaded["train"].features) == "clip" else SOUNDS
    again = load_sequences(recipe, 16, 4, 0, tmp_path)
    assert all(again[split].to_dict() == loaded[split].to_dict() for split in loaded)
    other = load_sequences(recipe, 2, 1, 1, tmp_path)
    assert other["train"]["captions"] != loaded["train"][:2]["captions"]
    monkeypatch.setattr(sequences, "_row", None)
    assert load_sequences(recipe, 2, 1, 1, tmp_path)["train"].to_dict() == other["train"].to_dict()
    assert len(list(tmp_path.glob(f"tandem_{recipe.name}/v*"))) == 2


@pytest.mark.parametrize("name", ["num_train", "num_eval"])
def test_numbers_out_of_range(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{name} is 0; "):
        load_clips(**{name: 0}, cache_dir=tmp_path)


def test_the_name_of_a_data_set_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, recipe in (("clips", CLIPS), ("sounds", SOUNDS)):
        monkeypatch.setitem(SETS, name, lambda recipe=recipe: load_sequences(recipe, 6, 3, 0, tmp_path / "cache"))
        pairs = load_pairs(DataArguments(dataset_name=name, max_train_samples=4, max_eval_samples=2))
        assert {split: len(rows) for split, rows in pairs.items()} == {"train": 4, "validation": 2, "test": 2}
        assert kind_of(pairs["train"].features) == recipe.kind
