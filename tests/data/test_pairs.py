"""Every source yields the same pairs in the same schema; raw ones are prepared once, bad ones are named."""

import hashlib
import io
import json
import logging
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value
from PIL import Image as Picture

from mm_utils.data import pairs as source_pairs
from mm_utils.data import scenes as scenes_module
from mm_utils.data.arguments import DataArguments, EvaluatedDataArguments
from mm_utils.data.pairs import load_pairs, load_split
from mm_utils.data.scenes import load_scenes
from tests.kit.corpora import write_corpus
from tests.kit.fault_images import grey
from tests.kit.reading import lines

COUNT = 8
EMBEDDED = Features({"image": Image(decode=False), "captions": List(Value("string"))})
pytestmark = pytest.mark.usefixtures("own_cache")
Rows = list[dict[str, Any]]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 8 images, `0.png` to `7.png`, each of its own colour."""
    for index in range(COUNT):
        (tmp_path / f"{index}.png").write_bytes(grey(10 * index))
    return tmp_path


def rows_of(indices: range = range(COUNT)) -> Rows:
    """Two captions for each image, in one row."""
    return [{"image": f"{index}.png", "captions": [f"scene {index}", f"view, {index}"]} for index in indices]


def listed(path: Path, rows: Rows) -> DataArguments:
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        path.write_text(lines(*rows), encoding="utf-8")
    return DataArguments(train_file=str(path))


def embedded(folder: Path, rows: Rows) -> Dataset:
    """The rows with the images' bytes in place of their paths."""
    cells = [{**row, "image": {"bytes": (folder / row["image"]).read_bytes(), "path": None}} for row in rows]
    return Dataset.from_list(cells, features=EMBEDDED)


def saved(folder: Path, dataset: Dataset | DatasetDict) -> DataArguments:
    dataset.save_to_disk(folder / "saved")
    return DataArguments(dataset_name=str(folder / "saved"))


def sizes(pairs: DatasetDict) -> dict[str, int]:
    return {split: len(rows) for split, rows in pairs.items()}


def test_without_a_source_the_embedded_scenes_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = load_scenes(num_train=20, num_eval=4, cache_dir=tmp_path)
    monkeypatch.setattr(source_pairs, "load_scenes", lambda: scenes)
    loaded = load_pairs(DataArguments(max_train_samples=10, max_eval_samples=3))
    assert sizes(loaded) == {"train": 10, "validation": 3, "test": 3}
    assert loaded["train"].to_list() == scenes["train"].to_list()[:10]


def test_what_stands_beside_the_captions_of_an_image_is_joined(folder: Path) -> None:
    box = {"box": [0.0, 0.0, 1.25, 1.0], "phrase": "a"}
    other = {"box": [1.0, 1.0, 2.0, 2.0], "phrase": "b"}
    rows = [{**row, "languages": ["en"], "regions": [box], "x": 1} for row in rows_of()]
    rows[0].update(captions=["", "Bild"])
    rows[1].update(captions=["same", "same"], negatives=["a", "b"])
    rows.append({"image": "1.png", "captions": ["image"], "regions": [other], "negatives": ["b", "c"]})
    loaded = load_pairs(listed(folder / "p.jsonl", rows), need_train=False)["train"]
    assert list(loaded["captions"])[:2] == [["Bild"], ["same", "image"]]
    assert loaded[1]["regions"] == [box, other]
    assert list(loaded["negatives"]) == [[], ["a", "b", "c"], *[[]] * (COUNT - 2)]
    assert not {"x", "languages"} & set(loaded.column_names)
    again = embedded(folder, [*rows_of(), {"image": "2.png", "captions": ["again"]}])  # equal bytes are one image
    stored = again.add_column("negatives", [["x"]] * (COUNT + 1), feature=List(Value("string")))
    loaded = load_pairs(saved(folder, stored), need_train=False)["train"]
    assert (len(loaded), list(loaded["negatives"])) == (COUNT, [["x"]] * COUNT)
    assert loaded[2]["captions"] == ["scene 2", "view, 2", "again"]


