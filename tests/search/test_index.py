"""An index follows its media: only what changed is embedded, and a killed run leaves nothing that a later one cannot use."""

import errno
import json
import os
import shutil
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
from accelerate import Accelerator

from mm_utils.data.media.medium import read_by
from mm_utils.distributed import RunError
from mm_utils.files import folder_lock
from mm_utils.model.build import open_model
from mm_utils.search import index as index_folder
from mm_utils.search import updating
from mm_utils.search.index import open_index, read_parts, write_index
from mm_utils.search.listing import Listing, folder_listing, pair_listing
from mm_utils.search.searcher import Searcher
from mm_utils.search.updating import update_index
from scripts import embed
from tests.kit.jsonl import read_lines
from tests.kit.stock_folders import write_stock
from tests.kit.tiny_run import alone
from tests.search.conftest import make_embedder, update, write_photos


def contents(index: Path) -> dict[str, dict]:
    return {row["id"]: row for row in open_index(index)[1]}


def assert_same(index: Path, other: Path) -> None:
    """The same rows in the same order; embeddings up to the rounding of other batches."""
    found = contents(index)
    expected = contents(other)
    assert list(found) == list(expected)
    for name, row in expected.items():
        assert found[name].pop("embedding") == pytest.approx(row.pop("embedding"), abs=2e-3)
        assert found[name] == row


def test_an_index_is_a_data_set_of_unit_vectors(index: Path, photos: Path) -> None:
    [file] = index.glob("rows-*.arrow")
    rows = datasets.Dataset.from_file(str(file))
    assert rows["id"] == sorted(path.relative_to(photos).as_posix() for path in photos.rglob("*.png"))
    assert np.linalg.norm(np.array(rows["embedding"], np.float32), axis=1) == pytest.approx(1, abs=2e-3)
    assert all(thumbnail.startswith(b"\xff\xd8\xff") for thumbnail in rows["thumbnail"])
    assert not list(index.glob("parts-*"))
    assert len(rows.data.column("embedding").chunks) == 1, "searches read few blocks"


