"""What a source says about its rows, and which sources and columns are refused; the same for images, clips and sounds."""

import gzip
import json
import pickle
import random
import re
import sqlite3
import tarfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.arguments import DataArguments, PathArguments
from mm_utils.data.faults import Fault
from mm_utils.data.prepare.workspace import parse_source
from mm_utils.data.rows.columns import USUAL_NAMES, Columns, find_columns, is_null, split_named, split_of, tell_once
from mm_utils.data.rows.records import FileImage
from mm_utils.data.rows.tars import read_shard
from tests.kit.fault_images import grey
from tests.kit.reading import Member, content, lines, put, read, reasons, write, write_tar

NAMES = ["a.jpg", "b.jpg", "c.jpg"]
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """`a.jpg`, `b.jpg` and `c.jpg`, which are never decoded here."""
    files(tmp_path, *NAMES)
    return tmp_path


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(f"bytes of {name}".encode())


def listed(folder: Path, *rows: Any) -> Path:
    return write(folder / "rows.jsonl", lines(*rows))


# -- sources and columns ------------------------------------------------------------------------------------------------


def test_an_item_is_parsed() -> None:
    source = parse_source(r"coco/captions\, all.json,image_root=coco/train2017,split=val,templates=a {}.|{}")
    assert (source.path, source.name) == ("coco/captions, all.json", "captions, all.json")
    assert (source.image_root, source.split) == ("coco/train2017", "validation")
    assert pickle.loads(pickle.dumps(source)) == source


REFUSED = [
    (lambda: parse_source("p.jsonl,spilt=val"), r"has the key spilt; known are .*Did you mean 'split'"),
    (lambda: parse_source("p.jsonl,split=nowhere"), "split=nowhere; a split is train, validation or test"),
    (lambda: parse_source("p.jsonl,medium=sounds"), "known are auto, image, clip, sound. Did you mean 'sound'"),
    (lambda: parse_source("p.jsonl,split"), "'split' is not key=value"),
    (lambda: parse_source("p.jsonl,split=val,split=test"), "split is given twice"),
    (lambda: parse_source("p,templates=a photo"), "templates=a photo; a template says"),
    (lambda: parse_source(",split=val"), "an item without a path"),
    (lambda: DataArguments(dataset_name="a", train_file="b"), "--dataset_name and --train_file are given together"),
    (lambda: find_columns(["Bild", "text"], "t", Columns()), "no image .* are: Bild, text. Set --image_column"),
    (lambda: find_columns([*map(str, range(10**5))], "t", Columns(image="x" * 99)), r"^.{,999} and 99,960 more\.$"),
    (lambda: find_columns(["image", "audio", "text"], "t", Columns(medium="auto")), "may all be the medium. Name one by"),
]  # fmt: skip


