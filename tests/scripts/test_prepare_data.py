"""From raw files to a data set that pretrain takes: whole runs in process, interrupted ones, damaged results."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, load_from_disk
from PIL import Image

from mm_utils.data.prepare import pipeline, prepared
from mm_utils.data.prepare.ingest import stored_hash
from mm_utils.data.prepare.prepared import content_id
from mm_utils.data.sources import DataArguments, load_pairs
from scripts.prepare_data import main


def picture(seed: int, side: int = 90) -> Image.Image:
    """Large smooth blobs: no two seeds look the same."""
    cells = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((side + 20, side), Image.Resampling.BICUBIC)


def write_source(folder: Path, count: int = 40, first: int = 0, **values: Any) -> Path:
    """`pairs.jsonl` and its images, without splits."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for seed in range(first, first + count):
        picture(seed).save(folder / f"{seed}.jpg", quality=95)
        rows.append({"image": f"{seed}.jpg", "captions": [f"picture {seed}", f"number {seed}"], **values})
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def flags(tmp_path: Path) -> list[str]:
    source = write_source(tmp_path / "raw")
    output = str(tmp_path / "out")
    return ["--sources", str(source), "--output_dir", output, "--image_size", "48", "--num_proc", "1"]


def report_of(folder: str | Path) -> dict[str, Any]:
    return json.loads(Path(folder, "report.json").read_text())


def test_every_row_carries_its_proof(flags: list[str]) -> None:
    assert main([*flags, "--validation_fraction", "0.25"]).keys() == {"train_images", "validation_images"}
    pairs = load_from_disk(flags[3])
    assert sum(map(len, pairs.values())) == 40
    ids = set()
    for rows in pairs.values():
        for row in rows:
            ids.add(row["id"])
            assert row["captions"] == [f"picture {row['id'][:-4]}", f"number {row['id'][:-4]}"]
            assert min(row["width"], row["height"]) == round(1.15 * 48)
            assert row["content_id"] == content_id(stored_hash(row["image"]["bytes"]), row["captions"])
    assert ids == {f"{seed}.jpg" for seed in range(40)}
    report = report_of(flags[3])
    assert (report["format"], report["sources"][0]["format"]) == ("tandem-pairs", "jsonl")
    assert report["storage"]["stored_bytes_per_pair"] < report["storage"]["original_bytes_per_pair"]
    assert report["storage"]["psnr_db"]["mean"] > 30
    assert "40 images" in Path(flags[3], "report.md").read_text()
    assert not Path(flags[3] + ".partial").exists()