def test_only_added_and_changed_files_are_embedded(model: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    index = tmp_path / "index"
    write_photos(photos, range(100))
    assert update(index, model, photos)["embedded"] == 100
    write_photos(photos, range(100, 110))
    write_photos(photos, range(5), seed=1)
    for number in (50, 51, 52):
        (photos / f"{number % 2}/{number:03d}.png").unlink()
    done = update(index, model, photos)
    assert (done["embedded"], done["kept"], done["removed"], done["images"]) == (15, 92, 3, 107)
    update(tmp_path / "fresh", model, photos)
    assert_same(index, tmp_path / "fresh")
    [rows] = index.glob("rows-*.arrow")
    assert update(index, model, photos)["embedded"] == 0
    assert list(index.glob("rows-*.arrow")) == [rows], "nothing changed, so nothing is written"
    photos.rename(tmp_path / "moved")
    assert update(index, model, tmp_path / "moved")["embedded"] == 0
    assert contents(index)["0/054.png"]["path"] == str(tmp_path / "moved/0/054.png")


def test_bad_files_are_set_aside_and_tried_again(model: Path, tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    index = tmp_path / "index"
    write_photos(photos, range(4))
    whole = (photos / "0/000.png").read_bytes()
    (photos / "0/000.png").write_bytes(whole[: len(whole) // 2])
    (photos / "page.jpg").write_text("<html>")
    (photos / "away.jpg").symlink_to("/etc/hostname")
    for name in ("notes.txt", "a.NEF", ".c.nef"):
        (photos / name).write_text("no image")
    done = update(index, model, photos)
    assert (done["embedded"], done["skipped"], done["images"]) == (3, 3, 3)
    lines = read_lines(index / "skipped.jsonl")
    assert {line["id"]: line["reason"] for line in lines} == {
        "0/000.png": "image_truncated",
        "page.jpg": "no_image",
        "away.jpg": "outside_root",
    }
    assert update(index, model, photos)["skipped"] == 3
    (photos / "0/000.png").write_bytes(whole)
    done = update(index, model, photos)
    assert (done["embedded"], done["kept"], done["images"]) == (1, 3, 4)


def killed_everywhere(model: Path, folder: Path) -> tuple[int, int]:
    """Kill an update before the 1st, the 2nd ... file that it opens to write, renames or removes, until one has ended."""
    photos = folder / "photos"
    index = folder / "index"
    torch.set_num_threads(1)
    write_photos(photos, range(4))
    updating.FLUSH_SECONDS = 0.0
    update(index, model, photos)
    old = list(contents(index))
    write_photos(photos, range(4, 12))
    update(folder / "whole", model, photos)
    task = str(model), folder_listing(str(photos)), make_embedder(model, 4)
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
        parts = max(parts, len(read_parts(folder / f"{kills}", info)))
        update_index(folder / f"{kills}", *task, Accelerator(cpu=True))
        assert_same(folder / f"{kills}", folder / "whole")
        assert len(list((folder / f"{kills}").glob("rows-*.arrow"))) == 1
        kills += 1
    return kills, parts


def test_killed_at_any_write_an_index_has_its_old_rows_or_the_new(model: Path, tmp_path: Path) -> None:
    status, (kills, parts) = alone(killed_everywhere, model, tmp_path)
    assert (status, parts) == (0, 2)
    assert kills > 10


def _kill_at_write(countdown: int) -> None:
    def hook(event, args):
        nonlocal countdown
        writes = event == "open" and isinstance(args[2], int) and args[2] & (os.O_WRONLY | os.O_RDWR)
        if writes or event in ("os.rename", "os.remove", "os.mkdir", "os.rmdir"):
            if countdown == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            countdown -= 1

    sys.addaudithook(hook)


def test_a_reader_beside_updates_sees_whole_rows(index: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "index")
    info, rows = open_index(tmp_path / "index")
    table = rows.data.table
    ended = threading.Event()

    def write():
        while not ended.wait(0.02):
            write_index(tmp_path / "index", info, [table], [])

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
    vector = open_index(folder)[1].data.column("embedding").chunks[0].flatten().to_numpy().tobytes()[64:128]
    content = bytearray(_rows(folder).read_bytes())
    content[content.index(vector) + 9] ^= 2
    _rows(folder).write_bytes(content)


def _set(folder: Path, **values: Any) -> None:
    path = folder / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **values}))


def _rows(folder: Path) -> Path:
    return next(folder.glob("rows-*.arrow"))


DAMAGES = {
    "rows cut": lambda folder: _cut(_rows(folder), 9999),
    "rows gone": lambda folder: _rows(folder).unlink(),
    "a bit of a row": _flip,
    "info cut": lambda folder: _cut(folder / "index.json", 40),
    "a file outside": lambda folder: _set(folder, rows="/etc/passwd"),
    "another width": lambda folder: _set(folder, width=7),
    "another version": lambda folder: _set(folder, version=99),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_index_is_named_with_the_remedy(name: str, index: Path, tmp_path: Path):
    folder = tmp_path / "index"
    shutil.copytree(index, folder)
    DAMAGES[name](folder)
    with pytest.raises(ValueError, match=rf"{folder}.*Delete the folder, and run"):
        open_index(folder)


def test_the_old_rows_stay_where_the_disk_is_full(index: Path, model: Path, photos: Path, tmp_path: Path, monkeypatch):
    shutil.copytree(index, tmp_path / "index")
    shutil.copytree(photos, tmp_path / "photos")
    write_photos(tmp_path / "photos", range(30, 32))

    def refuse(*args, **kwargs):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    for module, name in ((updating, "write_part"), (pa.ipc, "new_stream"), (index_folder, "write_atomic")):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, refuse)
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                update(tmp_path / "index", model, tmp_path / "photos")
        assert len(contents(tmp_path / "index")) == 30
    assert update(tmp_path / "index", model, tmp_path / "photos")["images"] == 32


def test_parts_that_are_damaged_or_of_another_model_are_not_read(model: Path, tmp_path: Path, caplog) -> None:
    write_photos(tmp_path / "photos", range(6))
    update(tmp_path / "whole", model, tmp_path / "photos")
    info, _ = open_index(tmp_path / "whole")
    for name, left in ((info.fingerprint, -4000), ("0" * 32, None)):
        place = tmp_path / f"index/parts-{name}-{info.texts}"
        place.mkdir(parents=True)
        (place / "a.arrow").write_bytes(_rows(tmp_path / "whole").read_bytes()[:left])
    with pytest.raises(ValueError, match=r"Run scripts/embed\.py to its end"):
        open_index(tmp_path / "index")
    assert update(tmp_path / "index", model, tmp_path / "photos")["embedded"] == 6
    assert "is damaged" in caplog.text
    assert_same(tmp_path / "index", tmp_path / "whole")
    assert not list((tmp_path / "index").glob("parts-*"))


def test_a_second_run_and_a_folder_of_something_else_are_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with folder_lock(tmp_path / "index"), pytest.raises(RunError, match="another run writes"):
        update(tmp_path / "index", model, photos)
    (tmp_path / "index/mine.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        update(tmp_path / "index", model, photos)


def test_pairs_are_embedded_with_their_captions(model: Path, corpus: Path, own_cache: Path, tmp_path: Path) -> None:
    flags = ["--model_name_or_path", str(model), "--index_dir", str(tmp_path / "index"), "--train_file", str(corpus)]
    assert embed.main([*flags, "--dataloader_num_workers", "0"])["images"] == 24
    rows = contents(tmp_path / "index")
    assert {row["split"] for row in rows.values()} == {"train", "validation"}
    assert all(len(row["captions"]) == 2 for row in rows.values())
    assert embed.main([*flags, "--split", "validation"])["removed"] == 16


def test_a_pair_keeps_its_id_and_its_embedding_where_its_split_changes(model: Path, tmp_path: Path) -> None:
    """An id that two splits have is told apart by the split."""
    write_photos(tmp_path / "photos", range(6))
    images = folder_listing(str(tmp_path / "photos")).rows

    def run(**ids):
        places = iter(range(6))
        splits = {}
        for split, names in ids.items():
            rows = images.select([next(places) for _ in names.split()])
            splits[split] = rows.add_column("id", names.split())
        listing = pair_listing(splits)
        embedder = make_embedder(model)
        done = update_index(tmp_path / "index", str(model), listing, embedder, Accelerator(cpu=True))
        return done["embedded"], {name: row["split"] for name, row in contents(tmp_path / "index").items()}

    assert run(train="SKU-1 SKU-2", validation="SKU-3") == (
        3,
        {"SKU-1": "train", "SKU-2": "train", "SKU-3": "validation"},
    )
    assert run(train="SKU-1", validation="SKU-2 SKU-3 4") == (
        1,
        {"SKU-1": "train", "SKU-2": "validation", "SKU-3": "validation", "4": "validation"},
    )
    assert run(train="SKU-1 2", test="2 4")[1] == {"SKU-1": "train", "train/2": "train", "test/2": "test", "4": "test"}


def test_an_index_of_an_earlier_version_is_made_anew(index: Path, model: Path, photos: Path, tmp_path: Path) -> None:
    shutil.copytree(index, tmp_path / "index")
    _set(tmp_path / "index", version=5)
    with pytest.raises(ValueError, match=r"an earlier version wrote this index\. Run scripts/embed\.py again"):
        open_index(tmp_path / "index")
    assert update(tmp_path / "index", model, photos)["embedded"] == 30
    assert len(list((tmp_path / "index").glob("rows-*.arrow"))) == 1
    assert contents(tmp_path / "index").keys() == contents(index).keys()


def repooled(
    model: Path, folder: Path, old: str = 'text_pooling": "mean"', new: str = 'text_pooling": "pooler"'
) -> None:
    """Write a copy of a model that pools otherwise."""
    shutil.copytree(model, folder)
    text = (folder / "config.json").read_text()
    assert f'"{old}' in text
    (folder / "config.json").write_text(text.replace(f'"{old}', f'"{new}'))


def test_stored_bytes_are_compared_by_content_and_captions_are_kept_up_to_date(
    model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Rows with other captions, or with captions that another text side has embedded, are embedded anew."""

    def listing(count, seed, caption):
        write_photos(tmp_path / "photos", range(count))
        write_photos(tmp_path / "photos", range(1), seed)
        files = [tmp_path / f"photos/{number % 2}/{number:03d}.png" for number in range(count)]
        images = [{"bytes": file.read_bytes(), "path": None} for file in files]
        features = folder_listing(str(tmp_path)).rows.features
        rows = datasets.Dataset.from_dict({"image": images, "captions": [[caption]] * count}, features)
        return Listing([f"test/{number}" for number in range(count)], rows)

    args = (tmp_path / "index", str(model))
    tools = (make_embedder(model), Accelerator(cpu=True))
    assert update_index(*args, listing(5, 0, "x"), *tools)["embedded"] == 5
    assert update_index(*args, listing(6, 1, "x"), *tools)["embedded"] == 2
    assert update_index(*args, listing(6, 1, "a red y"), *tools)["embedded"] == 6
    assert update_index(*args, listing(6, 1, "a red y"), *tools)["embedded"] == 0
    rows = contents(tmp_path / "index").values()
    assert {tuple(row["captions"]) for row in rows} == {("a red y",)}
    expected = tools[0].model.encode(texts=["a red y"])[0].tolist()
    assert all(row["caption_embedding"] == pytest.approx(expected, abs=2e-3) for row in rows)
    repooled(model, tmp_path / "other")
    other = make_embedder(tmp_path / "other")
    Searcher(tmp_path / "index", str(tmp_path / "other"), device="cpu")
    assert "embedded with another text side" in caplog.text
    done = update_index(args[0], str(tmp_path / "other"), listing(6, 1, "a red y"), other, tools[1])
    assert (done["embedded"], done["kept"]) == (6, 0)
    expected = other.model.encode(texts=["a red y"])[0].tolist()
    rows = contents(tmp_path / "index").values()
    assert all(row["caption_embedding"] == pytest.approx(expected, abs=2e-3) for row in rows)


def test_a_model_with_another_image_side_is_refused_and_another_text_side_is_not(
    index: Path, model: Path, tmp_path: Path
):
    repooled(model, tmp_path / "text")
    repooled(model, tmp_path / "vision", 'vision_pooling": "pooler"', 'vision_pooling": "mean"')
    with pytest.raises(RunError, match="made with another image side"):
        Searcher(index, str(tmp_path / "vision"), device="cpu")
    assert Searcher(index, str(tmp_path / "text"), device="cpu").search_text("red", 1)


@pytest.mark.parametrize(
    ("part", "changed"),
    [("vision_model", 0), ("visual_projection", 0), ("text_model", 1), ("text_projection", 1)],
)
def test_an_index_knows_each_part_that_embeds(part: str, changed: int, tmp_path: Path) -> None:
    model, processor = open_model(write_stock(tmp_path / "clip", "clip"))
    before = index_folder.fingerprints(model, read_by(processor))
    with torch.no_grad():
        next(getattr(model, part).parameters()).mul_(1.5)
    after = index_folder.fingerprints(model, read_by(processor))
    assert [old != new for old, new in zip(before, after, strict=True)] == [changed == 0, changed == 1]
