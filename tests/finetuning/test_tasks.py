"""Labelled rows from every kind of source, as splits that a run takes; bad input is named."""

import json
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature

from mm_utils.data import media
from mm_utils.data.batches.dataset import Pairs, TrainingTransform
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets.questions import TASKS
from mm_utils.finetuning import labels
from mm_utils.finetuning.labels import LabelledTask, TaskArguments, load_task
from mm_utils.model.processor import train_tokenizer
from tests.kit.fault_images import grey


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    for row in rows:
        if isinstance(row.get("image"), str):
            (folder / row["image"]).write_bytes(grey(40))
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def load(file: str, **flags: Any) -> LabelledTask:
    return load_task(TaskArguments(train_file=file, **flags))


def question(number: int, answer: Any, **other: Any) -> dict[str, Any]:
    return {"image": f"{number}.png", "question": f"what is {number}?", "answer": answer, **other}


def named(task: LabelledTask, split: str) -> list[str]:
    return [task.classes[label] if label >= 0 else "?" for label in task.splits[split]["label"]]


def test_pairs_of_a_file_with_a_split_column(tmp_path: Path) -> None:
    rows = [question(n, "yes" if n % 2 else "no", split="val" if n == 5 else "train") for n in range(6)]
    task = load(write(tmp_path, rows))
    assert (task.classes, task.has_images, task.has_texts) == (["no", "yes"], True, True)
    assert named(task, "train") == ["no", "yes", "no", "yes", "no"]
    assert named(task, "validation") == ["yes"]
    assert task.splits["train"]["captions"][1] == ["what is 1?"]
    assert task.splits["train"][1]["image"]["path"] == str(tmp_path / "1.png")


def test_only_frequent_answers_are_learnt_and_others_count_as_wrong(tmp_path: Path) -> None:
    answers = ["red", "red", "blue", "blue", "green", "red"]
    train = write(tmp_path, [question(n, answer) for n, answer in enumerate(answers)])
    test = write(tmp_path, [question(9, "green"), question(8, "blue"), question(7, "pink")], "test.jsonl")
    task = load(train, validation_file=test, num_answers=2)
    assert task.classes == ["red", "blue"]
    assert named(task, "train") == ["red", "red", "blue", "blue", "red"]
    assert named(task, "validation") == ["?", "blue", "?"]


def test_several_answers_are_the_most_frequent_one_and_earn_their_share(tmp_path: Path) -> None:
    several = ["red", "blue", "blue", "blue", "red", "tan"]
    as_objects = [{"answer": name} for name in ["red", "red", "red", "red", "blue"]]
    file = write(tmp_path, [question(0, several), question(1, as_objects), question(2, ["blue"])])
    task = load(file, validation_file=file)
    assert named(task, "train") == ["blue", "red", "blue"]
    shares = [{task.classes[a["label"]]: a["share"] for a in row} for row in task.splits["validation"]["answers"]]
    assert shares == [
        {"red": pytest.approx(2 / 3), "blue": 1.0},
        {"red": 1.0, "blue": pytest.approx(1 / 3)},
        {"blue": 1},
    ]


