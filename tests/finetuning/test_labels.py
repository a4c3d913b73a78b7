"""Labelled rows, for tasks and for zero-shot evaluation: classes, held-out rows, prepared sets; bad input is named."""

import copy
import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, List, Value
from datasets import Image as ImageFeature

from mm_utils.data import media
from mm_utils.data.batches.column_cache import image_digest
from mm_utils.data.batches.dataset import EvaluationTransform, Pairs, TrainingTransform
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media.riff import read_wav, write_wav
from mm_utils.data.scenes import load_scenes
from mm_utils.finetuning import labels
from mm_utils.finetuning.arguments import ZeroShotArguments
from mm_utils.finetuning.evaluator import report_classes
from mm_utils.finetuning.labels import LabelledTask
from mm_utils.finetuning.zero_shot import LabelledImages, ZeroShotEvaluator, unknown_names
from mm_utils.model.processor import train_tokenizer
from tests.kit.corpora import labelled_of, task_of
from tests.kit.fault_images import grey
from tests.kit.jsonl import write_lines
from tests.kit.media_files import tone
from tests.kit.reading import write_tar


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    for row in rows:
        if isinstance(row.get("image"), str):
            (folder / row["image"]).write_bytes(grey(sum(map(ord, row["image"])) % 256))
    write_lines(folder / name, rows)
    return str(folder / name)


def load(folder: Path, rows: list[dict[str, Any]], medium: str = "image", **flags: Any) -> LabelledTask:
    return task_of(medium, train_file=write(folder, rows), **flags)


def question(number: int, answer: Any, **other: Any) -> dict[str, Any]:
    return {"image": f"{number}.png", "question": f"what is {number}?", "answer": answer, **other}


def named(task: LabelledTask, split: str) -> list[str]:
    return [task.classes[label] if label >= 0 else "?" for label in task.splits[split]["label"]]


def shown_of(task: LabelledTask, split: str) -> set[Any]:
    """The pictures of a split, by their bytes, or by their path where a row has none."""
    return {image["bytes"] or image["path"] for image in task.splits[split]["image"]}


def pictures(count: int) -> list[dict[str, Any]]:
    return [{"bytes": grey(10 * number), "path": None} for number in range(count)]


def save(folder: Path, given: list[Any], feature: Any, split: str = "test") -> str:
    """A folder of `save_to_disk` with one split."""
    rows = {"img": pictures(len(given)), "label": given}
    table = Dataset.from_dict(rows, Features({"img": ImageFeature(), "label": feature}))
    DatasetDict({split: table}).save_to_disk(folder)
    return str(folder)


