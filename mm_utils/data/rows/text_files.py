"""Rows of JSONL, JSON, CSV and TSV by line number, and unreadable ones."""

import csv
import json
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TextIO

from mm_utils.data.faults import REASONS, Fault, first_repeated
from mm_utils.data.rows.columns import SUFFIXES
from mm_utils.text import shortened

TEXT_SUFFIXES = (".jsonl", ".json", ".csv", ".tsv")
DEEPEST = 32  # lists and objects in each other in a row; other processes get it, and fail at some hundreds
LONGEST_LINE = 16 << 20  # characters
LONGEST_DOCUMENT = 1 << 30  # bytes of JSON that is parsed whole; COCO's captions have 0.1 GB
_LONGEST_HEADER = 1 << 16  # characters that decide about the delimiter
_COMMAS = re.compile(r"\s*,\s*\n[^\n]*,\s*\n")  # behind an object and the line after it
_UNDECODED = re.compile("[\udc80-\udcff]")  # what errors="surrogateescape" makes of bytes that are not UTF-8
_EXCEL = re.compile(r"sep=(.)\s*")  # a first line by which Excel tells the separator
_MEDIA = tuple(suffix for suffixes in SUFFIXES.values() for suffix in suffixes)


Values = dict[str, Any]
"""Of a row, by column."""
Rows = Iterator[tuple[str, Values | Fault]]
"""The place of each row in its file, such as "line 12", and its values by column, or why there are none."""


def text_rows(path: Path, kind: str | None = None) -> Rows:
    """Return the rows of a text file.

    Blank lines are skipped. A file in UTF-16, and a JSON array that does not parse, is one fault. `kind` is a suffix of
    `TEXT_SUFFIXES`, by default the file's own.
    """
    kind = (kind or path.suffix).lower()
    with path.open("rb") as file:
        head = file.read(4096)
    if is_wide(head):
        return iter([("line 1", Fault("bad_encoding", "UTF-16 or UTF-32 text", str(head[:40])))])
    if kind in (".csv", ".tsv"):
        return _delimited_records(path, _delimiter(path, kind))
    if head.decode("utf-8-sig", "replace").lstrip().startswith("["):
        return _array_records(path)
    _check_lines(path)
    return _line_records(path)


def _check_lines(path: Path) -> None:
    """Raise ValueError if a file of JSON is one object that holds the rows, or objects over several lines or divided by commas."""
    lines = read_lines(path)
    first = next(lines, "{}")
    rest = ""
    try:
        item = json.loads(first)
        if any(map(str.strip, lines)):
            return
    except (ValueError, RecursionError):
        if not first.startswith("{"):
            return
        try:
            text = read_document(path).lstrip()
            item, end = json.JSONDecoder().raw_decode(text)
        except (ValueError, RecursionError):  # a Fault, too
            return
        rest = text[end:].strip()
        if _COMMAS.match(text, end) or (rest and "\n" in text[:end]):
            raise ValueError(
                f"{path}: its objects extend over several lines, or are divided by commas. Write one object a line, or a list."
            ) from None
    if rest or not isinstance(item, dict):
        return
    lists = [name for name, value in item.items() if _is_rows(value)]
    if file := next((name for name in item if name.lower().endswith(_MEDIA)), None):
        raise ValueError(
            f"{path} holds one object with a key for every file, such as {shortened(file)}. Write a row for each: "
            '{"image": "a.jpg", "captions": ["a dog"]}, one a line.'
        )
    if set(lists) - {"regions", "moments"} and not any(isinstance(value, str) for value in item.values()):
        raise ValueError(
            f"{path} holds one object, with rows in {', '.join(map(shortened, lists))}. Write each list to a file of its own, whose name "
            "may begin with a split's, such as train.json."
        )
    if not first.rstrip().endswith("}"):
        names = ", ".join(map(shortened, [*item][:5]))
        raise ValueError(
            f"{path} holds one object with {names} over several lines. Write rows: one object a line, or a list."
        )


def _is_rows(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(each, dict) for each in value)


