"""Rows of a SQLite table: captions, with the paths of images or with their bytes, which are read by key when needed."""

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import suppress
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
    """A cell of `size` bytes in the row of a key."""

    path: str
    query: str
    key: int
    size: int

    def read(self, limits: Limits) -> bytes:
        """Read the cell alone."""
        try:
            row = _open(self.path, os.getpid()).execute(self.query, (self.key,)).fetchone()
        except sqlite3.Error as error:
            raise Fault("read_error", f"{self.name}: {one_line(error)}") from error
        return checked_bytes(row and row[0], self.name, limits)


def read_sqlite(source: Source, safety: PathArguments) -> Iterator[Record | BadRow]:
    """Read the only table of a database, or the one that `config` names."""
    builder = RecordBuilder(source, safety, Path(source.path).parent)
    try:
        database = _open(os.path.abspath(source.path), os.getpid())
        found = database.execute("SELECT name FROM sqlite_master WHERE type = 'table'").fetchall()
        tables = [
            name for (name,) in found if not name.startswith("sqlite_")
        ]  # of SQLite itself: AUTOINCREMENT, ANALYZE
        if source.config not in tables and (source.config or len(tables) != 1):
            raise ValueError(
                f"{source.title}; its tables are {', '.join(tables) or 'none'}. Name one of them, by config=NAME."
            )
        yield from records_of(_table(database, _quoted(source.config or tables[0]), builder), builder)
    except sqlite3.Error as error:
        raise ValueError(
            f"{source.title}; it cannot be read as SQLite ({one_line(error)}). Check the file."
        ) from error


def _table(database: sqlite3.Connection, table: str, builder: RecordBuilder) -> Table:
    path, names = (
        os.path.abspath(builder.source.path),
        [row[1] for row in database.execute(f"PRAGMA table_xinfo({table})") if row[6] != 1],  # generated ones, too
    )
    columns = find_columns(names, builder.source.title, builder.source.columns)
    image = "NULL" if columns.image is None else _quoted(columns.image)
    key_name = _key_of(database, table, names, builder.source.title)
    cells = [
        f"iif(typeof({image}) = 'blob', length({image}), {name})" if name == image else name
        for name in map(_quoted, names)
    ]

    def rows() -> Rows:
        for key, is_file, *found in database.execute(
            f"SELECT {key_name}, typeof({image}), {', '.join(cells)} FROM {table} ORDER BY {key_name}"
        ):
            values = dict(zip(names, found, strict=True))
            if is_file == "blob":
                query, size = f"SELECT {image} FROM {table} WHERE {key_name} = ?", values[str(columns.image)]
                values[str(columns.image)] = SqliteImage(f"{path}, row {key}", path, query, key, size)
            yield key, values

    return Table("row", columns, rows(), builder.jail)


def _key_of(database: sqlite3.Connection, table: str, names: Sequence[str], title: str) -> str:
    """Return the name of SQLite's own key of the rows, which a column of that name hides.

    Raises:
        ValueError: if the table has no such key.
    """
    columns = {name.lower() for name in names}
    key = next((name for name in ("rowid", "_rowid_", "oid") if name not in columns), None)
    with suppress(sqlite3.OperationalError):
        if key is not None:
            database.execute(f"SELECT {key} FROM {table} LIMIT 0")
            return key
    raise ValueError(
        f"{title}; the rows of its table {table} have no rowid. Copy them, CREATE TABLE pairs AS SELECT * FROM {table}, and name "
        "the copy by config=pairs."
    )


def _quoted(name: str) -> str:
    return '"{}"'.format(name.replace('"', '""'))


@lru_cache(maxsize=4)
def _open(path: str, process: int) -> sqlite3.Connection:
    """Open a database for reading, in each process anew."""
    database = sqlite3.connect(f"{Path(path).as_uri()}?mode=ro", uri=True, check_same_thread=False)
    database.text_factory = lambda text: text.decode("utf-8", "surrogateescape")
    return database
