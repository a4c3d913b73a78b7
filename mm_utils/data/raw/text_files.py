"""Rows of JSONL, JSON, CSV and TSV files, each with the number of its line, and the rows that cannot be read.

There is one parser for both readers: training stops at a `BadLine`, the preparation of a data set writes it down.
"""

import csv
import json
import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from mm_utils.data.raw.faults import Fault

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
_UNDECODED = re.compile("[\udc80-\udcff]")  # what errors="surrogateescape" makes of bytes that are no UTF-8
_EXCERPT = 200


@dataclass(slots=True)
class BadLine:
    """A row that cannot be read: why, the begin of its text, and for a person the whole story in one line."""

    fault: Fault
    raw: str
    message: str


Rows = Iterator[tuple[int, dict[str, Any] | BadLine]]


class RepeatedKeys(dict[str, Any]):
    """A JSON object that has the key `key` twice."""

    key: str


def text_records(path: Path, kind: str | None = None) -> tuple[str, Rows]:
    """Give the unit that counts the rows, and the rows with their number.

    `kind` is a suffix of `TEXT_SUFFIXES`, by default the file's own. Blank lines are no rows. A file in UTF-16, and a JSON array that does not parse, is one bad line.
    """
    kind = (kind or path.suffix).lower()
    with path.open("rb") as file:
        head = file.read(4096)
    if is_utf16(head):
        fault = Fault("bad_encoding", "the file is UTF-16 text; save it as UTF-8")
        return "line", iter(
            [(1, BadLine(fault, excerpt(str(head[:40])), f"{path} is UTF-16 text. Save it as UTF-8."))]
        )
    if kind in (".csv", ".tsv"):
        return "line", _delimited_records(path, "\t" if kind == ".tsv" else ",")
    array = is_array(head.decode("utf-8-sig", "replace"))
    return ("row", _array_records(path)) if array else ("line", _line_records(path))


