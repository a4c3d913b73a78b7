"""An index follows its images: only what changed is embedded, and a killed run leaves nothing that a later one cannot use."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock

from mm_utils.data.faults import Fault
from mm_utils.distributed import RunError
from mm_utils.search import index as index_folder
from mm_utils.search import updating
from mm_utils.search.index import open_index, read_parts, replace_rows
from mm_utils.search.listing import Listing, folder_listing, list_folder
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import update_index
from scripts import embed
from tests.kit.tiny_run import alone
from tests.search.conftest import make_embedder, update, write_photos


def contents(index: Path) -> dict[str, dict]:
    rows = datasets.load_from_disk(str(index))
    return {row["id"]: row for row in rows}


def assert_same(index: Path, other: Path) -> None:
    """The same rows in the same order; embeddings up to the rounding of other batches."""
    found, expected = contents(index), contents(other)
    assert list(found) == list(expected)
    for name, row in expected.items():
        assert found[name].pop("embedding") == pytest.approx(row.pop("embedding"), abs=2e-3)
        assert found[name] == row


def test_an_index_is_a_data_set_of_unit_vectors(index: Path, photos: Path) -> None:
    rows = contents(index)
    assert list(rows) == sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    norms = np.linalg.norm(np.array([row["embedding"] for row in rows.values()], np.float32), axis=1)
    assert norms == pytest.approx(1, abs=2e-3)
    assert all(row["thumbnail"].startswith(b"\xff\xd8\xff") for row in rows.values())
    info = json.loads((index / "index.json").read_text())
    assert (info["images"], info["skipped"]) == (30, 0)
    assert not (index / "parts").exists()


def test_only_added_and_changed_files_are_embedded(model: Path, tmp_path: Path) -> None:
    photos, index = tmp_path / "photos", tmp_path / "index"
    write_photos(photos, range(100))
    assert update(index, model, photos).embedded == 100
    write_photos(photos, range(100, 110))
    write_photos(photos, range(5), seed=1)
    for number in (50, 51, 52):
        (photos / f"{number % 2}/{number:03d}.png").unlink()
    done = update(index, model, photos)
    assert (done.embedded, done.kept, done.removed, done.images) == (15, 92, 3, 107)
    update(tmp_path / "fresh", model, photos)
    assert_same(index, tmp_path / "fresh")
    [rows] = index.glob("data-*.arrow")
    assert update(index, model, photos).embedded == 0
    assert list(index.glob("data-*.arrow")) == [rows], "nothing changed, so nothing is written"


def test_bad_files_are_set_aside_and_tried_again(model: Path, tmp_path: Path) -> None:
    photos, index = tmp_path / "photos", tmp_path / "index"
    write_photos(photos, range(4))
    whole = (photos / "0/000.png").read_bytes()
    (photos / "0/000.png").write_bytes(whole[:-20])
    (photos / "page.jpg").write_text("<html>")
    (photos / "away.jpg").symlink_to("/etc/hostname")
    (photos / "notes.txt").write_text("no image")
    done = update(index, model, photos)
    assert (done.embedded, done.skipped, done.images) == (3, 3, 3)
    lines = [json.loads(line) for line in (index / "skipped.jsonl").read_text().splitlines()]
    reasons = {line["id"]: line["reason"] for line in lines}
    assert reasons == {
        "0/000.png": "image_truncated",
        "page.jpg": "image_unknown_format",
        "away.jpg": "outside_root",
    }
    (photos / "0/000.png").write_bytes(whole)
    done = update(index, model, photos)
    assert (done.embedded, done.kept, done.images) == (1, 3, 4)


def test_raw_photographs_are_named_and_not_passed_over(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.NEF", "b.cr2", ".c.nef", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    names, skipped = list_folder(str(tmp_path))
    assert names == ["a.jpg"]
    assert [(line["id"], line["reason"]) for line in skipped] == [
        (name, "image_unknown_format") for name in ("a.NEF", "b.cr2")
    ]


def killed_everywhere(model: Path, folder: Path) -> tuple[int, int]:
    """Kill an update before the 1st, the 2nd ... file that it opens to write, renames or removes, until one has ended."""
    photos, index = folder / "photos", folder / "index"
    torch.set_num_threads(1)
    write_photos(photos, range(4))
    updating.FLUSH_SECONDS = 0.0
    update(index, model, photos)
    old = list(contents(index))
    write_photos(photos, range(4, 12))
    update(folder / "whole", model, photos)
    task = str(model), folder_listing(str(photos), *list_folder(str(photos))), make_embedder(model, 4)
    kills = parts = 0
    while kills < 99:
        shutil.copytree(index, folder / f"{kills}")
        pid = os.fork()
        if pid == 0:
            _kill_at_write(kills)
            try:
                update_index(folder / f"{kills}", *task, Accelerator(cpu=True))
            finally:
                os._exit(0)
        if not os.WIFSIGNALED(os.waitpid(pid, 0)[1]):
            break
        info, rows = open_index(folder / f"{kills}")
        assert rows["id"][:] in (old, list(contents(folder / "whole")))
        parts = max(parts, len(read_parts(folder / f"{kills}", info.columns)))
        update_index(folder / f"{kills}", *task, Accelerator(cpu=True))
        assert_same(folder / f"{kills}", folder / "whole")
        kills += 1
    return kills, parts


def test_killed_at_any_write_an_index_has_its_old_rows_or_the_new(model: Path, tmp_path: Path) -> None:
    status, (kills, parts) = alone(killed_everywhere, model, tmp_path)
    assert (status, parts) == (0, 2)
    assert kills > 10


def _kill_at_write(countdown: int) -> None:
    def hook(event: str, args: tuple) -> None:
        nonlocal countdown
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            countdown -= 1

    sys.addaudithook(hook)


def test_a_reader_beside_updates_sees_the_old_rows_or_the_new(index: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "index")
    info, rows = open_index(tmp_path / "index")
    table, ended = rows.data.table, threading.Event()

    def write() -> None:
        while not ended.wait(0.02):
            replace_rows(tmp_path / "index", [table], info.columns)

    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(write)
        try:
            for _ in range(150):
                assert len(open_index(tmp_path / "index")[1]) == 30
        finally:
            ended.set()
        running.result()


def _cut(path: Path, left: int) -> None:
    path.write_bytes(path.read_bytes()[:left])


def _flip(folder: Path) -> None:
    """Flip a bit of an embedding."""
    path, vector = _rows(folder), datasets.load_from_disk(str(folder)).data.column("embedding").chunks[0]
    content, found = bytearray(path.read_bytes()), vector.flatten().to_numpy().tobytes()[64:128]
    content[content.index(found) + 9] ^= 2
    path.write_bytes(content)


def _set(path: Path, **values: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _rows(folder: Path) -> Path:
    return next(folder.glob("data-*.arrow"))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "rows cut": lambda folder: _cut(_rows(folder), 9999),
    "rows gone": lambda folder: _rows(folder).unlink(),
    "a bit of a row": _flip,
    "state empty": lambda folder: _cut(folder / "state.json", 0),
    "state without files": lambda folder: _set(folder / "state.json", _data_files=[]),
    "state of a file outside": lambda folder: _set(folder / "state.json", _data_files=[{"filename": "/etc/passwd"}]),
    "description cut": lambda folder: _cut(folder / "dataset_info.json", 40),
    "info cut": lambda folder: _cut(folder / "index.json", 40),
    "info deep": lambda folder: (folder / "index.json").write_text("[" * 100_000),
    "another width": lambda folder: _set(folder / "index.json", width=7),
    "another medium": lambda folder: _set(folder / "index.json", medium="sound"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_named_with_the_remedy(
    name: str, index: Path, model: Path, photos: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "index"
    shutil.copytree(index, folder)
    DAMAGES[name](folder)
    for use in (lambda: Searcher(folder, device="cpu"), lambda: update(folder, model, photos)):
        with pytest.raises((ValueError, RunError), match=rf"{folder}.*(Delete the folder, and run|new --index_dir)"):
            use()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_full_disk_is_a_line_and_the_old_rows_stay(
    number: int, index: Path, model: Path, photos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(index, tmp_path / "index")
    shutil.copytree(photos, tmp_path / "photos")
    write_photos(tmp_path / "photos", range(30, 32))

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    for module, name in ((updating, "write_part"), (pa, "OSFile"), (index_folder, "write_atomic")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(RunError, match=rf"{tmp_path}/index.*{os.strerror(number)}"):
                update(tmp_path / "index", model, tmp_path / "photos")
        assert len(contents(tmp_path / "index")) == 30
    assert update(tmp_path / "index", model, tmp_path / "photos").images == 32


def test_rows_stay_whose_files_cannot_be_read_for_a_moment(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder or a file: what is gone drops out, and what is only out of reach is kept."""
    photos, index = tmp_path / "photos", tmp_path / "index"
    write_photos(photos, range(8))
    update(index, model, photos)
    (photos / "1/001.png").unlink()
    listed = os.scandir

    def scan(path: Any) -> Any:
        if str(path).endswith("photos/0"):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return listed(path)

    with monkeypatch.context() as patch:
        patch.setattr(os, "scandir", scan)
        done = update(index, model, photos)
    assert (done.embedded, done.kept, done.removed, done.skipped, done.images) == (0, 7, 1, 1, 7)
    found = Searcher(index, device="cpu").search_text("a red circle", 9)
    assert len(found) == 7
    done = update(index, model, photos)
    assert (done.embedded, done.kept, done.removed, done.images) == (0, 7, 0, 7)
    assert list(contents(index)) == sorted(contents(index))

    def read(path: str, *args: Any) -> bytes:
        raise Fault("read_error", f"{path}: Stale file handle")

    os.utime(photos / "0/000.png", ns=(1, 1))
    monkeypatch.setattr(updating, "read_file", read)
    assert update(index, model, photos).kept == 7


