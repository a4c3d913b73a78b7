"""Labelled rows from every kind of source, for tasks and for zero-shot evaluation; bad input is named."""

import json
import sqlite3
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature

from mm_utils.data import media
from mm_utils.data.batches.dataset import EvaluationTransform, Pairs, TrainingTransform
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media import COLUMNS, kind_of
from mm_utils.data.media.riff import read_wav
from mm_utils.data.scenes import load_scenes
from mm_utils.data.sets import SETS
from mm_utils.data.sets.events import load_clips
from mm_utils.data.sets.questions import TASKS
from mm_utils.finetuning import labels
from mm_utils.finetuning.labels import LabelledTask, TaskArguments
from mm_utils.finetuning.zero_shot import LabelledImages
from mm_utils.model.processor import train_tokenizer
from tests.kit.fault_images import grey
from tests.kit.finetuning import labelled_of, task_of
from tests.kit.media_files import COLOURS, clip, media_rows, tone
from tests.kit.reading import write_tar


def write(folder: Path, rows: list[dict[str, Any]], name: str = "rows.jsonl") -> str:
    for row in rows:
        if isinstance(row.get("image"), str):
            (folder / row["image"]).write_bytes(grey(40))
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / name)


def load(folder: Path, rows: list[dict[str, Any]], medium: str = "image", **flags: Any) -> LabelledTask:
    return task_of(medium, train_file=write(folder, rows), **flags)


def question(number: int, answer: Any, **other: Any) -> dict[str, Any]:
    return {"image": f"{number}.png", "question": f"what is {number}?", "answer": answer, **other}


def named(task: LabelledTask, split: str) -> list[str]:
    return [task.classes[label] if label >= 0 else "?" for label in task.splits[split]["label"]]


def pictures(count: int) -> list[dict[str, Any]]:
    return [{"bytes": grey(10 * number), "path": None} for number in range(count)]


def save(folder: Path, given: list[Any], feature: Any) -> str:
    """A folder of `save_to_disk` with a test split."""
    rows = {"img": pictures(len(given)), "label": given}
    table = Dataset.from_dict(rows, Features({"img": ImageFeature(), "label": feature}))
    DatasetDict({"test": table}).save_to_disk(folder)
    return str(folder)


def files(root: Path, contents: dict[str, bytes]) -> str:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)
    return str(root)


def class_folders(root: Path, names: list[str], split: str = "") -> str:
    """Two images a class; the shade is the number of the class."""
    return files(
        root, {str(Path(split, name, f"{copy}.png")): grey(n) for n, name in enumerate(names) for copy in range(2)}
    )


def shades(found: LabelledImages) -> list[int]:
    """Return the shade of each row as the loader shows it."""
    pairs = Pairs(found.rows, EvaluationTransform(media.Image(4)))
    return [int(pairs[row, 0]["pixel_values"][0, 0, 0]) for row in range(len(pairs))]


# -- every kind of source ---------------------------------------------------------------------------------------------

ANIMALS = ["owl", "ant", "yak", "owl"]
ROWS = [{"image": f"{at}.png", "label": name} for at, name in enumerate(ANIMALS)]
NAMED = Features({"image": ImageFeature(), "label": ClassLabel(names=["owl", "ant", "yak"])})
EMBEDDED = {"image": pictures(4), "label": [0, 1, 2, 0]}


def database(folder: Path) -> None:
    with sqlite3.connect(folder / "rows.db") as rows:
        rows.execute("CREATE TABLE birds (image BLOB, label TEXT)")
        rows.executemany("INSERT INTO birds VALUES (?, ?)", [(grey(10 * at), name) for at, name in enumerate(ANIMALS)])


def shards(folder: Path, suffix: str) -> None:
    cells = [name if suffix == "cls" else json.dumps({"label": name}) for name in ANIMALS]
    members = [((f"{at}.png", grey(10 * at)), (f"{at}.{suffix}", cell.encode())) for at, cell in enumerate(cells)]
    write_tar(folder / "0.tar", [*(member for both in members for member in both), ("9.png", grey(90))])  # of no label