def test_the_end_says_what_was_found_and_what_comes_next(
    tmp_path: Path, flags: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    source = Path(flags[1])
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    for row in rows[:20]:
        row["captions"] = ["a picture", *row["captions"]]
    rows[5]["image"] = "nowhere.jpg"
    source.write_text("".join(json.dumps(row) + "\n" for row in rows))
    with caplog.at_level("INFO"):
        main(flags)
    for words in ("image_missing 1", "One caption for 19 images", "report.md", f"--dataset_name {flags[3]}"):
        assert words in caplog.text


def test_load_pairs_takes_it_as_it_is(flags: list[str]) -> None:
    main(flags)
    pairs = load_pairs(DataArguments(dataset_name=flags[3]))
    assert {name: len(rows) for name, rows in pairs.items()} == {
        name: part["images"] for name, part in report_of(flags[3])["splits"].items()
    }
    assert "content_id" in pairs["train"].column_names


def test_the_result_is_the_same_each_time(flags: list[str], tmp_path: Path) -> None:
    main(flags)
    first = report_of(flags[3])["fingerprint"]
    main([*flags, "--overwrite_output_dir", "--num_proc", "2"])
    assert report_of(flags[3])["fingerprint"] == first
    with pytest.raises(ValueError, match="is not empty"):
        main(flags)


def test_an_interrupted_run_goes_on(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cut_into_chunks", _chunks_of_eight)
    with monkeypatch.context() as patch:
        patch.setattr("scripts.prepare_data.reconcile", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main(flags)
    parts = Path(flags[3] + ".partial", "parts")
    written = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    (parts / "part-000001.json").unlink()
    with monkeypatch.context() as patch:
        patch.setattr("scripts.prepare_data.reconcile", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            main(flags)
    again = {path.name: path.stat().st_mtime_ns for path in parts.iterdir()}
    assert {name for name in written if written[name] != again[name]} == {"part-000001.arrow", "part-000001.json"}
    main(flags)
    assert sum(part["images"] for part in report_of(flags[3])["splits"].values()) == 40


def _chunks_of_eight(items: Any) -> Any:
    items = list(items)
    for number, at in enumerate(range(0, len(items), 8)):
        yield pipeline.Chunk(number, tuple(items[at : at + 8]))


def test_two_runs_do_not_share_a_folder(flags: list[str], tmp_path: Path) -> None:
    args = pipeline.PrepareArguments(["x"], flags[3])
    first = pipeline.workspace(args)
    first.__enter__()
    with pytest.raises(ValueError, match="in use by another run"):
        main(flags)
    first.__exit__(RuntimeError, RuntimeError(), None)


def test_a_hopeless_source_stops_the_run(flags: list[str]) -> None:
    source = Path(flags[1])
    for number in range(3):
        (source.parent / f"{number}.jpg").write_bytes(b"<html>not found</html>")
    with pytest.raises(ValueError, match=r"3 of 40 rows are bad.*image_unknown_format: 3.*line 1"):
        main(flags)
    main([*flags, "--max_bad_fraction", "0.1"])
    assert report_of(flags[3])["quarantined"]["image_unknown_format"]["count"] == 3
    lines = [json.loads(line) for line in Path(flags[3], "quarantine.jsonl").read_text().splitlines()]
    assert [line["where"] for line in lines] == ["line 1", "line 2", "line 3"]


def test_planted_leaks_are_found(tmp_path: Path) -> None:
    train = write_source(tmp_path / "train", 20, split="train")
    test = write_source(tmp_path / "test", 8, 100, split="test")
    (tmp_path / "test" / "100.jpg").write_bytes((tmp_path / "train" / "3.jpg").read_bytes())
    picture(7).resize((80, 66)).save(tmp_path / "test" / "101.jpg", quality=60)
    output = tmp_path / "out"
    flags = ["--sources", str(train), str(test), "--output_dir", str(output), "--num_proc", "1", "--image_size", "48"]
    with pytest.raises(ValueError, match="2 rows have an image that is in another split"):
        main(flags)
    counts = main([*flags, "--on_leakage", "drop"])
    assert counts == {"train_images": 18.0, "test_images": 8.0}
    assert (output / "leakage.jpg").is_file()
    leakage = report_of(output)["leakage"]
    assert (leakage["exact"], leakage["near"], leakage["by_id"]) == (1, 1, 0)
    ids = load_from_disk(str(output))["train"]["id"]
    assert "train/pairs.jsonl/3.jpg" not in ids
    assert "train/pairs.jsonl/7.jpg" not in ids


def test_a_raw_store(flags: list[str]) -> None:
    main([*flags, "--store", "raw"])
    row = load_from_disk(flags[3])["train"][0]
    assert len(row["image"]["bytes"]) == 3 * row["width"] * row["height"]
    main(["--verify", flags[3]])


def test_max_rows_tries_a_few(flags: list[str]) -> None:
    assert sum(main([*flags, "--max_rows", "12"]).values()) == 12


@pytest.mark.parametrize("damage", ["bit", "row", "order"])
def test_damage_is_found(damage: str, flags: list[str]) -> None:
    main([*flags, "--validation_fraction", "0"])
    assert main(["--verify", flags[3]]) == {"rows": 40}
    folder = Path(flags[3], "train")
    if damage == "bit":
        [file] = folder.glob("*.arrow")
        content = bytearray(file.read_bytes())
        image = Dataset.from_file(str(file))[20]["image"]["bytes"]
        content[content.find(image) + len(image) // 2] ^= 1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=r"1 of 40 rows differ.*row 20 of train"):
            main(["--verify", flags[3]])
        return
    rows = load_from_disk(str(folder))
    chosen = range(39) if damage == "row" else [1, 0, *range(2, 40)]
    rows.select(chosen).save_to_disk(flags[3] + "-copy")
    for path in folder.glob("*"):
        path.unlink()
    for path in Path(flags[3] + "-copy").glob("*"):
        os.replace(path, folder / path.name)
    with pytest.raises(ValueError, match="missing or in another order"):
        main(["--verify", flags[3]])


def test_many_shards(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline, "cut_into_chunks", _chunks_of_eight)
    monkeypatch.setattr(prepared, "SHARD_BYTES", 20_000)
    main(flags)
    files = sorted(path.name for path in Path(flags[3], "train").glob("*.arrow"))
    assert len(files) > 2
    assert files[0] == f"data-00000-of-{len(files):05d}.arrow"
    main(["--verify", flags[3]])


def test_caches_of_two_data_sets_are_apart(flags: list[str], tmp_path: Path) -> None:
    main(flags)
    other = write_source(tmp_path / "other", first=200)
    main(["--sources", str(other), "--output_dir", str(tmp_path / "out2"), "--image_size", "48", "--num_proc", "1"])
    prints = {load_from_disk(folder)["train"]._fingerprint for folder in (flags[3], str(tmp_path / "out2"))}
    assert len(prints) == 2


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        ([], "--sources is empty"),
        (["--sources", "x"], "--output_dir is empty"),
        (["--sources", "x", "--output_dir", "y", "--image_size", "3"], "--image_size is 3"),
        (["--sources", "x", "--output_dir", "y", "--max_bad_fraction", "2"], "--max_bad_fraction is 2"),
        (["--sources", "x", "--output_dir", "y", "--num_proc", "0"], "--num_proc is 0"),
        (["--sources", "x", "--output_dir", "y", "--store", "webp"], "--store"),
    ],
)
def test_arguments_that_cannot_be(argv: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(argv)
    assert message in capsys.readouterr().err
