"""Folders as CLIP_benchmark writes them hold the same as the same data in our own layouts."""

import json
import re
import shutil
from pathlib import Path

import pytest
from datasets import ClassLabel, Dataset, Features, Image

from mm_utils.data.benchmarks import CLASSIFICATION
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.finetuning.zero_shot import LabelledImages
from tests.kit.fault_images import grey
from tests.kit.finetuning import labelled_of
from tests.kit.reading import content, read, write_tar

STL = ["airplane", "bird", "car", "cat", "deer", "dog", "horse", "monkey", "ship", "truck"]


def zero_shot_folder(folder: Path, labels: list[str], names: list[str] | None = None) -> Path:
    """Two shards of a test split, and one of a train split that holds something else."""
    for split in ("test", "train"):
        (folder / split).mkdir(parents=True)
        (folder / split / "nshards.txt").write_text("2\n")
    half = len(labels) // 2
    for shard, part in enumerate((range(half), range(half, len(labels)))):
        images = [(f"s{at:07d}.png", grey(20 * at)) for at in part]
        classes = [(f"s{at:07d}.cls", labels[at].encode()) for at in part]
        write_tar(
            folder / f"test/{shard}.tar", [member for both in zip(images, classes, strict=True) for member in both]
        )
    write_tar(folder / "train/0.tar", [("s0000000.png", grey(255)), ("s0000000.cls", b"0")])
    if names:
        (folder / "classnames.txt").write_text("".join(f"{name}\n" for name in names))
    return folder


def retrieval_folder(folder: Path) -> Path:
    """Six captions of each of two test images, and one train image, in shards of the same name."""
    for split, keys in (("test", ("a", "b")), ("train", ("a",))):
        (folder / split).mkdir(parents=True)
        members = []
        for at, key in enumerate(keys):
            captions = "\n".join(f"{split} {key} says {number}" for number in range(6))
            members += [(f"{key}.png", grey(90 * at + 30 * len(split))), (f"{key}.txt", captions.encode())]
        write_tar(folder / split / "0.tar", members)
    (folder / "dataset_type.txt").write_text("retrieval\n")
    return folder


def seen(found: LabelledImages) -> list[tuple[bytes, str]]:
    names = [found.classes[label] for label in found.label_M.tolist()]
    return list(zip([row["image"]["bytes"] for row in found.rows], names, strict=True))


def test_labels_of_shards_are_those_of_the_same_rows(tmp_path: Path, own_cache: Path) -> None:
    labels = [3, 0, 9, 10, 3]
    names = ["zebra", "ant", "sea lion", "owl", *(f"kind {place}" for place in range(4, 11))]
    folder = zero_shot_folder(tmp_path / "wds", list(map(str, labels)), names)
    rows = {"image": [{"bytes": grey(20 * at), "path": None} for at in range(5)], "label": labels}
    features = Features({"image": Image(), "label": ClassLabel(names=names)})
    Dataset.from_dict(rows, features).save_to_disk(tmp_path / "saved")
    flags = {"dataset_name": str(folder), "split": "test", "classes": f"{folder}/classnames.txt"}
    found = labelled_of(**flags)
    other = labelled_of(dataset_name=str(tmp_path / "saved"))
    assert seen(found) == seen(other)
    assert found.classes == other.classes == names
    assert found.split == "test"
    again = zero_shot_folder(tmp_path / "other", ["1"] * 5, names)
    shutil.rmtree(folder)
    again.rename(folder)  # the same path, other bytes
    assert set(labelled_of(**flags).label_M.tolist()) == {1}


def test_a_benchmarks_name_gives_classes_prompts_and_the_split(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zero_shot_folder(tmp_path / "wds", ["9", "0"], ["x", "y"])
    found = labelled_of(dataset_name=str(folder), classes="stl10")
    assert found.classes == STL
    assert (found.label_M.tolist(), found.split) == ([9, 0], "test")
    assert found.templates == ("a photo of a {}.", "a photo of the {}.")
    assert "2 images, and stl10 has 8,000; the figures are not those of the benchmark" in caplog.text


@pytest.mark.parametrize(
    ("name", "file", "split"),
    [
        ("cifar10", "plain_text/test", "test"),
        ("svhn", "cropped_digits/test", "test"),
        ("food101", "data/validation", "validation"),
    ],
)
def test_parquet_of_the_hub_is_read_where_it_was_fetched_to(name: str, file: str, split: str, own_cache: Path) -> None:
    benchmark = CLASSIFICATION[name]
    folder = own_cache / "tandem_benchmarks" / name
    path = folder / f"{file}-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    features = Features({"img": Image(), "label": ClassLabel(names=list(benchmark.names))})
    Dataset.from_dict(
        {"img": [{"bytes": grey(at), "path": None} for at in range(3)], "label": [2, 0, 1]}, features
    ).to_parquet(path)
    beside = folder / ".cache/huggingface/download" / f"{path.name}.metadata"  # as the Hub's client leaves it
    beside.parent.mkdir(parents=True)
    beside.write_text("x")
    found = labelled_of(classes=name)
    assert (found.split, found.label_M.tolist(), found.classes) == (split, [2, 0, 1], list(benchmark.classes))


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("a.png", grey(0))], r"incomplete_sample.*member a.*a has no label among its members \(a.png\)"),
        ([("a.cls", b"0")], r"incomplete_sample.*a has no image among its members"),
        ([("a.png", grey(0)), ("a.cls", b"0"), ("a.pkl", b"")], "unsafe_member.* is a pickle"),
    ],
)
def test_samples_without_image_or_label_are_left_out_and_named(
    members: list[tuple[str, bytes]], message: str, tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zero_shot_folder(tmp_path / "wds", ["0", "1"], ["ant", "bee"])
    write_tar(folder / "test/1.tar", members)
    flags = {"dataset_name": str(folder), "split": "test", "classes": f"{folder}/classnames.txt"}
    assert len(labelled_of(**flags).rows) == 1
    assert re.search(message, caplog.text)


def test_pairs_of_shards_are_those_of_the_same_rows(tmp_path: Path, own_cache: Path) -> None:
    folder = retrieval_folder(tmp_path / "wds")
    rows = []
    for at, record in enumerate(read(folder)[0]):
        (tmp_path / f"{at}.png").write_bytes(content(record))
        rows.append({"image": f"{at}.png", "captions": record.captions, "split": record.split})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    of_shards = load_pairs(DataArguments(dataset_name=str(folder)), need_train=False)
    of_lines = load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")), need_train=False)
    assert of_shards["test"]["captions"] == of_lines["test"]["captions"]
    assert set(of_shards) == {"train", "test"}


def test_a_retrieval_benchmark_is_a_source_by_its_name(tmp_path: Path, own_cache: Path) -> None:
    retrieval_folder(own_cache / "tandem_benchmarks/flickr8k")
    pairs = load_pairs(DataArguments(dataset_name="flickr8k"), need_train=False)
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 1, "test": 2}
    assert len(pairs["train"]["captions"][0]) == 6  # the protocol is that of an evaluation