def write_prepared(folder: Path, counts: dict[str, int]) -> str:
    own = {"id": Value("string"), "source": Value("string"), "content_id": Value("string")}
    row = {"source": "s", "content_id": "c", "image": {"bytes": b"no image at all"}, "captions": ["", "same"]}
    splits = {
        split: Dataset.from_list(
            [{**row, "id": f"{split}-{index}"} for index in range(count)], features=Features({**EMBEDDED, **own})
        )
        for split, count in counts.items()
    }
    DatasetDict(splits).save_to_disk(folder / "prepared")
    (folder / "prepared" / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
    return str(folder / "prepared")


def test_a_prepared_data_set_is_given_as_it_is_and_validation_held_out_where_it_has_none(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"test": 3, "train": 9, "validation": 4})
    loaded = load_pairs(DataArguments(dataset_name=name))
    assert sizes(loaded) == {"train": 9, "validation": 4, "test": 3}
    assert loaded["train"].to_list() == DatasetDict.load_from_disk(name)["train"].to_list()
    limited = load_pairs(DataArguments(dataset_name=name, max_train_samples=5, max_eval_samples=20))
    assert sizes(limited) == {"train": 5, "validation": 4, "test": 3}
    assert list(limited["train"]["id"]) == [f"train-{index}" for index in range(5)]

    name = write_prepared(tmp_path / "alone", {"train": 60})
    loaded = load_pairs(DataArguments(dataset_name=name))
    assert sizes(loaded) == {"train": 48, "validation": 12}
    assert sorted([*loaded["train"]["id"], *loaded["validation"]["id"]]) == sorted(f"train-{at}" for at in range(60))
    assert list(load_pairs(DataArguments(dataset_name=name), need_train=False)) == ["train"]
    (Path(name) / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report\.json is not valid JSON"):
        load_pairs(DataArguments(dataset_name=name))


# Rows of one image: their columns, and the captions of each image by its id
A = {"image": "0.png", "caption": "a"}
SAME = [
    ([{**A, "id": 1, "image_id": 7, "caption": "b"}, {**A, "id": 2, "image_id": 8, "image": "1.png"},
      {**A, "id": 3, "image_id": 7}, {**A, "id": 4, "image_id": 7, "image": "./0.png", "caption": "b"}],
     {"7": ["b", "a"], "8": ["a"]}),
    ([{"id": at, "image": f"{at % 2}.png", "caption": str(at)} for at in range(4)], {"0": ["0", "2"], "1": ["1", "3"]}),
    ([A, {**A, "image": "copy.png", "caption": "b"}], {"0.png": ["a", "b"]}),  # under two names, too
]  # fmt: skip


@pytest.mark.parametrize(("rows", "expected"), SAME)
def test_rows_of_one_image_become_one(rows: Rows, expected: dict[str, Any], folder: Path) -> None:
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())
    loaded = load_pairs(listed(folder / "p.jsonl", rows), need_train=False)["train"]
    assert list(zip(loaded["id"], loaded["captions"], strict=True)) == list(expected.items())


# Splits
def test_the_holdout_depends_on_the_ids_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first = load_pairs(listed(folder / "p.jsonl", rows_of()))
    second = load_pairs(listed(folder / "q.jsonl", rows_of()[::-1]))
    assert sizes(first) == {"train": 7, "validation": 1}
    assert list(first["validation"]["id"]) == list(second["validation"]["id"])
    assert set(first["train"]["id"]) == set(second["train"]["id"])
    assert "no validation split; 1 images are held out" in caplog.text


