"""Nothing readable vanishes without a line, and one bad row, cell or column stops nothing; each rule has a table."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.paths import MOST_FILES
from mm_utils.data.rows.tar_patterns import expand_braces, files_of_pattern
from tests.kit.fault_images import grey
from tests.kit.reading import Build, check_closed, check_linked, content, lines, put, read, reasons, write

Texts = list[tuple[str, str]]


CLASSES = put("cat/0.png", "dog/0.png")
CAPTIONED = put("0.png", "0.txt", "dog/1.png", "dog/1.txt")
TABLES = put("0.parquet", "dog/1.parquet")
FOLDERS = [(CLASSES, "classes"), (CAPTIONED, "imagefolder"), (TABLES, "parquet")]


@pytest.mark.parametrize(("build", "kind"), FOLDERS)
def test_a_folder_that_cannot_be_listed_is_a_bad_row(
    build: Build, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_closed(build, kind, tmp_path, monkeypatch)


@pytest.mark.parametrize(("build", "kind"), FOLDERS)
def test_a_linked_folder_is_a_bad_row(build: Build, kind: str, tmp_path: Path) -> None:
    check_linked(build, kind, tmp_path)


@pytest.mark.parametrize(
    ("build", "kind", "rows", "bad"),
    [
        (put("0.png", "0.TXT", "1.JPG", "1.Txt"), "imagefolder", 2, []),
        (put("0.png", "0.TXT"), "", 1, []),
        (put("0.png", "0.txt", "0.NEF", "x/1.cr2"), "imagefolder", 1, [
            ("folder .", "image_unknown_format")
        ]),
        (put("cat/0.png", "___/0.png"), "classes", 1, [("folder ___", "caption_empty")]),
    ],
)  # fmt: skip
def test_names_that_people_and_cameras_write(build: Build, kind: str, rows: int, bad: Texts, tmp_path: Path) -> None:
    build(tmp_path)
    good, found = read(tmp_path, format=kind)
    assert len(good) == rows
    assert [(where.replace(f"{tmp_path}/", ""), reason) for where, reason in reasons(found)] == bad


def test_a_pattern_leaves_out_no_folder_in_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("cat/0.parquet", "dog/1.parquet")(tmp_path)
    scandir = os.scandir

    def closed(place: Any = ".") -> Any:
        if os.fspath(place).rstrip("/").endswith("dog"):
            raise PermissionError(13, "Permission denied", place)
        return scandir(place)

    names = ("cat/*.parquet", "*/*.parquet", "**/*.parquet", "{cat,dog}/*.parquet", "**/1.parquet")
    assert [len(files_of_pattern(str(tmp_path / name))) for name in names] == [1, 2, 2, 2, 1]
    monkeypatch.setattr(os, "scandir", closed)
    assert len(files_of_pattern(str(tmp_path / "cat/*.parquet"))) == 1
    for name in names[1:]:
        with pytest.raises(PermissionError, match="dog"):
            files_of_pattern(str(tmp_path / name))


def test_braces_have_an_end() -> None:
    names = [f"{name}-{number}" for name in "abac" for number in ("08", "09", "10")]
    assert sorted(expand_braces("{a,{b,c}}-{08..10}")) == sorted(names)
    for pattern in ("w-{000..99999999999}.tar", "{0..999}{0..999}{0..999}"):
        with pytest.raises(ValueError, match=f"stands for more than {MOST_FILES:,} files"):
            expand_braces(pattern)


def nested(depth: int) -> str:
    return json.dumps({"image": "b.jpg", "caption": "b", "regions": "@"}).replace('"@"', "[" * depth + "]" * depth)


def bad_text(*texts: bytes) -> pa.Array:
    return pa.Array.from_buffers(pa.string(), len(texts), pa.array(texts, pa.binary()).buffers())


def tables() -> Iterator[tuple[str, dict[str, Any], Texts]]:
    """Columns of a Parquet file of three rows, and the rows that are bad for them."""
    names = ["a.jpg", "b.jpg", "c.jpg"]
    plain = {"image": pa.array(names), "caption": pa.array(["a", "b", "c"])}
    yield "map", {**plain, "attributes": pa.array([[("a", "b")]] * 3, pa.map_(pa.string(), pa.string()))}, []
    yield "uuid", {**plain, "key": pa.array([bytes(16)] * 3, pa.binary(16)).cast(pa.uuid())}, []
    yield "list_view", {**plain, "x": pa.array([[1]] * 3, pa.list_view(pa.int64()))}, []
    yield "dictionary", {**plain, "image": pa.array(names).dictionary_encode()}, []
    yield "text", {**plain, "caption": bad_text(b"a", b"\xff", b"c")}, [("row 1", "bad_encoding")]
    yield "path", {**plain, "image": bad_text(b"a.jpg", b"b.jpg", b"\xff")}, [("row 2", "bad_encoding")]
    both = [{"bytes": grey(1), "path": None}, {"bytes": None, "path": "b.jpg"}, {"bytes": grey(2), "path": "c.jpg"}]
    yield "mixed", {**plain, "image": pa.array(both)}, []


@pytest.mark.parametrize(("name", "columns", "bad"), list(tables()))
def test_one_cell_or_column_of_a_table_stops_nothing(
    name: str, columns: dict[str, Any], bad: Texts, folder: Path
) -> None:
    pq.write_table(pa.table(columns), folder / "t.parquet")
    good, found = read(folder / "t.parquet")
    assert len(good) == 3 - len(bad)
    assert reasons(found) == bad
    assert all(content(record) for record in good)
    if name == "text":
        assert "column caption is not UTF-8 text: byte 1" in found[0].fault.detail


@pytest.mark.parametrize(
    ("text", "bad"),
    [
        (lines({"image": "a.jpg", "caption": "a"}, nested(900), {"image": "c.jpg", "caption": "c"}), ["too_nested"]),
        (lines({"image": "a.jpg", "caption": "a"}, nested(40), {"image": "c.jpg", "caption": "c"}), ["too_nested"]),
        (f'[{{"image": "a.jpg", "caption": "a"}},\n{nested(600)},\n{{"image": "c.jpg", "caption": "c"}}]', ["too_nested"]),
        (lines({"image": "a.jpg", "caption": "a"}, {"image": "c.jpg", "caption": "c"}) + "\0" * 5000, ["malformed_row"]),
    ],
)  # fmt: skip
def test_one_line_stops_nothing(text: str, bad: list[str], folder: Path) -> None:
    good, found = read(write(folder / "a.jsonl", text))
    assert [record.id for record in good] == ["a.jpg", "c.jpg"]
    assert [row.fault.reason for row in found] == bad


@pytest.mark.parametrize("codec", ["utf-16", "utf-16-le", "utf-32", "utf-32-be"])
def test_wide_texts_are_called_by_their_name(codec: str, folder: Path) -> None:
    (folder / "a.jsonl").write_bytes(lines({"image": "a.jpg", "caption": "a"}).encode(codec))
    with pytest.raises(ValueError, match=codec.upper()[:6]):
        read(folder / "a.jsonl")


def test_empty_cells_at_the_end_of_a_header_name_no_column(folder: Path) -> None:
    good, bad = read(write(folder / "a.csv", "image,caption,,\na.jpg,a,,\nb.jpg,b,x,y\n"))
    assert ([record.id for record in good], bad) == (["a.jpg", "b.jpg"], [])


@pytest.mark.parametrize("name", ["image path", "Image Path", "image-path", "ImagePath"])
def test_a_column_is_known_with_blanks_and_hyphens(name: str, folder: Path) -> None:
    assert len(read(write(folder / "a.csv", f"{name},caption\na.jpg,a\n"))[0]) == 1


def test_the_slashes_of_windows_are_hinted_at(folder: Path) -> None:
    put("sub/a.png")(folder)
    [bad] = read(write(folder / "a.csv", "image,caption\nsub\\a.png,a\n"))[1]
    assert "there is sub/a.png, and a path has slashes" in bad.fault.detail


def test_clips_that_begin_with_the_same_picture_are_two(folder: Path) -> None:
    rows = [["a.jpg", "b.jpg"], ["a.jpg", "c.jpg"], ["a.jpg", "b.jpg"], ["b.jpg"]]
    text = lines(*({"video": frames, "caption": str(at)} for at, frames in enumerate(rows)))
    ids = [record.id for record in read(write(folder / "a.jsonl", text), medium="clip")[0]]
    assert (ids[0], ids[2], ids[3]) == ("a.jpg", "a.jpg", "b.jpg")
    assert str(ids[1]).startswith("a.jpg#")