@pytest.mark.parametrize(("action", "message"), REFUSED, ids=[message for _, message in REFUSED])
def test_what_cannot_be_meant_is_refused_in_one_line(action: Callable[[], Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        action()
    assert "\n" not in str(error.value)


_OF_TABLES = "image_root image_column caption_column id_column caption_template group_column"
READ = {  # the options that each format reads
    **dict.fromkeys(("jsonl", "json", "csv", "tsv", "parquet"), _OF_TABLES),
    **dict.fromkeys(("coco", "karpathy", "flickr"), "image_root"),
    **{"sqlite": f"{_OF_TABLES} config", "datasets": _OF_TABLES, "imagefolder": "", "webdataset": "caption_column"},
    "classes": "classes templates",
}


@pytest.mark.parametrize("kind", READ)
def test_an_option_that_a_format_does_not_read_is_refused(kind: str, folder: Path) -> None:
    options = dict.fromkeys(f"{_OF_TABLES} config classes".split(), "x")
    options |= {"templates": ("a {}",), "caption_template": "{x}"}
    for option in options.keys() - set(READ[kind].split()):
        with pytest.raises(ValueError, match=f"{option}=.*; the format {kind} does not read that"):
            read(folder, format=kind, **{option: options[option]})


def test_columns_have_usual_names_in_any_case_and_those_that_are_asked_for_win() -> None:
    for image in USUAL_NAMES["image"]:
        for caption in ("caption", "Text", "SENTENCES"):
            names = ["x", image.upper(), caption]
            assert find_columns(names, "a table", Columns()) == Columns(image.upper(), caption)
    for name in ("image path", "Image Path", "image-path", "ImagePath"):
        assert find_columns([name, "Alt-Text"], "a table", Columns()) == Columns(name, "Alt-Text")
    names = ["image", "photo", "caption", "alt", "id", "lang"]
    assert find_columns(names, "t", Columns("photo", "alt", "lang")) == Columns("photo", "alt", "lang")
    assert find_columns(["image", "text"], "t", Columns(id="image")).id is None


def test_of_several_columns_of_captions_or_images_the_one_that_is_read_is_named(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = {"image": "a.jpg", "image_2": "b.jpg", "Description": "long", "title": "short", "txt": "other"}
    write(folder / "set/a.jsonl", lines(row))
    write(folder / "set/b.jsonl", lines(row))
    for asked in ({}, {"caption_column": "Description"}):
        with caplog.at_level("INFO"):
            read(folder / "set", image_root=str(folder), **asked)
    assert "the image is the column image; image_2 could" in caplog.text
    assert "2 tables are read together: a.jsonl, b" in caplog.text
    assert len(re.findall("the caption is the column title; .*txt .*--caption_column", caplog.text)) == 1
    caplog.clear()
    described = [("1.jpg", b"x"), ("1.json", b'{"Description": "long", "sentence": "short", "alt": "other"}')]
    with caplog.at_level("INFO"):
        read(write_tar(folder / "s.tar", described))
    assert re.search("the caption is the column sentence; .*alt .*--caption_column", caplog.text)


def test_the_columns_that_are_read_are_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tell_once.cache_clear()
    with caplog.at_level("INFO"):
        read(listed(folder, {"sku": "7", "file": "a.jpg", "title": "a cup"}))
    assert "; read are the columns of image file, caption title; there is no id (id_column= names one), so paths are the ids" in caplog.text


def test_a_column_of_splits_of_another_name_is_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, value, told in (("subset", "Train", True), ("split", "test", False), ("kind", "photo", False)):
        caplog.clear()
        row = {"image": "a.jpg", "caption": "a", name: value}
        parquet = folder / f"{name}.parquet"
        pq.write_table(pa.Table.from_pylist([row]), parquet)
        for path in (listed(folder, row), parquet):
            tell_once.cache_clear()
            caplog.clear()
            read(path)
            assert (f"the column {name} has {value} and is not read" in caplog.text) is told


def test_columns_of_times_of_other_names_are_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    for name, end, told in (
        ("Start Time", "end_sec", True),
        ("start", "end_time", False),
        ("started", "ended", False),
    ):
        caplog.clear()
        read(listed(folder, {"audio": "a.wav", "caption": "a", name: 1, end: 2}))
        assert (f"{name}, {end} are not read" in caplog.text) is told


def test_splits_and_nulls_have_many_names_and_no_others() -> None:
    found = [split_of(name) for name in ("Training", "restval", " val ", "dev", "TEST", "eval")]
    assert found == [*["train"] * 2, *["validation"] * 2, *["test"] * 2]
    for name in (None, "", "challenge", 3):
        with pytest.raises(Fault):
            split_of(name)
    folders = ("train ", "01_train", "Training_set", "val2017", "valid_set", "TEST-2", "test images")
    assert [split_named(name) for name in folders] == [*["train"] * 3, *["validation"] * 2, *["test"] * 2]
    assert {split_named(name) for name in ("train station", "eye test", "2017")} == {None}
    assert all(map(is_null, (None, "", "  ", "nan", " NaN ", float("nan"))))
    assert not any(map(is_null, (0, "null and void", "None", [], False)))


# -- tables -------------------------------------------------------------------------------------------------------------


def test_columns_ids_regions_negatives_and_splits_are_read(folder: Path) -> None:
    rows = [
        {"i": "a.jpg", "c": ["one", "eins"], "n": 2**70, "split": "val", "regions": [1]},
        {"i": "b.jpg", "c": "zwei", "n": "x", "split": "restval", "negatives": ["drei"]},
        {"i": "c.jpg", "c": "x", "n": None},
    ]
    path = listed(folder, *rows)
    names = {"image_column": "i", "caption_column": "c"}
    good, bad = read(path, **names, id_column="n")
    found = [(row.id, row.split, row.regions, row.negatives) for row in good]
    assert found == [(str(2**70), "validation", [1], None), ("x", "train", None, ["drei"])]
    assert reasons(bad) == [("line 3", "missing_column")]
    good, _ = read(path, **names, split="test")
    assert [(row.id, row.split) for row in good][::2] == [("a.jpg", "test"), ("c.jpg", "test")]
    good, bad = read(write(folder / "a.csv", "image,caption,,\na.jpg,a,,\nb.jpg,b,x,y\n"))
    assert ([record.id for record in good], bad) == (["a.jpg", "b.jpg"], [])


def test_templates_and_groups_are_read_of_any_table(folder: Path) -> None:
    template = {"caption_template": "{brand} {title}, for {who}", "group_column": "who"}
    rows = [
        {"image": "a.jpg", "brand": "Acme", "title": "red {shoe}", "who": 7, "price": 1},
        {"image": "b.jpg", "brand": "Acme", "title": "bag", "who": None, "price": 2},
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    odd = ["", ["hat"], {"en": "hat"}, "['hat', 'cap']", "['hat' 'cap']"]
    others = [{**rows[0], "title": title} for title in odd]
    for path in (folder / "p.parquet", listed(folder, *rows, *others)):
        good, bad = read(path, **template)
        assert [row.captions for row in good] == [["Acme red {shoe}, for 7"]]
        assert good[0].group == "7"
        assert "the column who of the template is empty" in str(bad[0].fault)
    assert [row.fault.reason for row in bad[1:]] == ["caption_empty", *["caption_not_text"] * 3, "caption_list"]
    for wrong, message in (
        ({"caption_template": "{brnd}"}, r"no such column .*Did you mean 'brand'"),
        ({"caption_template": "shoe"}, "Name columns in braces"),
        (template | {"caption_column": "title"}, "it takes the place of caption_column"),
        ({"group_column": "whom"}, r"there is no such column .*Did you mean 'who'"),
        ({"templates": ("a {}",)}, r"templates=a {}; .* only image_root, .*, group_column\. Leave it out"),
    ):
        with pytest.raises(ValueError, match=message):
            read(folder / "rows.jsonl", **wrong)


def test_paths_begin_at_a_root_and_near_misses_are_named(folder: Path) -> None:
    path = write(folder / "lists" / "p.jsonl", lines({"image": "../a.jpg", "caption": "a"}))
    assert reasons(read(path)[1]) == [("line 1", "outside_root")]
    inside = write(folder / "lists" / "q.jsonl", lines({"image": "a.jpg", "caption": "a"}))
    assert read(inside, image_root=str(folder))[0][0].image == FileImage(str(folder / "a.jpg"))
    assert read(inside, PathArguments(image_root=str(folder)))[0][0].id == "a.jpg"
    assert read(listed(folder, {"image": f"file://{folder}/%61.jpg", "caption": "a"}))[0][0].id == "a.jpg"
    for written, stored in (
        ("Caf\u00e9.png", "Cafe\u0301.png"),
        ("photo.PNG", "photo.png"),
        ("sub\\a.png", "sub/a.png"),
    ):
        files(folder, stored)
        [bad] = read(listed(folder, {"image": written, "caption": "a"}))[1]
        assert re.search("there is .*which differs in case, Unicode form", bad.fault.detail)


def test_parquet_cells_are_read_in_any_order_and_empty_ones_are_faults(folder: Path) -> None:
    rows = [{"image": f"image {at}".encode(), "caption": "a"} for at in range(150)]
    rows[7]["image"] = b""
    rows[8]["image"] = None
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", row_group_size=70)
    good, _ = read(folder / "p.parquet")
    for at in random.Random(0).sample([at for at in range(150) if at not in (7, 8)], 60):
        assert content(good[at]) == rows[at]["image"]
    for at, most, reason in ((7, 99, "image_empty"), (8, 99, "image_empty"), (9, 3, "too_many_bytes")):
        with pytest.raises(Fault, match=reason):
            good[at].image.read(most)
    cells = [{"image": {"bytes": None, "path": name}, "caption": "a"} for name in [*NAMES, "/etc/hostname"]]
    kinds = {"image": pa.struct({"bytes": pa.binary(), "path": pa.string()}), "caption": pa.string()}
    pq.write_table(pa.Table.from_pylist(cells, pa.schema(kinds)), folder / "p.parquet")
    good, bad = read(folder / "p.parquet")
    assert ([record.id for record in good], reasons(bad)) == (NAMES, [("row 3", "outside_root")])


def test_the_only_table_of_a_database_is_read_or_the_one_that_is_named(tmp_path: Path) -> None:
    rows = [(None if at == 3 else grey(10 * at), f"caption {at}") for at in range(5)]
    with sqlite3.connect(tmp_path / "a.db") as made:
        made.execute(
            "CREATE TABLE pairs (number INTEGER PRIMARY KEY AUTOINCREMENT, image BLOB, name TEXT, caption TEXT AS (name))"
        )
        made.executemany("INSERT INTO pairs (image, name) VALUES (?, ?)", rows)
    good, bad = read(tmp_path / "a.db")
    assert all(len(repr(record)) < 1000 for record in good)
    assert [(content(record), record.captions[0]) for record in good] == rows[:3] + rows[4:]
    assert reasons(bad) == [("row 3", "image_empty")]
    with made:
        made.execute('CREATE TABLE "odd-name" (image BLOB PRIMARY KEY, caption TEXT) WITHOUT ROWID')
    made.close()
    with pytest.raises(ValueError, match=r"its tables are pairs, odd-name\. Name one of them, by config=NAME"):
        read(tmp_path / "a.db")
    assert read(tmp_path / "a.db", config="odd-name") == ([], [])


# -- folders ------------------------------------------------------------------------------------------------------------


def test_metadata_of_each_split_or_one_above_them(folder: Path) -> None:
    for split, name in (("train", "a.jpg"), ("val", "b.jpg")):
        files(folder / "set", f"{split}/{name}")
        write(folder / "set" / split / "metadata.jsonl", lines({"file_name": name, "text": name}))
    good, _ = read(folder / "set")
    assert [(row.split, row.where) for row in good] == [
        ("train", "train/metadata.jsonl, line 1"), ("validation", "val/metadata.jsonl, line 1")
    ]  # fmt: skip
    rows = [{"file_name": "train/a.jpg", "text": "a"}, {"file_name": "val/b.jpg", "text": "b"}]
    write(folder / "set" / "metadata.jsonl", lines(*rows))
    good, _ = read(folder / "set")
    assert [(row.split, row.id) for row in good] == [("train", "train/a.jpg"), ("validation", "val/b.jpg")] * 2


def test_classes_get_captions_from_templates(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    files(folder, "set/train/n02123045/x.JPEG", "set/train/garden_spider/x.JPEG", "set/val/n02123045/x.JPEG")
    names = write(folder / "names.txt", "n02123045 tabby, tabby cat\n")
    good, bad = read(folder / "set", format="classes", classes=str(names), templates=("a {}!", "{}"))
    assert not bad
    assert [(record.id, record.captions, record.split) for record in good] == [
        ("train/garden_spider/x.JPEG", ["a garden spider!", "garden spider"], "train"),
        ("train/n02123045/x.JPEG", ["a tabby!", "tabby"], "train"),
        ("val/n02123045/x.JPEG", ["a tabby!", "tabby"], "validation"),
    ]
    with pytest.raises(ValueError, match="n02123045 is named by a WordNet id"):
        read(folder / "set", format="classes")
    files(folder, "set/train/garden_spider/web/y.jpg")
    assert [record.captions[0] for record in read(folder / "set", format="classes", classes=str(names))[0]][:2] == [
        "a photo of a garden spider."
    ] * 2
    assert "folders inside those of classes, such as train/garden_spider/web, count for the outer one" in caplog.text
    files(folder, "sounds/train/dog_bark/a.wav", "sounds/test/rain/c.wav")
    found = {
        (record.medium, record.split, record.captions[0]) for record in read(folder / "sounds", format="classes")[0]
    }
    assert found == {("sound", "train", "the sound of a dog bark."), ("sound", "test", "the sound of a rain.")}


NAMES_OF_CLASSES = [
    "cat\nred_fox\ndog\n", "name\ncat\nred fox\ndog", "0 cat\n1 red fox\n2 dog", "00,cat\n01,red fox\n02,dog",
    "2: dog\n1: red fox\n0: cat", "0. cat\n1. red fox\n2. dog", "0\tcat\r\n1\tred fox\r\n2\tdog", "cat 0\nred fox 1\ndog 2",
    'id,name\n0,"cat, felis"\n1,red fox\n2,dog', "label\tname\n0\tcat\n1\tred fox\n2\tdog", "name;super;id\ncat;a;0\nred fox;b;1\ndog;a;2",
    '["cat", "red fox", "dog"]', '{"0": "cat", "1": "red fox", "2": "dog"}', '{"cat": 0, "red fox": 1, "dog": 2}',
    '{"categories": [{"id": 2, "name": "dog"}, {"id": 1, "name": "red fox"}, {"id": 0, "name": "cat"}]}',
    '{"id": 0, "name": "cat"}\n{"id": 1, "name": "red fox"}\n{"id": 2, "name": "dog"}', "{0: 'cat', 1: 'red fox', 2: 'dog'}",
]  # fmt: skip


def test_names_of_classes_are_read_in_the_usual_forms_or_refused(folder: Path) -> None:
    files(folder, "set/0/a.jpg", "set/1/a.jpg", "set/02/a.jpg", "other/a/a.jpg")
    for form in NAMES_OF_CLASSES:
        names = str(write(folder / "names.txt", form))
        good, _ = read(folder / "set", format="classes", classes=names, templates=("{}",))
        assert [record.captions[0] for record in good] == ["cat", "dog", "red fox"], form
    with pytest.raises(ValueError, match=r"it names 0, 1, 2, and no folder has such a name"):
        read(folder / "other", format="classes", classes=names)
    with pytest.raises(ValueError, match=r"the folder 02 is named by a number, .* has a name for it"):
        read(folder / "set", format="classes", classes=str(write(folder / "names.txt", "cat\n")))
    for form, message in {
        "2010 cat\n1999 dog": "every line begins with a number, which may be a label or part of the name",
        '{"a": {"b": 1}}': "it cannot be read",
        "[1, 2": "it cannot be read",
        "- cat\n- dog": "'- cat' is no name",
        "0\tn00000001\tcat": "is no name",
    }.items():
        names = str(write(folder / "names.txt", form))
        with pytest.raises(ValueError, match=message):
            read(folder / "set", format="classes", classes=names)


def test_a_folder_without_captions_says_what_to_give(folder: Path) -> None:
    files(folder, "set/images/a.jpg", "set/README.txt", "other/README.txt")
    write(folder / "set/captions.jsonl", lines({"image": "images/a.jpg", "caption": "a"}))
    put("a.mp4", "a.wav", "a.txt")(folder / "mixed")
    put("a.png")(folder / "flat")
    for name, message in {
        "flat": "this folder holds images and no captions. Write a table of paths and captions",
        "other": "its format is not recognised",
        "mixed": r"1 clips and 1 sounds. Set ,medium=clip or sound",
    }.items():
        with pytest.raises(ValueError, match=message):
            read(folder / name)
    assert [row.captions for row in read(folder / "set")[0]] == [["a"]]
    assert len(read(folder / "set", format="classes")[0]) == 1


def test_a_function_of_ones_own_reads_a_source(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs/data.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def read_diary" in block]
    (folder / "diary.py").write_text(block + "\n\ndef odd(source, paths):\n    yield 1\n")
    monkeypatch.syspath_prepend(str(folder))
    file = write(folder / "diary.txt", "a.jpg: a house\nno colon\n9.png: gone\nb.jpg: a street\n")
    good, bad = read(file, format="diary.read_diary")
    assert [(record.id, record.captions) for record in good] == [("a.jpg", ["a house"]), ("b.jpg", ["a street"])]
    assert reasons(bad) == [("line 2", "malformed_row"), ("line 3", "image_missing")]
    assert read(file, format="diary.read_diary", caption_template="{image}: {caption}")[0][0].captions == [
        "a.jpg: a house"
    ]
    for name, message in (
        ("diary.odd", "it yields int. Yield a row's place"),
        ("diary.no", "format has diary.no; module 'diary' has no attribute"),
        ("diary", "known are .*sqlite.*, and a function of your own as module.function"),
    ):
        with pytest.raises(ValueError, match=message):
            read(file, format=name)


# -- clips and sounds ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("column", "file", "medium"),
    [
        ("audio", "a.MP3", "sound"), ("Speech", "a.ogg", "sound"), ("video", "a.mp4", "clip"), ("gif", "a.gif", "clip"),
        ("path", "a.flac", "sound"), ("file_name", "a.webm", "clip"), ("file_name", "a.gif", "image"), ("image", "a.png", "image"),
    ],
)  # fmt: skip
def test_columns_and_members_say_the_medium(column: str, file: str, medium: str, tmp_path: Path) -> None:
    files(tmp_path, file)
    [record], _ = read(listed(tmp_path, {column: file, "caption": "a dog"}))
    assert (record.medium, record.id, content(record)) == (medium, file, f"bytes of {file}".encode())
    if column == "gif":  # in a tar, it is an image
        return
    [record], [bad] = read(write_tar(tmp_path / "s.tar", [("0.txt", b"alone"), *pair("1", file[2:])]))
    assert (record.medium, record.id, record.captions) == (medium, "s/1", ["caption of 1"])
    assert (content(record), bad.where, bad.fault.reason) == (b"medium", "s.tar, member 0", "incomplete_sample")
    assert bad.fault.detail == f"0 has no {medium} among its members (0.txt)"


def test_columns_of_two_kinds_are_a_question(tmp_path: Path) -> None:
    files(tmp_path, "a.wav", "a.png")
    path = listed(tmp_path, {"image": "a.png", "audio": "a.wav", "caption": "a dog"})
    assert read(path, medium="sound")[0][0].image.name.endswith("a.wav")
    assert read(path, medium="image")[0][0].image.name.endswith("a.png")
    assert read(path, image_column="audio")[0][0].medium == "sound"
    with pytest.raises(ValueError, match=r"no clip column was recognised. The columns are: image, audio, caption"):
        read(path, medium="clip")


# -- tars ---------------------------------------------------------------------------------------------------------------


def pair(key: str, suffix: str = "jpg", data: bytes = b"medium", **values: Any) -> list[Member]:
    described = [(f"{key}.json", json.dumps(values).encode())] if values else []
    return [(f"{key}.{suffix}", data), *described, (f"{key}.txt", f"caption of {key}".encode())]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_one_key_are_one_sample(tmp_path: Path, kind: int) -> None:
    long = "/".join(["folder"] * 20)
    mac = [(f"./._{name}", b"\0\5\x16\7" + bytes(80)) for name, _ in pair("000")]  # macOS puts these beside files
    path = write_tar(
        tmp_path / "s-0.tar", [*mac, *pair("000"), *pair("a/b"), *pair(f"{long}/ảnh" if kind else "img")], kind
    )
    good, bad = read(path)
    assert (len(good), bad) == (3, [])
    assert [(record.id, record.captions, content(record)) for record in good][:2] == [
        ("s-0/000", ["caption of 000"], b"medium"), ("s-0/a/b", ["caption of a/b"], b"medium")
    ]  # fmt: skip
    assert good[0].where == "s-0.tar, member 000"


def test_captions_come_from_text_then_json(tmp_path: Path) -> None:
    described = json.dumps({"text": ["one", "zwei"], "split": "val", "regions": [1], "negatives": ["x"]}).encode()
    members = [
        *(("0.png", b"x"), ("0.json", described)),
        *(("1.png", b"x"), ("1.json", described), ("1.txt", b"\xef\xbb\xbfplain")),
        *(("3.png", b"x"), ("3.txt", b"one\r\n\nanother\n")),
        *(("4.json", b'{"caption": "a"}'),),
    ]
    path = write_tar(tmp_path / "s.tar", members)
    good, bad = read(path)
    assert [record.captions for record in good] == [["one", "zwei"], ["plain"], ["one", "another"]]
    assert (good[0].split, good[0].regions, good[0].negatives) == ("validation", [1], ["x"])
    assert [row.fault.reason for row in bad] == ["incomplete_sample"]


def test_samples_of_two_kinds_are_a_question(tmp_path: Path) -> None:
    """As video2dataset writes them: a picture, and perhaps the sound, beside the video."""
    both = [("0.jpg", b"picture"), *pair("0", "mp4", b"video"), ("1.m4a", b"sound"), *pair("1", "mp4", b"video")]
    path = write_tar(tmp_path / "s.tar", both)
    with pytest.raises(ValueError, match=r"its samples hold images and clips and sounds, such as .*s.tar, member 0.jpg and "
        r".* Set ,medium=image or clip or sound"):  # fmt: skip
        read(path)
    for medium, contents in {"image": [b"picture"], "clip": [b"video"] * 2, "sound": [b"video", b"sound"]}.items():
        assert [content(record) for record in read(path, medium=medium)[0]] == contents
    moments = [{"span": [1, 2], "phrase": "a bark"}]
    path = write_tar(tmp_path / "p.tar", pair("0", "wav", start=0.5, end=2, moments=moments))
    [record] = read(path)[0]
    assert (record.id, record.cut, record.moments) == ("p/0#0.5-2", (0.5, 2), moments)


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_large_extended_header_is_refused_before_it_is_searched(kind: bytes, tmp_path: Path) -> None:
    """Python before 3.11.10 searches digits in quadratic time (CVE-2024-6232): a megabyte takes a quarter of an hour."""
    head = tarfile.TarInfo("x")
    head.type = kind
    head.size = 1 << 20
    held = head.tobuf(tarfile.USTAR_FORMAT) + b"1" * head.size
    (tmp_path / "a.tar").write_bytes(held + tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    began = time.process_time()
    [sample] = read_shard(str(tmp_path / "a.tar"))
    assert time.process_time() - began < 20
    assert "an extended header has 1,048,576 bytes" in str(sample.fault)


@pytest.mark.parametrize("more", [bytes(512 * 7) + b"another archive" * 99, b"garbage" * 100])
def test_what_follows_an_archive_is_named(more: bytes, tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "a.tar", [*pair("a", "png", grey(1)), *pair("b", "png", grey(1))]))
    path.write_bytes(path.read_bytes() + more)
    good, bad = read(path)
    assert [record.where for record in good] == ["a.tar, member a", "a.tar, member b"]
    assert reasons(bad) == [("a.tar", "truncated_archive")]
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert [row.fault.reason for row in read(path)[1]] == ["truncated_archive"]


@pytest.mark.parametrize("pattern", ["{a,b}/*.tar", "a/0.tar {a,b}/{0..1}.tar", "a/[5-9].tar", "a/{0..3}.tar"])
def test_a_pattern_that_finds_less_than_it_says_is_refused(pattern: str, tmp_path: Path) -> None:
    put("a/0.tar", "a/1.tar")(tmp_path)
    with pytest.raises(ValueError, match="there is no "):
        read(tmp_path / pattern.rpartition(" ")[2], format="webdataset")
    assert len(read(tmp_path / "a/{0..1}.tar")[0]) == 2
    put("train/0.tar", "Training/0.tar")(tmp_path / "splits")
    for path in (tmp_path / "splits", tmp_path / "splits/{train,Training}/0.tar"):
        assert {record.id for record in read(path)[0]} == {"train/0/a", "Training/0/a"}
