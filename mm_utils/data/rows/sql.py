"""Rows of a SQLite table: captions, with the paths of images or with their bytes, which are read by key when needed."""

import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from mm_utils.data.faults import Fault
from mm_utils.data.paths import Limits
from mm_utils.data.rows.columns import find_columns
from mm_utils.data.rows.records import BadRow, ImageRef, Record, RecordBuilder, checked_bytes
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.tables import Table, records_of
from mm_utils.data.rows.text_files import Rows
from mm_utils.text import one_line


@dataclass(frozen=True, slots=True)
class SqliteImage(ImageRef):
    """A cell in the row of a key."""

    path: str
    query: str
    key: int

    def read(self, limits: Limits) -> bytes:
        """Read the cell alone."""
        try:
            row = _open(self.path, os.getpid()).execute(self.query, (self.key,)).fetchone()
        except sqlite3.Error as error:
            raise Fault("read_error", f"{self.name}: {one_line(error)}") from error
        return checked_bytes(row and row[0], self.name, limits)


def read_sqlite(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read the only table of a database, or the one that `config` names."""
    builder, path = RecordBuilder(source, safety), os.path.abspath(source.path)
    try:
        database = _open(path, os.getpid())
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = [name for (name,) in found if not name.startswith("sqlite_")]  # of AUTOINCREMENT, ANALYZE
        if source.config not in tables and (source.config or len(tables) != 1):
            raise ValueError(
                f"{source.title}; its tables are {', '.join(tables) or 'none'}. Name one of them, by config=NAME."
            )
        table = _quoted(source.config or tables[0])
        names = [
            row[1] for row in database.execute(f"PRAGMA table_xinfo({table})") if row[6] != 1
        ]  # generated ones, too
        columns = find_columns(names, source.title, source.columns)
        image = "NULL" if columns.image is None else _quoted(columns.image)
        hidden = {name.lower() for name in names}  # a column of that name hides SQLite's own key
        key_name = next((name for name in ("rowid", "_rowid_", "oid") if name not in hidden), "rowid")
        path_only = f"iif(typeof({image}) = 'blob', NULL, {image})"
        cells = [path_only if cell == image else cell for cell in map(_quoted, names)]

        def rows() -> Rows:
            query = f"SELECT {key_name}, typeof({image}), {', '.join(cells)} FROM {table} ORDER BY {key_name}"
            for key, kind, *row in database.execute(query):
                values = dict(zip(names, row, strict=True))
                if kind == "blob":
                    cell = f"SELECT {image} FROM {table} WHERE {key_name} = ?"
                    values[str(columns.image)] = SqliteImage(f"{path}, row {key}", path, cell, key)
                yield key, values

        yield from records_of(Table("row", columns, rows(), builder.jail), builder)
    except sqlite3.Error as error:
        raise ValueError(
            f"{source.title}; it cannot be read as SQLite ({one_line(error)}). Check the file; a table needs rowids."
        ) from error


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


@lru_cache(maxsize=4)
def _open(path: str, process: int) -> sqlite3.Connection:
    """Open a database for reading, in each process anew."""
    database = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, check_same_thread=False)
    database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return database
