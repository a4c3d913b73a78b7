"""Sources full of faults: every good row comes out with its own picture and captions, every bad one is named.

`prepare_data` reads the whole zoo once; training from raw files reads it by the same readers.
"""

import re
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from datasets import disable_progress_bars, load_from_disk

from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_splits
from mm_utils.data.images import open_image
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from scripts.prepare_data import main
from tests.data.prepare.zoo import Corpus, Pair, line
from tests.kit.fault_images import draw, png
from tests.kit.numbered_rows import loaders, new_tokenizer
from tests.kit.prepared import CLOSE, pixels_apart, quarantine_of, report_of
from tests.kit.reading import add_member

FLAGS = ["--num_proc", "2", "--max_bad_fraction", "1", "--on_leakage", "drop", "--near_duplicates", "drop"]
disable_progress_bars()


def check_pairs(wanted: list[Pair], rows: list[dict[str, Any]]) -> None:
    """All of these came out, each with its own picture, and nothing else."""
    found = {tuple(row["captions"]): row for row in rows}
    assert {pair.kind for pair in wanted if pair.captions not in found} == set()
    assert set(found) == {pair.captions for pair in wanted}
    apart = {pair.kind: _apart(pair, found[pair.captions]) for pair in wanted}
    assert {kind: value for kind, value in apart.items() if value > CLOSE} == {}


def _apart(pair: Pair, row: dict[str, Any]) -> float:
    return pixels_apart(open_image(row["image"]).resize(pair.picture.size), pair.picture)


# -- the whole zoo ------------------------------------------------------------------------------------------------------


def test_every_good_row_comes_out_with_its_own_picture(zoo: Corpus, prepared: Path) -> None:
    rows = [row for split in load_from_disk(str(prepared)).values() for row in split]
    for source in {pair.source for pair in zoo.pairs}:
        pairs = [pair for pair in zoo.pairs if pair.source == source]
        check_pairs(pairs, [row for row in rows if row["source"] == source])


def test_every_bad_row_is_in_the_quarantine_and_nothing_else_is(zoo: Corpus, prepared: Path) -> None:
    kinds = {(loss.source, loss.where, loss.reason): loss.kind for loss in zoo.losses}
    found = Counter((fault["source"], fault["where"], fault["reason"]) for fault in quarantine_of(prepared))
    wanted = Counter((loss.source, loss.where, loss.reason) for loss in zoo.losses)
    assert {key: kinds[key] for key in wanted - found} == {}
    assert found - wanted == Counter()


def test_the_report_counts_the_rows(zoo: Corpus, prepared: Path) -> None:
    report, pairs = report_of(prepared), load_from_disk(str(prepared))
    kept = Counter(pair.source for pair in zoo.pairs)
    assert {source["name"]: source["rows"] for source in report["sources"]} == zoo.rows
    assert {source["name"]: source["kept"] for source in report["sources"]} == {name: kept[name] for name in zoo.rows}
    assert {split: found["images"] for split, found in report["splits"].items()} == {
        split: len(rows) for split, rows in pairs.items()
    }
    reasons = Counter(loss.reason for loss in zoo.losses)
    assert {reason: found["count"] for reason, found in report["quarantined"].items()} == reasons
    assert {name: count for name, count in report["notes"].items() if count} == zoo.notes
    assert report["duplicates"]["merged_rows"] == 1
    assert (report["leakage"]["exact"], report["leakage"]["near"], report["leakage"]["by_id"]) == (1, 2, 1)