SOURCES: dict[str, tuple[str, Callable[[Path], object]]] = {  # the name of the source, and what writes it beside the pictures
    "lines": ("rows.jsonl", lambda folder: write(folder, ROWS)),
    "a table": ("rows.csv", lambda folder: (folder / "rows.csv").write_text(
        "image path;category\n" + "".join(f"{at}.png;{name}\n" for at, name in enumerate(ANIMALS)))),
    "Parquet": ("rows.parquet", lambda folder: Dataset.from_dict(EMBEDDED, NAMED).to_parquet(folder / "rows.parquet")),
    "a database": ("rows.db", database),
    "metadata": ("", lambda folder: write(
        folder, [{"file_name": row["image"], "label": row["label"]} for row in ROWS], "metadata.jsonl")),
    "a saved set": ("set", lambda folder: Dataset.from_dict(EMBEDDED, NAMED).save_to_disk(folder / "set")),
    "classes": ("set", lambda folder: files(folder, {f"set/{name}/{at}.png": grey(10 * at) for at, name in enumerate(ANIMALS)})),
    **{f"shards of .{end}": ("", partial(shards, suffix=end)) for end in ("cls", "json")},
}  # fmt: skip


@pytest.mark.parametrize("source", SOURCES)
def test_every_kind_of_source_holds_the_same_rows(source: str, tmp_path: Path) -> None:
    name, make = SOURCES[source]
    make(tmp_path)
    files(tmp_path, {f"{at}.png": grey(10 * at) for at in range(4)})
    flag = {"train_file" if "." in name else "dataset_name": str(tmp_path / name)}
    found = labelled_of(**flag)
    seen = zip(shades(found), (found.classes[label] for label in found.label_M.tolist()), strict=True)
    assert sorted(seen) == [(10 * at, name) for at, name in enumerate(ANIMALS)]
    assert found.classes == (["owl", "ant", "yak"] if source in ("Parquet", "a saved set") else ["ant", "owl", "yak"])
    task = task_of(**flag)
    assert sorted([*named(task, "train"), *named(task, "validation")]) == sorted(ANIMALS)


@pytest.mark.parametrize("kind", ["classes", "parquet"])
def test_two_folders_of_one_split_are_both_read(kind: str, tmp_path: Path) -> None:
    for at, place in enumerate(("train", "Train", "val")):
        if kind == "classes":
            class_folders(tmp_path, ["cat", "dog"], place)
        else:
            (tmp_path / place).mkdir()
            rows = {"image": [each["bytes"] for each in pictures(4)], "label": ["cat", "dog"] * 2}
            pq.write_table(pa.table(rows), tmp_path / place / f"{at}.parquet")
    task = task_of(dataset_name=str(tmp_path))
    assert {split: Counter(named(task, split)) for split in task.splits} == {
        "train": {"cat": 4, "dog": 4}, "validation": {"cat": 2, "dog": 2}
    }  # fmt: skip


def test_splits_and_columns_are_chosen(tmp_path: Path) -> None:
    def rows(count: int) -> Dataset:
        names = ClassLabel(names=["a", "b"])
        features = Features({"picture": ImageFeature(), "depth": ImageFeature(), "coarse": names, "fine_label": names})
        shown = pictures(count)
        return Dataset.from_dict(
            {"picture": shown, "depth": shown, "coarse": [0] * count, "fine_label": [1] * count}, features
        )

    DatasetDict({"train": rows(1), "test": rows(2), "val": rows(3)}).save_to_disk(tmp_path / "saved")
    name = str(tmp_path / "saved")
    assert labelled_of(dataset_name=name).split == "validation"
    assert labelled_of(dataset_name=name, split="train", label_column="coarse").label_M.tolist() == [0]
    assert labelled_of(dataset_name=name, split="test").label_M.tolist() == [1, 1]
    for flags, message in (
        ({"split": "dev2"}, "--split is dev2; a split is train, validation or test"),
        ({"label_column": "lable"}, "--label_column is lable; there is no such column .* The columns are: picture, "),
        ({"image_column": "x"}, "--image_column is x; there is no such column"),
        (
            {"image_column": "coarse"},
            "image column coarse holds int64, not paths or images. Set image_column to another",
        ),
        ({"label_column": "depth"}, "a label is {.bytes.: .*, not a name or a number"),
    ):
        with pytest.raises(ValueError, match=message):
            labelled_of(dataset_name=name, **flags)


