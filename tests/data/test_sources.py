"""Every source gives the same pairs in the same schema; every bad input is named."""

import csv
import io
import json
import logging
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset, DatasetDict, Features, Image, Sequence, Value, disable_progress_bars
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image as PILImage

from mm_utils.data import sources
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sources import DataArguments, load_pairs

SCHEMA = Features({"id": Value("string"), "image": Image(decode=False), "captions": Sequence(Value("string"))})
COUNT = 8
disable_progress_bars()


@pytest.fixture(autouse=True)
def offline_and_own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of 8 images, `0.png` to `7.png`, each of its own colour."""
    for index in range(COUNT):
        PILImage.new("RGB", (4, 4), (index * 30, 0, 255 - index)).save(tmp_path / f"{index}.png")
    return tmp_path


def rows_of(indices: range = range(COUNT)) -> list[dict[str, Any]]:
    """The corpus: two captions for each image, in one row."""
    return [{"image": f"{index}.png", "captions": [f"scene {index}", f"view, {index}"]} for index in indices]


def flat(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One caption per row, as in CSV files."""
    return [{"image": row["image"], "caption": caption} for row in rows for caption in row["captions"]]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def write_table(path: Path, rows: list[dict[str, Any]], delimiter: str = ",") -> str:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), delimiter=delimiter)
        writer.writeheader()
        writer.writerows(rows)
    return str(path)


def embedded(folder: Path, rows: list[dict[str, Any]]) -> Dataset:
    """The rows with the images' bytes in place of their paths."""
    images = [{"bytes": (folder / row["image"]).read_bytes(), "path": None} for row in rows]
    return Dataset.from_list(
        [{**row, "image": image} for row, image in zip(rows, images, strict=True)],
        features=Features({"image": Image(decode=False), "captions": Sequence(Value("string"))}),
    )


def content(folder: Path, image: dict[str, Any]) -> bytes:
    """The pixels of a stored image; for a file also check that its bytes were left on disk."""
    if image["bytes"] is None:
        assert os.path.isabs(image["path"])
        return PILImage.open(image["path"]).tobytes()
    return PILImage.open(io.BytesIO(image["bytes"])).tobytes()


def pairs(folder: Path, split: Dataset) -> dict[bytes, list[str]]:
    return {content(folder, row["image"]): row["captions"] for row in split}


def jsonl_file(folder: Path) -> DataArguments:
    return DataArguments(train_file=write_jsonl(folder / "pairs.jsonl", rows_of()))


def json_array(folder: Path) -> DataArguments:
    (folder / "pairs.json").write_text(json.dumps(rows_of(), indent=1), encoding="utf-8")
    return DataArguments(train_file=str(folder / "pairs.json"))


def csv_file(folder: Path) -> DataArguments:
    return DataArguments(train_file=write_table(folder / "pairs.csv", flat(rows_of())))


def tsv_file(folder: Path) -> DataArguments:
    return DataArguments(train_file=write_table(folder / "pairs.tsv", flat(rows_of()), "\t"))


def parquet_of_paths(folder: Path) -> DataArguments:
    pq.write_table(pa.Table.from_pylist(rows_of()), folder / "pairs.parquet")
    return DataArguments(train_file=str(folder / "pairs.parquet"))


