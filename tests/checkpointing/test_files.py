"""Checkpoint folders are complete or absent: the order of writing, finding, damage, removal."""

import errno
import json
import logging
import os
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mm_utils.checkpointing import files
from mm_utils.checkpointing.files import (
    MANIFEST,
    STATE_FILE,
    checkpoint_folders,
    checkpoint_path,
    find_checkpoint,
    newest_checkpoint,
    remove_unfinished,
    set_aside,
    size_of,
    verify,
    write_checkpoint,
)
from mm_utils.checkpointing.writer import make_room, remove_old_checkpoints
from tests.kit.checkpoints import FILES, flip, saved, write_files


def steps_in(output_dir: Path) -> list[int]:
    return [files.step_of(path) for path in checkpoint_folders(output_dir)]


# -- writing ------------------------------------------------------------------------------------------------------------
_recorder: list[tuple[str, str, str]] | None = None


def _hook(event: str, args: tuple[Any, ...]) -> None:
    if _recorder is not None and event in ("os.rename", "os.mkdir", "os.rmdir"):
        _recorder.append((event, str(args[0]), str(args[1]) if event == "os.rename" else ""))


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str, str]]:
    """What is renamed, made and removed, and what reaches the disk, in order: (what, path, other path or size)."""
    global _recorder
    real = os.fsync

    def fsync(handle: int) -> None:
        path = os.readlink(f"/proc/self/fd/{handle}")
        _recorded.append(("fsync", path, str(os.path.getsize(path)) if os.path.isfile(path) else ""))
        real(handle)

    _recorded: list[tuple[str, str, str]] = []
    monkeypatch.setattr("os.fsync", fsync)
    if not getattr(_hook, "added", False):
        sys.addaudithook(_hook)
        _hook.added = True  # type: ignore[attr-defined]
    monkeypatch.setattr(sys.modules[__name__], "_recorder", _recorded)
    return _recorded


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="names of open files come from /proc")
def test_all_is_on_the_disk_before_it_has_its_name_and_before_older_ones_go(
    tmp_path: Path, events: list[tuple[str, str, str]]
) -> None:
    saved(tmp_path, 1)
    events.clear()
    final = saved(tmp_path, 2)
    remove_old_checkpoints(tmp_path, 1, [])
    temporary = str(tmp_path / ".checkpoint-2.tmp")
    renamed = events.index(("os.rename", temporary, str(final)))
    before, after = events[:renamed], events[renamed + 1 :]
    for path in (path for path in final.rglob("*") if path.is_file()):
        name = f"{temporary}/{path.relative_to(final)}"
        assert ("fsync", name, str(path.stat().st_size)) in before, f"{path.name}, or its end, is not on the disk"
    for folder in ("", "/deep", "/deep/er"):
        assert ("fsync", temporary + folder, "") in before
    assert before[-1] == ("fsync", temporary, "")
    assert after[0] == ("fsync", str(tmp_path), "")
    assert [args[1] for args in after if args[0] == "os.rename"] == [str(tmp_path / "checkpoint-1")]
    assert not any("checkpoint-1" in path for _, path, _ in before)


def test_a_manifest_names_every_file(tmp_path: Path) -> None:
    path = saved(tmp_path, 7)
    manifest = json.loads((path / MANIFEST).read_text())
    assert (manifest["step"], manifest["files"].keys()) == (7, FILES.keys())
    assert {name: file["size"] for name, file in manifest["files"].items()} == {
        name: len(content) for name, content in FILES.items()
    }
    assert verify(path) == []
    assert size_of(path) == sum(map(len, FILES.values())) + (path / MANIFEST).stat().st_size


