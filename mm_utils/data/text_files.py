"""Rows of JSONL, JSON, CSV and TSV files, each with the number of its line."""

import csv
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")


def text_records(path: Path) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]]:
    """Give the unit that counts the rows, and the rows with their number."""
    if path.suffix.lower() in (".csv", ".tsv"):
        return "line", _as_utf8(path, _delimited_records(path))
    with path.open("rb") as file:
        is_array = file.read(4096).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
    return ("row", _as_utf8(path, _array_records(path))) if is_array else ("line", _as_utf8(path, _line_records(path)))


def _as_utf8(path: Path, records: Iterator[tuple[int, dict[str, Any]]]) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        yield from records
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}). Save it as UTF-8.") from error


def _line_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    with path.open(encoding="utf-8-sig") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                yield number, _json_row(text, f"{path}, line {number}")


def _array_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        items = json.loads(path.read_text(encoding="utf-8-sig"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}, line {error.lineno} is not valid JSON: {error}. Repair it.") from error
    for number, item in enumerate(items):
        yield number, _checked_row(item, f"{path}, row {number}")


def _json_row(text: str, where: str) -> dict[str, Any]:
    try:
        return _checked_row(json.loads(text), where)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not valid JSON: {error}. Repair or delete the line.") from error


def _checked_row(item: Any, where: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f"{where} is a JSON {type(item).__name__}; a row is an object. Repair or delete it.")
    return item


def _delimited_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    delimiter = "\t" if path.suffix.lower() == ".tsv" else ","
    with path.open(encoding="utf-8-sig", newline="") as file:
        # strict: else one forgotten quote swallows all lines up to the next quote, in silence.
        reader = csv.DictReader(file, delimiter=delimiter, strict=True)
        begin = 1
        try:
            names = reader.fieldnames or []
            twice = [name for at, name in enumerate(names) if name in names[:at]]
            if twice:
                raise ValueError(f"{path} has two columns {twice[0]}; only one can be read. Rename one.")
            for values in reader:
                begin = reader.line_num + 1
                # `line_num` is the row's last line; a cell may span several.
                yield reader.line_num - sum(str(value).count("\n") for value in values.values()), values
        except csv.Error as error:
            raise ValueError(
                f"{path}: the row that begins on line {begin} cannot be read: {error}. Quote a cell that holds a "
                "separator, a quote or a line break, and write a quote inside it twice."
            ) from error