def test_training_on_the_prepared_zoo_skips_no_row(zoo: Corpus, prepared: Path) -> None:
    pairs = tokenize_splits(load_pairs(DataArguments(dataset_name=str(prepared))), new_tokenizer(), 16)
    seen = []
    for split, rows in pairs.items():
        batches = list(loaders().evaluation(rows, 8))
        if split == "train":
            order = GlobalOrder(len(rows), BatchSizes((0,), (8,)), 0)
            trained = list(loaders().train(rows, order, 0, len(rows) // 8))
            assert all(len(batch["image_ids"]) == 8 for batch in trained)
            batches += trained
        assert [reason for batch in batches for reason in batch["skipped"]] == []
        seen += [key for batch in batches for key in batch["image_ids"]]
    assert len(set(seen)) == len(zoo.pairs)


def test_nothing_outside_was_read_and_nothing_was_unpacked(zoo: Corpus, prepared: Path) -> None:
    secret = (zoo.folder / "outside" / "secret.png").read_bytes()
    rows = [row for split in load_from_disk(str(prepared)).values() for row in split]
    assert all(row["image"]["bytes"] != secret for row in rows)
    hostile = [loss for loss in zoo.losses if loss.kind.startswith(("../", "/tmp/"))]
    names = [loss.where.removeprefix("000.tar, member ") for loss in hostile]
    assert len(names) == 2
    for name in names:
        assert not (zoo.folder / "shards" / "data" / f"{name}.png").exists()
        assert not Path(f"{name}.png").exists()


# -- training from raw files --------------------------------------------------------------------------------------------


RAW = {
    **dict.fromkeys(("lines", "captions", "regions", "odd"), "pairs.jsonl"),
    **{"csv": "pairs.csv", "tsv": "pairs.tsv", "flickr30k": "results.token", "flickr8k": "captions.txt"},
    **{"parquet": "pairs.parquet", "saved": "folder", "paths": "data/pairs.jsonl"},
}


@pytest.mark.parametrize("source", RAW)
def test_training_from_raw_files_finds_the_same(source: str, zoo: Corpus, own_cache: Path) -> None:
    path = str(zoo.folder / source / RAW[source])
    pairs = load_pairs(DataArguments(dataset_name=path) if source == "saved" else DataArguments(train_file=path))
    check_pairs(
        [pair for pair in zoo.pairs if pair.source == source], [row for split in pairs.values() for row in split]
    )
    [quarantine] = own_cache.glob("tandem_pairs/*/quarantine.jsonl")
    found = Counter((fault["where"], fault["reason"]) for fault in quarantine_of(quarantine.parent))
    no_download = {"private_address": "url_not_allowed", "download_failed": "url_not_allowed"}
    wanted = [(loss.where, no_download.get(loss.reason, loss.reason)) for loss in zoo.losses if loss.source == source]
    assert found == Counter(wanted)


# -- rows ---------------------------------------------------------------------------------------------------------------


def test_an_archive_made_on_a_mac_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "mac.tar", "w") as archive:
        for number in range(5):
            texts = {f"{number}.png": png(draw(number)), f"{number}.txt": b"a picture of %d" % number}
            for name, content in texts.items():
                add_member(archive, f"./._{name}", b"\0\5\x16\7" + bytes(80))
                add_member(archive, f"./{name}", content)
    main(["--sources", str(tmp_path / "mac.tar"), "--output_dir", str(tmp_path / "out"), *FLAGS])
    assert report_of(tmp_path / "out")["sources"][0]["kept"] == 5


def test_no_line_of_the_log_and_of_the_quarantine_is_made_by_a_caption(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = []
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(draw(number)))
        rows.append(line(image=f"{number}.png", caption=f"picture {number}", id=f"{number}\n12:00:00 ERROR forged"))
    rows.append(line(image="gone\n12:00:00 ERROR forged\x1b[2J.png", caption="a dog", id="x"))
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(rows))
    with caplog.at_level("INFO"):
        main(["--sources", str(path), "--output_dir", str(tmp_path / "out"), *FLAGS])
        load_pairs(DataArguments(train_file=str(path)))
    assert [each["reason"] for each in quarantine_of(tmp_path / "out")] == ["image_missing"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "gone" in said
    assert not any(text.startswith("12:00:00 ERROR forged") for text in said.splitlines())
    assert "\x1b" not in said
    rows[1] = line(image="2.png", caption="another", id="0\n12:00:00 ERROR forged")
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"^[^\n\x1b]+$"):
        load_pairs(DataArguments(train_file=str(path)))
    with pytest.raises(ValueError, match=r"^[^\n\x1b]+$"):
        main(["--sources", str(path), "--output_dir", str(tmp_path / "2"), "--num_proc", "1"])


# -- sources that cannot be read as a whole -----------------------------------------------------------------------------

