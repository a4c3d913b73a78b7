"""Every source yields the same pairs in the same schema; raw ones are prepared once, bad ones are named."""

import csv
import io
import json
import logging
import os
import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Image, List, Value, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from mm_utils.data import pairs as source_pairs
from mm_utils.data.pairs import load_pairs
from mm_utils.data.prepare.checks import CheckArguments, check_caption
from mm_utils.data.rows.source import DataArguments, EvaluatedDataArguments
from mm_utils.data.scenes import load_scenes

COUNT = 8
EMBEDDED = Features({"image": Image(decode=False), "captions": List(Value("string"))})
disable_progress_bars()
Rows = list[dict[str, Any]]


@pytest.fixture(autouse=True)
def offline_and_own_cache(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 8 images, `0.png` to `7.png`, each of its own colour."""
    for index in range(COUNT):
        PILImage.new("RGB", (4, 4), (index * 30, 0, 255 - index)).save(tmp_path / f"{index}.png")
    return tmp_path


def rows_of(indices: range = range(COUNT)) -> Rows:
    """Two captions for each image, in one row."""
    return [{"image": f"{index}.png", "captions": [f"scene {index}", f"view, {index}"]} for index in indices]


def flat(rows: Rows) -> Rows:
    """One caption per row, as in CSV files."""
    return [{"image": row["image"], "caption": caption} for row in rows for caption in row["captions"]]


def write(path: Path, rows: Rows) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    elif path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    else:
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    return str(path)


def embedded(folder: Path, rows: Rows) -> Dataset:
    """The rows with the images' bytes in place of their paths."""
    contents = [(folder / row["image"]).read_bytes() for row in rows]
    images = [{"bytes": content, "path": None} for content in contents]
    return Dataset.from_list(
        [{**row, "image": image} for row, image in zip(rows, images, strict=True)], features=EMBEDDED
    )


def pixels(image: dict[str, Any]) -> bytes:
    """The pixels of a stored image; a file was left where it is."""
    if image["bytes"] is None:
        assert os.path.isabs(image["path"])
        return PILImage.open(image["path"]).tobytes()
    return PILImage.open(io.BytesIO(image["bytes"])).tobytes()


def saved(folder: Path, dataset: Dataset | DatasetDict) -> DataArguments:
    dataset.save_to_disk(folder / "saved")
    return DataArguments(dataset_name=str(folder / "saved"))


def test_without_a_source_the_embedded_scenes_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = load_scenes(num_train=20, num_eval=4, cache_dir=tmp_path)
    monkeypatch.setattr(source_pairs, "load_scenes", lambda: scenes)
    loaded = load_pairs(DataArguments(max_train_samples=10, max_eval_samples=3))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 10, "validation": 3, "test": 3}
    assert loaded["train"].to_list() == scenes["train"].to_list()[:10]


def test_an_image_column_is_found_by_its_type_and_others_are_refused(folder: Path) -> None:
    unusual = embedded(folder, rows_of()).rename_column("image", "x").add_column("y", list(range(COUNT)))
    args = saved(folder, unusual)
    assert len(load_pairs(args)["train"]) == COUNT - 1
    with pytest.raises(ValueError, match=r"the image column y holds .*int64.*, not paths or images"):
        load_pairs(DataArguments(dataset_name=args.dataset_name, image_column="y"))


def test_regions_stay_beside_their_captions(folder: Path) -> None:
    box, other = {"box": [0.0, 0.0, 1.25, 1.0], "phrase": "a"}, {"box": [1.0, 1.0, 2.0, 2.0], "phrase": "b"}
    rows = [{**row, "languages": ["en"], "regions": [box], "x": 1} for row in rows_of()]
    rows[0].update(captions=["", "Bild"])
    rows[1].update(captions=["same", "same"])
    rows.append({"image": "1.png", "captions": ["image"], "regions": [other]})
    loaded = load_pairs(DataArguments(train_file=write(folder / "p.jsonl", rows)), need_train=False)["train"]
    assert list(loaded["captions"])[:2] == [["Bild"], ["same", "image"]]
    assert loaded[1]["regions"] == [box, other]
    assert "negatives" not in loaded.column_names
    assert not {"x", "languages"} & set(loaded.column_names)


def test_negatives_of_the_rows_of_an_image_are_joined(folder: Path) -> None:
    rows = rows_of()
    rows[1]["negatives"] = ["a", "b"]
    rows.append({"image": "1.png", "captions": ["image"], "negatives": ["b", "c"]})
    loaded = load_pairs(DataArguments(train_file=write(folder / "p.jsonl", rows)), need_train=False)["train"]
    assert list(loaded["negatives"]) == [[], ["a", "b", "c"], *[[]] * (COUNT - 2)]
    stored = embedded(folder, rows_of()).add_column("negatives", [["x"]] * COUNT, feature=List(Value("string")))
    assert list(load_pairs(saved(folder, stored), need_train=False)["train"]["negatives"]) == [["x"]] * COUNT


# Prepared data sets
PREPARED = Features(
    {
        **{"id": Value("string"), "image": Image(decode=False), "captions": List(Value("string"))},
        **{"source": Value("string"), "content_id": Value("string")},
    }
)


