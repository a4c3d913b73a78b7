"""Labelled images from every kind of source, and the names of their classes; bad input is named."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature

from mm_utils.data import media
from mm_utils.data.batches.dataset import EvaluationTransform, Pairs
from mm_utils.data.media import COLUMNS, kind_of
from mm_utils.finetuning.labels import LabelledArguments, LabelledImages, load_labelled
from tests.kit.fault_images import grey
from tests.kit.media_files import media_rows, tone
from tests.kit.reading import write_tar


def pictures(count: int) -> list[dict[str, Any]]:
    return [{"bytes": grey(10 * number), "path": None} for number in range(count)]


def save(folder: Path, labels: list[Any], feature: Any, image: str = "img", label: str = "label") -> str:
    """A folder of `save_to_disk` with a test split."""
    columns = {image: pictures(len(labels)), label: labels}
    rows = Dataset.from_dict(columns, Features({image: ImageFeature(), label: feature}))
    DatasetDict({"test": rows}).save_to_disk(folder)
    return str(folder)


def load_images(name: Any, **flags: Any) -> LabelledImages:
    return load_labelled(LabelledArguments(dataset_name=str(name), **flags))


def class_folders(folder: Path, names: list[str], split: str = "") -> Path:
    """Two images a class; the shade is the number of the class."""
    for number, name in enumerate(names):
        (folder / split / name).mkdir(parents=True)
        for copy in range(2):
            (folder / split / name / f"{copy}.png").write_bytes(grey(number))
    return folder


def shades(found: LabelledImages) -> list[int]:
    """Return the shade of each row as the loader shows it."""
    pairs = Pairs(found.rows, EvaluationTransform(media.Image(4)))
    return [int(pairs[row, 0]["pixel_values"][0, 0, 0]) for row in range(len(pairs))]


def test_a_saved_data_set(tmp_path: Path) -> None:
    name = save(tmp_path / "saved", [1, 0, 2, 1], ClassLabel(names=["cat", "sea_lion", "tench, Tinca tinca"]))
    found = load_images(name)
    assert found.classes == ["cat", "sea lion", "tench"]
    assert found.label_M.tolist() == [1, 0, 2, 1]
    assert found.split == "test"
    assert shades(found) == [0, 10, 20, 30]


def test_class_folders(tmp_path: Path) -> None:
    found = load_images(class_folders(tmp_path, ["dog", "sea_lion", "tree frog"]))
    assert found.classes == ["dog", "sea lion", "tree frog"]
    assert shades(found) == found.label_M.tolist() == [0, 0, 1, 1, 2, 2]


def test_wordnet_ids_need_names(tmp_path: Path) -> None:
    ids = ["n01440764", "n01443537", "n01484850"]
    folder = class_folders(tmp_path / "images", ids, "val")
    with pytest.raises(ValueError, match=r"its class n01440764 is a WordNet id, not a name. Set --classes"):
        load_images(folder)
    file = tmp_path / "names.txt"
    file.write_text("n01484850 great white shark, white shark\nn01443537 goldfish\nn09 x\nn01440764 tench, Tinca\n")
    found = load_images(folder, classes=str(file))
    assert found.classes == ["tench", "goldfish", "great white shark"]
    assert found.split == "validation"
    file.write_text("tench\ngoldfish\nshark\n")
    assert load_images(folder, classes=str(file)).classes == ["tench", "goldfish", "shark"]
    file.write_text("tench\ngoldfish\n")
    with pytest.raises(
        ValueError, match=r"it has 2 names for 3 classes and none for n01440764. Write lines 'id name'"
    ):
        load_images(folder, classes=str(file))


def test_labels_as_text_and_as_bare_numbers(tmp_path: Path) -> None:
    found = load_images(save(tmp_path / "text", ["owl", "ant", "owl"], Value("string")))
    assert (found.classes, found.label_M.tolist()) == (["ant", "owl"], [1, 0, 1])
    bare = save(tmp_path / "bare", [1, 0, 2], Value("int64"))
    with pytest.raises(ValueError, match=r"its labels are numbers, not a name. Set --classes"):
        load_images(bare)
    file = tmp_path / "names.txt"
    file.write_text("ant\nbee\nowl\nyak\n")
    found = load_images(bare, classes=str(file))
    assert (found.classes, found.label_M.tolist()) == (["ant", "bee", "owl", "yak"], [1, 0, 2])
    file.write_text("ant\nbee\n")
    with pytest.raises(ValueError, match=r"row 2: the label is 2; the 2 classes count from 0. Name all of them"):
        load_images(bare, classes=str(file))


def test_synonyms_that_two_classes_share_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    names = ["crane, bird", "crane, machine", "maillot", "tub, vat"]
    assert load_images(save(tmp_path / "a", [0, 1], ClassLabel(names=names))).classes == [*names[:3], "tub"]
    load_images(save(tmp_path / "b", ["a_b", "a b"], Value("string")))
    assert "several classes are called a b" in caplog.text


def prepared(folder: Path, captions: list[list[str]], kind: str = "sound") -> str:
    """Write the rows of a prepared set, as `prepare_data.py` lays them."""
    contents = [tone(100 * place, each=0.1) for place in range(1, 1 + len(captions))]
    rows = media_rows(kind, contents, captions=captions, content_id=["x"] * len(captions))
    DatasetDict(test=rows.rename_columns({"image": COLUMNS[kind]})).save_to_disk(str(folder))
    (folder / "report.json").write_text(json.dumps({"format": "tandem-pairs"}))
    return str(folder)


def test_equal_captions_of_a_prepared_set_are_a_class(tmp_path: Path) -> None:
    dog, rain = ["a dog barks", "barking", "barking"], ["rain falls"]
    found = load_images(prepared(tmp_path / "set", [rain, dog, rain, dog, dog]))
    assert (found.classes, found.texts, found.split) == (
        ["a dog barks", "rain falls"], [["a dog barks"], ["rain falls"]], "test"
    )  # fmt: skip
    assert found.label_M.tolist() == [1, 0, 1, 0, 0]
    assert kind_of(found.rows.features) == "sound"
    again = load_images(prepared(tmp_path / "mixed", [dog, rain, dog[::-1]]))
    assert (again.classes, again.label_M.tolist()) == (["a dog barks", "rain falls"], [0, 1, 0])
    with pytest.raises(ValueError, match=r"captions tell the classes. Drop --classes"):
        load_images(tmp_path / "set", classes=str(tmp_path / "set/report.json"))
    for number, captions in enumerate(([rain, dog], [rain, rain])):
        with pytest.raises(ValueError, match="different captions, which do not form classes"):
            load_images(prepared(tmp_path / str(number), captions))


def test_splits_and_columns_are_chosen(tmp_path: Path) -> None:
    def rows(count: int) -> Dataset:
        names = ClassLabel(names=["a", "b"])
        features = Features({"picture": ImageFeature(), "depth": ImageFeature(), "coarse": names, "fine_label": names})
        shown = pictures(count)
        return Dataset.from_dict(
            {"picture": shown, "depth": shown, "coarse": [0] * count, "fine_label": [1] * count}, features
        )

    DatasetDict({"train": rows(1), "test": rows(2), "val": rows(3)}).save_to_disk(tmp_path / "saved")
    assert load_images(tmp_path / "saved").split == "val"
    assert load_images(tmp_path / "saved", split="train", label_column="coarse").label_M.tolist() == [0]
    assert load_images(tmp_path / "saved", split="test").label_M.tolist() == [1, 1]
    for flags, message in (
        ({"split": "dev"}, "--split is dev; the data has train, test, val. Choose one of them."),
        ({"label_column": "lable"}, "--label_column is lable; there is no such column .* The columns are: picture, "),
        ({"image_column": "x"}, "--image_column is x; there is no such column"),
        ({"image_column": "coarse"}, "image column coarse holds ClassLabel.* Set image_column to another"),
        ({"label_column": "depth"}, "a label is {.bytes.: .*, not a name or a number. Set --label_column."),
    ):
        with pytest.raises(ValueError, match=message):
            load_images(tmp_path / "saved", **flags)


@pytest.mark.parametrize(
    ("labels", "feature", "message"),
    [
        (
            [-1, 0, -1],
            ClassLabel(names=["a", "b"]),
            r"1 of 3 rows are usable \(row 0, column label: it has no label\). .* whose labels are public",
        ),
        (["a", None], Value("string"), "it has 1 of at least 2 classes"),
        ([0.5, 1.0], Value("float32"), "its labels are numbers, not a name"),
        ([0, 0], ClassLabel(names=["a"]), "it has 1 of at least 2 classes"),
        ([0, 1], ClassLabel(names=["a", " "]), "class 1 has no name. Give them in --classes"),
    ],
)
def test_labels_that_are_not_a_class(labels: list[Any], feature: Any, message: str, tmp_path: Path) -> None:
    name = save(tmp_path / "saved", labels, feature)
    with pytest.raises(ValueError, match=message) as caught:
        load_images(name)
    assert "\n" not in str(caught.value)


def test_a_table_names_classes_as_a_folder_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Columns with blanks, rows without a category, a text in another encoding; the file or its folder."""
    for at in range(4):
        (tmp_path / f"{at}.png").write_bytes(grey(10 * at))
    text = "title,image path,category\n" + "".join(
        f"t{at},{at}.png,{kind}\n" for at, kind in enumerate(["b", "a", "", "b"])
    )
    (tmp_path / "shop.csv").write_text(text)
    found = load_images(tmp_path / "shop.csv", label_column="category")
    assert (found.classes, found.label_M.tolist(), found.split) == (["a", "b"], [1, 0, 1], "train")
    assert shades(found) == [0, 10, 30]
    assert "1 of 4 rows are left out" in caplog.text
    columns = {
        "image": pa.array([f"{at}.png" for at in range(4)]),
        "label": pa.Array.from_buffers(pa.string(), 4, pa.array([b"b", b"\xff", b"a", b"b"], pa.binary()).buffers()),
        "attributes": pa.array([[("a", "b")]] * 4, pa.map_(pa.string(), pa.string())),
    }
    pq.write_table(pa.table(columns), tmp_path / "shop.parquet")
    assert load_images(tmp_path / "shop.parquet").label_M.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("labels", "names", "message"),
    [
        (["0", "-1"], "ant\nbee\n", "it has 2 names for 2 classes and none for -1"),
        (["0", "x"], "ant\nbee\n", "it has 2 names for 2 classes and none for x"),
        (["٠", "١"], "ant\nbee\n", "it has 2 names for 2 classes and none for ٠"),
        (["0", "1" * 31], "ant\nbee\n", "it has 2 names for 2 classes and none for 1{31}"),
    ],
)
def test_labels_that_a_file_of_names_does_not_have(
    labels: list[str], names: str, message: str, tmp_path: Path, own_cache: Path
) -> None:
    members = [
        part for at, label in enumerate(labels) for part in ((f"{at}.png", grey(at)), (f"{at}.cls", label.encode()))
    ]
    (tmp_path / "test").mkdir()
    write_tar(tmp_path / "test/0.tar", members)
    (tmp_path / "classnames.txt").write_text(names)
    with pytest.raises(ValueError, match=message):
        load_images(tmp_path)