def _open(path: Path, newline: str | None = None) -> TextIO:
    """Open a text file as UTF-8, with or without a mark; `check_line` finds other bytes."""
    return path.open(encoding="utf-8-sig", errors="surrogateescape", newline=newline)


def read_lines(path: Path, newline: str | None = None) -> Iterator[str]:
    """Yield the lines of a file; of one that `check_line` refuses as too long, its beginning."""
    with _open(path, newline) as file:
        while line := file.readline(LONGEST_LINE + 1):  # one character more tells a line that is too long
            yield line
            while len(line) > LONGEST_LINE and line[-1] not in "\r\n":
                line = file.readline(LONGEST_LINE + 1)


def read_document(path: Path) -> str:
    """Return the text of a file that is parsed whole; raises bad_encoding or malformed_row."""
    if (size := path.stat().st_size) > LONGEST_DOCUMENT:
        most = f"{LONGEST_DOCUMENT:,} is the most; write one object a line (JSONL)"
        raise Fault("malformed_row", f"a JSON document of {size:,} bytes, and {most}")
    with path.open("rb") as head:
        if is_wide(head.read(4096)):
            raise Fault("bad_encoding", "UTF-16 or UTF-32 text")
    with _open(path) as file:
        text = file.read()
    check_line(text, len(text))
    return text


def lines_of(text: str) -> list[str]:
    """Return the captions of a text, one a line; an empty one if there is none."""
    return list(filter(None, map(str.strip, text.splitlines()))) or [""]


def check_line(text: str, longest: int = 0) -> None:
    """Raise malformed_row if a line of `read_lines` is too long, bad_encoding if it held bytes that are not UTF-8."""
    if len(text) > (longest or LONGEST_LINE):
        raise Fault("malformed_row", f"a line of more than {LONGEST_LINE:,} characters")
    if not text.isascii() and (found := _UNDECODED.search(text)) is not None:
        at = len(text[: found.start()].encode("utf-8", "surrogateescape"))
        raise Fault("bad_encoding", f"not UTF-8 text: byte {at + 1} of the line")


def is_wide(head: bytes) -> bool:
    """Return whether the beginning of a file is that of UTF-16 or UTF-32, by its mark or its many zeros."""
    # English in UTF-16 is half zeros; an empty file is none
    return head.startswith((b"\xff\xfe", b"\xfe\xff")) or head.count(0) > 0.3 * len(head) > 0


def parse_json(text: str) -> Any:
    """Parse JSON; raise malformed_row or too_nested. An object with a repeated key has it as the value of None."""
    try:
        return json.loads(text, object_pairs_hook=_object)
    except RecursionError as error:
        raise Fault("too_nested", "not readable JSON: it is nested too deeply") from error
    except ValueError as error:  # JSONDecodeError, or a number of more than 4300 digits
        raise Fault("malformed_row", f"not valid JSON: {error}") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[Any, Any]:
    item: dict[Any, Any] = dict(pairs)
    if len(item) < len(pairs):
        item[None] = first_repeated(name for name, _ in pairs)  # for `checked_object`, which knows the row
    return item


def checked_object(item: Any) -> Values:
    """Return a JSON object without repeated keys; raise not_an_object, duplicate_key or too_nested."""
    if not isinstance(item, dict):
        raise Fault("not_an_object", f"a JSON {type(item).__name__}; a row is an object")
    if None in item:
        raise Fault("duplicate_key", f"an object that has the key '{shortened(item[None])}' twice")
    level: list[Any] = [item]
    for _ in range(DEEPEST):
        level = [value for each in level for value in (each.values() if isinstance(each, dict) else each)]
        level = [value for value in level if isinstance(value, (dict, list))]
        if not level:
            return item
    raise Fault("too_nested", f"an object that is nested more than {DEEPEST} deep")


def made_rows(unit: str, items: Iterable[tuple[Any, Any]], make: Callable[[Any], Values]) -> Rows:
    """Make a row of each numbered item; `make` raises the fault of one that is none."""
    for number, item in items:
        try:
            row: Values | Fault = make(item)
        except Fault as fault:
            row = fault
            fault.raw = "" if fault.reason == "too_nested" else str(item)
        yield f"{unit} {number}", row