def parquet_of_bytes(folder: Path) -> DataArguments:
    rows = [{**row, "image": (folder / row["image"]).read_bytes()} for row in rows_of()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    return DataArguments(train_file=str(folder / "pairs.parquet"))


def parquet_of_structs(folder: Path) -> DataArguments:
    rows = [{**row, "image": {"bytes": (folder / row["image"]).read_bytes(), "path": "x.png"}} for row in rows_of()]
    pq.write_table(pa.Table.from_pylist(rows), folder / "pairs.parquet")
    return DataArguments(train_file=str(folder / "pairs.parquet"))


def saved_dataset(folder: Path) -> DataArguments:
    embedded(folder, rows_of()).save_to_disk(folder / "saved")
    return DataArguments(dataset_name=str(folder / "saved"))


def saved_dataset_dict(folder: Path) -> DataArguments:
    DatasetDict({"train": embedded(folder, rows_of())}).save_to_disk(folder / "saved")
    return DataArguments(dataset_name=str(folder / "saved"))


def local_repository(folder: Path) -> DataArguments:
    (folder / "repo" / "data").mkdir(parents=True)
    embedded(folder, rows_of()).to_parquet(folder / "repo" / "data" / "train-00000-of-00001.parquet")
    return DataArguments(dataset_name=str(folder / "repo"), image_column="image")


def image_folder(folder: Path) -> DataArguments:
    rows = [{"file_name": row["image"], "text": row["captions"]} for row in rows_of()]
    write_jsonl(folder / "metadata.jsonl", rows)
    return DataArguments(dataset_dir=str(folder))


def absolute_paths(folder: Path) -> DataArguments:
    (folder / "elsewhere").mkdir()
    rows = [{**row, "image": str(folder / row["image"])} for row in rows_of()]
    return DataArguments(train_file=write_jsonl(folder / "elsewhere" / "pairs.jsonl", rows), allow_outside_root=True)


def own_image_root(folder: Path) -> DataArguments:
    (folder / "elsewhere").mkdir()
    file = write_jsonl(folder / "elsewhere" / "pairs.jsonl", rows_of())
    return DataArguments(train_file=file, image_root=str(folder))


SOURCES = [
    jsonl_file,
    json_array,
    csv_file,
    tsv_file,
    parquet_of_paths,
    parquet_of_bytes,
    parquet_of_structs,
    saved_dataset,
    saved_dataset_dict,
    local_repository,
    image_folder,
    absolute_paths,
    own_image_root,
]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.__name__)
def test_every_source_gives_the_same_pairs_in_the_same_schema(
    source: Callable[[Path], DataArguments], folder: Path
) -> None:
    loaded = load_pairs(source(folder), need_train=False)
    assert list(loaded) == ["train"]
    assert loaded["train"].features == SCHEMA
    assert len(set(loaded["train"]["id"])) == COUNT
    expected = {PILImage.open(folder / row["image"]).tobytes(): row["captions"] for row in rows_of()}
    assert pairs(folder, loaded["train"]) == expected
    assert list(loaded["train"]["captions"]) == [row["captions"] for row in rows_of()]


@pytest.mark.parametrize("source", [csv_file, parquet_of_bytes])
def test_the_same_source_gives_the_same_data_set_twice(source: Callable[[Path], DataArguments], folder: Path) -> None:
    args = source(folder)
    first, second = load_pairs(args), load_pairs(args)
    assert [split.to_list() for split in first.values()] == [split.to_list() for split in second.values()]


def test_without_a_source_the_embedded_scenes_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scenes = load_scenes(num_train=20, num_eval=4, cache_dir=tmp_path)
    monkeypatch.setattr(sources, "load_scenes", lambda: scenes)
    loaded = load_pairs(DataArguments(max_train_samples=10, max_eval_samples=3))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 10, "validation": 3, "test": 3}
    assert loaded["train"].column_names == ["id", "image", "captions", "languages", "regions", "order_pair"]
    assert list(loaded["train"]["id"]) == list(scenes["train"]["id"])[:10]
    row, scene = loaded["train"][3], scenes["train"][3]
    assert row["image"]["bytes"] == scene["image"]["bytes"]
    assert row["regions"] == scene["regions"]
    assert list(dict.fromkeys(scene["captions"])) == row["captions"]
    assert len(row["languages"]) == len(row["captions"])


def test_splits_of_a_repository_are_renamed(folder: Path) -> None:
    DatasetDict(
        {"train": embedded(folder, rows_of(range(4))), "dev": embedded(folder, rows_of(range(4, 8)))}
    ).save_to_disk(folder / "saved")
    loaded = load_pairs(DataArguments(dataset_name=str(folder / "saved")))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 4, "validation": 4}


def test_an_image_folder_may_have_one_metadata_file_per_split(folder: Path) -> None:
    for split, indices in {"train": range(6), "val": range(6, 8)}.items():
        (folder / "set" / split).mkdir(parents=True)
        for number, index in enumerate(indices):
            (folder / f"{index}.png").rename(folder / "set" / split / f"{number}.png")
        rows = [{"file_name": f"{number}.png", "caption": f"{split} {number}"} for number in range(len(indices))]
        write_table(folder / "set" / split / "metadata.csv", rows)
    loaded = load_pairs(DataArguments(dataset_dir=str(folder / "set")))
    assert list(loaded["validation"]["id"]) == ["val/0.png", "val/1.png"]
    assert list(loaded["train"]["captions"]) == [[f"train {number}"] for number in range(6)]