# -- classes ----------------------------------------------------------------------------------------------------------


def test_several_answers_are_the_most_frequent_one_and_earn_their_share(tmp_path: Path) -> None:
    """A list may be written as text, as pandas' to_csv writes it."""
    several = ["red", "blue", "blue", "blue", "red", "tan"]
    objects = [{"answer": name} for name in ["red", "red", "red", "red", "blue"]]
    cells = [several, objects, ["blue"], json.dumps(several), repr(several), repr(objects)]
    file = write(tmp_path, [question(n, cell) for n, cell in enumerate(cells)])
    task = task_of(train_file=file, validation_file=file)
    assert named(task, "train") == ["blue", "red", "blue", "blue", "blue", "red"]
    shares = [{task.classes[a["label"]]: a["share"] for a in row} for row in task.splits["validation"]["answers"]]
    of_several = {"red": pytest.approx(2 / 3), "blue": 1.0}
    of_objects = {"red": 1.0, "blue": pytest.approx(1 / 3)}
    assert shares == [of_several, of_objects, {"blue": 1.0}, of_several, of_several, of_objects]


def test_only_frequent_answers_are_learnt_and_others_count_as_wrong(tmp_path: Path) -> None:
    answers = ["red", "red", "blue", "blue", "green", "red"]
    test = write(tmp_path, [question(9, "green"), question(8, "blue"), question(7, "pink")], "test.jsonl")
    rows = [question(n, answer) for n, answer in enumerate(answers)]
    task = load(tmp_path, rows, validation_file=test, num_answers=2)
    assert task.classes == ["red", "blue"]
    assert named(task, "train") == ["red", "red", "blue", "blue", "red"]
    assert named(task, "validation") == ["?", "blue", "?"]


def test_classes_that_are_nearly_equal_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    load(tmp_path, [{"text": f"{n}", "label": ["Cat", "cat ", "CAT", "dog"][n % 4]} for n in range(20)])
    assert "the classes 'CAT', 'Cat', 'cat' are nearly equal" in caplog.text
    labelled_of(dataset_name=save(tmp_path / "b", ["a_b", "a b", "C"], Value("string")))
    assert "the classes 'a b', 'a b' are nearly equal" in caplog.text


def test_names_of_classes_are_kept_and_numbers_are_sorted(tmp_path: Path) -> None:
    columns = {"image": pictures(4), "label": [1, 0, -1, 1]}
    rows = Dataset.from_dict(columns, NAMED)
    DatasetDict({"train": rows, "validation": rows}).save_to_disk(tmp_path / "saved")
    task = task_of(dataset_name=str(tmp_path / "saved"))
    assert task.classes == ["owl", "ant", "yak"]
    assert named(task, "train") == ["ant", "owl", "ant"]  # -1 is not a label
    numbers = load(tmp_path, [{"text": f"{n}", "label": n % 10 + 2} for n in range(60)])
    assert numbers.classes == [str(n) for n in range(2, 12)]