@pytest.mark.parametrize("name", ["split", "Split"])
@pytest.mark.parametrize("second", ["validation_file", "test_file"])
def test_a_rows_own_split_counts_beside_a_second_file(
    name: str, second: str, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    splits = [None, "train", "restval", "VAL", "dev", "testing", "eval_set", ""]
    rows = [{**row, name: split} if split else row for row, split in zip(rows_of(), splits, strict=True)]
    every = listed(folder / "all.jsonl", rows * 20)  # whose first hundred rows may lack the column
    sentences = [{"filename": row["image"], "split": row.get(name), "sentences": [{"raw": "a"}]} for row in rows]
    (folder / "karpathy.json").write_text(json.dumps({"images": sentences}))
    other = listed(folder / "more.jsonl", rows_of(range(3, 5))).train_file
    for file in (str(every.train_file), str(folder / "karpathy.json")):
        loaded = load_pairs(EvaluatedDataArguments(train_file=file, **{second: other}))
        assert set(loaded["train"]["id"]) | set(loaded["validation"]["id"] if second == "test_file" else ()) == {
            "0.png", "1.png", "2.png", "7.png"}  # fmt: skip
        assert "not read as train: 2 validation, 2 test" in caplog.text.replace("40", "2")
    test = load_split(EvaluatedDataArguments(train_file=other, test_file=every.train_file), "test")
    assert set(test["id"]) == {"0.png", "5.png", "6.png", "7.png"}
    of_train = listed(folder / "t.jsonl", [{**row, name: "train"} for row in rows_of(range(2))]).train_file
    with pytest.raises(ValueError, match="by their own split, its rows are 2 train"):
        load_pairs(EvaluatedDataArguments(train_file=other, **{second: of_train}))


def test_limits_take_the_first_images_of_files_for_each_split(folder: Path) -> None:
    train = [{**row, "captions": [text]} for row in rows_of(range(5)) for text in row["captions"]]
    other = listed(folder / "v.jsonl", rows_of(range(5, 8))).train_file
    files = {"train_file": listed(folder / "t.jsonl", train).train_file, "validation_file": other, "test_file": other}
    loaded = load_pairs(EvaluatedDataArguments(**files, max_train_samples=3, max_eval_samples=2))
    assert list(loaded["train"]["id"]) == ["0.png", "1.png", "2.png"]
    assert list(loaded["validation"]["id"]) == list(loaded["test"]["id"]) == ["5.png", "6.png"]
    assert all(len(row["captions"]) == 2 for split in loaded.values() for row in split)
    alone = EvaluatedDataArguments(test_file=other)
    assert list(load_pairs(alone, need_train=False)) == ["test"]
    with pytest.raises(ValueError, match=r"--test_file is .*; there is no train split, only test"):
        load_pairs(alone)


def test_images_in_two_splits_are_named_and_not_trained_on(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train, other = (listed(folder / f"{low}.jsonl", rows_of(range(low, low + 6))).train_file for low in (0, 2))
    files = EvaluatedDataArguments(train_file=train, validation_file=other, test_file=other)
    for need_train, count in ((True, 2), (True, 2), (False, 6)):  # from the cache, too; what is not trained on stays
        caplog.clear()
        assert sizes(load_pairs(files, need_train=need_train)) == {"train": count, "validation": 6, "test": 6}
        assert "rows have an image or group that is in another split too" in caplog.text
        assert ("the 4 rows of train that are the very same are left out" in caplog.text) == need_train
    same = DataArguments(train_file=train, validation_file=train)
    with pytest.raises(ValueError, match="there is no train split, only validation"):
        load_pairs(same)


BAD_PLACES = [
    ({"train_file": "one.jsonl"}, "train has 0 pairs, and contrastive training needs at least 2"),
    ({"train_file": "twice.jsonl"}, r"line 8: line 1 of .*twice\.jsonl assigns id 0 to another image\. .*id column"),
    ({"dataset_name": "kinds"}, "--dataset_name is kinds; this folder holds images and no captions"),
    ({"dataset_name": "0.png"}, r"--dataset_name is 0\.png; that is a file\. Give it as --train_file"),
    ({"dataset_name": "saved"}, r"its splits are challenge\. Name them train, validation and test"),
]


@pytest.mark.parametrize(("given_args", "message"), BAD_PLACES)
def test_what_does_not_exist_or_cannot_be_meant_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given_args: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    listed(Path("p.jsonl"), rows_of())
    listed(Path("one.jsonl"), rows_of(range(1)))
    listed(Path("twice.jsonl"), [{**A, "id": at % 7, "image": f"{at}.png"} for at in range(COUNT)])
    for name in ("a", "b"):
        Path("kinds", name).mkdir(parents=True)
        Path("kinds", name, "0.png").write_bytes(grey(1))
    DatasetDict({"challenge": embedded(folder, rows_of())}).save_to_disk("saved")
    with pytest.raises(ValueError, match=message) as error:
        load_pairs(DataArguments(**given_args))
    assert "\n" not in str(error.value)


# -- the embedded scenes -----------------------------------------------------------------------------------------------
COUNTS = {"train": 2000, "validation": 200, "test": 200}


def pixels_of(row: dict[str, Any]) -> np.ndarray:
    return np.asarray(Picture.open(io.BytesIO(row["image"]["bytes"])))


@pytest.fixture(scope="module")
def scenes(tmp_path_factory: pytest.TempPathFactory) -> datasets.DatasetDict:
    return load_scenes(300, 60, tmp_path_factory.mktemp("scenes"))


def test_scenes_change_only_with_their_version(scenes: datasets.DatasetDict) -> None:
    """Guards old caches: where the digest changes on purpose, GENERATOR_VERSION must be raised with it."""
    digest = hashlib.sha256()
    for row in scenes["train"].select(range(40)):
        digest.update(pixels_of(row).tobytes())
        digest.update(json.dumps([row["captions"], row["regions"]]).encode())
    assert (scenes_module.GENERATOR_VERSION, digest.hexdigest()[:16]) == ("3", "c23dbb469b3888d0")
    assert {name: len(split) for name, split in scenes.items()} == {"train": 300, "validation": 60, "test": 60}
    assert scenes["train"][7]["id"] == "scene-train-00007"
    assert scenes["train"].cache_files, "the rows should be memory-mapped"


def test_splits_share_no_content_and_twins_are_neighbours() -> None:
    drawn = [scenes_module._draw_scenes(COUNTS, seed) for seed in ("0", "1")]
    assert {split: len(contents) for split, contents in drawn[0].items()} == COUNTS
    groups = {split: {content.group() for one in drawn for content in one[split]} for split in COUNTS}
    assert not groups["train"] & (groups["validation"] | groups["test"])
    assert not groups["validation"] & groups["test"]
    for contents in drawn[0].values():
        places = {}
        for place, content in enumerate(contents):
            places.setdefault(content.group(), []).append(place)
        assert max(map(len, places.values())) == 2
        assert all(max(each) - min(each) < 2 for each in places.values())


def test_what_is_prepared_is_flushed_to_the_disk(own_cache: Path, flushed: set[int], tmp_path: Path) -> None:
    load_pairs(DataArguments(train_file=str(write_corpus(tmp_path / "data"))))
    tables = list((own_cache / "tandem_pairs").rglob("*.arrow"))
    assert tables
    assert not [path for path in tables if path.stat().st_ino not in flushed]