def test_a_damaged_part_is_not_read(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_photos(tmp_path / "photos", range(6))
    update(tmp_path / "whole", model, tmp_path / "photos")
    (tmp_path / "index/parts").mkdir(parents=True)
    (tmp_path / "index/index.json").write_bytes((tmp_path / "whole/index.json").read_bytes())
    (tmp_path / "index/parts/a.arrow").write_bytes(next((tmp_path / "whole").glob("data*")).read_bytes()[:-4000])
    (tmp_path / "index/parts/.b.arrow.1.tmp").write_bytes(b"half")
    (tmp_path / "index/parts/folder").mkdir()
    assert update(tmp_path / "index", model, tmp_path / "photos").embedded == 6
    assert "is damaged" in caplog.text
    assert_same(tmp_path / "index", tmp_path / "whole")
    assert not (tmp_path / "index/parts").exists()


def test_a_second_run_on_an_index_is_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with FileLock(tmp_path / "index/.lock"), pytest.raises(RunError, match="another run writes"):
        update(tmp_path / "index", model, photos)


def test_pairs_are_embedded_with_their_captions(model: Path, corpus: Path, own_cache: Path, tmp_path: Path) -> None:
    flags = ["--model_name_or_path", str(model), "--index_dir", str(tmp_path / "index"), "--train_file", str(corpus)]
    assert embed.main([*flags, "--dataloader_num_workers", "0"])["images"] == 24
    rows = contents(tmp_path / "index")
    assert {name.split("/")[0] for name in rows} == {"train", "validation"}
    assert all(len(row["captions"]) == 2 for row in rows.values())
    assert embed.main([*flags, "--split", "validation"])["removed"] == 16


def test_stored_bytes_are_compared_by_content(model: Path, tmp_path: Path) -> None:
    def listing(count: int, seed: int) -> Listing:
        images = []
        for number in range(count):
            write_photos(tmp_path / "photos", range(number, number + 1), seed if number == 0 else 0)
            content = (tmp_path / f"photos/{number % 2}/{number:03d}.png").read_bytes()
            images.append({"bytes": content, "path": None})
        features = folder_listing(str(tmp_path), [], []).rows.features
        ids = [f"test/{number}" for number in range(count)]
        return Listing(ids, datasets.Dataset.from_dict({"image": images, "captions": [["x"]] * count}, features))

    args = (tmp_path / "index", str(model))
    embedder, accelerator = make_embedder(model), Accelerator(cpu=True)
    assert update_index(*args, listing(5, 0), embedder, accelerator).embedded == 5
    assert update_index(*args, listing(6, 1), embedder, accelerator).embedded == 2