def test_names_for_prompts(tmp_path: Path) -> None:
    """The first synonym, unless two classes share it; a file names WordNet ids and numbers."""
    names = ["crane, bird", "crane, machine", "maillot", "tub, vat", "sea_lion"]
    name = save(tmp_path / "a", [0, 4], ClassLabel(names=names))
    assert labelled_of(dataset_name=name).classes == [*names[:3], "tub", "sea lion"]
    folder = class_folders(tmp_path / "images", ["n01440764", "n01443537", "n01484850"], "val")
    bare = save(tmp_path / "bare", [1, 0, 2], Value("int64"))
    for source, message in ((folder, "its class n01440764 is a WordNet id"), (bare, "its labels are numbers")):
        with pytest.raises(ValueError, match=f"{message}, not a name. Set --classes to lines 'id name'"):
            labelled_of(dataset_name=source)
    file = tmp_path / "names.txt"
    sharks = "n01484850 great white shark, white shark\nn01443537 goldfish\nn09 x\nn01440764 tench, Tinca\n"
    for source, lines, classes in (
        (folder, sharks, ["tench", "goldfish", "great white shark"]),
        (folder, "tench\ngoldfish\nshark\n", ["tench", "goldfish", "shark"]),
        (bare, "ant\nbee\nowl\nyak\n", ["ant", "bee", "owl", "yak"]),
    ):
        file.write_text(lines)
        assert labelled_of(dataset_name=source, classes=str(file)).classes == classes
    texts = save(tmp_path / "texts", ["0", "x"], Value("string"))
    file.write_text("tench\ngoldfish\n")
    for source, message in (
        (folder, "it has 2 names for 3 classes and none for n01440764. Write lines 'id name'"),
        (texts, "it has 2 names for 2 classes and none for x. Write lines 'id name'"),
        (bare, "row 2: the label is 2; the 2 classes count from 0. Name all of them"),
        (save(tmp_path / "minus", ["0", "-1"], Value("string")), "row 1: the label is -1; the 2 classes count from 0"),
    ):
        with pytest.raises(ValueError, match=message):
            labelled_of(dataset_name=source, classes=str(file))


