"""Rows of a SQLite table are those of the same rows in a file, with their bytes read by key; other files are named."""

import re
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.rows.sql import SqliteImage
from tests.kit.fault_images import grey
from tests.kit.reading import content, lines, read, reasons, write

ROWS = [(f"k{at}", f"{at}.png", f"caption {at}", "val" if at == 5 else None) for at in range(6)]


def database(path: Path, *tables: str, values: Any = ROWS, kind: str = "TEXT") -> Path:
    with sqlite3.connect(path) as made:
        for table in tables or ("pairs",):
            made.execute(f'CREATE TABLE "{table}" (id TEXT, image {kind}, caption TEXT, split TEXT)')
            made.executemany(f'INSERT INTO "{table}" VALUES (?, ?, ?, ?)', values)
    made.close()
    return path


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    for at in range(6):
        (tmp_path / f"{at}.png").write_bytes(grey(10 * at))
    return tmp_path


def test_paths_are_those_of_the_same_rows_in_a_file(pictures: Path) -> None:
    names = ("id", "image", "caption", "split")
    text = lines(*({key: value for key, value in zip(names, row, strict=True) if value} for row in ROWS))
    for of_table, of_file in zip(
        read(database(pictures / "a.db"))[0], read(write(pictures / "a.jsonl", text))[0], strict=True
    ):
        assert (of_table.id, of_table.image, of_table.captions, of_table.split) == (
            of_file.id, of_file.image, of_file.captions, of_file.split
        )  # fmt: skip


def test_bytes_are_read_by_key_and_not_before(tmp_path: Path) -> None:
    rows = [(f"k{at}", None if at == 3 else grey(10 * at), f"caption {at}", None) for at in range(5)]
    path = database(tmp_path / "a.sqlite", values=rows, kind="BLOB")
    good, bad = read(path)
    assert [record.id for record in good] == ["k0", "k1", "k2", "k4"]
    assert all(isinstance(record.image, SqliteImage) and len(repr(record)) < 1000 for record in good)
    assert [content(record) for record in reversed(good)] == [grey(10 * at) for at in (4, 2, 1, 0)]
    assert reasons(bad) == [("row 4", "image_empty")]


def test_training_reads_a_table_and_sees_that_it_changed(tmp_path: Path, own_cache: Path) -> None:
    rows = [(f"k{at}", grey(10 * at), f"caption {at}", None) for at in range(6)]
    path = database(tmp_path / "a.db", values=rows, kind="BLOB")
    pairs = load_pairs(DataArguments(train_file=str(path)))
    assert {name: len(split) for name, split in pairs.items()} == {"train": 5, "validation": 1}
    with sqlite3.connect(path) as made:
        made.execute("UPDATE pairs SET caption = 'another' WHERE id = 'k0'")
    made.close()
    again = load_pairs(DataArguments(train_file=str(path)))
    assert "another" in [caption for split in again.values() for row in split["captions"] for caption in row]


KEYS = {
    "plain": "(image BLOB, caption TEXT)",
    "a column rowid": "(rowid TEXT DEFAULT 'same', image BLOB, caption TEXT)",
    "columns RowId and oid": "(RowId INTEGER DEFAULT 2, oid TEXT DEFAULT 'a', image BLOB, caption TEXT)",
    "counted": "(number INTEGER PRIMARY KEY AUTOINCREMENT, image BLOB, caption TEXT)",
    "a generated caption": "(image BLOB, name TEXT, caption TEXT AS (name))",
}


@pytest.mark.parametrize("columns", KEYS.values(), ids=KEYS)
def test_each_caption_has_its_image_whatever_the_columns_are_called(columns: str, tmp_path: Path) -> None:
    caption = "name" if "AS (name)" in columns else "caption"
    with sqlite3.connect(tmp_path / "a.db") as made:
        made.execute(f"CREATE TABLE pairs {columns}")
        rows = [(grey(10 * at), f"caption {at}") for at in range(5)]
        made.executemany(f"INSERT INTO pairs (image, {caption}) VALUES (?, ?)", rows)
    made.close()
    assert [(content(record), record.captions[0]) for record in read(tmp_path / "a.db")[0]] == rows


def test_a_table_without_keys_of_rows_is_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as made:
        made.execute("CREATE TABLE pairs (image BLOB PRIMARY KEY, caption TEXT) WITHOUT ROWID")
    made.close()
    with pytest.raises(ValueError, match=r'its table "pairs" have no rowid\. Copy them'):
        read(tmp_path / "a.db")


def test_several_tables_and_other_files_are_named(tmp_path: Path) -> None:
    path = database(tmp_path / "a.db", "pairs", "odd-name", values=[])
    with pytest.raises(ValueError, match=r"its tables are pairs, odd-name\. Name one of them, by config=NAME"):
        read(path)
    assert read(path, config="odd-name") == ([], [])
    (tmp_path / "b.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"b\.db; it cannot be read as SQLite \(.*file is not a database\)"):
        read(tmp_path / "b.db")


def test_a_function_of_ones_own_reads_a_source(pictures: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[3] / "docs/data.md").read_text()
    [block] = [block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "def read_diary" in block]
    assert len(block.splitlines()) <= 20
    (pictures / "diary.py").write_text(block + "\n\ndef odd(source, paths):\n    yield 1\n")
    monkeypatch.syspath_prepend(str(pictures))
    file = write(pictures / "diary.txt", "0.png: a house\nno colon\n9.png: gone\n1.png: a street\n")
    good, bad = read(file, format="diary.read_diary")
    assert [(record.id, record.captions) for record in good] == [("0.png", ["a house"]), ("1.png", ["a street"])]
    assert reasons(bad) == [("line 2", "malformed_row"), ("line 3", "image_missing")]
    for name, message in (
        ("diary.odd", "it yields int. Yield Record or BadRow"),
        ("diary.no", "format has diary.no; module 'diary' has no attribute"),
    ):
        with pytest.raises(ValueError, match=message):
            read(file, format=name)
    with pytest.raises(ValueError, match=r"known are .*sqlite.*, and a function of your own as module.function"):
        read(file, format="diary")
