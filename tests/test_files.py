"""Rows that are added, cut off, and lost without harm."""

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path

import pytest

from mm_utils.files import allow_open_files, append_rows, atomic_folder, truncate_rows, write_atomic


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


def test_an_atomic_write_that_fails_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "settings.json"
    write_atomic(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomic(path, "\ud800")
    assert path.read_text() == "old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    assert [file.name for file in tmp_path.iterdir()] == ["settings.json"]


def test_an_atomic_folder_appears_complete_or_not_at_all(tmp_path: Path) -> None:
    def fail() -> None:
        with atomic_folder(tmp_path / "cache" / "one") as folder:
            (folder / "part").write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert list((tmp_path / "cache").iterdir()) == []
    with atomic_folder(tmp_path / "cache" / "one") as folder:
        (folder / "part").write_text("whole")
        assert not (tmp_path / "cache" / "one").exists()
    with atomic_folder(tmp_path / "cache" / "one") as folder:
        (folder / "part").write_text("late")
    with (
        pytest.raises(ValueError, match=r"--output_dir is .*one; another run has written it"),
        atomic_folder(tmp_path / "cache" / "one", "--output_dir") as folder,
    ):
        (folder / "part").write_text("other")
    assert (tmp_path / "cache" / "one" / "part").read_text() == "whole"
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_what_a_killed_process_left_is_removed_and_what_one_writes_is_not(tmp_path: Path) -> None:
    (tmp_path / ".one-original").mkdir()  # not of ours
    (tmp_path / ".one-abcdefgh.unfinished").mkdir()
    (tmp_path / ".one[1]-abcdefgh.unfinished").mkdir()
    with atomic_folder(tmp_path / "one") as first, atomic_folder(tmp_path / "one") as second:
        assert first.is_dir()
        (second / "part").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {".one-original", ".one[1]-abcdefgh.unfinished", "one"}


@pytest.fixture
def open_files() -> Iterator[tuple[int, int]]:
    """The limit of open files, put back afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_the_limit_of_open_files_is_raised(open_files: tuple[int, int]) -> None:
    hard = open_files[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, hard))
    allow_open_files()
    raised = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert raised[0] > 512 or hard == 512
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == raised


def test_lines_after_the_resumed_step_and_torn_lines_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_rows(path, 3)
    assert not path.exists()
    rows = [{"step": step, "text": "\u2028é"} for step in (1, 2, 3, 4)]
    kept = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows[:3])
    path.write_bytes((kept + json.dumps(rows[3]) + '\n[1]\n{"step": "5"}\n{"st').encode() + b"\xff")
    truncate_rows(path, 3)
    assert path.read_text() == kept
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]
