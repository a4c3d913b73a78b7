"""An index follows its images: only what changed is embedded, and a killed run leaves nothing that a later one cannot use."""

import io
import json
import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from filelock import FileLock
from PIL import Image

from mm_utils.data import media
from mm_utils.data.batches.dataset import EvaluationTransform
from mm_utils.data.batches.loaders import LoaderArguments, Loaders
from mm_utils.distributed import RunError
from mm_utils.extras.search import embedding
from mm_utils.extras.search.index import model_fingerprint, read_parts, schema
from mm_utils.extras.search.listing import Listing, folder_listing, list_folder
from mm_utils.extras.search.reading import Reader
from mm_utils.extras.search.updating import try_out, update_index
from scripts import embed
from tests.extras.search.conftest import make_embedder, update, write_photos
from tests.kit.launches import ROOT, launch


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
    assert (info["images"], info["skipped"], info["image_size"]) == (30, 0, 32)
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
    assert len(list(index.glob("data-*.arrow"))) == 1


def test_nothing_to_do_writes_nothing(model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(4))
    update(tmp_path / "index", model, tmp_path / "photos")
    before = (tmp_path / "index/state.json").read_bytes()
    assert update(tmp_path / "index", model, tmp_path / "photos").embedded == 0
    assert (tmp_path / "index/state.json").read_bytes() == before


def test_a_file_of_another_date_and_the_same_bytes_is_kept(model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(4))
    update(tmp_path / "index", model, tmp_path / "photos")
    touched = tmp_path / "photos/0/000.png"
    os.utime(touched, ns=(1, 1))
    assert update(tmp_path / "index", model, tmp_path / "photos").embedded == 0
    assert contents(tmp_path / "index")["0/000.png"]["mtime_ns"] == 1


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


def test_a_file_that_breaks_drops_out(model: Path, tmp_path: Path) -> None:
    write_photos(tmp_path / "photos", range(4))
    update(tmp_path / "index", model, tmp_path / "photos")
    (tmp_path / "photos/0/000.png").write_bytes(b"broken")
    assert update(tmp_path / "index", model, tmp_path / "photos").images == 3
    assert "0/000.png" not in contents(tmp_path / "index")


