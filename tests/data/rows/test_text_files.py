"""One parser for good and bad lines: every bad one is named, and takes no other with it."""

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data.rows import text_files
from mm_utils.data.rows.text_files import BadLine, text_records


def read(path: Path, content: bytes | str) -> list[tuple[int, Any]]:
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return list(text_records(path)[1])


def faults(rows: list[tuple[int, Any]]) -> dict[int, str]:
    return {number: row.fault.reason for number, row in rows if isinstance(row, BadLine)}


def test_the_byte_that_is_not_utf8_is_counted(tmp_path: Path) -> None:
    ((_, bad),) = read(tmp_path / "p.jsonl", 'é"'.encode() + b"\xff\n")
    assert "byte 4 " in bad.fault.detail


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_line_ends_and_a_byte_order_mark_change_nothing(tmp_path: Path, line_end: str, mark: str) -> None:
    text = mark + line_end.join(['{"n": "ä"}', "", " ", '{"n": 4}', ""])
    assert read(tmp_path / "p.jsonl", text) == [(1, {"n": "ä"}), (4, {"n": 4})]
    table = mark + line_end.join(["n,m", "1,ä", "", "2,b", ""])
    assert read(tmp_path / "p.csv", table) == [(2, {"n": "1", "m": "ä"}), (4, {"n": "2", "m": "b"})]


BAD_CSV = [
    ('n,m\n1,a\n2,"b\n3,c\n4,"d, e"\n5,f\n', {3}, [1, 3, 4, 5]),
    ('n,m\n1,a\n2,"b\n3,c\n', {3}, [1, 3]),
    ('n,m\n1,"a\nb"\n2,"c" d\n3,e\n', {4}, [1, 3]),
    ('n,m\n1,"' + "x" * 200_000 + '"\n2,b\n', {2}, [2]),
    ("n,m\n1,a\n2,\udcff\n3,c\n", {3}, [1, 3]),
]


@pytest.mark.parametrize(("text", "bad", "good"), BAD_CSV, ids=range(len(BAD_CSV)))
def test_a_bad_csv_row_costs_one_line(tmp_path: Path, text: str, bad: set[int], good: list[int]) -> None:
    rows = read(tmp_path / "p.csv", text.encode("utf-8", "surrogateescape"))
    assert set(faults(rows)) == bad
    assert [int(row["n"]) for _, row in rows if isinstance(row, dict)] == good


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=5)] * 2), max_size=6),
    tabs=st.booleans(),
)
def test_csv_is_read_as_the_standard_library_does(tmp_path: Path, cells: list[tuple[str, str]], tabs: bool) -> None:
    delimiter = "\t" if tabs else ","
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("n", "m"), *cells])
    expected = list(csv.DictReader(io.StringIO(text.getvalue(), newline=""), delimiter=delimiter, strict=True))
    rows = read(tmp_path / ("p.tsv" if tabs else "p.csv"), text.getvalue())
    assert [row for _, row in rows] == expected


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.one_of(st.none(), st.text(max_size=5)), max_size=9))
def test_bad_lines_among_good_ones_are_exactly_those(tmp_path: Path, texts: list[str | None]) -> None:
    rows = [None if text is None else {"caption": text} for text in texts]
    text = "".join(("{broken" if row is None else json.dumps(row)) + "\n" for row in rows)
    found = read(tmp_path / "p.jsonl", text)
    assert set(faults(found)) == {number for number, row in enumerate(rows, 1) if row is None}
    assert [row for _, row in found if isinstance(row, dict)] == [row for row in rows if row is not None]


@pytest.mark.parametrize("suffix", [".jsonl", ".csv"])
def test_a_very_long_line_is_a_fault_that_takes_no_memory(
    suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    good, long = ('{"n": 1}', f'{{"n": "{"x" * 5000}"}}') if suffix == ".jsonl" else ("1", "x" * 5000)
    header = [] if suffix == ".jsonl" else ["n"]
    rows = read(tmp_path / f"p{suffix}", "\n".join([*header, good, long, "", good, ""]))
    assert faults(rows) == {2 + len(header): "malformed_row"}
    assert [str(row["n"]) for _, row in rows if isinstance(row, dict)] == ["1", "1"]
    [bad] = [row for _, row in rows if isinstance(row, BadLine)]
    assert bad.fault.detail == "a line of more than 1,000 characters"
    assert len(bad.text) == 1001


def test_a_very_large_document_is_a_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", 30)
    assert not faults(read(tmp_path / "p.json", '[{"n": 0}]'))
    rows = read(tmp_path / "p.json", '[{"n": 0}, {"n": 1}, {"n": 2}, {}]')
    assert faults(rows) == {1: "malformed_row"}
    assert "write one object a line" in rows[0][1].fault.detail


@pytest.mark.parametrize("sign", [",", ";", "\t", "|"])
@pytest.mark.parametrize("suffix", [".csv", ".tsv"])
def test_the_header_decides_about_the_delimiter(
    sign: str, suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Spreadsheets of half of Europe write semicolons."""
    caplog.set_level("INFO", "mm_utils")
    text = f"Bild{sign}Titel\n1.png{sign}a dog, a cat; a | and a bird\n".replace(", a" if sign == "," else "\0", " a")
    text = text.replace("; a", " a") if sign == ";" else text.replace("| and", "and") if sign == "|" else text
    [(number, row)] = read(tmp_path / f"p{suffix}", text)
    assert (number, list(row)) == (2, ["Bild", "Titel"])
    said = [record.getMessage() for record in caplog.records]
    usual = sign == ("," if suffix == ".csv" else "\t")
    assert said == ([] if usual else [f"{tmp_path / f'p{suffix}'}: its cells are separated by {sign!r}"])