def test_no_image_is_in_train_and_held_out(tmp_path: Path) -> None:
    rows = [question(n // 4, str(n % 4)) for n in range(160)]  # four questions a picture
    task = load(write(tmp_path, rows))
    paths = {split: {row["image"]["path"] for row in task.splits[split]} for split in ("train", "validation")}
    assert len(task.splits["train"]) + len(task.splits["validation"]) == 160
    assert 24 <= len(task.splits["validation"]) <= 40  # at least 30, of whole pictures
    assert not paths["train"] & paths["validation"]
    bytes_alike = [
        {"image": {"bytes": grey(n // 4), "path": None}, "text": f"{n}", "label": n % 2} for n in range(160)
    ]
    features = Features({"image": ImageFeature(), "text": Value("string"), "label": Value("int64")})
    DatasetDict({"train": Dataset.from_list(bytes_alike, features)}).save_to_disk(tmp_path / "saved")
    embedded = load_task(TaskArguments(dataset_name=str(tmp_path / "saved")))
    shown = {split: {row["image"]["bytes"] for row in embedded.splits[split]} for split in ("train", "validation")}
    assert not shown["train"] & shown["validation"]
    assert embedded.classes == ["0", "1"]


def test_rows_are_held_out_of_every_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"common": 200, "rare": 40, "two": 2, "one": 1}
    rows = [{"text": f"{name} {n}", "label": name} for name, size in sizes.items() for n in range(size)]
    with caplog.at_level("INFO"):
        task = load(write(tmp_path, rows))
    assert Counter(named(task, "validation")) == {"common": 24, "rare": 4, "two": 1}
    assert "no row of 1 of the classes is held out, such as one" in caplog.text
    again = load(write(tmp_path, rows[::-1]))
    assert sorted(again.splits["validation"]["captions"]) == sorted(task.splits["validation"]["captions"])
    many = [{"text": str(n), "label": str(n // 2)} for n in range(200)]  # as answers: a hundred classes of two rows
    assert len(load(write(tmp_path, many)).splits["validation"]) == 60


def test_texts_alone_and_images_alone(tmp_path: Path) -> None:
    texts = load(write(tmp_path, [{"text": f"text {n}", "label": n % 2} for n in range(4)]))
    assert (texts.has_images, texts.has_texts) == (False, True)
    for shade in range(6):
        folder = tmp_path / "images" / ("cat" if shade < 3 else "dog")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{shade}.png").write_bytes(grey(10 * shade))
    images = load_task(TaskArguments(dataset_name=str(tmp_path / "images")))
    assert (images.has_images, images.has_texts, images.classes) == (True, False, ["cat", "dog"])
    for task in (texts, images):  # either way, the loader has something to show
        rows = tokenize_captions(task.splits["train"], train_tokenizer(["text 0 1 2 3"], 50), 8)
        example = Pairs(rows, TrainingTransform(media.Image(16)))[0, 0]
        assert example["pixel_values"].shape == (3, 16, 16)
        assert len(example["input_ids"]) == 1


def test_names_of_classes_are_kept_and_numbers_are_sorted(tmp_path: Path) -> None:
    features = Features({"image": ImageFeature(), "label": ClassLabel(names=["owl", "ant", "yak"])})
    columns = {"image": [{"bytes": grey(n), "path": None} for n in range(4)], "label": [1, 0, -1, 1]}
    splits = {name: Dataset.from_dict(columns, features) for name in ("train", "validation")}
    DatasetDict(splits).save_to_disk(tmp_path / "saved")
    task = load_task(TaskArguments(dataset_name=str(tmp_path / "saved")))
    assert task.classes == ["owl", "ant", "yak"]
    assert named(task, "train") == ["ant", "owl", "ant"]  # -1 is not a label
    numbers = load(write(tmp_path, [{"text": f"{n}", "label": n % 10 + 2} for n in range(60)]))
    assert numbers.classes == [str(n) for n in range(2, 12)]


def test_the_scenes_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = partial(load_scenes, num_train=20, num_eval=8, cache_dir=tmp_path)
    monkeypatch.setattr(labels, "load_scenes", small)
    task = load_task(TaskArguments(max_train_samples=20, max_eval_samples=10))
    assert task.title == "--task is scenes:describes"
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 20, "validation": 10, "test": 10}
    assert Counter(task.splits["train"]["label"]) == {0: 10, 1: 10}
    assert task.splits["train"][0]["image"]["bytes"].startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"task": "scenes:count", "train_file": "a"}, r"--task and --train_file are given together"),
        ({"task": "vqa"}, r"--task is vqa; choose one of scenes:describes"),
        ({"test_file": "a"}, r"--test_file is given without --train_file"),
        ({"num_answers": 1}, r"--num_answers is 1; give at least 2"),
    ],
)
def test_contradictions_are_refused(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskArguments(**flags)


def test_errors_are_one_line_and_name_the_flag(tmp_path: Path) -> None:
    for rows, flags, message in (
        ([{"a": 1}], {}, r"rows.jsonl; no label column was recognised. The columns are: a. Set --label_column"),
        ([{"a": 1, "label": 2}], {}, r"no image column and no text column was recognised"),
        ([{"text": "a", "label": 1}], {"image_column": "b"}, r"--image_column is b; there is no such column"),
        ([{"text": "a", "label": 1}] * 3, {}, r"all rows show the same, so none can be held out"),
        ([{"text": f"{n}", "label": 1} for n in range(3)], {}, r"its labels are '1' alone, and a task has 2 classes"),
        ([{"text": "a", "label": None}] * 3, {}, r"0 of 3 rows are usable \(line 1, column label: it has no label\)"),
        (
            [{"text": ["a", "b"], "label": 1}] * 3,
            {},
            r"0 of 3 rows are usable \(line 1, column text: its text is empty or no text\)",
        ),
        ([{"text": "a", "label": 1, "split": "dev2"}] * 2, {}, r"split is dev2, not train, validation or test"),
        (
            [{"text": f"{n}", "label": {"x": 1}} for n in range(2)],
            {},
            r"a label is {.x.: 1}, not a name or a number",
        ),
    ):
        with pytest.raises(ValueError, match=message) as caught:
            load(write(tmp_path, rows), **flags)
        assert "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"--train_file is .*none.jsonl; there is no such file"):
        load(str(tmp_path / "none.jsonl"))


def test_rows_without_their_image_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, [question(n, str(n % 2)) for n in range(5)])
    (tmp_path / "3.png").unlink()
    task = load(file, validation_file=file)
    assert len(task.splits["train"]) == 4
    assert "1 of 5 rows are left out" in caplog.text
    assert "3.png" in caplog.text
    with pytest.raises(ValueError, match=r"only one of train and test has a column of images"):
        load(file, test_file=write(tmp_path, [{"question": "a", "answer": "1"}], "other.jsonl"))


def test_a_line_that_cannot_be_read_is_left_out_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = write(tmp_path, [{"text": f"text {n}", "label": n % 2} for n in range(6)])
    Path(file).write_text("{broken\n" + Path(file).read_text())
    assert sum(map(len, load(file).splits.values())) == 6
    assert f"1 of 7 rows are left out ({file}, line 1 is not valid JSON" in caplog.text


# -- tasks on the embedded scenes ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def asked_scenes(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return load_scenes(num_train=120, num_eval=2, cache_dir=tmp_path_factory.mktemp("scenes"))["train"]


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith("scenes")])
def test_the_questions_follow_from_the_scene(task: str, asked_scenes: Dataset) -> None:
    assert list(TASKS[task](asked_scenes)) == list(TASKS[task](asked_scenes))
    alone = asked_scenes.select([7])
    moved = [(text, label) for place, text, label in TASKS[task](asked_scenes) if place == 7]
    assert [(text, label) for _, text, label in TASKS[task](alone)] == moved


def test_an_unknown_task_is_named() -> None:
    with pytest.raises(ValueError, match=r"--task is scenes:size; choose one of scenes:describes, scenes:count"):
        TaskArguments(task="scenes:size")