@pytest.mark.parametrize("call", ["write", "rename", "last rename", "fsync"])
def test_the_old_checkpoint_survives_a_failed_write(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, 1, 2)
    (path / "extra").write_text("of the first")

    def failing(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    real = Path.rename

    def failing_rename(source: Path, target: Path) -> Path:
        if call == "rename" or source.name.endswith(".tmp"):
            failing()
        return real(source, target)

    if "rename" in call:
        monkeypatch.setattr(Path, "rename", failing_rename)
    if call == "fsync":
        monkeypatch.setattr("os.fsync", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        write_checkpoint(path, failing if call == "write" else write_files)
    assert [each.name for each in sorted(tmp_path.iterdir())] == ["checkpoint-1", "checkpoint-2"]
    assert (path / "extra").read_text() == "of the first"
    assert verify(path) == []


def test_links_and_files_in_the_way_are_moved_and_not_followed(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "precious").touch()
    (tmp_path / "out").mkdir()
    (tmp_path / "out/checkpoint-1").symlink_to(elsewhere)
    (tmp_path / "out/checkpoint-2").symlink_to(tmp_path / "nowhere")
    (tmp_path / "out/checkpoint-3").write_text("a file")
    (tmp_path / "out/.checkpoint-4.tmp").symlink_to(elsewhere)
    (tmp_path / "out/.checkpoint-5.tmp").write_text("a file")
    for step in range(1, 6):
        assert verify(saved(tmp_path / "out", step)) == []
    assert steps_in(tmp_path / "out") == [1, 2, 3, 4, 5]
    assert (elsewhere / "precious").exists()
    assert not list((tmp_path / "out").glob(".*"))


def test_leftovers_of_a_killed_run_are_removed_and_a_replaced_checkpoint_is_restored(tmp_path: Path) -> None:
    path = saved(tmp_path, 1, 2, 3)
    for name in (".checkpoint-4.tmp", ".checkpoint-1.removed"):
        shutil.copytree(path, tmp_path / name)
    path.rename(tmp_path / ".checkpoint-3.old")  # killed between the two renames
    shutil.copytree(tmp_path / "checkpoint-2", tmp_path / ".checkpoint-2.old")  # killed after them
    (tmp_path / ".checkpoint-9.unknown").mkdir()
    remove_unfinished(tmp_path)
    left = [".checkpoint-9.unknown", "checkpoint-1", "checkpoint-2", "checkpoint-3"]
    assert sorted(each.name for each in tmp_path.iterdir()) == left
    remove_unfinished(tmp_path / "nowhere")


# -- finding ------------------------------------------------------------------------------------------------------------
def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-2])


def test_every_flipped_bit_of_a_manifest_is_found_or_changes_nothing(tmp_path: Path) -> None:
    path = checkpoint_path(tmp_path, 1)
    write_checkpoint(path, lambda folder: (folder / STATE_FILE).write_bytes(b"{}"))
    good = (path / MANIFEST).read_bytes()
    for bit in range(8 * len(good)):
        content = bytearray(good)
        content[bit // 8] ^= 1 << bit % 8
        (path / MANIFEST).write_bytes(content)
        if not verify(path):
            assert json.loads(content) == json.loads(good)


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"[]", b"{}", b"null", b'{"format": 1}', b'{"format": 1, "step": 1, "files": []}', b"\xff\xfe"),
        b'{"format": 1, "step": 1, "files": {}}',
        b'{"format": 1, "step": 1, "files": {"trainer_state.json": 3}}',
        b'{"format": 1, "step": 1, "files": {"trainer_state.json": {"size": "3", "sha256": ""}}}',
        b'{"format": 2, "step": 1, "files": {"trainer_state.json": {"size": 3, "sha256": ""}}}',
        b"[" * 100_000,
    ],
)
def test_a_manifest_of_another_form_is_no_manifest(content: bytes, tmp_path: Path) -> None:
    path = saved(tmp_path, 1)
    (path / MANIFEST).write_bytes(content)
    [wrong] = verify(path)
    assert wrong.startswith(f"{MANIFEST} cannot be used")


def test_the_latest_is_the_highest_number_that_is_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert find_checkpoint("latest", tmp_path) is None
    assert find_checkpoint("latest", tmp_path / "nowhere") is None
    assert find_checkpoint(None, tmp_path) is None
    saved(tmp_path, 10, 9, 100)
    for name in ("checkpoint-1000.superseded", ".checkpoint-1000.tmp", "checkpoint-", "checkpoint-x"):
        (tmp_path / name).mkdir()
    (tmp_path / "checkpoint-2000").symlink_to(tmp_path / "checkpoint-9")
    (tmp_path / "checkpoint-3000").touch()
    os.utime(tmp_path / "checkpoint-9", (9e9, 9e9))  # the clock is of no account
    assert steps_in(tmp_path) == [9, 10, 100]
    assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-100"
    flip(tmp_path / "checkpoint-100/model.safetensors")
    with caplog.at_level(logging.WARNING):
        assert find_checkpoint("latest", tmp_path) == tmp_path / "checkpoint-10"
    assert "checkpoint-100 is damaged and passed over: model.safetensors is not what was written" in caplog.text
    for step in (9, 10):
        cut(tmp_path / f"checkpoint-{step}" / MANIFEST)
    with pytest.raises(ValueError, match=r"is whole \(checkpoint-100, checkpoint-10, checkpoint-9\)"):
        find_checkpoint("latest", tmp_path)