def write_prepared(folder: Path, sizes: dict[str, int]) -> str:
    splits = {}
    for split, count in sizes.items():
        row = {"source": "s", "content_id": "c", "image": {"bytes": b"no image at all"}, "captions": ["", "same"]}
        rows = [{**row, "id": f"{split}-{index}"} for index in range(count)]
        splits[split] = Dataset.from_list(rows, features=PREPARED)
    DatasetDict(splits).save_to_disk(folder / "prepared")
    (folder / "prepared" / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
    return str(folder / "prepared")


def test_a_prepared_data_set_is_given_as_it_is(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"test": 3, "train": 9, "validation": 4})
    loaded = load_pairs(DataArguments(dataset_name=name))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 9, "validation": 4, "test": 3}
    assert loaded["train"].to_list() == DatasetDict.load_from_disk(name)["train"].to_list()
    limited = load_pairs(DataArguments(dataset_name=name, max_train_samples=5, max_eval_samples=20))
    assert {split: len(rows) for split, rows in limited.items()} == {"train": 5, "validation": 4, "test": 3}
    assert list(limited["train"]["id"]) == [f"train-{index}" for index in range(5)]


def test_validation_is_held_out_of_a_prepared_data_set_that_has_none(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"train": 60})
    loaded, again = (load_pairs(DataArguments(dataset_name=name)) for _ in range(2))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 48, "validation": 12}
    assert sorted([*loaded["train"]["id"], *loaded["validation"]["id"]]) == sorted(f"train-{at}" for at in range(60))
    assert list(loaded["validation"]["id"]) == list(again["validation"]["id"])
    assert list(load_pairs(DataArguments(dataset_name=name), need_train=False)) == ["train"]


def test_a_prepared_data_set_that_is_damaged_or_too_small_is_named(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"test": 2})
    with pytest.raises(ValueError, match="there is no train split, only test"):
        load_pairs(DataArguments(dataset_name=name))
    name = write_prepared(tmp_path / "small", {"train": 2})
    with pytest.raises(ValueError, match="train has 1 pairs, and contrastive training needs at least 2"):
        load_pairs(DataArguments(dataset_name=name))
    (Path(name) / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report\.json is not valid JSON"):
        load_pairs(DataArguments(dataset_name=name))


# Rows of one image: their columns, and the captions of each image by its id
A = {"image": "0.png", "caption": "a"}
SAME = [
    ("csv", [{**A, "id": 1, "image_id": 7, "caption": "b"}, {**A, "id": 2, "image_id": 8, "image": "1.png"},
             {**A, "id": 3, "image_id": 7}, {**A, "id": 4, "image_id": 7, "image": "./0.png", "caption": "b"}],
     {"7": ["b", "a"], "8": ["a"]}),
    ("jsonl", [{"id": at, "image": f"{at % 2}.png", "caption": str(at)} for at in range(4)], {"0": ["0", "2"], "1": ["1", "3"]}),
    ("jsonl", [A, {**A, "image": "copy.png"}], {"0.png": ["a"], "copy.png": ["a"]}),
]  # fmt: skip


@pytest.mark.parametrize(("suffix", "rows", "expected"), SAME)
def test_rows_of_one_image_become_one(suffix: str, rows: Rows, expected: dict[str, Any], folder: Path) -> None:
    (folder / "copy.png").write_bytes((folder / "0.png").read_bytes())  # under two names it stays two images
    loaded = load_pairs(DataArguments(train_file=write(folder / f"p.{suffix}", rows)), need_train=False)["train"]
    assert list(zip(loaded["id"], loaded["captions"], strict=True)) == list(expected.items())


def test_equal_embedded_images_without_an_id_are_one_image(folder: Path) -> None:
    args = saved(folder, embedded(folder, [*rows_of(), {"image": "2.png", "captions": ["again"]}]))
    loaded = load_pairs(args, need_train=False)["train"]
    assert len(loaded) == COUNT
    assert loaded[2]["captions"] == ["scene 2", "view, 2", "again"]


def test_one_id_for_two_images_is_refused(folder: Path) -> None:
    file = write(folder / "p.jsonl", [{**A, "id": at % 7, "image": f"{at}.png"} for at in range(COUNT)])
    with pytest.raises(
        ValueError, match=r"p\.jsonl, line 8: line 1 of .*p\.jsonl assigns id 0 to another image\. .*id column"
    ):
        load_pairs(DataArguments(train_file=file))


@settings(max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    captions=st.lists(
        st.lists(st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=6), min_size=1, max_size=4),
        min_size=3,
        max_size=COUNT,
    ),
    seed=st.integers(0, 2**16),
    suffix=st.sampled_from([".jsonl", ".csv", ".tsv", ".parquet"]),
)
def test_each_image_keeps_exactly_its_captions(
    folder: Path, captions: list[list[str]], seed: int, suffix: str
) -> None:
    table = [
        {"image": f"{index}.png", "caption": f"{index}:{caption}"}
        for index, texts in enumerate(captions)
        for caption in texts
    ]
    random.Random(seed).shuffle(table)
    loaded = load_pairs(DataArguments(train_file=write(folder / f"table{suffix}", table)))
    found = {row["id"]: row["captions"] for split in loaded.values() for row in split}
    expected: dict[str, list[str]] = {}
    for row in table:
        expected.setdefault(row["image"], []).append(check_caption(row["caption"], CheckArguments())[0])
    assert found == {image: list(dict.fromkeys(texts)) for image, texts in expected.items()}
    assert sum(map(len, loaded.values())) == len(captions)


