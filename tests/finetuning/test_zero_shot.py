"""Benchmarks by name, their classes, data and order of labels; texts of classes; the report of classes."""

import copy
import csv
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image

from mm_utils.data import benchmarks as named
from mm_utils.data.benchmarks import CLASSIFICATION, RETRIEVAL, fetch
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.finetuning.confusion import report_classes
from mm_utils.finetuning.zero_shot import LabelledImages, ZeroShotArguments, ZeroShotEvaluator, unknown_names
from mm_utils.model.processor import train_tokenizer
from tests.kit.fault_images import grey
from tests.kit.finetuning import labelled_of
from tests.kit.reading import write_tar

NUMBERS = {
    **{"imagenet1k": 1000, "cifar10": 10, "cifar100": 100, "food101": 101, "oxford_pets": 37, "flowers102": 102},
    **{"dtd": 47, "eurosat": 10, "stl10": 10, "mnist": 10, "svhn": 10},
}
KNOWN = {
    "imagenet1k": {0: "tench", 1: "goldfish", 207: "golden retriever", 281: "tabby", 817: "sports car", 999: "toilet tissue"},
    "cifar10": {0: "airplane", 1: "automobile", 6: "frog", 9: "truck"},
    "cifar100": {0: "apple", 1: "aquarium fish", 41: "lawn mower", 70: "rose", 99: "worm"},
    "food101": {0: "apple pie", 16: "cheesecake", 17: "cheese plate", 55: "hot dog", 76: "pizza", 100: "waffles"},
    "oxford_pets": {0: "Abyssinian", 14: "German Shorthaired", 25: "Pug", 36: "Yorkshire Terrier"},
    "flowers102": {0: "pink primrose", 42: "sword lily", 73: "rose", 76: "passion flower", 101: "blackberry lily"},
    "dtd": {0: "banded", 30: "polka-dotted", 46: "zigzagged"},
    "eurosat": {1: "forest", 8: "river", 9: "lake or sea"},
    "stl10": {0: "airplane", 2: "car", 7: "monkey", 9: "truck"},
    "mnist": {0: "0", 9: "9"},
    "svhn": {0: "zero", 9: "nine"},
}  # fmt: skip


def test_every_list_has_its_number_of_names_in_the_order_of_the_labels() -> None:
    assert {name: len(each.classes) for name, each in CLASSIFICATION.items()} == NUMBERS
    for name, each in CLASSIFICATION.items():
        assert len({one.lower() for one in each.classes}) == len(each.classes) == len(each.names)
        assert {place: each.classes[place] for place in KNOWN[name]} == KNOWN[name]
        assert all(one == one.strip() and "_" not in one for one in each.classes)


def test_labels_are_matched_by_name_in_any_order_and_writing() -> None:
    pets, eurosat = CLASSIFICATION["oxford_pets"], CLASSIFICATION["eurosat"]
    assert pets.places(["pug", "american_bulldog", "Maine_Coon"], "t") == [25, 1, 20]
    assert eurosat.places(["SeaLake", "Annual Crop"], "t") == [9, 0]
    assert CLASSIFICATION["svhn"].places(["7", "0"], "t") == [7, 0]
    for own, others in ((pets, ["pug", "dachshund"]), (CLASSIFICATION["stl10"], CLASSIFICATION["cifar10"].classes)):
        with pytest.raises(ValueError, match=r"^t; its .* classes .* are not the"):
            own.places(others, "t")


def test_imagenet_is_known_by_its_synonyms_and_by_wordnet_ids() -> None:
    imagenet = CLASSIFICATION["imagenet1k"]
    synonyms = [f"{name}, another name" for name in imagenet.names]
    synonyms[134] = "crane"  # as the other one
    assert imagenet.places(synonyms, "t") == list(range(1000))
    ids = [f"n{number:08d}" for number in range(1000)]
    assert imagenet.places(ids, "t") == list(range(1000))
    for own, others in ((imagenet, ids[:200]), (imagenet, ids[::-1]), (CLASSIFICATION["cifar10"], ids[:10])):
        with pytest.raises(ValueError, match=r"^t; its .* classes .* are not the"):
            own.places(others, "t")


def test_without_the_hub_there_is_a_remedy(own_cache: Path) -> None:
    with pytest.raises(ValueError, match=r"uoft-cs/cifar10 could not be fetched .* or give a local folder of it"):
        fetch(CLASSIFICATION["cifar10"], "--classes is cifar10")