def test_killed_anywhere_and_run_again_it_is_the_same_index(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill the run before or after a file gets its name, at random ones, until a run has ended."""
    photos, draw = tmp_path / "photos", random.Random(0)
    write_photos(photos, range(40))
    monkeypatch.setattr(embedding, "FLUSH_SECONDS", 0.0)
    update(tmp_path / "whole", model, photos)
    kills, embedded = 0, []
    for _ in range(40):
        countdown, after = draw.randrange(4), draw.random() < 0.5
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            _kill_at_rename(countdown, after)
            try:
                update(tmp_path / "index", model, photos, batch_size=4)
            finally:
                os._exit(0)
        status = os.waitpid(pid, 0)[1]
        if not os.WIFSIGNALED(status):
            break
        kills += 1
        parts = len(list((tmp_path / "index").glob("parts/*.arrow")))
        embedded.append(parts)
    assert kills >= 3
    assert max(embedded) >= 3
    update(tmp_path / "index", model, photos, batch_size=4)
    assert_same(tmp_path / "index", tmp_path / "whole")


@pytest.mark.slow
def test_killed_at_ten_moments_a_thousand_files_lose_nothing(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    photos, index, draw = tmp_path / "photos", tmp_path / "index", random.Random(0)
    write_photos(photos, range(1000))
    monkeypatch.setattr(embedding, "FLUSH_SECONDS", 0.1)
    update(tmp_path / "whole", model, photos)
    held = [0]
    for turn in range(10):
        wanted = len(list(index.glob("parts/*.arrow"))) + turn % 2
        pid = os.fork()
        if pid == 0:
            torch.set_num_threads(1)
            try:
                update(index, model, photos)
            finally:
                os._exit(0)
        while len(list(index.glob("parts/*.arrow"))) < wanted:
            time.sleep(0.01)
        time.sleep(draw.uniform(0, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        parts = read_parts(index, schema(make_embedder(model).width)).values() if index.is_dir() else ()
        held.append(max(sum(map(len, parts)), len(contents(index)) if (index / "state.json").exists() else 0))
    assert held == sorted(held)
    assert len(set(held)) > 4
    assert update(index, model, photos).embedded == (1000 - held[-1])
    assert_same(index, tmp_path / "whole")
    write_photos(photos, range(1000, 1010))
    write_photos(photos, range(5), seed=1)
    for number in (500, 501, 502):
        (photos / f"{number % 2}/{number:03d}.png").unlink()
    done = update(index, model, photos)
    assert (done.embedded, done.kept, done.removed, done.images) == (15, 992, 3, 1007)


def _kill_at_rename(countdown: int, after: bool) -> None:
    rename = Path.replace

    def dying(self: Path, target: Path) -> Path:
        nonlocal countdown
        countdown -= 1
        if countdown < 0 and not after:
            os.kill(os.getpid(), signal.SIGKILL)
        found = rename(self, target)
        if countdown < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return found

    Path.replace = dying  # type: ignore[method-assign]


def test_a_damaged_part_is_not_read(model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_photos(tmp_path / "photos", range(6))
    update(tmp_path / "whole", model, tmp_path / "photos")
    (tmp_path / "index/parts").mkdir(parents=True)
    (tmp_path / "index/index.json").write_bytes((tmp_path / "whole/index.json").read_bytes())
    (tmp_path / "index/parts/a.arrow").write_bytes(next((tmp_path / "whole").glob("data*")).read_bytes()[:-4000])
    (tmp_path / "index/parts/.b.arrow.1.tmp").write_bytes(b"half")
    assert update(tmp_path / "index", model, tmp_path / "photos").embedded == 6
    assert "is damaged" in caplog.text
    assert_same(tmp_path / "index", tmp_path / "whole")
    assert not (tmp_path / "index/parts").exists()


def test_other_weights_are_refused(model: Path, photos: Path, index: Path) -> None:
    embedder = make_embedder(model)
    next(embedder.model.vision_model.parameters()).data.add_(1)
    other = replace(embedder, fingerprint=model_fingerprint(embedder.model, embedder.loaders.input_key))
    listing = folder_listing(str(photos), *list_folder(str(photos)))
    with pytest.raises(RunError, match=r"other weights .*new --index_dir"):
        update_index(index, str(model), listing, other, Accelerator(cpu=True))


def test_a_folder_of_other_things_is_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").touch()
    with pytest.raises(ValueError, match="holds something else"):
        update(tmp_path, model, photos)


def test_a_second_run_on_an_index_is_refused(model: Path, photos: Path, tmp_path: Path) -> None:
    (tmp_path / "index").mkdir()
    with FileLock(tmp_path / "index/.lock"), pytest.raises(RunError, match="another run writes"):
        update(tmp_path / "index", model, photos)


def test_a_large_jpeg_is_cut_as_evaluations_cut_it(tmp_path: Path) -> None:
    """Decoded at a reduced scale for the model, and larger for the thumbnail."""
    Image.effect_noise((1300, 900), 80).convert("RGB").save(tmp_path / "large.jpg")
    listing = folder_listing(str(tmp_path), *list_folder(str(tmp_path)))
    row = Reader(listing, [0], Loaders(LoaderArguments(), torch.device("cpu"), 0, media.Image(64)))[0]
    value = {"image": listing.rows[0]["image"], "input_ids": [], "caption_keys": []}
    assert torch.equal(row["square"], EvaluationTransform(media.Image(64))._show(value)["pixel_values"])
    assert min(Image.open(io.BytesIO(row["thumbnail"])).size) == 256


def test_a_dry_run_writes_nothing(model: Path, photos: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "mm_utils")
    listing = folder_listing(str(photos), *list_folder(str(photos)))
    try_out(tmp_path / "index", str(model), listing, make_embedder(model), Accelerator(cpu=True))
    assert "30 images: 30 to embed, 0 unchanged; 0 removed" in caplog.text
    assert not (tmp_path / "index").exists()


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


def test_a_folder_without_images(model: Path, tmp_path: Path) -> None:
    flags = ["--model_name_or_path", str(model), "--index_dir", str(tmp_path / "index"), "--images", str(tmp_path)]
    with pytest.raises(ValueError, match="holds no image"):
        embed.main(flags)


@pytest.mark.slow
def test_two_processes_make_the_same_index(model: Path, photos: Path, index: Path, tmp_path: Path) -> None:
    words = ["--model_name_or_path", str(model), "--images", str(photos), "--index_dir", str(tmp_path / "index")]
    config = str(ROOT / "accelerate_configs/two_processes.yaml")
    done = launch(
        ["--config_file", config, str(ROOT / "scripts/embed.py"), *words], tmp_path, ACCELERATE_USE_CPU="true"
    )
    assert done.returncode == 0, done.stderr
    assert "2 x cpu" in done.stderr + done.stdout
    assert_same(tmp_path / "index", index)