HEADER, WHOLE = b"image,caption\n", b"image,caption\n0.png,a dog\n1.png,a cat\n"
LINES = b'{"image": "0.png", "caption": "a dog"}\n{"image": "1.png", "caption": "a cat"}\n'
GONE = b'{"image": "none.png", "caption": "a dog"}\n'
UTF16_LINES, UTF16_CELLS = (text.decode().encode("utf-16") for text in (LINES, WHOLE))
REFUSED = {  # kind: file, its content (None: there is none), further keys and flags, and a part of the message
    "UTF-16 lines": ("a.jsonl", UTF16_LINES, "", "a.jsonl, line 1 is UTF-16 text. The text is not UTF-8. Save"),
    "UTF-16 cells": ("a.csv", UTF16_CELLS, "", "a.csv, line 1 is UTF-16 text."),
    "a UTF-16 document": (
        "a.json",
        '{"images": []}'.encode("utf-16"),
        ",format=coco",
        "UTF-16 text. Save it as UTF-8",
    ),
    "binary lines": ("a.jsonl", png(draw(0)), "", "a.jsonl, line 1 is not UTF-8 text: byte 1 of the line."),
    "an empty file of lines": ("a.jsonl", b"", "", "holds no rows. Give a file"),
    "blank lines": ("a.jsonl", b"\n \n\n", "", "holds no rows. Give a file"),
    "an empty table": ("a.csv", b"", "", "holds no rows. Give a file"),
    "a table of a header": ("a.csv", HEADER, "", "holds no rows. Give a file"),
    "an empty array": ("a.json", b"[]", "", "holds no rows. Give a file"),
    "an array that is cut": ("a.json", b'[{"image": "0.png",\n"cap', "", "a.json, line 2 is not valid JSON"),
    "a file that is not there": ("a.jsonl", None, "", "there is no such file or folder. Check the path"),
    "an archive that is not there": ("{000..002}.tar", None, "", "000.tar. Check the path and the range"),
    "an unknown suffix": ("a.xlsx", LINES, "", "its format is not known by '.xlsx'. Known are .jsonl"),
    "no such column": ("a.jsonl", LINES, ",caption_column=captoin", "Did you mean 'caption'? The columns are"),
    "no column of captions": ("a.csv", b"image,words\n0.png,a dog\n", "", "no caption column was recognised"),
    "a column twice": (
        "a.csv",
        b"image,caption,caption\n",
        "",
        "two columns caption; only one can be read. Rename one",
    ),
    "a header in Latin-1": ("a.csv", b"image,l\xe9gende\n", "", "a.csv, line 1 is not UTF-8 text"),
    "a header cut in quotes": ("a.csv", b'"image,caption\n', "", "a.csv, line 1 is a row that cannot be read"),
    "Parquet that is none": ("a.parquet", LINES, "", "cannot be read as Parquet"),
    "Parquet that is cut": ("a.parquet", b"PAR1" + bytes(50), "", "cannot be read as Parquet"),
    "COCO that is cut": ("a.json", b'{"images": [{"id": 1', ",format=coco", "Copy or repair the file"),
    "COCO of boxes": (
        "a.json",
        b'{"images": [], "annotations": [{"image_id": 1, "bbox": []}]}',
        ",format=coco",
        "no annotation has image_id and caption",
    ),
    "COCO nested without end": ("a.json", b"[" * 100_000, ",format=coco", "nested too deeply"),
    "COCO of sounds": (
        "a.json",
        b'{"images": [], "annotations": []}',
        ",medium=sound",
        "coco is read for images alone",
    ),
    "COCO of objects": ("a.json", b'{"images": [], "categories": []}', ",format=coco", "no list 'annotations'"),
    "only images that are missing": ("a.jsonl", GONE * 20, "", "20 of 20 rows are bad"),
    "every tenth image missing": ("a.jsonl", (LINES * 9 + GONE * 2) * 3, "", "6 of 60 rows are bad, more than"),
    "no good row, though all may be bad": (
        "a.jsonl",
        GONE * 20,
        " --max_bad_fraction 1",
        "no row is left of any source (image_missing: 20). The first is line 1",
    ),
    "a single pair": ("a.jsonl", LINES.splitlines()[0], " --validation_fraction 0", "at least 2. Add some"),
    "an image root that is none": ("a.jsonl", LINES, ",image_root=/nowhere", "Give the folder of the images"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_a_source_that_cannot_be_read_is_refused_in_one_line(kind: str, tmp_path: Path) -> None:
    name, content, more, message = REFUSED[kind]
    for number in range(2):
        draw(number).save(tmp_path / f"{number}.png")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    keys, *flags = more.split(" ")
    output = str(tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        main(["--sources", f"{tmp_path / name}{keys}", "--output_dir", output, "--num_proc", "1", *flags])
    assert "\n" not in str(caught.value)
    assert not Path(output).exists()