@pytest.mark.parametrize("kind", ["image", "sound", "clip"])
def test_equal_captions_of_a_prepared_set_are_a_class(kind: str, tmp_path: Path) -> None:
    contents = {
        "sound": [tone(100 * n, each=0.1) for n in range(1, 6)],
        "clip": [clip([each]) for each in (*COLOURS, "red")],
    }
    made = contents.get(kind, [grey(n) for n in range(5)])

    def prepared(name: str, captions: list[list[str]]) -> str:
        rows = media_rows(kind, made[: len(captions)], captions=captions, content_id=["x"] * len(captions))
        rows = rows.rename_columns({"image": COLUMNS[kind]}) if kind != "image" else rows
        DatasetDict(train=rows, validation=rows.select([1])).save_to_disk(str(tmp_path / name))
        (tmp_path / name / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
        return str(tmp_path / name)

    dog, rain = ["a dog barks", "barking", "barking"], ["rain falls"]
    name = prepared("set", [rain, dog, rain, dog[::-1], dog])
    found = labelled_of(kind, dataset_name=name, split="train")
    assert (found.classes, found.texts) == (["a dog barks", "rain falls"], [["a dog barks"], ["rain falls"]])
    assert (found.label_M.tolist(), kind_of(found.rows.features)) == ([1, 0, 1, 0, 0], kind)
    task = task_of(kind, dataset_name=name)
    assert (task.classes, task.has_texts, named(task, "validation")) == (found.classes, False, ["a dog barks"])
    assert [image["bytes"] for image in task.splits["train"]["image"]] == made
    with pytest.raises(ValueError, match=r"captions tell the classes. Drop --classes"):
        labelled_of(kind, dataset_name=name, classes=f"{name}/report.json")
    for number, captions in enumerate(([rain, dog], [rain, rain])):
        with pytest.raises(ValueError, match="different captions, which do not form classes"):
            labelled_of(kind, dataset_name=prepared(str(number), captions), split="train")


# -- splits -----------------------------------------------------------------------------------------------------------


def test_a_column_divides_the_rows_of_a_file(tmp_path: Path) -> None:
    rows = [question(n, "yes" if n % 2 else "no", split="val" if n == 5 else "train") for n in range(6)]
    task = load(tmp_path, rows)
    assert (task.classes, task.has_images, task.has_texts) == (["no", "yes"], True, True)
    assert named(task, "train") == ["no", "yes", "no", "yes", "no"]
    assert named(task, "validation") == ["yes"]
    assert task.splits["train"]["captions"][1] == ["what is 1?"]
    assert task.splits["train"][1]["image"]["path"] == str(tmp_path / "1.png")


def test_no_image_is_in_train_and_held_out(tmp_path: Path) -> None:
    task = load(tmp_path, [question(n // 4, str(n % 4)) for n in range(160)])  # four questions a picture
    paths = {split: {row["image"]["path"] for row in task.splits[split]} for split in ("train", "validation")}
    assert len(task.splits["train"]) + len(task.splits["validation"]) == 160
    assert 24 <= len(task.splits["validation"]) <= 40  # at least 30, of whole pictures
    assert not paths["train"] & paths["validation"]
    alike = [{"image": {"bytes": grey(n // 4), "path": None}, "text": f"{n}", "label": n % 2} for n in range(160)]
    features = Features({"image": ImageFeature(), "text": Value("string"), "label": Value("int64")})
    DatasetDict({"train": Dataset.from_list(alike, features)}).save_to_disk(tmp_path / "saved")
    embedded = task_of(dataset_name=str(tmp_path / "saved"))
    shown = {split: {row["image"]["bytes"] for row in embedded.splits[split]} for split in ("train", "validation")}
    assert not shown["train"] & shown["validation"]


def test_rows_are_held_out_of_every_class(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sizes = {"common": 200, "rare": 40, "two": 2, "one": 1}
    rows = [{"text": f"{name} {n}", "label": name} for name, size in sizes.items() for n in range(size)]
    with caplog.at_level("INFO"):
        task = load(tmp_path, rows)
    assert Counter(named(task, "validation")) == {"common": 24, "rare": 4, "two": 1}
    assert "no row of 1 of the classes is held out, such as one" in caplog.text
    again = load(tmp_path, rows[::-1])
    assert sorted(again.splits["validation"]["captions"]) == sorted(task.splits["validation"]["captions"])
    many = [{"text": str(n), "label": str(n // 2)} for n in range(200)]  # as answers: a hundred classes of two rows
    assert len(load(tmp_path, many).splits["validation"]) == 60


def test_texts_alone_and_images_alone(tmp_path: Path) -> None:
    texts = load(tmp_path, [{"text": f"text {n}", "label": n % 2} for n in range(4)])
    images = task_of(dataset_name=class_folders(tmp_path / "images", ["cat", "dog"]))
    assert (texts.has_images, texts.has_texts) == (False, True)
    assert (images.has_images, images.has_texts, images.classes) == (True, False, ["cat", "dog"])
    lists = load(tmp_path, [{"image": f"{n}.png", "captions": ["a", "b"], "label": n % 2} for n in range(8)])
    assert (lists.has_images, lists.has_texts) == (True, False)  # a list of captions is no text of the row
    for task in (texts, images):  # either way, the loader has something to show
        rows = tokenize_captions(task.splits["train"], train_tokenizer(["text 0 1 2 3"], 50), 8)
        example = Pairs(rows, TrainingTransform(media.Image(16)))[0, 0]
        assert example["pixel_values"].shape == (3, 16, 16)
        assert len(example["input_ids"]) == 1


# -- clips and sounds -------------------------------------------------------------------------------------------------


@pytest.fixture
def tones(tmp_path: Path) -> list[dict[str, Any]]:
    """Four files of two tones each, with a question about each tone."""
    rows = []
    for number in range(4):
        (tmp_path / f"{number}.wav").write_bytes(tone(300, 300 + 300 * number))
        for start, end in ((None, 0.5), (0.5, 1.0)):
            answer = "yes" if start and number else "no"
            rows.append({"audio": f"{number}.wav", "start": start, "end": end, "question": "other?", "answer": answer})
    return rows


def samples(task: LabelledTask, split: str = "train") -> list[np.ndarray]:
    return [read_wav(image["bytes"])[0] for image in task.splits[split]["image"]]


def test_parts_of_files_are_stored_and_held_out_by_file(tones: list[dict[str, Any]], tmp_path: Path) -> None:
    task = load(tmp_path, tones, "sound")
    assert (task.classes, task.has_images, task.has_texts) == (["no", "yes"], True, True)
    assert [len(task.splits[split]) for split in ("train", "validation")] == [6, 2]
    whole = {number: read_wav(tone(300, 300 + 300 * number))[0] for number in range(4)}
    found = [*samples(task), *samples(task, "validation")]
    expected = [part for each in whole.values() for part in (each[:8000], each[8000:])]
    assert sorted(map(bytes, found)) == sorted(map(bytes, expected))
    [held] = [number for number, each in whole.items() if bytes(each[8000:]) == bytes(samples(task, "validation")[1])]
    assert bytes(samples(task, "validation")[0]) == bytes(whole[held][:8000])


def test_a_new_answer_is_read_although_no_file_has_changed(tmp_path: Path) -> None:
    for answer in ("yes", "perhaps"):
        task = load(tmp_path, [question(n, answer if n % 2 else "no") for n in range(6)])
        assert set(task.classes) == {"no", answer}


# -- bad input --------------------------------------------------------------------------------------------------------


def test_mistakes_name_the_source_the_row_and_the_remedy(tmp_path: Path, tones: list[dict[str, Any]]) -> None:
    (tmp_path / "a.png").write_bytes(grey(1))
    (tmp_path / "text.wav").write_text("no sound")
    sound, text = {"audio": "0.wav", "answer": "no"}, {"text": "a", "label": 1}
    nothing = "has no label. The label is missing, or neither a name nor a number. Set --label_column"
    others = "holds sounds, and the model is for"
    cases: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
        ("image", {"a": 1}, {}, "no label column was recognised. The columns are: a. Set --label_column"),
        ("image", {"a": 1, "label": 2}, {}, "no image column and no text column was recognised. The columns are: a, lab"),
        ("image", text, {"image_column": "b"}, "--image_column is b; there is no such column"),
        ("image", text, {}, "all rows show the same, so none can be held out"),
        ("image", {**text, "label": None}, {}, f"3 of 3 rows are bad.* line 1: it {nothing}"),
        ("image", {**text, "text": ["a", "b"]}, {}, "3 of 3 rows are bad.* line 1: its text is empty or no text"),
        ("image", {**text, "split": "dev2"}, {}, "split is dev2, not train, validation or test"),
        ("image", {**text, "label": {"x": 1}}, {}, "a label is {.x.: 1}, not a name or a number"),
        ("sound", {"image": "a.png", "label": 1}, {}, "column image holds images, and the model is for sounds. Give sounds, or"),
        ("sound", {"image": "a.png", **text}, {}, "column image holds images, and the model is for sounds"),
        ("sound", {"path": "a.png", "label": 1}, {}, "line 1: it begins with .*PNG.* The file is not a known sound"),
        ("image", {"audio": "0.wav", "label": 1}, {}, f"column audio {others} images"),
        ("image", {**sound, "question": "q"}, {}, f"column audio {others} images"),
        ("clip", sound, {}, f"column audio {others} clips"),
        ("sound", {**sound, "audio": "none.wav"}, {}, "line 1: .*none.wav"),
        ("sound", {**sound, "audio": ""}, {}, "line 1: the cell of the sound is empty"),
        ("sound", {**sound, "start": "soon"}, {}, "line 1: 'soon' is not a time in seconds"),
        ("sound", {"label": 1}, {}, "no sound column and no text column was recognised"),
    ]  # fmt: skip
    for number, (medium, row, flags, message) in enumerate(cases):
        (tmp_path / f"{number}.jsonl").write_text(3 * (json.dumps(row) + "\n"))
        with pytest.raises(ValueError, match=message) as caught:
            task_of(medium, train_file=str(tmp_path / f"{number}.jsonl"), **flags)
        assert "\n" not in str(caught.value)
    one_class = write(tmp_path, [{"text": f"{n}", "label": 1} for n in range(3)])
    bare = tmp_path / "bare"
    Dataset.from_dict({"image": pictures(2)}, Features({"image": ImageFeature()})).save_to_disk(bare)
    sounds = files(tmp_path / "media", {f"{name}/{copy}.wav": tone(200) for name in "ab" for copy in range(2)})
    of_scenes = {"task": "scenes:colour", "train_file": one_class}
    not_a_class: list[tuple[list[Any], Any, str]] = [
        ([-1, 0, -1], ClassLabel(names=["a", "b"]), "2 of 3 rows are bad, .* row 0: it has no label. .* are public"),
        (["a", None], Value("string"), "it has 1 of at least 2 classes"),
        ([0.5, 1.0], Value("float32"), "its labels are numbers, not a name"),
        ([0, 1], ClassLabel(names=["a", " "]), "class 1 has no name. Give them in --classes"),
    ]
    doors: list[tuple[Callable[..., Any], str, dict[str, Any], str]] = [
        (task_of, "image", {"train_file": one_class}, "its labels are '1' alone, and a task has 2 classes"),
        (task_of, "image", {"train_file": f"{bare}.csv"}, "--train_file is .*bare.csv; there is no such file"),
        (task_of, "image", of_scenes, "--task is scenes:colour; --train_file is .*, too, and labels have one source"),
        (task_of, "sound", {"dataset_name": "sounds"}, "its rows have no labels. Give a --task on them: sounds:describes"),
        *((labelled_of, "image", {"dataset_name": save(tmp_path / f"saved {n}", *case)}, message)
          for n, (*case, message) in enumerate(not_a_class)),
        (labelled_of, "image", {"dataset_name": str(bare)}, "no label column was recognised. The columns are: image."),
        (labelled_of, "image", {"dataset_name": str(tmp_path / "no")}, "there is no such folder"),
        (labelled_of, "image", {}, "--dataset_name is missing"),
        (labelled_of, "image", {"classes": "no.txt"}, "--classes is no.txt; there is no such file and no such benchmark"),
        *((door, kind, {"dataset_name": sounds}, f"media; it {others} {kind}s. Give {kind}s, or --model") for door in (task_of, labelled_of)
          for kind in ("image", "clip")),
    ]  # fmt: skip
    for door, medium, flags, message in doors:
        with pytest.raises(ValueError, match=message) as caught:
            door(medium, **flags)
        assert "\n" not in str(caught.value)
    for flags, message in (
        ({"task": "vqa"}, "--task is vqa; choose one of scenes:describes, scenes:colour"),
        ({"num_answers": 1}, "--num_answers is 1; give at least 2"),
    ):
        with pytest.raises(ValueError, match=message):
            TaskArguments(**flags)


def test_rows_that_cannot_be_used_are_left_out_and_named(
    tones: list[dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A line that is no row, a missing image, an empty cell, a text in another encoding, a file that is no sound."""
    rows = [question(n, str(n % 2)) for n in range(5)]
    file = write(tmp_path, rows)
    (tmp_path / "3.png").unlink()
    Path(file).write_text("{broken\n" + Path(file).read_text())
    task = task_of(train_file=file, validation_file=file)
    assert len(task.splits["train"]) == 4
    assert "malformed_row, 1 times in 6 rows (line 1)" in caplog.text
    assert f"image_missing, 1 times in 6 rows (line 5), such as: {tmp_path / '3.png'}" in caplog.text
    with pytest.raises(ValueError, match=r"only one of train and test has images"):
        task_of(train_file=file, test_file=write(tmp_path, [{"question": "a", "answer": "1"}], "other.jsonl"))
    columns = {
        "image": pa.array([f"{at}.png" for at in (0, 1, 2, 4, 4)]),
        "label": pa.Array.from_buffers(
            pa.string(), 5, pa.array([b"b", b"\xff", b"a", b"", b"b"], pa.binary()).buffers()
        ),
        "attributes": pa.array([[("a", "b")]] * 5, pa.map_(pa.string(), pa.string())),
    }
    pq.write_table(pa.table(columns), tmp_path / "shop.parquet")
    assert labelled_of(train_file=str(tmp_path / "shop.parquet")).label_M.tolist() == [1, 0, 1]
    assert "bad_label, 1 times in 5 rows (row 3)" in caplog.text
    rows = [f"{n}.png,{n},{'train' if n > 4 else 'test'}\n" for n in range(20)]
    (tmp_path / "rows.csv").write_text("image,label,split\n" + "".join(rows))
    (tmp_path / "names.txt").write_text("".join(f"name {n}\n" for n in range(5)))
    (tmp_path / "3.png").write_bytes(grey(3))
    flags = {"train_file": str(tmp_path / "rows.csv"), "classes": str(tmp_path / "names.txt")}
    assert len(labelled_of(split="test", **flags).rows) == 5  # although most images of train are missing
    names = {f"{name}/{copy}.wav": tone(200) for name in "ab" for copy in range(2)} | {"a/0.wav": b"nothing"}
    found = labelled_of("sound", dataset_name=files(tmp_path / "media", names))
    assert found.label_M.tolist() == [0, 1, 1]
    assert "medium_unknown_format, 1 times in 4 rows (file a/0.wav)" in caplog.text


# -- tasks on the embedded sets ---------------------------------------------------------------------------------------


def test_the_scenes_need_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labels, "load_scenes", partial(load_scenes, num_train=20, num_eval=8, cache_dir=tmp_path))
    task = task_of(max_train_samples=20, max_eval_samples=10)
    assert task.title == "--task is scenes:describes"
    assert {name: len(rows) for name, rows in task.splits.items()} == {"train": 20, "validation": 10, "test": 10}
    assert Counter(task.splits["train"]["label"]) == {0: 10, 1: 10}
    assert task.splits["train"][0]["image"]["bytes"].startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="--task is scenes:describes; it holds images, and the model is for sounds"):
        task_of("sound")


@pytest.fixture(scope="module")
def asked_scenes(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return load_scenes(num_train=120, num_eval=2, cache_dir=tmp_path_factory.mktemp("scenes"))["train"]


@pytest.mark.parametrize("task", [name for name in TASKS if name.startswith("scenes")])
def test_the_questions_follow_from_the_scene(task: str, asked_scenes: Dataset) -> None:
    assert list(TASKS[task](asked_scenes)) == list(TASKS[task](asked_scenes))
    alone = asked_scenes.select([7])
    moved = [(text, label) for place, text, label in TASKS[task](asked_scenes) if place == 7]
    assert [(text, label) for _, text, label in TASKS[task](alone)] == moved


def test_an_embedded_clip_is_described_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = load_clips(num_train=12, num_eval=4, cache_dir=tmp_path)
    monkeypatch.setitem(SETS, "clips", lambda: splits)
    task = task_of("clip", task="clips:describes")
    assert task.classes == ["no", "yes"]
    assert [len(task.splits[split]) for split in ("train", "validation", "test")] == [24, 8, 8]
