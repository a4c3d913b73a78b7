"""Rows of tables, text, Parquet and `datasets`, become records; their images are references."""

import random
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Limits
from mm_utils.data.rows.records import FileImage, UrlImage
from mm_utils.data.rows.source import PathArguments
from tests.kit.reading import NAMES, content, lines, read, reasons, write


def test_columns_ids_regions_negatives_and_splits_are_read(folder: Path) -> None:
    rows = [
        {"i": "a.jpg", "c": ["one", "eins"], "l": ["en", "de"], "n": 2**70, "split": "val", "regions": [1]},
        {"i": "b.jpg", "c": "zwei", "l": "de", "n": "x", "split": "restval", "negatives": ["drei"]},
        {"i": "c.jpg", "c": "x", "l": None, "n": None},
    ]
    path = write(folder / "p.jsonl", lines(*rows))
    good, bad = read(path, image_column="i", caption_column="c", id_column="n")
    assert [(row.id, row.split, row.regions, row.negatives) for row in good] == [
        (str(2**70), "validation", [1], None),
        ("x", "train", None, ["drei"]),
    ]
    assert reasons(bad) == [("line 3", "missing_column")]
    good, _ = read(path, image_column="i", caption_column="c", split="test")
    assert [(row.id, row.split) for row in good][::2] == [
        ("a.jpg", "test"),
        ("c.jpg", "test"),
    ]


def test_a_template_makes_a_caption_of_several_columns(folder: Path) -> None:
    template = {"caption_template": "{brand} {title}, for {who}"}
    rows = [
        {"image": "a.jpg", "brand": "Acme", "title": "red {shoe}", "who": "men", "price": 1},
        {"image": "b.jpg", "brand": None, "title": "bag", "who": "all", "price": 2},
    ]
    expected = [["Acme red {shoe}, for men"], ["bag, for all"]]
    table = pa.Table.from_pylist(rows)
    pq.write_table(table, folder / "p.parquet")
    for path in (folder / "p.parquet", write(folder / "p.jsonl", lines(*rows, {"image": "c.jpg", "title": "hat"}))):
        good, bad = read(path, **template)
        assert not bad
        assert [row.captions for row in good] == expected + [["hat, for"]] * (path.suffix == ".jsonl")
    for wrong, message in (
        ({"caption_template": "{brnd}"}, r"no such column .*Did you mean 'brand'"),
        ({"caption_template": "shoe"}, "Name columns in braces"),
        (template | {"caption_column": "title"}, "it takes the place of caption_column"),
    ):
        with pytest.raises(ValueError, match=message):
            read(folder / "p.jsonl", **wrong)
    with pytest.raises(ValueError, match=r"the format classes has no columns"):
        read(folder / "p.jsonl", format="classes", **template)


def test_a_group_is_read_of_any_table(folder: Path) -> None:
    rows = [{"image": f"{name}.jpg", "caption": name, "site": site} for name, site in (("a", 7), ("b", None))]
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet")
    for path in (folder / "p.parquet", write(folder / "p.jsonl", lines(*rows))):
        assert [row.group for row in read(path, group_column="site")[0]] == ["7", None]
        assert [row.group for row in read(path)[0]] == [None, None]
    with pytest.raises(ValueError, match=r"group_column is sight; there is no such column .*Did you mean 'site'"):
        read(folder / "p.jsonl", group_column="sight")
    with pytest.raises(ValueError, match=r"group_column=site; the format classes has no columns"):
        read(folder / "p.jsonl", format="classes", group_column="site")


def test_the_root_may_be_elsewhere_and_may_be_left_when_allowed(folder: Path) -> None:
    path = write(folder / "lists" / "p.jsonl", lines({"image": "../a.jpg", "caption": "a"}))
    assert reasons(read(path)[1]) == [("line 1", "outside_root")]
    assert len(read(path, PathArguments(allow_outside_root=True))[0]) == 1
    inside = write(folder / "lists" / "q.jsonl", lines({"image": "a.jpg", "caption": "a"}))
    assert read(inside, image_root=str(folder))[0][0].image == FileImage(str(folder / "a.jpg"))
    assert read(inside, PathArguments(image_root=str(folder)))[0][0].id == "a.jpg"
    with pytest.raises(ValueError, match="image_root absent is not a folder"):
        read(inside, image_root="absent")


def test_an_address_is_a_reference_only_where_downloads_are_allowed(folder: Path) -> None:
    path = write(folder / "p.jsonl", lines({"image": "https://a.example/b.jpg", "caption": "a"}))
    good, _ = read(path, PathArguments(allow_download=True))
    assert good[0].image == UrlImage("https://a.example/b.jpg")
    assert good[0].id == "https://a.example/b.jpg"


def test_parquet_rows_are_read_in_any_order_and_empty_ones_are_faults(folder: Path) -> None:
    data = [f"image {at}".encode() for at in range(150)]
    rows: list[dict[str, Any]] = [{"image": item, "caption": "a"} for item in data]
    rows[7]["image"], rows[8]["image"] = b"", None
    pq.write_table(pa.Table.from_pylist(rows), folder / "p.parquet", row_group_size=70)
    good, _ = read(folder / "p.parquet")
    order = random.Random(0).sample([at for at in range(150) if at not in (7, 8)], 60)
    assert [content(good[at]) for at in order] == [data[at] for at in order]
    for at in (7, 8):
        with pytest.raises(Fault) as fault:
            good[at].image.read(Limits())
        assert fault.value.reason == "image_empty"
    with pytest.raises(Fault) as fault:
        good[9].image.read(Limits(max_bytes=3))
    assert fault.value.reason == "too_many_bytes"
    (folder / "q.parquet").write_bytes(b"PAR1")
    with pytest.raises(ValueError, match="cannot be read as Parquet"):
        read(folder / "q.parquet")


def test_a_parquet_struct_of_paths_alone_is_paths(folder: Path) -> None:
    rows = [{"image": {"bytes": None, "path": name}, "caption": "a"} for name in [*NAMES, "/etc/hostname"]]
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("caption", pa.string())]
    )
    pq.write_table(pa.Table.from_pylist(rows, schema), folder / "p.parquet")
    good, bad = read(folder / "p.parquet")
    assert [record.id for record in good] == NAMES
    assert reasons(bad) == [("row 3", "outside_root")]


def test_metadata_of_each_split_or_one_above_them(folder: Path) -> None:
    for split, name in (("train", "a.jpg"), ("val", "b.jpg")):
        (folder / "set" / split).mkdir(parents=True)
        (folder / name).rename(folder / "set" / split / name)
        write(folder / "set" / split / "metadata.jsonl", lines({"file_name": name, "text": name}))
    good, _ = read(folder / "set")
    assert [(row.split, row.where) for row in good] == [
        ("train", "train/metadata.jsonl, line 1"),
        ("validation", "val/metadata.jsonl, line 1"),
    ]
    rows = [{"file_name": "train/a.jpg", "text": "a"}, {"file_name": "val/b.jpg", "text": "b"}]
    write(folder / "set" / "metadata.jsonl", lines(*rows))
    good, _ = read(folder / "set")
    assert [(row.split, row.id) for row in good] == [("train", "train/a.jpg"), ("validation", "val/b.jpg")] * 2