@pytest.mark.parametrize("name", ["classnames.txt", "zeroshot_classification_templates.txt"])
def test_names_beside_shards_stay_in_the_folder_and_have_an_end(name: str, tmp_path: Path, own_cache: Path) -> None:
    folder = tmp_path / "set"
    (folder / "test").mkdir(parents=True)
    write_tar(folder / "test/0.tar", [("0.png", grey(0)), ("0.cls", b"0"), ("1.png", grey(1)), ("1.cls", b"1")])
    (folder / "classnames.txt").write_text("ant\nbee\n")
    assert load_images(folder).classes == ["ant", "bee"]
    (folder / name).unlink(missing_ok=True)
    (tmp_path / "secret.txt").write_text("my secret {c}\nmy other secret\n")
    (folder / name).symlink_to(tmp_path / "secret.txt")
    with pytest.raises(ValueError, match=r"leads to .*secret.txt, outside"):
        load_images(folder)
    (folder / name).unlink()
    (folder / name).write_text("a {c}\n" * 6_000_000)
    with pytest.raises(ValueError, match=rf"{name}.*: it has 36,000,000 bytes; [0-9,]* is the most\). Write"):
        load_images(folder)
    (folder / "classnames.txt").write_text("ant\nbee\n")
    (folder / "zeroshot_classification_templates.txt").write_text("a {c}\n" * 501)
    with pytest.raises(ValueError, match="has 501 prompts; 500 is the most"):
        load_images(folder)


def test_no_labels_no_images_no_source(tmp_path: Path) -> None:
    Dataset.from_dict({"image": pictures(2)}, Features({"image": ImageFeature()})).save_to_disk(tmp_path / "bare")
    with pytest.raises(
        ValueError, match=r"no label column was recognised. The columns are: image. Set --label_column"
    ):
        load_images(tmp_path / "bare")
    Dataset.from_dict({"image": ["a.png"], "label": ["a"]}).save_to_disk(tmp_path / "paths")
    with pytest.raises(ValueError, match=r"column image holds text. Give images, or a folder of images per class"):
        load_images(tmp_path / "paths")
    with pytest.raises(ValueError, match=r"there is no such folder"):
        load_images(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"--dataset_name is missing"):
        LabelledArguments()
    with pytest.raises(ValueError, match=r"--max_eval_samples is 0"):
        LabelledArguments(dataset_name="x", max_eval_samples=0)
    with pytest.raises(ValueError, match=r"--classes is nowhere.txt; there is no such file"):
        load_images(save(tmp_path / "ok", [0, 1], ClassLabel(names=["a", "b"])), classes="nowhere.txt")