def test_one_metadata_file_above_split_folders_is_divided_by_them(folder: Path) -> None:
    rows = []
    for index in range(COUNT):
        split = "test" if index > 5 else "train"
        (folder / split).mkdir(exist_ok=True)
        (folder / f"{index}.png").rename(folder / split / f"{index}.png")
        rows.append({"file_name": f"{split}/{index}.png", "caption": f"scene {index}"})
    write_jsonl(folder / "metadata.jsonl", rows)
    loaded = load_pairs(DataArguments(dataset_dir=str(folder)), need_train=False)
    assert {split: len(images) for split, images in loaded.items()} == {"train": 6, "test": 2}


# Columns


def test_an_unknown_column_is_named_with_the_closest_one(folder: Path) -> None:
    file = write_table(folder / "pairs.csv", flat(rows_of()))
    with pytest.raises(ValueError, match=r"--caption_column is captoin; there is no such column .*Did you mean 'cap"):
        load_pairs(DataArguments(train_file=file, caption_column="captoin"))


@pytest.mark.parametrize("kind", ["image", "caption"])
def test_no_recognised_column_lists_the_columns_and_the_flag(folder: Path, kind: str) -> None:
    rows = [{"x" if name == kind else name: value for name, value in row.items()} for row in flat(rows_of())]
    file = write_table(folder / "pairs.csv", rows)
    with pytest.raises(ValueError, match=rf"no {kind} column was .* are: .*x.*Set --{kind}_column"):
        load_pairs(DataArguments(train_file=file))
    named: Any = {f"{kind}_column": "x"}
    assert len(load_pairs(DataArguments(train_file=file, **named), need_train=False)["train"]) == COUNT


def test_an_image_column_is_found_by_its_type_and_others_are_refused(folder: Path) -> None:
    unusual = embedded(folder, rows_of()).rename_column("image", "x").add_column("y", list(range(COUNT)))
    unusual.save_to_disk(folder / "saved")
    assert len(load_pairs(DataArguments(dataset_name=str(folder / "saved")))["train"]) == COUNT - 1
    with pytest.raises(ValueError, match=r"the image column y holds .*int64.*, not paths or images"):
        load_pairs(DataArguments(dataset_name=str(folder / "saved"), image_column="y"))


def test_languages_stay_beside_their_captions_and_other_columns_go(folder: Path) -> None:
    rows = [{**row, "languages": ["en", "de"], "regions": [{"box": [0, 0, 1, 1]}], "x": 1} for row in rows_of()]
    rows[0].update(captions=["", "Bild"])
    rows[1].update(captions=["same", "same"])
    rows.append({"image": "1.png", "captions": ["image"], "languages": ["fr"], "regions": [{"box": [1, 1, 2, 2]}]})
    loaded = load_pairs(DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows)), need_train=False)["train"]
    assert loaded.column_names == ["id", "image", "captions", "languages", "regions"]
    assert (loaded[0]["captions"], loaded[0]["languages"]) == (["Bild"], ["de"])
    assert (loaded[1]["captions"], loaded[1]["languages"]) == (["same", "image"], ["en", "fr"])
    assert loaded[1]["regions"] == [{"box": [0, 0, 1, 1]}, {"box": [1, 1, 2, 2]}]


@pytest.mark.parametrize("one_a_row", [True, False])
def test_languages_may_be_in_a_column_of_another_name(folder: Path, one_a_row: bool) -> None:
    rows = [{**row, "lang": "vi" if one_a_row else ["vi", "en"]} for row in rows_of()]
    args = DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows), language_column="lang")
    loaded = load_pairs(args, need_train=False)["train"]
    assert loaded.column_names == ["id", "image", "captions", "languages"]
    assert list(loaded["languages"]) == [["vi", "vi" if one_a_row else "en"]] * COUNT
    with pytest.raises(ValueError, match=r"--language_column is lagn; there is no such column .*'lang'"):
        load_pairs(DataArguments(train_file=args.train_file, language_column="lagn"))


# Paths


