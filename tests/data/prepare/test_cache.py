"""Raw sources are prepared once: the result follows whatever it depends on, and no process leaves half of one."""

import json
import os
import signal
import tarfile
import time
from pathlib import Path

import pytest
from datasets import DatasetDict, disable_progress_bars
from PIL import Image

from mm_utils.data.prepare import cache, pipeline
from mm_utils.data.prepare.cache import load_or_prepare
from mm_utils.data.rows.source import PathArguments, Source
from tests.data.prepare.fault_layouts import add_member
from tests.kit.fault_images import draw, jpeg

disable_progress_bars()


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, own_cache: Path) -> Path:
    """`pairs.jsonl` and six pictures."""
    for number in range(6):
        draw(number).save(tmp_path / f"{number}.png")
    write(tmp_path, [f"{number}.png" for number in range(6)])
    return tmp_path


def write(folder: Path, images: list[str]) -> None:
    rows = [{"image": name, "caption": f"the picture {name[:-4]}"} for name in images]
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def load(folder: Path, name: str = "pairs.jsonl") -> DatasetDict:
    source = Source(str(folder / name), title=f"--train_file is {name}")
    return load_or_prepare([source], PathArguments(allow_outside_root=True), 2)


def ids(folder: Path) -> list[str]:
    return list(load(folder)["train"]["id"])


def results(own_cache: Path) -> list[str]:
    return sorted(path.name for path in (own_cache / "tandem_pairs").iterdir() if path.name[0] != ".")


def test_files_stay_files_and_the_second_start_reads_the_result(
    folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = load(folder)["train"]
    assert first[2]["image"] == {"bytes": None, "path": str(folder / "2.png")}
    assert first["captions"][:] == [[f"the picture {number}"] for number in range(6)]
    monkeypatch.setattr(cache, "_prepare", lambda *_: pytest.fail("prepared again"))
    assert load(folder)["train"].to_list() == first.to_list()
    assert len(results(own_cache)) == 1


def test_a_changed_image_row_or_option_leads_to_another_result(folder: Path, own_cache: Path) -> None:
    write(folder, [f"{number}.png" for number in range(7)])
    assert ids(folder) == [f"{number}.png" for number in range(6)]
    draw(6).save(folder / "6.png")  # the image appeared
    assert len(ids(folder)) == 7
    (folder / "6.png").write_bytes(b"broken")  # it changed
    assert len(ids(folder)) == 6
    write(folder, [f"{number}.png" for number in range(5)])
    assert len(ids(folder)) == 5
    load_or_prepare([Source(str(folder / "pairs.jsonl"), id_column="caption")], PathArguments(), 1)
    assert len(results(own_cache)) == 5


def test_odd_images_that_training_takes_are_kept(folder: Path) -> None:
    Image.new("RGB", (2, 2), "red").save(folder / "0.png")
    Image.new("RGB", (400, 3), "blue").save(folder / "1.png")
    Image.new("RGB", (7000, 6000)).save(folder / "large.jpg")  # 42 million pixels, which a JPEG need not decode
    Image.new("1", (9000, 9000)).save(folder / "large.png")
    write(folder, ["0.png", "1.png", "2.png", "large.jpg", "large.png"])
    assert ids(folder) == ["0.png", "1.png", "2.png", "large.jpg"]


def test_bad_rows_are_counted_and_named_at_every_start(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(folder, ["0.png", "gone.png", "1.png", "2.png", *["gone.png"] * 3, "3.png", "4.png", "5.png"])
    for _ in range(2):
        caplog.clear()
        assert len(ids(folder)) == 6
        assert "pairs.jsonl: image_missing, 4 times in 10 rows (line 2, line 5, line 6 ...), such as: " in caplog.text
        assert f"{folder / 'gone.png'}. There is no such file." in caplog.text


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (
            ["img/0.png", "img/1.png", "2.png"],
            r"2 of 3 rows are bad, more than half .*line 1: .*img/0.png.* --image_root",
        ),
        ([], r"the file holds no rows"),
    ],
)
def test_a_hopeless_source_is_refused_and_leaves_nothing(
    folder: Path, own_cache: Path, images: list[str], message: str
) -> None:
    write(folder, images)
    with pytest.raises(ValueError, match=rf"^--train_file is pairs.jsonl; {message}") as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert not (own_cache / "tandem_pairs").exists() or not results(own_cache)


def test_an_interrupted_start_is_resumed(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(70):
        draw(number, (16, 12)).save(folder / f"{number}.png")
    write(folder, [f"{number}.png" for number in range(70)])
    with monkeypatch.context() as patch:
        patch.setattr(cache, "reconcile", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(folder)
    [partial] = (own_cache / "tandem_pairs").glob("*.partial")
    done = {path: path.stat().st_mtime_ns for path in (partial / "parts").iterdir()}
    assert len(done) == 4
    with monkeypatch.context() as patch:
        patch.setattr(cache, "write_pairs", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            load(folder)
    assert {path: path.stat().st_mtime_ns for path in (partial / "parts").iterdir()} == done
    assert len(ids(folder)) == 70
    assert len(results(own_cache)) == 1


def test_a_killed_start_holds_nobody_up(folder: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The processes of its pool, which share its lock, end with it."""
    with monkeypatch.context() as patch:
        patch.setattr(pipeline, "_count", lambda *_: (folder / "here").touch() or time.sleep(60))
        child = os.fork()
        if child == 0:
            load(folder)
            os._exit(0)
    while not (folder / "here").exists():
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    start = time.perf_counter()
    assert len(ids(folder)) == 6
    assert time.perf_counter() - start < 10


def test_embedded_images_are_stored_as_they_came(folder: Path) -> None:
    contents = [jpeg(draw(number, (900, 700))) for number in range(3)]
    with tarfile.open(folder / "pairs.tar", "w") as archive:
        for number, content in enumerate(contents):
            add_member(archive, f"{number}.jpg", content)
            add_member(archive, f"{number}.txt", b"a picture")
    rows = load(folder, "pairs.tar")["train"]
    assert [row["image"] for row in rows] == [{"bytes": content, "path": None} for content in contents]
    assert rows["id"][:] == ["pairs/0", "pairs/1", "pairs/2"]
