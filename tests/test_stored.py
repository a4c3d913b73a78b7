"""Files, folders and stored results: written whole or not at all, made once, by one process, and anew when they are damaged."""

import json
import logging
import os
import signal
import time
from pathlib import Path

import datasets
import pytest

from mm_utils.files import append_rows, atomic_folder, replace_folder, restore_folder, truncate_rows, write_atomic
from mm_utils.stored import key_of, open_rows, place_of, stamp, stored, version_of
from tests.kit.processes import wait_until

# -- files and folders --------------------------------------------------------------------------------------------------


def test_lines_after_the_resumed_step_and_torn_lines_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    truncate_rows(path, 3)
    assert not path.exists()
    rows = [{"step": step, "text": "\u2028é"} for step in (1, 2, 3, 4)]
    append_rows(path, rows[:2])
    append_rows(path, rows[2:])
    kept = "".join(json.dumps(row) + "\n" for row in rows[:3])
    path.write_bytes(path.read_bytes() + b'[1]\n{"step": "5"}\n{"st\xff')
    truncate_rows(path, 3)
    assert path.read_text() == kept
    assert [each.name for each in tmp_path.iterdir()] == ["metrics.jsonl"]


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
    folder = tmp_path / "cache" / "one"

    def write(text, flag=None):
        with atomic_folder(folder, flag) as work:
            (work / "part").write_text(text)
            assert text == "late" or not folder.exists()
            if text == "half":
                raise KeyError

    with pytest.raises(KeyError):
        write("half")
    assert list((tmp_path / "cache").iterdir()) == []
    write("whole")
    write("late")
    with pytest.raises(ValueError, match=r"--output_dir is .*one; another run has written it"):
        write("late", "--output_dir")
    assert (folder / "part").read_text() == "whole"
    assert list((tmp_path / "cache").iterdir()) == [folder]


def test_what_a_killed_process_left_is_removed_and_what_one_writes_is_not(tmp_path: Path) -> None:
    names = [".one-original", ".one-abcdefgh.unfinished", ".two-abcdefgh.unfinished", ".three-abcdefgh.unfinished"]
    for name in names:
        (tmp_path / name).mkdir()
    os.utime(tmp_path / names[2], (0, 0))  # the third may not be locked yet, and the first is not of ours
    with atomic_folder(tmp_path / "one") as first, atomic_folder(tmp_path / "one") as second:
        os.utime(first, (0, 0))
        with atomic_folder(tmp_path / "four"):
            assert first.is_dir()
        (second / "part").write_text("whole")
    assert {path.name for path in tmp_path.iterdir()} == {names[0], names[3], "one", "four"}


def test_a_folder_is_replaced_or_restored(tmp_path: Path) -> None:
    final = tmp_path / "final"
    new = tmp_path / "new"
    for number in range(3):
        new.mkdir()
        (new / "number").write_text(str(number))
        replace_folder(new, final)
        assert (final / "number").read_text() == str(number)
        assert [path.name for path in tmp_path.iterdir()] == ["final"]
    final.rename(tmp_path / ".final.replaced")  # where a process was killed between two renames
    restore_folder(final)
    assert (final / "number").read_text() == "2"


# -- stored results -----------------------------------------------------------------------------------------------------
KEY = key_of("settings", 1)


def make(folder: Path) -> None:
    (folder / "part").mkdir()
    (folder / "rows").write_bytes(b"rows" * 100)
    (folder / "part/more").write_bytes(b"more")


def content(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in ("rows", "part/more")]


DAMAGE = {
    "a flipped bit": lambda folder: (folder / "rows").write_bytes(b"rowt" + b"rows" * 99),
    "an empty file": lambda folder: os.truncate(folder / "part/more", 0),
    "a lost file": lambda folder: (folder / "part/more").unlink(),
    "no checksums": lambda folder: (folder / ".checksums").unlink(),
    "broken checksums": lambda folder: (folder / ".checksums").write_text("{"),
}


@pytest.mark.parametrize("how", DAMAGE)
def test_a_damaged_result_is_made_anew(how: str, own_cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = stored("things", KEY, make)
    wanted = content(folder)
    DAMAGE[how](folder)
    assert content(stored("things", KEY, make)) == wanted
    assert ("is damaged; it is made anew" in caplog.text) == (how != "no checksums")
    assert stored("things", KEY, lambda _: pytest.fail("made again")) == folder


def test_what_others_put_beside_a_result_is_no_part_of_it(own_cache: Path) -> None:
    """`datasets` writes the caches of its transforms beside the files of a table."""
    rows = datasets.Dataset.from_dict({"number": [3, 1, 2]})
    folder = stored("rows", KEY, lambda work: rows.map(cache_file_name=str(work / "rows.arrow")))
    (folder / "cache-1.arrow").write_bytes(b"another's")
    assert stored("rows", KEY, lambda _: pytest.fail("made again")) == folder
    assert open_rows(folder)["number"][:] == [3, 1, 2]


def test_of_several_processes_one_works_and_a_killed_one_holds_nobody_up(own_cache: Path, tmp_path: Path) -> None:
    def slowly(folder):
        (tmp_path / f"made by {os.getpid()}").touch()
        make(folder)
        time.sleep(0.3 if (tmp_path / "killed").exists() else 60)

    def child():
        if not (number := os.fork()):
            signal.alarm(120)
            try:
                stored("things", KEY, slowly)
            finally:
                os._exit(0 if place_of("things", KEY).is_dir() else 1)
        return number

    first = child()
    assert wait_until(lambda: bool(list(tmp_path.glob("made by *"))))
    os.kill(first, signal.SIGKILL)
    os.waitpid(first, 0)
    (tmp_path / "killed").touch()
    assert [os.waitpid(number, 0)[1] for number in [child(), child(), child()]] == [0] * 3
    assert len(list(tmp_path.glob("made by *"))) == 2
    assert not [path for path in (own_cache / "tandem_things").iterdir() if path.name[0] == "." and path.is_dir()]


def test_a_cache_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"file.* cannot be written: .* set HF_DATASETS_CACHE to another folder"):
        stored("things", KEY, make, tmp_path / "file")


def test_a_key_changes_with_every_part_and_every_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    stamps = [stamp(path)]
    for text in ("one", "other"):
        path.write_text(text)
        stamps.append(stamp(path))
    os.utime(path, ns=(0, 0))
    parts = [*((1, each) for each in (*stamps, stamp(path))), (2, stamps[0]), (1, version_of("PIL", "pillow"))]
    assert len({key_of(*part) for part in parts}) == 6
    assert version_of("no_such_module") is None