@pytest.mark.parametrize("how", ["absolute", "dots", "link", "folder link"])
def test_no_path_of_a_file_leaves_the_image_root_unless_allowed(
    folder: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    place = folder / "place"
    place.mkdir()
    for index in range(1, COUNT):
        (folder / f"{index}.png").rename(place / f"{index}.png")
    (place / "link.png").symlink_to(folder / "0.png")
    (place / "away").symlink_to(folder)
    name = {"absolute": str(folder / "0.png"), "dots": "../0.png", "link": "link.png", "folder link": "away/0.png"}[
        how
    ]
    rows = [{"image": name, "caption": "out"}, *flat(rows_of(range(1, COUNT)))]
    file = write_jsonl(place / "p.jsonl", rows)
    loaded = load_pairs(DataArguments(train_file=file), need_train=False)["train"]
    assert list(loaded["id"]) == [f"{index}.png" for index in range(1, COUNT)]
    assert (
        "1 of 15 rows skipped: image lies outside --image_root; --allow_outside_root accepts it (line 1)"
        in caplog.text
    )
    loaded = load_pairs(DataArguments(train_file=file, allow_outside_root=True), need_train=False)["train"]
    assert len(loaded) == COUNT
    assert content(folder, loaded[0]["image"]) == PILImage.open(folder / "0.png").tobytes()


def test_absolute_paths_below_the_image_root_are_fine(folder: Path) -> None:
    (folder / "elsewhere").mkdir()
    rows = [{**row, "image": str(folder / row["image"])} for row in rows_of()]
    file = write_jsonl(folder / "elsewhere" / "p.jsonl", rows)
    assert len(load_pairs(DataArguments(train_file=file, image_root=str(folder)), need_train=False)["train"]) == COUNT
    with pytest.raises(ValueError, match=r"lies outside .* Set --image_root, now .*elsewhere, to a folder above"):
        load_pairs(DataArguments(train_file=file))


def test_files_that_datasets_itself_found_are_used_wherever_they_lie(folder: Path) -> None:
    for index in range(COUNT):
        (folder / "set" / "train").mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.png").rename(folder / "set" / "train" / f"{index}.png")
    rows = [{"file_name": row["image"], "text": row["captions"][0]} for row in rows_of()]
    write_jsonl(folder / "set" / "train" / "metadata.jsonl", rows)
    args = DataArguments(dataset_name=str(folder / "set"), image_root=str(folder))
    assert len(load_pairs(args, need_train=False)["train"]) == COUNT


# Prepared data sets


PREPARED = Features(
    {
        **{"id": Value("string"), "image": Image(decode=False), "width": Value("int32"), "height": Value("int32")},
        **{"captions": Sequence(Value("string")), "source": Value("string"), "content_id": Value("string")},
    }
)


def write_prepared(folder: Path, sizes: dict[str, int]) -> str:
    splits = {}
    for split, count in sizes.items():
        row = {"width": 4, "height": 4, "source": "s", "content_id": "c", "image": {"bytes": b"no image at all"}}
        rows = [{**row, "id": f"{split}-{index}", "captions": ["", "same", "same"]} for index in range(count)]
        splits[split] = Dataset.from_list(rows, features=PREPARED)
    DatasetDict(splits).save_to_disk(folder / "prepared")
    (folder / "prepared" / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
    return str(folder / "prepared")


def test_a_prepared_data_set_is_given_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = write_prepared(tmp_path, {"test": 3, "train": 9, "validation": 4})
    monkeypatch.setattr(sources, "read_table", lambda *a, **k: pytest.fail("rows were visited"))
    loaded = load_pairs(DataArguments(dataset_name=name))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 9, "validation": 4, "test": 3}
    assert all(rows.features == PREPARED for rows in loaded.values())
    assert loaded["train"].to_list() == DatasetDict.load_from_disk(name)["train"].to_list()
    limited = load_pairs(DataArguments(dataset_name=name, max_train_samples=5, max_eval_samples=20))
    assert {split: len(rows) for split, rows in limited.items()} == {"train": 5, "validation": 4, "test": 3}
    assert list(limited["train"]["id"]) == [f"train-{index}" for index in range(5)]


def test_validation_is_held_out_of_a_prepared_data_set_that_has_none(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"train": 60})
    loaded = load_pairs(DataArguments(dataset_name=name))
    again = load_pairs(DataArguments(dataset_name=name))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 57, "validation": 3}
    assert sorted([*loaded["train"]["id"], *loaded["validation"]["id"]]) == sorted(f"train-{at}" for at in range(60))
    assert list(loaded["validation"]["id"]) == list(again["validation"]["id"])
    assert list(load_pairs(DataArguments(dataset_name=name), need_train=False)) == ["train"]


