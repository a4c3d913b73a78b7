"""Nothing readable vanishes without a line, and one bad row, cell or column stops nothing; each rule has a table."""

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.paths import MOST_FILES, expand_braces
from mm_utils.extras.streams.rows import read_rows
from tests.kit.fault_images import grey
from tests.kit.reading import Source, content, lines, read, reasons, write, write_tar

Texts = list[tuple[str, str]]


def put(*names: str) -> Callable[[Path], None]:
    """Write files of these names: pictures, captions, tables and archives of one row each."""

    def build(root: Path) -> None:
        for at, name in enumerate(names):
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            if name.endswith(".parquet"):
                pq.write_table(pa.table({"image": [grey(at)], "caption": ["a"], "id": [name]}), path)
            elif name.endswith(".tar"):
                write_tar(path, [("a.png", grey(at)), ("a.txt", b"a")])
            else:
                path.write_bytes(b"a caption" if name.lower().endswith(".txt") else grey(at))

    return build


CLASSES = put("cat/0.png", "dog/0.png")
CAPTIONED = put("0.png", "0.txt", "dog/1.png", "dog/1.txt")
TABLES = put("0.parquet", "dog/1.parquet")
SHARDS = put("0.tar", "dog/1.tar")
LISTS = put("images/0.png", "images/dog/1.png", "captions/0.txt", "captions/dog/1.txt")


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `dog` cannot be listed, for anybody."""
    scan = os.scandir

    def refuse(path: Any = ".") -> Any:
        if Path(path).name == "dog":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", refuse)


FOLDERS = [  # how many folders are named dog, and whether a link in the place of one is entered
    (CLASSES, "classes", 1, False),
    (CAPTIONED, "imagefolder", 1, False),
    (TABLES, "parquet", 1, False),
    (SHARDS, "webdataset", 1, True),
    (LISTS, "parallel", 2, False),
]


@pytest.mark.parametrize(("build", "kind", "count", "_"), FOLDERS)
def test_a_folder_that_cannot_be_listed_is_a_bad_row(
    build: Callable[[Path], None], kind: str, count: int, _: bool, tmp_path: Path, closed: None
) -> None:
    build(tmp_path)
    good, found = read(tmp_path, format=kind)
    assert (len(good), reasons(found)) == (1, [("folder dog", "permission_denied")] * count)


@pytest.mark.parametrize(("build", "kind", "count", "entered"), FOLDERS)
def test_a_linked_folder_is_read_or_a_bad_row(
    build: Callable[[Path], None], kind: str, count: int, entered: bool, tmp_path: Path
) -> None:
    build(tmp_path / "set")
    for at, folder in enumerate(sorted((tmp_path / "set").rglob("dog"))):
        target = tmp_path / "set/elsewhere" / str(at) if entered else tmp_path / f"elsewhere {at}"
        target.parent.mkdir(exist_ok=True)
        folder.rename(target)
        folder.symlink_to(target)
    good, found = read(tmp_path / "set", format=kind)
    assert len({record.image.name for record in good}) == (3 if entered else 1)  # also where the link leads to
    assert reasons(found) == ([] if entered else [("folder dog", "linked_folder")] * count)


@pytest.mark.parametrize(
    ("build", "kind", "rows", "bad"),
    [
        (put("0.png", "0.TXT", "1.JPG", "1.Txt"), "imagefolder", 2, []),
        (put("0.png", "0.TXT"), "", 1, []),
        (put("0.png", "0.txt", "0.NEF", "x/1.cr2"), "imagefolder", 1, [
            ("folder .", "image_unknown_format"), ("folder x", "image_unknown_format")
        ]),
        (put("cat/0.png", "___/0.png"), "classes", 1, [("folder ___", "caption_empty")]),
    ],
)  # fmt: skip
def test_names_that_people_and_cameras_write(
    build: Callable[[Path], None], kind: str, rows: int, bad: Texts, tmp_path: Path
) -> None:
    build(tmp_path)
    good, found = read(tmp_path, format=kind)
    assert len(good) == rows
    assert [(where.replace(f"{tmp_path}/", ""), reason) for where, reason in reasons(found)] == bad


def samples(*keys: str) -> list[tuple[str, bytes]]:
    return [member for key in keys for member in ((f"{key}.png", grey(1)), (f"{key}.txt", b"a"))]


def archive(tmp_path: Path, *keys: str) -> bytes:
    return Path(write_tar(tmp_path / "part.tar", samples(*keys))).read_bytes()


@pytest.mark.parametrize(
    ("join", "keys", "bad"),
    [
        (lambda a, b: a + b, ["a", "b", "c", "d"], []),
        (lambda a, b: a + bytes(512 * 7) + b, ["a", "b", "c", "d"], []),
        (lambda a, b: a + b[:-2000] if len(b.rstrip(b"\0")) > len(b) - 2000 else a + b[:700], ["a", "b"], ["truncated_archive"]),
        (lambda a, b: a + b"garbage" * 100, ["a", "b"], ["truncated_archive"]),
    ],
)  # fmt: skip
def test_archives_that_follow_each_other_in_a_file_are_all_read(
    join: Callable[[bytes, bytes], bytes], keys: list[str], bad: list[str], tmp_path: Path
) -> None:
    joined = tmp_path / "both.tar"
    joined.write_bytes(join(archive(tmp_path, "a", "b"), archive(tmp_path, "c", "d")))
    good, found = read(joined)
    assert [record.where.rpartition(" ")[2] for record in good] == keys
    assert all(content(record) == grey(1) for record in good)
    assert [row.fault.reason for row in found] == bad
    if not bad:  # a stream reads the same rows, from any on
        rows = list(read_rows(str(joined), 3, Source(str(joined), medium="image")))
        assert [isinstance(row, dict) for row in rows] == [True]


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_a_compressed_archive_is_called_so(module: str, tmp_path: Path) -> None:
    compress = __import__(module).compress
    (tmp_path / "a.tar").write_bytes(compress(archive(tmp_path, "a")))
    assert [row.fault.reason for row in read(tmp_path / "a.tar")[1]] == ["compressed_archive"]


@pytest.mark.parametrize("pattern", ["{a,b}/*.tar", "a/0.tar {a,b}/{0..1}.tar", "a/[5-9].tar", "a/{0..3}.tar"])
def test_a_pattern_that_finds_less_than_it_says_is_refused(pattern: str, tmp_path: Path) -> None:
    put("a/0.tar", "a/1.tar")(tmp_path)
    with pytest.raises(ValueError, match="there is no "):
        read(tmp_path / pattern.rpartition(" ")[2], format="webdataset")
    assert len(read(tmp_path / "a/{0..1}.tar")[0]) == 2


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
