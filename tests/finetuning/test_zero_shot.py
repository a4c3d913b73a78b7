"""Benchmarks by name, their classes, data and order of labels; texts of classes; the report of classes."""

import copy
import csv
import hashlib
import json
from pathlib import Path

import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Image

from mm_utils.data.benchmarks import BENCHMARKS
from mm_utils.finetuning.evaluator import report_classes
from mm_utils.finetuning.zero_shot import LabelledImages, ZeroShotArguments, ZeroShotEvaluator, unknown_names
from mm_utils.model.processor import train_tokenizer
from tests.kit.corpora import labelled_of
from tests.kit.fault_images import grey
from tests.kit.reading import write_tar


def test_the_table_of_classes_changes_on_purpose_alone() -> None:
    """Their names are in the order of the labels; the digest was taken when each list was compared with its data set."""
    names = {name: each.classes for name, each in BENCHMARKS.items()}
    assert sum(map(len, names.values())) == 1437
    assert hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16] == "9260e1206fece39e"
    for each in BENCHMARKS.values():
        assert len({one.lower() for one in each.classes}) == len(each.classes) == len(each.names)


def test_labels_are_matched_by_name_in_any_order_and_writing() -> None:
    pets, eurosat = BENCHMARKS["oxford_pets"], BENCHMARKS["eurosat"]
    assert pets.places(["pug", "american_bulldog", "Maine_Coon"], "t") == [25, 1, 20]
    assert eurosat.places(["SeaLake", "Annual Crop"], "t") == [9, 0]
    assert BENCHMARKS["svhn"].places(["7", "0"], "t") == [7, 0]
    for own, others in ((pets, ["pug", "dachshund"]), (BENCHMARKS["stl10"], BENCHMARKS["cifar10"].classes)):
        with pytest.raises(ValueError, match=r"^t; its .* classes .* are not the"):
            own.places(others, "t")


def test_imagenet_is_known_by_its_synonyms_and_by_wordnet_ids() -> None:
    imagenet = BENCHMARKS["imagenet1k"]
    synonyms = [f"{name}, another name" for name in imagenet.names]
    synonyms[134] = "crane"  # as the other one
    assert imagenet.places(synonyms, "t") == list(range(1000))
    ids = [f"n{number:08d}" for number in range(1000)]
    assert imagenet.places(ids, "t") == list(range(1000))
    for own, others in ((imagenet, ids[:200]), (imagenet, ids[::-1]), (BENCHMARKS["cifar10"], ids[:10])):
        with pytest.raises(ValueError, match=r"^t; its .* classes .* are not the"):
            own.places(others, "t")


def test_without_a_folder_the_command_that_fetches_it_is_said() -> None:
    with pytest.raises(
        ValueError, match=r"--dataset_name is missing; .* hf download uoft-cs/cifar10 --repo-type dataset"
    ):
        labelled_of(classes="cifar10")


def test_a_benchmarks_name_gives_classes_prompts_and_the_split(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for place, shade, label in (("test/0", 0, b"9"), ("test/1", 20, b"0"), ("train/0", 255, b"0")):
        (tmp_path / place).parent.mkdir(exist_ok=True)
        write_tar(tmp_path / f"{place}.tar", [("s0000000.png", grey(shade)), ("s0000000.cls", label)])
    found = labelled_of(dataset_name=str(tmp_path), classes="stl10")
    assert found.classes == list(BENCHMARKS["stl10"].classes)
    assert (found.label_M.tolist(), found.split) == ([9, 0], "test")
    assert found.templates == ("a photo of a {}.", "a photo of the {}.")
    assert "2 images, and stl10 has 8,000; the figures are not those of the benchmark" in caplog.text


def test_parquet_of_the_hub_is_read_where_it_was_fetched_to(tmp_path: Path, own_cache: Path) -> None:
    benchmark, folder = BENCHMARKS["food101"], tmp_path / "food101"
    path = folder / "data/validation-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    features = Features({"img": Image(), "label": ClassLabel(names=list(benchmark.names))})
    shown = [{"bytes": grey(at), "path": None} for at in range(3)]
    Dataset.from_dict({"img": shown, "label": [2, 0, 1]}, features).to_parquet(path)
    beside = folder / ".cache/huggingface/download" / f"{path.name}.metadata"  # as the Hub's client leaves it
    beside.parent.mkdir(parents=True)
    beside.write_text("x")
    found = labelled_of(dataset_name=str(folder), classes="food101")
    assert (found.split, found.label_M.tolist(), found.classes) == ("validation", [2, 0, 1], list(benchmark.classes))


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