def test_what_was_fetched_is_found_again_without_the_hub(own_cache: Path) -> None:
    folder = own_cache / "tandem_benchmarks/flickr8k/test"
    folder.mkdir(parents=True)
    (folder / "0.tar").touch()
    assert fetch(RETRIEVAL["flickr8k"], "x") == str(folder.parent)
    (folder / "0.tar").rename(folder.parent / "0.tar")
    with pytest.raises(ValueError, match=r"has no files test/\*"):
        fetch(RETRIEVAL["flickr8k"], "x")


def test_only_the_files_of_an_evaluation_are_fetched(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def download(name: str, repo_type: str, local_dir: Path, allow_patterns: list[str] | None) -> None:
        asked.append((name, repo_type, allow_patterns))
        (local_dir / "data").mkdir(parents=True)
        (local_dir / "data/validation-0-of-1.parquet").touch()

    monkeypatch.setattr(named, "snapshot_download", download)
    fetch(CLASSIFICATION["imagenet1k"], "x")
    assert asked == [("ILSVRC/imagenet-1k", "dataset", ["*validation-*", "*.txt"])]


def zero_shot_folder(folder: Path) -> Path:
    """As CLIP_benchmark writes them: two shards of a test split, and one of a train split that holds something else."""
    for place, shade, label in (("test/0", 0, b"9"), ("test/1", 20, b"0"), ("train/0", 255, b"0")):
        path = folder / f"{place}.tar"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "nshards.txt").write_text("2\n")
        write_tar(path, [("s0000000.png", grey(shade)), ("s0000000.cls", label)])
    return folder


def test_a_benchmarks_name_gives_classes_prompts_and_the_split(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = zero_shot_folder(tmp_path / "wds")
    found = labelled_of(dataset_name=str(folder), classes="stl10")
    assert found.classes == list(CLASSIFICATION["stl10"].classes)
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


def test_a_retrieval_benchmark_is_a_source_by_its_name(tmp_path: Path, own_cache: Path) -> None:
    retrieval_folder(own_cache / "tandem_benchmarks/flickr8k")
    pairs = load_pairs(DataArguments(dataset_name="flickr8k"), need_train=False)
    assert {split: len(rows) for split, rows in pairs.items()} == {"train": 1, "test": 2}
    assert len(pairs["train"]["captions"][0]) == 6  # the protocol is that of an evaluation


# -- names, templates and the report of classes -------------------------------------------------------------------------
def test_names_that_the_tokenizer_does_not_know_are_named(caplog: pytest.LogCaptureFixture) -> None:
    classes = ["cat", "sea lion", "жзж", "a 象", ""]
    own = train_tokenizer(["a photo of a cat, a dog or a sea lion"], 200)
    stock = copy.deepcopy(own)
    stock.unk_token = stock.sep_token  # as CLIP's
    assert [unknown_names(each, classes, 32) for each in (own, stock)] == [["жзж", "a 象", ""], [""]]
    images = LabelledImages(Dataset.from_dict({}), torch.tensor([0]), ["cat", "жзж"], "test")
    ZeroShotEvaluator(images, own, 32, ZeroShotArguments())
    assert "1 of 2 classes have words that the tokenizer does not know, and are not found by them: жзж" in caplog.text


def test_templates_are_checked_and_read_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "templates.txt"
    file.write_text("a {}\n\n the {} \n")
    assert ZeroShotArguments(templates=[str(file)]).templates == ["a {}", "the {}"]
    for templates, message in ((["a photo"], "--templates is a photo; "), ([], "--templates is an empty file; ")):
        with pytest.raises(ValueError, match=message):
            ZeroShotArguments(templates=templates)


def test_the_table_of_classes_by_hand(tmp_path: Path) -> None:
    predictions = torch.tensor([[0, 0], [0, 2], [0, 2], [0, 1], [1, 1], [1, 1], [-1, 1]])
    assert report_classes(predictions, ["cat", "dog", "owl", "yak"], tmp_path) == [
        ("cat", 4, 0.25, 1.0, "owl", 2),
        ("dog", 2, 1.0, 0.5, "", 0),
        ("owl", 0, None, 0.0, "", 0),
        ("yak", 0, None, None, "", 0),
    ]
    rows = list(csv.reader((tmp_path / "classes.csv").open()))
    assert rows[0] == ["name", "rows", "recall", "precision", "most_confused_with", "times"]
    assert rows[1] == ["cat", "4", "0.25", "1.0", "owl", "2"]