# -- removing -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("limit", "keep", "left"),
    [
        (None, [], [1, 2, 9, 10]),
        (1, [], [10]),
        (2, [], [9, 10]),
        (1, [1], [1, 10]),
        (2, [9, 10], [9, 10]),
        (5, [], [1, 2, 9, 10]),
    ],
)
def test_the_newest_and_the_best_stay(limit: int | None, keep: list[int], left: list[int], tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 9, 10)
    remove_old_checkpoints(tmp_path, limit, keep)
    assert steps_in(tmp_path) == left


def test_a_checkpoint_that_cannot_be_removed_is_reported_and_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    saved(tmp_path, 1, 2, 3)

    def failing(path: Path, **_: Any) -> None:
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr("shutil.rmtree", failing)
    remove_old_checkpoints(tmp_path, 1, [])
    assert steps_in(tmp_path) == [3]
    for step in (1, 2):
        assert f"{tmp_path}/.checkpoint-{step}.removed" in caplog.text
    assert os.strerror(errno.EACCES) in caplog.text


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A disk on which each checkpoint takes 10 bytes."""
    found = SimpleNamespace(capacity=40)

    def usage(folder: Path) -> SimpleNamespace:
        return SimpleNamespace(free=found.capacity - 10 * len(checkpoint_folders(Path(folder))))

    monkeypatch.setattr("shutil.disk_usage", usage)
    return found


@pytest.mark.parametrize(
    ("capacity", "limit", "keep", "left"),
    [
        (40, 2, [], [1, 2, 3]),  # there is room
        (30, 2, [], [2, 3]),  # no more goes than must
        (30, 3, [], [2, 3]),
        (20, 1, [], [3]),  # before, as there is no room for both
        (30, 2, [1], [1, 3]),
    ],
)
def test_room_is_made_by_removing_old_checkpoints_early(
    capacity: int, limit: int, keep: list[int], left: list[int], tmp_path: Path, disk: SimpleNamespace
) -> None:
    saved(tmp_path, 1, 2, 3)
    disk.capacity = capacity
    make_room(tmp_path, 10, limit, keep)
    assert steps_in(tmp_path) == left


@pytest.mark.parametrize(("limit", "keep"), [(None, []), (1, []), (3, [1, 2])])
def test_without_room_the_newest_undamaged_checkpoint_stays(
    limit: int | None, keep: list[int], tmp_path: Path, disk: SimpleNamespace
) -> None:
    saved(tmp_path, 1, 2, 3)
    flip(tmp_path / "checkpoint-3/model.safetensors")
    disk.capacity = 10
    with pytest.raises(OSError, match=r"are free, a checkpoint takes .* Make room, or give") as caught:
        make_room(tmp_path, 10, limit, keep)
    assert (caught.value.errno, str(tmp_path) in str(caught.value)) == (errno.ENOSPC, True)
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "checkpoint-2"


def test_checkpoints_after_the_resumed_step_are_set_aside(tmp_path: Path) -> None:
    saved(tmp_path, 1, 2, 3)
    flip(tmp_path / "checkpoint-3/model.safetensors")
    (tmp_path / "checkpoint-3.damaged").mkdir()  # of an earlier time
    set_aside(tmp_path, 1)
    names = ["checkpoint-1", "checkpoint-2.superseded", "checkpoint-3.damaged"]
    assert sorted(each.name for each in tmp_path.iterdir()) == names
    assert (tmp_path / "checkpoint-3.damaged/model.safetensors").exists()


def test_damage_behind_the_first_block_of_a_file_is_found(tmp_path: Path) -> None:
    def write(folder: Path) -> None:
        (folder / STATE_FILE).write_bytes(b"{}")
        (folder / "model.safetensors").write_bytes(bytes(files._BLOCK + 9))

    path = checkpoint_path(tmp_path, 1)
    write_checkpoint(path, write)
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\1")
    [wrong] = verify(path)
    assert wrong.startswith("model.safetensors")