def open_lines(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file as UTF-8, with or without a byte order mark; `check_line` then finds what was no UTF-8."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def check_line(text: str) -> None:
    """Raise bad_encoding if a line of `open_lines` held bytes that are no UTF-8."""
    found = None if text.isascii() else _UNDECODED.search(text)
    if found is not None:
        at = len(text[: found.start()].encode("utf-8", "surrogateescape"))
        raise Fault("bad_encoding", f"byte {at + 1} of the line is not UTF-8 text")


def is_utf16(head: bytes) -> bool:
    """Whether a file that begins so is UTF-16 text: by its byte order mark, or as every second byte of it is zero."""
    half = len(head) // 2
    zeros = max(head[0::2].count(0), head[1::2].count(0))
    return head[:2] in (b"\xff\xfe", b"\xfe\xff") or (half > 1 and zeros > 0.8 * half)


def is_array(head: str) -> bool:
    """Whether JSON that begins so is one array, and not lines of which the first is a list by mistake."""
    text = head.lstrip()
    first, _, rest = text.partition("\n")
    if not text.startswith("[") or not rest.strip():
        return text.startswith("[")
    try:
        parse_json(first)
    except Fault:
        return True
    return False


def excerpt(text: str) -> str:
    """The begin of a text with control characters, line breaks and lone surrogates escaped; at most 200 characters."""
    return repr(text[:_EXCERPT])[1:-1][:_EXCERPT]


def parse_json(text: str) -> Any:
    """Parse JSON; an object with a key twice becomes `RepeatedKeys`. Raises malformed_row or too_nested."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise Fault("too_nested", "not readable JSON: it is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, or a number of more than 4300 digits
        raise Fault("malformed_row", f"not valid JSON: {error}") from error


def checked_object(item: Any) -> dict[str, Any]:
    """Give `item` if it is a JSON object without repeated keys; raises not_an_object or duplicate_key."""
    if not isinstance(item, dict):
        raise Fault("not_an_object", f"a JSON {type(item).__name__}; a row is an object")
    if isinstance(item, RepeatedKeys):
        raise Fault("duplicate_key", f"an object that has the key '{item.key}' twice")
    return item


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    item = dict(pairs)
    if len(item) == len(pairs):
        return item
    repeated = RepeatedKeys(item)
    names = [name for name, _ in pairs]
    repeated.key = next(name for at, name in enumerate(names) if name in names[:at])
    return repeated


def _line_records(path: Path) -> Rows:
    with open_lines(path) as file:
        for number, text in enumerate(file, start=1):
            if not text.strip():
                continue
            try:
                check_line(text)
                yield number, checked_object(parse_json(text))
            except Fault as fault:
                yield number, _bad_line(fault, text, path, number)


def _bad_line(fault: Fault, text: str, path: Path, number: int) -> BadLine:
    if fault.reason == "bad_encoding":
        message = f"{path} is not UTF-8 text (line {number}: {fault.detail}). Save it as UTF-8."
    else:
        message = f"{path}, line {number} is {fault.detail}. Repair or delete the line."
    if not text.endswith("\n"):
        fault = Fault(fault.reason, f"{fault.detail}; the file ends in this line, cut or still being written")
    return BadLine(fault, excerpt(text), message)


def _array_records(path: Path) -> Rows:
    with open_lines(path) as file:
        text = file.read()
    try:
        check_line(text)
        items = parse_json(text)
    except Fault as fault:
        cause = fault.__cause__
        line = cause.lineno if isinstance(cause, json.JSONDecodeError) else 1
        if fault.reason == "bad_encoding":
            message = f"{path} is not UTF-8 text. Save it as UTF-8."
        else:
            message = f"{path}, line {line} is {fault.detail}. Repair it."
        yield line, BadLine(fault, excerpt(text), message)
        return
    for number, item in enumerate(items):
        try:
            yield number, checked_object(item)
        except Fault as fault:
            message = f"{path}, row {number} is {fault.detail}. Repair or delete it."
            yield number, BadLine(fault, excerpt(str(item)), message)


class _Lines:
    """The lines of a file for `csv`, which can be read again from the second line of a row that went wrong."""

    def __init__(self, file: TextIO) -> None:
        self._file, self._again = file, deque[str]()
        self.begin, self.taken = 1, list[str]()

    def __iter__(self) -> "_Lines":
        return self

    def __next__(self) -> str:
        line = self._again.popleft() if self._again else next(self._file)
        self.taken.append(line)
        return line

    def finish_row(self) -> None:
        self.begin += len(self.taken)
        self.taken.clear()

    def finish_line(self) -> None:
        self._again.extendleft(reversed(self.taken[1:]))
        del self.taken[1:]
        self.finish_row()


def _delimited_records(path: Path, delimiter: str) -> Rows:
    with open_lines(path, newline="") as file:
        lines = _Lines(file)
        # strict: else one forgotten quote swallows all lines up to the next quote, in silence.
        reader = csv.reader(lines, delimiter=delimiter, strict=True)
        names: list[str] | None = None
        while True:
            try:
                cells = next(reader, None)
                check_line("".join(lines.taken))
            except csv.Error as error:
                if names is None:
                    raise ValueError(_csv_message(path, lines.begin, error)) from error
                fault = Fault("malformed_row", f"the row that begins here cannot be read: {error}")
                yield lines.begin, BadLine(fault, excerpt(lines.taken[0]), _csv_message(path, lines.begin, error))
                lines.finish_line()
                reader = csv.reader(lines, delimiter=delimiter, strict=True)
                continue
            except Fault as fault:
                bad = _bad_line(fault, lines.taken[0], path, lines.begin)
                if names is None:
                    raise ValueError(bad.message) from fault
                yield lines.begin, bad
                lines.finish_row()
                continue
            if cells is None:
                return
            if names is None and cells:
                names = _header(cells, path)
            elif names is not None and cells:
                yield lines.begin, _as_dict(names, cells)
            lines.finish_row()


def _header(cells: list[str], path: Path) -> list[str]:
    twice = [name for at, name in enumerate(cells) if name in cells[:at]]
    if twice:
        raise ValueError(f"{path} has two columns {twice[0]}; only one can be read. Rename one.")
    return cells


def _as_dict(names: list[str], cells: list[str]) -> dict[Any, Any]:
    """As `csv.DictReader` does: missing cells are None, cells too many are a list below the key None."""
    row: dict[Any, Any] = dict.fromkeys(names)
    row.update(zip(names, cells, strict=False))
    if len(cells) > len(names):
        row[None] = cells[len(names) :]
    return row


def _csv_message(path: Path, line: int, error: csv.Error) -> str:
    return (
        f"{path}: the row that begins on line {line} cannot be read: {error}. Quote a cell that holds a separator, a "
        "quote or a line break, and write a quote inside it twice."
    )
