"""What SQLite adds: a format of sources, known by the names of files."""

SOURCES = {"sqlite": "mm_utils.extras.sqlite.rows.read_sqlite"}
SOURCE_SUFFIXES = dict.fromkeys((".sqlite", ".sqlite3", ".db"), "sqlite")