def files(root: Path, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def shades(found: LabelledImages) -> list[int]:
    """Return the shade of each row as the loader shows it."""
    pairs = Pairs(found.rows, EvaluationTransform(media.Image(4)))
    return [int(pairs[row, 0]["pixel_values"][0, 0, 0]) for row in range(len(pairs))]


# -- sources and classes; other formats: tests/contracts/test_sources.py ----------------------------------------------
ANIMALS = ["owl", "ant", "yak", "owl"]


def shards(folder: Path, suffix: str) -> str:
    cells = [name if suffix == "cls" else json.dumps({"label": name}) for name in ANIMALS]
    members = [((f"{at}.png", grey(10 * at)), (f"{at}.{suffix}", cell.encode())) for at, cell in enumerate(cells)]
    write_tar(folder / "0.tar", [*(member for both in members for member in both), ("9.png", grey(90))])  # of no label
    return str(folder)


SOURCES = {
    "a saved set": lambda folder: save(folder, [0, 1, 2, 0], ClassLabel(names=["owl", "ant", "yak"]), "train"),
    "classes": lambda folder: files(folder, {f"{name}/{at}.png": grey(10 * at) for at, name in enumerate(ANIMALS)}),
    **{f"shards of .{end}": partial(shards, suffix=end) for end in ("cls", "json")},
}


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_source_holds_the_same_rows(source: str, tmp_path: Path) -> None:
    name = SOURCES[source](tmp_path)
    found = labelled_of(dataset_name=name)
    task = task_of(dataset_name=name)
    seen = zip(shades(found), (found.classes[label] for label in found.label_M.tolist()), strict=True)
    assert sorted(seen) == [(10 * at, name) for at, name in enumerate(ANIMALS)]
    assert found.classes == (["owl", "ant", "yak"] if source == "a saved set" else ["ant", "owl", "yak"])
    assert sorted([*named(task, "train"), *named(task, "validation")]) == sorted(ANIMALS)


def test_several_answers_are_the_most_frequent_one_and_unknown_ones_count_as_wrong(tmp_path: Path) -> None:
    """A list may be written as JSON in a cell; one that Python wrote is set aside."""
    several = ["red", "blue", "blue", "blue", "red", "tan"]
    objects = [{"answer": name} for name in ["red", "red", "red", "red", "blue"]]
    cells = [several, objects, ["blue"], json.dumps(several), json.dumps(objects), repr(several)]
    other = write(tmp_path, [question(9, "green"), question(8, ["blue", "green", "blue"])], "other.jsonl")
    task = load(tmp_path, [question(n, cell) for n, cell in enumerate(cells)], validation_file=other)
    assert named(task, "train") == ["blue", "red", "blue", "blue", "red"]
    assert named(task, "validation") == ["?", "blue"]


def test_names_are_kept_numbers_are_sorted_and_nearly_equal_ones_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = save(tmp_path / "saved", [1, 0, -1, 1], ClassLabel(names=["owl", "ant", "yak"]), "train")
    assert task_of(dataset_name=kept).classes == ["owl", "ant", "yak"]  # -1 is not a label
    numbers = [{"image": f"{n}.png", "label": n % 10 + 2} for n in range(60)]
    test = write(tmp_path, [{"image": "x.png", "label": 3.0}, {"image": "y.png", "label": "4.0"}], "test.jsonl")
    task = load(tmp_path, numbers, validation_file=test)
    assert task.classes == [str(n) for n in range(2, 12)]
    assert named(task, "validation") == ["3", "4"]
    load(tmp_path, [{"image": f"{n}.png", "label": ["Cat", "cat ", "CAT", "dog"][n % 4]} for n in range(20)])
    assert "the classes 'CAT', 'Cat', 'cat' are nearly equal" in caplog.text


def test_names_for_prompts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The first synonym, unless two classes share it; a file names WordNet ids and numbers."""
    names = ["crane, bird", "crane, machine", "maillot", "tub, vat", "sea_lion"]
    name = save(tmp_path / "a", [0, 4], ClassLabel(names=names))
    assert labelled_of(dataset_name=name).classes == [*names[:3], "tub", "sea lion"]
    ids = ["n01440764", "n01443537", "n01484850"]
    folder = files(tmp_path / "images", {f"val/{one}/{copy}.png": grey(copy) for one in ids for copy in range(2)})
    bare = save(tmp_path / "bare", [1, 0, 2], Value("int64"))
    texts = save(tmp_path / "texts", ["0", "x"], Value("string"))
    sharks = "n01484850 great white shark, white shark\nn01443537 goldfish\nn09 x\nn01440764 tench, Tinca\n"
    two = "tench\ngoldfish\n"
    three = "tench\ngoldfish\nshark\n"
    four = "ant\nbee\nowl\nyak\n"
    file = tmp_path / "names.txt"
    cases = [
        (folder, sharks, ["tench", "goldfish", "great white shark"]),
        (folder, three, ["tench", "goldfish", "shark"]),
        (bare, four, ["ant", "bee", "owl", "yak"]),
        (folder, None, "its class n01440764 is a WordNet id, not a name. Set --classes to lines 'id name'"),
        (bare, None, "its labels are numbers, not a name. Set --classes to lines 'id name'"),
        (folder, two, "it has 2 names for 3 classes and none for n01440764. Write lines 'id name'"),
        (texts, two, "it has 2 names for 2 classes and none for x. Write lines 'id name'"),
        (bare, two, "row 2: the label is 2; the 2 classes are 0 to 1. Name all of them"),
    ]
    for source, lines, expected in cases:
        file.write_text(lines or "")
        flags = {"dataset_name": source} | ({"classes": str(file)} if lines else {})
        if isinstance(expected, list):
            assert labelled_of(**flags).classes == expected
            assert ("in their order, n01440764 as tench" in caplog.text) is (lines == three)
            caplog.clear()
            continue
        with pytest.raises(ValueError, match=expected):
            labelled_of(**flags)


def test_classes_are_those_of_the_whole_set_and_splits_may_be_files(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    accents = ["caf\u00e9", "cafe\u0301", "bar", "bar"]
    rows = [{"image": f"{at}.png", "label": label} for at, label in enumerate([*accents, "zoo"])]
    train = write(tmp_path, rows, "train.jsonl")
    other = write(tmp_path, rows[:3], "other.jsonl")
    assert named(task_of(train_file=train, validation_file=other), "train") == ["bar", "zoo"]
    assert "3 rows of train are in another split too, and are left out" in caplog.text
    found = labelled_of(train_file=train, validation_file=other)
    assert (found.classes, len(found.rows)) == (["bar", "caf\u00e9", "zoo"], 3)
    set_of = files(tmp_path / "set", {f"{place}.png": grey(9) for place in ("train/a/0", "train/b/1", "val/a/2")})
    (tmp_path / "names.txt").write_text("a\tant\nb\tbee\nc\tcow\n")
    assert labelled_of(dataset_name=set_of, classes=str(tmp_path / "names.txt")).classes == ["ant", "bee"]
    assert "names.txt; classes without a row here are no choice (1, such as cow)" in caplog.text


def test_several_labels_of_a_row_are_named_or_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kinds = List(ClassLabel(names=["b", "a", "c"]))
    doors = [task_of, labelled_of]
    saved = save(tmp_path / "saved", [[0, 1], [1, 2], [2, 0]], kinds, "train")
    listed = [{"image": f"{at}.png", "labels": pair} for at, pair in enumerate(["ab", "bc", "ca", "b", "c", "c"])]
    few = write(tmp_path, [{**row, "labels": [*row["labels"]]} for row in [listed[0], *listed[3:]]], "few.jsonl")
    for door in doors:
        with pytest.raises(ValueError, match="3 of 3 rows have several labels, such as b, a, and a row has one class"):
            door(dataset_name=saved)
        assert sorted(door(train_file=few).classes) == ["a", "b", "c"]
        assert "1 of 4 rows have several labels, such as a, b; the first of them is the class" in caplog.text
        caplog.clear()


def test_parquet_of_the_hub_is_read_where_it_was_fetched_to(tmp_path: Path, own_cache: Path) -> None:
    path = tmp_path / "data/validation-00000-of-00001.parquet"
    path.parent.mkdir(parents=True)
    features = Features({"img": ImageFeature(), "label": ClassLabel(names=["apple pie", "baklava", "bibimbap"])})
    Dataset.from_dict({"img": pictures(3), "label": [2, 0, 1]}, features).to_parquet(path)
    beside = tmp_path / ".cache/huggingface/download" / f"{path.name}.metadata"  # as the Hub's client leaves it
    beside.parent.mkdir(parents=True)
    beside.write_text("x")
    found = labelled_of(dataset_name=str(tmp_path))
    assert (found.split, found.label_M.tolist()) == ("validation", [2, 0, 1])


def test_names_that_the_tokenizer_does_not_know_are_named(caplog: pytest.LogCaptureFixture) -> None:
    classes = ["cat", "sea lion", "жзж", "a 象", ""]
    own = train_tokenizer(["a photo of a cat, a dog or a sea lion"], 200)
    stock = copy.deepcopy(own)
    stock.unk_token = stock.sep_token  # as CLIP's
    assert [unknown_names(each, classes, 32) for each in (own, stock)] == [["жзж", "a 象", ""], [""]]
    images = LabelledImages(Dataset.from_dict({}), torch.tensor([0]), ["cat", "жзж"], "test")
    ZeroShotEvaluator(images, own, 32, ZeroShotArguments())
    assert "1 of 2 classes have words that the tokenizer does not know, and are not found by them: жзж" in caplog.text
    ZeroShotEvaluator(images, own, 8, ZeroShotArguments(templates=[f"{'a cat ' * 9}{{}}", "жзж жзж жзж {}"]))
    assert "Of the texts of the classes, the model reads 8 tokens. Longer are 2 of 4" in caplog.text
    assert "of the tokens are unknown to the tokenizer" in caplog.text


def test_the_table_of_classes_by_hand(tmp_path: Path) -> None:
    predictions = torch.tensor([[0, 0], [0, 2], [0, 2], [0, 1], [1, 1], [1, 1], [-1, 1]])
    report_classes(predictions, ["cat", "dog", "owl", "yak"], tmp_path)
    assert (tmp_path / "classes.csv").read_text().splitlines() == [
        "name,rows,recall,precision,most_confused_with,times",
        "cat,4,0.25,1.0,owl,2",
        "dog,2,1.0,0.5,,0",
        "owl,0,,0.0,,0",
        "yak,0,,,,0",
    ]


# -- splits -----------------------------------------------------------------------------------------------------------


def test_no_image_is_in_train_and_held_out(tmp_path: Path) -> None:
    task = load(tmp_path, [question(n // 4, str(n % 4)) for n in range(160)])  # four questions a picture
    assert len(task.splits["train"]) + len(task.splits["validation"]) == 160
    assert 24 <= len(task.splits["validation"]) <= 40  # at least 30, of whole pictures
    assert not shown_of(task, "train") & shown_of(task, "validation")


def test_media_that_differ_in_the_middle_alone_are_other_data(tmp_path: Path) -> None:
    """A resumed run refuses them, and features of frozen towers are computed anew."""
    found = set()
    for at in range(2):
        for number in range(8):
            samples = np.zeros(16000, np.int16)
            samples[7000 + number] = 99
            samples[8000] = 9 * at
            (tmp_path / f"{number}.wav").write_bytes(write_wav(samples, 16000))
        rows = load(tmp_path, [{"audio": f"{n}.wav", "label": n % 2} for n in range(8)], "sound").splits["train"]
        found |= {image_digest(rows)}
        found |= {image_digest(rows.remove_columns("content_id"))}
    assert len(found) == 4


def test_rows_are_held_out_of_every_class(tmp_path: Path) -> None:
    sizes = {"common": 200, "rare": 40, "two": 2, "one": 1}
    rows = [{"image": f"{name}{n}.png", "label": name} for name, size in sizes.items() for n in range(size)]
    task = load(tmp_path, rows)
    again = load(tmp_path, rows[::-1])
    assert Counter(named(task, "validation")) == {"common": 24, "rare": 5, "two": 1}
    assert shown_of(task, "validation") == shown_of(again, "validation")
    many = [
        {"image": f"{n}.png", "label": str(n // 2)} for n in range(200)
    ]  # as answers: a hundred classes of two rows
    assert len(load(tmp_path, many).splits["validation"]) == 60


def test_images_alone(tmp_path: Path) -> None:
    task = load(tmp_path, [{"image": f"{n}.png", "captions": ["a", "b"], "label": n % 2} for n in range(8)])
    assert not task.has_texts  # a list of captions is no text of the row
    rows = tokenize_captions(task.splits["train"], train_tokenizer(["text 0 1 2 3"], 50), 8)
    example = Pairs(rows, TrainingTransform(media.Image(16)))[0, 0]
    assert example["pixel_values"].shape == (3, 16, 16)
    assert len(example["input_ids"]) == 1


def test_parts_of_files_are_stored_and_held_out_by_file(tmp_path: Path) -> None:
    """Four files of two tones each, with a question about each tone."""
    rows = []
    for number in range(4):
        (tmp_path / f"{number}.wav").write_bytes(tone(300, 300 + 300 * number))
        for start, end in ((None, 0.5), (0.5, 1.0)):
            answer = "yes" if start and number else "no"
            rows.append({"audio": f"{number}.wav", "start": start, "end": end, "question": "other?", "answer": answer})
    task = load(tmp_path, rows, "sound")
    assert (task.classes, task.has_texts) == (["no", "yes"], True)
    train = [read_wav(row["image"]["bytes"])[0] for row in task.splits["train"]]
    held = [read_wav(row["image"]["bytes"])[0] for row in task.splits["validation"]]
    whole = [read_wav(tone(300, 300 + 300 * number))[0] for number in range(4)]
    parts = [(each[:8000], each[8000:]) for each in whole]
    assert sorted(map(bytes, [*train, *held])) == sorted(bytes(part) for both in parts for part in both)
    assert list(map(bytes, held)) in [list(map(bytes, both)) for both in parts]


def test_zero_shot_measures_the_rows_that_finetuning_holds_out(tmp_path: Path) -> None:
    rows = [{"image": f"{n}.png", "label": f"class {n % 3}"} for n in range(40)]
    path = write(tmp_path, rows)
    held = task_of(train_file=path).splits["validation"]
    measured = labelled_of(train_file=path, split="validation")
    assert measured.split == "validation"
    assert [row["image"] for row in measured.rows] == [row["image"] for row in held]
    assert measured.label_M.tolist() == held["label"]
    assert len(labelled_of(train_file=path).rows) == 40


def test_the_scenes_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "load_scenes", partial(load_scenes, num_train=20, num_eval=8, cache_dir=tmp_path))
    task = task_of(max_train_samples=20, max_eval_samples=10)
    assert task.total_rows["train"] > 20  # a dry run estimates by it
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 20, "validation": 10, "test": 10}
    assert task.splits["train"][0]["captions"][0].startswith("what colour is the thing ")
    assert {"red", "blue"} < set(task.classes)
    with pytest.raises(ValueError, match="the embedded scenes; it holds images, and the model is for sounds"):
        task_of("sound")


# -- bad input --------------------------------------------------------------------------------------------------------
def test_mistakes_name_the_source_the_row_and_the_remedy(tmp_path: Path) -> None:
    text = {"image": "a.png", "text": "a", "label": 1}
    rows = [
        ({"a": 1}, "no label column was recognised. The columns are: a. Set --label_column"),
        (
            {"text": "a", "label": 1},
            "no image column was recognised. The columns are: text, label. Set --image_column.$",
        ),
        ({"image": "a.png", "label": 1}, "all rows show the same, so none can be held out"),
        ({**text, "label": None}, "3 of 3 rows are bad.* line 1: it has no label. The label is missing, or"),
        ({**text, "label": "['a', b]"}, "looks like a list, and is not JSON.* Set --label_column"),
        ({**text, "text": 7}, "3 of 3 rows are bad.* line 1: its text is empty or no text"),
        ({**text, "split": "odd"}, "split is odd, not train, validation or test"),
        ({**text, "label": {"x": 1}}, "a label is {.x.: 1}, not a name or a number"),
    ]
    cases = []
    for number, (row, message) in enumerate(rows):
        cases.append((task_of, {"train_file": write(tmp_path, [row] * 3, f"{number}.jsonl")}, message))
    one_class = write(tmp_path, [{"image": f"{n}.png", "label": 1} for n in range(3)])
    other = write(tmp_path, [{"image": "1.png", "question": "a", "answer": "1"}], "other.jsonl")
    sounds = files(tmp_path / "media", {f"{name}/0.wav": tone(200) for name in "ab"})
    prepared = files(tmp_path / "prepared", {"report.json": b'{"format": "tandem-pairs"}', "dataset_dict.json": b"{}"})
    hidden = save(tmp_path / "hidden", [-1, 0, -1], ClassLabel(names=["a", "b"]))
    cases += [
        (task_of, {"train_file": one_class}, "its labels are '1' alone, and a task needs two or more"),
        (task_of, {"train_file": one_class, "test_file": other}, "only some of train, test hold texts"),
        (task_of, {"medium": "clip", "dataset_name": sounds}, "media; it holds sounds, and the model is for clips"),
        (labelled_of, {"dataset_name": prepared}, "it is prepared, and has captions and no labels"),
        (labelled_of, {"dataset_name": hidden}, "2 of 3 rows are bad, .* row 0: it has no label. .* are public"),
        (labelled_of, {"dataset_name": save(tmp_path / "one", ["a", None], Value("string"))}, "it has 1 of at least 2"),
        (labelled_of, {"dataset_name": save(tmp_path / "blank", [0, 1], ClassLabel(names=["a", " "]))}, "class 1 has no name"),
        (labelled_of, {"classes": "no.txt"}, "--classes is no.txt; there is no such file"),
    ]  # fmt: skip
    for door, flags, message in cases:
        with pytest.raises(ValueError, match=message) as caught:
            door(**flags)
        assert "\n" not in str(caught.value)


def test_rows_that_cannot_be_used_are_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A file that is no sound; a split that is not read may lack all."""
    files(tmp_path, {f"{n}.png": grey(n) for n in range(5)})
    rows = [f"{n}.png,{n},{'train' if n > 4 else 'test'}\n" for n in range(20)]
    (tmp_path / "rows.csv").write_text("image,label,split\n" + "".join(rows))
    (tmp_path / "names.txt").write_text("".join(f"name {n}\n" for n in range(5)))
    flags = {"train_file": str(tmp_path / "rows.csv"), "classes": str(tmp_path / "names.txt")}
    assert len(labelled_of(split="test", **flags).rows) == 5
    names = {f"{name}/{copy}.wav": tone(200) for name in "ab" for copy in range(2)} | {"a/0.wav": b"nothing"}
    found = labelled_of("sound", dataset_name=files(tmp_path / "media", names))
    assert found.label_M.tolist() == [0, 1, 1]
    assert "medium_unknown_format, 1 times in 4 rows (file a/0.wav)" in caplog.text
