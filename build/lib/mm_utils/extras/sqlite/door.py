"""What SQLite adds: a format of sources, known by the names of files."""

SOURCES = {"sqlite": "mm_utils.extras.sqlite.rows.read_sqlite"}
COUNTS = {"sqlite": "mm_utils.extras.sqlite.rows.count_rows"}
"""What counts the rows of a source; its reader takes the first row too, so that streams read parts of it."""
SOURCE_SUFFIXES = dict.fromkeys((".sqlite", ".sqlite3", ".db"), "sqlite")