def _line_records(path: Path) -> Rows:
    def make(text: str) -> Values:
        check_line(text)
        return checked_object(parse_json(text))

    lines = enumerate(read_lines(path), start=1)
    return made_rows("line", ((number, text) for number, text in lines if text.strip()), make)


def _array_records(path: Path) -> Rows:
    try:
        items = parse_json(read_document(path))
    except Fault as fault:
        cause = fault.__cause__
        line, fault.raw = (cause.lineno, cause.doc[:1000]) if isinstance(cause, json.JSONDecodeError) else (1, "")
        return iter([(f"line {line}", fault)])
    return made_rows("row", enumerate(items), checked_object)


def _delimited_records(path: Path, delimiter: str) -> Rows:
    names: list[str] = []
    for number, cells in _delimited_rows(path, delimiter):
        if isinstance(cells, Fault):
            if not names:
                raise ValueError(f"{path}, line {number} is {cells.detail}. {REASONS[cells.reason]}") from cells
            yield f"line {number}", cells
        elif names and cells:
            # the columns that a short row lacks are null
            row: dict[Any, Any] = {**dict.fromkeys(names), **dict(zip(names, cells, strict=False))}
            row.pop("", None)  # a column without a name, such as the index that pandas writes
            if len(cells) > len(names):
                row[None] = cells[len(names) :]  # as `csv.DictReader` has it
            yield f"line {number}", row
        elif not names and cells != ["sep=", ""]:  # Excel's line, see `_delimiter`
            names = cells
            if file := next((name for name in names if name.lower().endswith(_MEDIA)), None):
                raise ValueError(
                    f"{path}, line {number} has {shortened(file)} where the name of a column belongs. Write a first line of names, such as "
                    "image,caption."
                )
            if (twice := first_repeated(filter(None, names))) is not None:
                raise ValueError(f"{path} has two columns {shortened(twice)}; only one can be read. Rename one.")


def _delimited_rows(path: Path, delimiter: str) -> Iterator[tuple[int, list[str] | Fault]]:
    """Yield the cells of every row, with the number of its first line."""
    csv.field_size_limit(LONGEST_LINE)  # of Python's 131,072; a cell may hold a web page
    lines = read_lines(path, newline="")
    again = deque[str]()
    begin = 1
    taken = list[str]()  # the number of the first line of a row, and its lines

    def feed() -> Iterator[str]:
        while line := again.popleft() if again else next(lines, ""):
            taken.append(line)
            yield line

    reader = None
    while True:
        # strict: else one forgotten quote swallows all lines up to the next quote, without an error.
        reader = reader or csv.reader(feed(), delimiter=delimiter, strict=True)
        try:
            cells = next(reader, None)
            check_line("".join(taken))
            if cells is None:
                return
            yield begin, cells
        except (csv.Error, Fault) as error:
            advice = "quote cells with separators, quotes or line breaks, and write a quote inside twice"
            told = Fault("malformed_row", f"a row that cannot be read: {error}; {advice}")
            fault = error if isinstance(error, Fault) else told
            reader = None
            fault.raw = taken[0]
            yield begin, fault
            if fault.reason != "bad_encoding":  # only the first line is lost, and the others are read again
                again.extendleft(reversed(taken[1:]))
                del taken[1:]
        begin += len(taken)
        taken.clear()


def _delimiter(path: Path, kind: str) -> str:
    """Return the sign that divides the header into most cells; of equals the usual one."""
    header = next((line for line in read_lines(path, newline="") if line.strip()), "")[:_LONGEST_HEADER]
    if found := _EXCEL.fullmatch(header):
        return found[1]
    signs = "\t,;|" if kind == ".tsv" else ",;\t|"
    cells = {sign: len(next(csv.reader([header], delimiter=sign), [])) for sign in signs}
    return max(cells, key=cells.__getitem__)