def test_a_prepared_data_set_that_is_damaged_or_too_small_is_named(tmp_path: Path) -> None:
    name = write_prepared(tmp_path, {"test": 2})
    with pytest.raises(ValueError, match="there is no train split, only test"):
        load_pairs(DataArguments(dataset_name=name))
    name = write_prepared(tmp_path / "small", {"train": 2})
    with pytest.raises(ValueError, match="train has 1 of the 2 pairs"):
        load_pairs(DataArguments(dataset_name=name))
    (Path(name) / "report.json").write_text("{")
    with pytest.raises(ValueError, match=r"report\.json is not valid JSON"):
        load_pairs(DataArguments(dataset_name=name))


# Grouping


def test_rows_of_one_image_are_merged_in_order(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [
        {"id": 1, "image_id": 7, "image": "0.png", "caption": "b"},
        {"id": 2, "image_id": 8, "image": "1.png", "caption": "c"},
        {"id": 3, "image_id": 7, "image": "0.png", "caption": "a"},
        {"id": 4, "image_id": 7, "image": "./0.png", "caption": "b"},
    ]
    with caplog.at_level(logging.INFO):
        loaded = load_pairs(DataArguments(train_file=write_table(folder / "p.csv", rows)), need_train=False)
    assert dict(zip(loaded["train"]["id"], loaded["train"]["captions"], strict=True)) == {"7": ["b", "a"], "8": ["c"]}
    assert "p.csv: 2 rows merged into an earlier row of the same image" in caplog.text


def test_equal_paths_are_one_image_whatever_their_ids(folder: Path) -> None:
    rows = [{"id": index, "image": f"{index % 4}.png", "caption": f"{index}"} for index in range(COUNT)]
    loaded = load_pairs(DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows)), need_train=False)["train"]
    assert list(loaded["id"]) == ["0", "1", "2", "3"]
    assert list(loaded["captions"]) == [["0", "4"], ["1", "5"], ["2", "6"], ["3", "7"]]


def test_equal_bytes_are_one_image(folder: Path) -> None:
    embedded(folder, [*rows_of(), {"image": "2.png", "captions": ["again"]}]).save_to_disk(folder / "saved")
    loaded = load_pairs(DataArguments(dataset_name=str(folder / "saved")), need_train=False)["train"]
    assert len(loaded) == COUNT
    assert loaded[2]["captions"] == ["scene 2", "view, 2", "again"]


def test_one_id_for_two_images_is_refused(folder: Path) -> None:
    rows = [{"id": index % 7, "image": f"{index}.png", "caption": "a"} for index in range(COUNT)]
    file = write_jsonl(folder / "p.jsonl", rows)
    with pytest.raises(ValueError, match=r"id is 0; lines 1 and 8 of .*p\.jsonl give it to .*0\.png.*7\.png"):
        load_pairs(DataArguments(train_file=file))
    assert len(load_pairs(DataArguments(train_file=file, id_column="image"), need_train=False)["train"]) == COUNT


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
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
    file = folder / f"table{suffix}"
    if suffix == ".jsonl":
        write_jsonl(file, table)
    elif suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(table), file)
    else:
        write_table(file, table, "\t" if suffix == ".tsv" else ",")
    loaded = load_pairs(DataArguments(train_file=str(file)))
    found = {row["id"]: row["captions"] for split in loaded.values() for row in split}
    expected: dict[str, list[str]] = {}
    for row in table:
        expected.setdefault(row["image"], []).append(row["caption"])
    assert found == {image: list(dict.fromkeys(texts)) for image, texts in expected.items()}
    assert sum(map(len, loaded.values())) == len(captions)


# Splits


def test_the_holdout_depends_on_the_ids_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        first = load_pairs(DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows_of())))
    second = load_pairs(DataArguments(train_file=write_jsonl(folder / "q.jsonl", rows_of()[::-1])))
    assert {split: len(rows) for split, rows in first.items()} == {"train": 7, "validation": 1}
    assert list(first["validation"]["id"]) == list(second["validation"]["id"])
    assert set(first["train"]["id"]) == set(second["train"]["id"])
    assert not set(first["train"]["id"]) & set(first["validation"]["id"])
    assert "no validation split; 1 images are held out" in caplog.text


