"""Rows of a SQLite table are those of the same rows in a file, with their bytes read by key; other files are named."""

import sqlite3
from pathlib import Path

import pytest

from mm_utils.data.rows.sql import SqliteImage
from tests.kit.fault_images import grey
from tests.kit.reading import content, read, reasons


def test_bytes_are_read_by_key_and_not_before(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.sqlite") as made:
        made.execute("CREATE TABLE pairs (id TEXT, image BLOB, caption TEXT)")
        rows = [(f"k{at}", None if at == 3 else grey(10 * at), f"caption {at}") for at in range(5)]
        made.executemany("INSERT INTO pairs VALUES (?, ?, ?)", rows)
    made.close()
    good, bad = read(tmp_path / "a.sqlite")
    assert [record.id for record in good] == ["k0", "k1", "k2", "k4"]
    assert all(isinstance(record.image, SqliteImage) and len(repr(record)) < 1000 for record in good)
    assert [content(record) for record in reversed(good)] == [grey(10 * at) for at in (4, 2, 1, 0)]
    assert reasons(bad) == [("row 4", "image_empty")]


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


def test_several_tables_those_without_keys_and_other_files_are_named(tmp_path: Path) -> None:
    with sqlite3.connect(tmp_path / "a.db") as made:
        made.execute("CREATE TABLE pairs (image BLOB PRIMARY KEY, caption TEXT) WITHOUT ROWID")
        made.execute('CREATE TABLE "odd-name" (image BLOB, caption TEXT)')
    made.close()
    with pytest.raises(ValueError, match=r"its tables are pairs, odd-name\. Name one of them, by config=NAME"):
        read(tmp_path / "a.db")
    assert read(tmp_path / "a.db", config="odd-name") == ([], [])
    with pytest.raises(ValueError, match=r"no such column: .*a table needs rowids"):
        read(tmp_path / "a.db", config="pairs")
    (tmp_path / "b.db").write_bytes(b"no database" * 1000)
    with pytest.raises(ValueError, match=r"b\.db; it cannot be read as SQLite \(.*file is not a database\)"):
        read(tmp_path / "b.db")
