"""Rows that are added, cut off, and lost without harm."""

import json
import logging
from pathlib import Path

import pytest

from mm_utils.jsonl import append_rows, truncate_rows


def test_what_is_appended_is_cut_at_a_step(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    append_rows(path, [{"step": 1, "loss": 2.0}, {"step": 2}])
    append_rows(path, [{"step": 3}])
    path.write_text(path.read_text() + '{"step": 2, "to')
    truncate_rows(path, 2)
    assert [json.loads(line) for line in path.read_text().splitlines()] == [{"step": 1, "loss": 2.0}, {"step": 2}]
    append_rows(path, [{"step": 3}])
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_full_disk_is_told_once_and_raises_nothing(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.ERROR):
        for step in range(3):
            append_rows(Path("/dev/full"), [{"step": step}])
    assert [record.getMessage() for record in caplog.records] == [
        "/dev/full cannot be written: No space left on device. Training goes on without it; make room"
    ]