@pytest.mark.parametrize("make", ["jsonl", "saved"])
def test_a_split_column_divides_the_rows(folder: Path, make: str) -> None:
    names = ["train", "train", "restval", "val", "dev", "Validation", "test", "nowhere"]
    rows = [{**row, "split": name} for row, name in zip(rows_of(), names, strict=True)]
    if make == "jsonl":
        args = DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows))
    else:
        DatasetDict({"test": embedded(folder, rows_of()).add_column("split", names)}).save_to_disk(folder / "saved")
        args = DataArguments(dataset_name=str(folder / "saved"))
    loaded = load_pairs(args)
    assert {split: len(images) for split, images in loaded.items()} == {"train": 3, "validation": 3, "test": 1}
    assert all(images.features == SCHEMA for images in loaded.values())
    assert content(folder, loaded["test"][0]["image"]) == PILImage.open(folder / "6.png").tobytes()


def test_a_split_column_is_ignored_beside_a_validation_file(folder: Path) -> None:
    train = write_jsonl(folder / "t.jsonl", [{**row, "split": "test"} for row in rows_of(range(5))])
    validation = write_jsonl(folder / "v.jsonl", rows_of(range(5, 8)))
    loaded = load_pairs(DataArguments(train_file=train, validation_file=validation))
    assert {split: len(rows) for split, rows in loaded.items()} == {"train": 5, "validation": 3}


def test_limits_take_the_first_images_after_merging(folder: Path) -> None:
    train = write_table(folder / "t.csv", flat(rows_of(range(5))))
    other = write_table(folder / "v.csv", flat(rows_of(range(5, 8))))
    args = DataArguments(
        train_file=train, validation_file=other, test_file=other, max_train_samples=3, max_eval_samples=2
    )
    loaded = load_pairs(args)
    assert list(loaded["train"]["id"]) == ["0.png", "1.png", "2.png"]
    assert list(loaded["validation"]["id"]) == list(loaded["test"]["id"]) == ["5.png", "6.png"]
    assert all(len(row["captions"]) == 2 for split in loaded.values() for row in split)


def test_images_in_two_splits_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    train = write_jsonl(folder / "t.jsonl", rows_of(range(6)))
    validation = write_jsonl(folder / "v.jsonl", rows_of(range(4, 8)))
    load_pairs(DataArguments(train_file=train, validation_file=validation))
    assert "2 images of validation are in train too, such as 4.png, 5.png" in caplog.text