# Splits
def test_the_holdout_depends_on_the_ids_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first = load_pairs(DataArguments(train_file=write(folder / "p.jsonl", rows_of())))
    second = load_pairs(DataArguments(train_file=write(folder / "q.jsonl", rows_of()[::-1])))
    assert {split: len(rows) for split, rows in first.items()} == {"train": 7, "validation": 1}
    assert list(first["validation"]["id"]) == list(second["validation"]["id"])
    assert set(first["train"]["id"]) == set(second["train"]["id"])
    assert "no validation split; 1 images are held out" in caplog.text


@pytest.mark.parametrize("make", ["lines", "saved"])
def test_a_split_column_divides_the_rows(folder: Path, make: str) -> None:
    names = ["train", "train", "restval", "val", "dev", "Validation", "test", "nowhere"]
    if make == "lines":
        rows = [{**row, "split": name} for row, name in zip(rows_of(), names, strict=True)]
        args = DataArguments(train_file=write(folder / "p.jsonl", rows))
    else:
        args = saved(folder, DatasetDict({"test": embedded(folder, rows_of()).add_column("split", names)}))
    loaded = load_pairs(args)
    assert {split: len(images) for split, images in loaded.items()} == {"train": 3, "validation": 3, "test": 1}
    assert pixels(loaded["test"][0]["image"]) == PILImage.open(folder / "6.png").tobytes()


def test_limits_take_the_first_images_after_merging(folder: Path) -> None:
    train = write(folder / "t.csv", [{**row, "split": "test"} for row in flat(rows_of(range(5)))])  # which is not read
    other = write(folder / "v.csv", flat(rows_of(range(5, 8))))
    loaded = load_pairs(
        EvaluatedDataArguments(
            train_file=train, validation_file=other, test_file=other, max_train_samples=3, max_eval_samples=2
        )
    )
    assert list(loaded["train"]["id"]) == ["0.png", "1.png", "2.png"]
    assert list(loaded["validation"]["id"]) == list(loaded["test"]["id"]) == ["5.png", "6.png"]
    assert all(len(row["captions"]) == 2 for split in loaded.values() for row in split)


def test_images_in_two_splits_are_named_and_stay(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write(folder / "t.jsonl", rows_of(range(6)))
    args = DataArguments(train_file=train, validation_file=write(folder / "v.jsonl", rows_of(range(4, 8))))
    for _ in range(2):  # from the cache, too
        caplog.clear()
        assert {split: len(rows) for split, rows in load_pairs(args).items()} == {"train": 6, "validation": 4}
        assert (
            "2 rows have an image or group that is in another split too (2 the very same), such as line 5 of"
            in caplog.text
        )


def test_evaluation_needs_no_train_split(folder: Path) -> None:
    args = EvaluatedDataArguments(test_file=write(folder / "p.jsonl", rows_of()))
    assert list(load_pairs(args, need_train=False)) == ["test"]
    with pytest.raises(ValueError, match=r"--test_file is .*; there is no train split, only test"):
        load_pairs(args)


# Places that do not exist
BAD_PLACES = [
    ({"train_file": "absent.jsonl"}, r"--train_file is absent\.jsonl; there is no such file"),
    ({"train_file": "0.png"}, r"its format is not known by '\.png'\. Known are \.jsonl, \.json, \.csv, \.tsv"),
    (
        {"train_file": "p.jsonl", "caption_column": "captoin"},
        r"--caption_column is captoin; .*Did you mean 'captions'",
    ),
    ({"train_file": "p.jsonl", "image_root": "absent"}, r"--image_root is absent; there is no such folder"),
    ({"dataset_name": "kinds"}, "--dataset_name is kinds; it holds a folder per class and no captions"),
    ({"dataset_name": "0.png"}, r"--dataset_name is 0\.png; that is a file\. Give it as --train_file"),
    ({"dataset_name": "nobody/nothing"}, r"--dataset_name is nobody/nothing; it could not be loaded .*local folder"),
    ({"dataset_name": "saved"}, r"its splits are challenge\. Name them train, validation and test"),
]


@pytest.mark.parametrize(("given_args", "message"), BAD_PLACES)
def test_a_place_or_column_that_does_not_exist_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given_args: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    write(Path("p.jsonl"), rows_of())
    for name in ("a", "b"):
        Path("kinds", name).mkdir(parents=True)
        Path("kinds", name, "0.png").write_bytes(Path("0.png").read_bytes())
    DatasetDict({"challenge": embedded(folder, rows_of())}).save_to_disk("saved")
    with pytest.raises(ValueError, match=message) as error:
        load_pairs(DataArguments(**given_args))
    assert "\n" not in str(error.value)