def test_equal_file_names_below_two_folders_are_not_one_image(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("a", "b"):
        (folder / name).mkdir()
        for index in range(3):
            PILImage.new("RGB", (2, 2)).save(folder / name / f"{index}.png")
        write_jsonl(folder / name / "p.jsonl", rows_of(range(3)))
    load_pairs(DataArguments(train_file=str(folder / "a" / "p.jsonl"), validation_file=str(folder / "b" / "p.jsonl")))
    assert "in train too" not in caplog.text


def test_evaluation_needs_no_train_split(folder: Path) -> None:
    args = DataArguments(test_file=write_jsonl(folder / "p.jsonl", rows_of()))
    assert list(load_pairs(args, need_train=False)) == ["test"]
    with pytest.raises(ValueError, match=r"--test_file is .*; there is no train split, only test"):
        load_pairs(args)


@pytest.mark.parametrize(("count", "left"), [(1, "0 pairs"), (2, "1 pair,")])
def test_training_needs_two_pairs(folder: Path, count: int, left: str) -> None:
    file = write_jsonl(folder / "p.jsonl", rows_of(range(count)))
    with pytest.raises(ValueError, match=rf"has {left}.* contrastive training needs at least 2 pairs"):
        load_pairs(DataArguments(train_file=file))


# Bad rows


BAD_ROWS = [
    ("image file not found", {"image": "absent.png", "caption": "a"}),
    ("image is empty", {"image": " ", "caption": "a"}),
    ("image is a URL; download it first", {"image": "https://example.org/0.png", "caption": "a"}),
    ("caption is empty", {"image": "0.png", "caption": ""}),
    ("caption is empty", {"image": "0.png", "caption": None}),
    ("caption is empty", {"image": "0.png", "caption": " \t"}),
    ("caption is empty", {"image": "0.png", "caption": "nan"}),
    ("caption is empty", {"image": "0.png", "caption": float("nan")}),
    ("caption is empty", {"image": "0.png", "caption": ["", None]}),
    ("caption is empty", {"image": "0.png", "caption": []}),
    ("caption is not a string", {"image": "0.png", "caption": 5}),
    ("text is not valid Unicode", {"image": "0.png", "caption": "half \ud83d"}),
    ("image is not a path", {"image": 5, "caption": "a"}),
    ("captions and languages differ in number", {"image": "0.png", "caption": ["a"], "languages": ["en", "de"]}),
]


@pytest.mark.parametrize(("reason", "bad"), BAD_ROWS)
def test_a_bad_row_is_skipped_counted_and_named(
    folder: Path, caplog: pytest.LogCaptureFixture, reason: str, bad: dict[str, Any]
) -> None:
    good = flat(rows_of(range(1, 7)))
    file = write_jsonl(folder / "p.jsonl", [*good[:2], bad, *good[2:5], bad, bad, bad, *good[5:]])
    loaded = load_pairs(DataArguments(train_file=file), need_train=False)["train"]
    assert list(loaded["id"]) == [f"{index}.png" for index in range(1, 7)]
    assert f"p.jsonl: 4 of 16 rows skipped: {reason} (lines 3, 7, 8 ...)" in caplog.text


def test_an_empty_id_is_a_bad_row(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [{"id": f"n{index}" if index else "", "image": f"{index}.png", "caption": "a"} for index in range(COUNT)]
    assert len(load_pairs(DataArguments(train_file=write_table(folder / "p.csv", rows)))["train"]) == COUNT - 2
    assert "p.csv: 1 of 8 rows skipped: id is empty (line 2)" in caplog.text


def test_empty_captions_of_a_list_are_dropped_alone(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = rows_of()
    rows[2]["captions"] = ["", "kept", None, "nan"]
    rows[4]["captions"] += ["", ""]
    loaded = load_pairs(DataArguments(train_file=write_jsonl(folder / "p.jsonl", rows)), need_train=False)["train"]
    assert loaded[2]["captions"] == ["kept"]
    assert "p.jsonl: 5 empty captions dropped (lines 3, 5)" in caplog.text


@pytest.mark.parametrize("with_id", [True, False])
def test_empty_image_bytes_are_a_bad_row(folder: Path, caplog: pytest.LogCaptureFixture, with_id: bool) -> None:
    rows = [{**row, "image": (folder / row["image"]).read_bytes()} for row in rows_of()]
    rows[1]["image"], rows[5]["image"] = b"", None
    if with_id:
        rows = [{"id": index, **row} for index, row in enumerate(rows)]
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    loaded = load_pairs(DataArguments(train_file=str(folder / "p.parquet")), need_train=False)["train"]
    assert "p.parquet: 2 of 8 rows skipped: image bytes are empty (rows 1, 5)" in caplog.text
    kept = [index for index in range(COUNT) if index not in (1, 5)]
    assert list(loaded["captions"]) == [row["captions"] for row in rows_of() if int(row["image"][0]) in kept]
    assert [row["image"]["bytes"] for row in loaded] == [(folder / f"{index}.png").read_bytes() for index in kept]


def test_a_csv_row_with_too_many_cells_is_bad(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    lines = ["image,caption", '0.png,"two\nlines"', "1.png,a dog, a cat", "2.png,b", "3.png,c"]
    (folder / "p.csv").write_text("\n".join(lines), encoding="utf-8")
    loaded = load_pairs(DataArguments(train_file=str(folder / "p.csv")), need_train=False)["train"]
    assert list(loaded["captions"]) == [["two\nlines"], ["b"], ["c"]]
    assert "1 of 4 rows skipped: more cells than columns; a separator without quotes? (line 4)" in caplog.text


def test_mostly_missing_images_say_where_was_looked(folder: Path) -> None:
    rows = [{**row, "image": f"img/{row['image']}"} for row in rows_of(range(5))] + rows_of(range(5, 8))
    file = write_jsonl(folder / "p.jsonl", rows)
    with pytest.raises(ValueError, match="only 3 pairs are left of 8 rows") as error:
        load_pairs(DataArguments(train_file=file))
    assert f"looked for at {folder / 'img' / '0.png'}. Set --image_root" in str(error.value)


def test_no_usable_row_lists_the_reasons(folder: Path) -> None:
    rows = [{"image": "0.png", "caption": ""}, {"image": "1.png", "caption": 5}]
    file = write_jsonl(folder / "p.jsonl", rows)
    with pytest.raises(ValueError, match=r"zero pairs are left of 2 rows \(caption is empty: 1, caption is not a str"):
        load_pairs(DataArguments(train_file=file))


# Bad files


BAD_FILES = [
    ("p.jsonl", "", r"p\.jsonl; the file holds no rows"),
    ("p.csv", "image,caption\n", r"p\.csv; the file holds no rows"),
    ("p.json", "[]", r"p\.json; the file holds no rows"),
    (
        "p.jsonl",
        '{"image": "0.png", "caption": "a"}\n\n{"image": 1,}\n',
        r"p\.jsonl, line 3 is not valid JSON: .*prop",
    ),
    ("p.jsonl", '"image"\n', r"p\.jsonl, line 1 is a JSON str; a row is an object"),
    ("p.json", '[{"image": "0.png"},\n{]', r"p\.json, line 2 is not valid JSON"),
    ("p.csv", 'image,caption\n0.png,a\n1.png,"b\n2.png,c\n', r"p\.csv: the row that begins on line 3 cannot be read"),
    ("p.csv", "image,caption,image\n0.png,a,b\n", r"p\.csv has two columns image"),
    ("p.csv", "image,caption\n0.png,\xe9\n", r"p\.csv is not UTF-8 text"),
    ("p.parquet", "no Parquet", r"p\.parquet; it cannot be read as Parquet"),
    ("p.xlsx", "?", r"format is not known by '\.xlsx'\. Known are \.jsonl, \.json, \.csv, \.tsv, \.parquet"),
]


@pytest.mark.parametrize(("name", "text", "message"), BAD_FILES)
def test_a_bad_file_is_named(folder: Path, name: str, text: str, message: str) -> None:
    (folder / name).write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=message) as error:
        load_pairs(DataArguments(train_file=str(folder / name)))
    assert "\n" not in str(error.value)


def test_an_empty_parquet_file_is_named(folder: Path) -> None:
    pq.write_table(
        pa.table({"image": pa.array([], pa.string()), "caption": pa.array([], pa.string())}), folder / "p.parquet"
    )
    with pytest.raises(ValueError, match=r"p\.parquet; it cannot be read as Parquet \(.*no rows"):
        load_pairs(DataArguments(train_file=str(folder / "p.parquet")))


def test_a_byte_order_mark_is_no_part_of_the_first_column(folder: Path) -> None:
    (folder / "p.csv").write_text("image,caption\n0.png,a\n1.png,b\n2.png,c\n", encoding="utf-8-sig")
    assert len(load_pairs(DataArguments(train_file=str(folder / "p.csv")), need_train=False)["train"]) == 3


# Arguments


BAD_ARGUMENTS = [
    ({"dataset_name": "a", "train_file": "b"}, r"--dataset_name and --train_file are given together"),
    ({"dataset_name": "a", "dataset_dir": "b"}, r"--dataset_name and --dataset_dir are given together"),
    ({"dataset_dir": "a", "validation_file": "b"}, r"--validation_file is given with --dataset_dir"),
    ({"dataset_config_name": "a"}, r"--dataset_config_name is a; there is no --dataset_name"),
    ({"max_train_samples": 0}, r"--max_train_samples is 0; it counts from 1"),
]


@pytest.mark.parametrize(("given_args", "message"), BAD_ARGUMENTS)
def test_contradictory_arguments_are_refused(given_args: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        DataArguments(**given_args)


BAD_PLACES = [
    ({"train_file": "absent.jsonl"}, r"--train_file is absent\.jsonl; there is no such file"),
    ({"dataset_dir": "absent"}, r"--dataset_dir is absent; there is no such folder"),
    ({"dataset_dir": "."}, r"--dataset_dir is \.; neither it nor .* metadata\.jsonl"),
    ({"train_file": "0.png", "image_root": "absent"}, r"--image_root is absent; there is no such folder"),
    ({"dataset_name": "0.png"}, r"--dataset_name is 0\.png; that is a file\. Give it as --train_file"),
    ({"dataset_name": "nobody/nothing"}, r"--dataset_name is nobody/nothing; it could not be loaded .*local folder"),
]


@pytest.mark.parametrize(("given_args", "message"), BAD_PLACES)
def test_a_place_that_does_not_exist_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch, given_args: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises(ValueError, match=message) as error:
        load_pairs(DataArguments(**given_args))
    assert "\n" not in str(error.value)


def test_a_data_set_without_known_splits_is_refused(folder: Path) -> None:
    DatasetDict({"challenge": embedded(folder, rows_of())}).save_to_disk(folder / "saved")
    with pytest.raises(ValueError, match=r"its splits are challenge\. Name them train, validation and test"):
        load_pairs(DataArguments(dataset_name=str(folder / "saved")))
