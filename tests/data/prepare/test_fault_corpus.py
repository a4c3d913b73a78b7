"""Whole runs over sources full of faults: good rows come out as they went in, bad rows are named, and no damage spreads."""

import json
import sys
import tarfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import DatasetDict, disable_progress_bars, load_from_disk

from mm_utils.data.images import open_image
from mm_utils.data.order import BatchSizes
from mm_utils.data.sources import DataArguments, load_pairs
from mm_utils.data.tokens import global_order, tokenize_splits
from scripts.prepare_data import main
from tests.data.numbered_rows import loaders, new_tokenizer
from tests.data.prepare.fault_corpus import Corpus, Pair, write_table
from tests.data.prepare.fault_images import draw, png
from tests.data.prepare.fault_layouts import add_member
from tests.data.prepare.fault_rows import CAPTION, TOKENS_GOOD, Row, line
from tests.data.prepare.fault_sources import build

FLAGS = ["--num_proc", "2", "--max_bad_fraction", "1", "--on_leakage", "drop", "--near_duplicates", "drop"]
NEEDS_DOWNLOADS = "--allow_download"  # no address of the corpus gets as far as a connection
disable_progress_bars()


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def prepared(corpus: Corpus) -> Path:
    output = corpus.folder / "prepared"
    main(["--sources", *corpus.sources, "--output_dir", str(output), NEEDS_DOWNLOADS, *FLAGS])
    return output


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def quarantine_of(folder: Path) -> list[dict[str, str]]:
    return [json.loads(text) for text in (folder / "quarantine.jsonl").read_text().splitlines()]


def rows_of(pairs: DatasetDict) -> Iterator[dict[str, Any]]:
    for rows in pairs.values():
        yield from rows


def difference(stored: dict[str, Any], pair: Pair) -> float:
    """Mean difference of the pixels, in levels of 255; pictures of two numbers differ by 50 and more."""
    image = open_image(stored).resize(pair.picture.size)
    return float(np.abs(np.asarray(image, np.float32) - np.asarray(pair.picture, np.float32)).mean())


def test_every_good_row_comes_out_with_its_own_picture_and_nothing_else_does(corpus: Corpus, prepared: Path) -> None:
    wanted = {(pair.source, pair.captions): pair for pair in corpus.pairs}
    assert len(wanted) == len(corpus.pairs)
    rows = {(row["source"], tuple(row["captions"])): row for row in rows_of(load_from_disk(str(prepared)))}
    assert {wanted[key].kind for key in wanted.keys() - rows.keys()} == set()
    assert {row["id"] for key, row in rows.items() if key not in wanted} == set()
    differing = {pair.kind: round(difference(rows[key]["image"], pair), 1) for key, pair in wanted.items()}
    assert {kind: value for kind, value in differing.items() if value > 12} == {}


def test_every_bad_row_is_in_the_quarantine_with_its_reason_and_nothing_else_is(
    corpus: Corpus, prepared: Path
) -> None:
    kinds = {(loss.source, loss.where, loss.reason): loss.kind for loss in corpus.losses}
    found = Counter((fault["source"], fault["where"], fault["reason"]) for fault in quarantine_of(prepared))
    wanted = Counter((loss.source, loss.where, loss.reason) for loss in corpus.losses)
    assert {key: kinds[key] for key in wanted - found} == {}
    assert found - wanted == Counter()
    assert len({loss.kind for loss in corpus.losses}) >= 150
    print_figures(corpus, prepared)


def test_the_report_counts_what_happened(corpus: Corpus, prepared: Path) -> None:
    report, pairs = report_of(prepared), load_from_disk(str(prepared))
    assert {source["name"]: source["rows"] for source in report["sources"]} == corpus.rows
    kept = Counter(pair.source for pair in corpus.pairs)
    assert {source["name"]: source["kept"] for source in report["sources"]} == {
        name: kept[name] for name in corpus.rows
    }
    assert sum(split["images"] for split in report["splits"].values()) == len(corpus.pairs)
    assert {split: found["images"] for split, found in report["splits"].items()} == {
        split: len(rows) for split, rows in pairs.items()
    }
    reasons = Counter(loss.reason for loss in corpus.losses)
    assert {reason: found["count"] for reason, found in report["quarantined"].items()} == reasons
    assert {name: count for name, count in report["notes"].items() if count} == corpus.notes
    assert report["duplicates"]["merged_rows"] == 1
    assert (report["leakage"]["exact"], report["leakage"]["near"], report["leakage"]["by_id"]) == (1, 2, 1)


def test_training_skips_none_of_what_is_left(corpus: Corpus, prepared: Path) -> None:
    tokenizer = new_tokenizer()
    pairs = tokenize_splits(load_pairs(DataArguments(dataset_name=str(prepared))), tokenizer, 16)
    seen = []
    for split, rows in pairs.items():
        batches = list(loaders().evaluation(rows, 8))
        if split == "train":
            order = global_order(rows, BatchSizes((0,), (8,)), 0, 1)
            trained = list(loaders().train(rows, order, 0, len(rows) // 8))
            assert all(len(batch["image_ids"]) == 8 for batch in trained)
            batches += trained
        assert [reason for batch in batches for reason in batch["skipped"]] == []
        seen += [key for batch in batches for key in batch["image_ids"]]
    assert set(seen) == {row["id"] for row in rows_of(pairs)}
    assert len(set(seen)) == len(corpus.pairs)


def test_no_row_reaches_a_file_outside(corpus: Corpus, prepared: Path) -> None:
    secret = (corpus.folder / "outside" / "secret.png").read_bytes()
    assert all(row["image"]["bytes"] != secret for row in rows_of(load_from_disk(str(prepared))))


def test_an_address_is_not_looked_at_unless_downloads_are_allowed(tmp_path: Path) -> None:
    rows = [line(image=address) for address in ("http://127.0.0.1:1/a.png", "https://example.org/a.png")]
    assert reasons_of(tmp_path, rows) == ["url_not_allowed"] * 2


@pytest.mark.parametrize(
    ("wanted", "row"),
    [
        pytest.param("bad_regions", line(regions=[{"box": box, "phrase": "a dog"}]), id=kind)
        for kind, box in {
            "a box of no number": [float("nan"), 2, 3, 4],
            "a box beyond the image": [900, 900, 20, 20],
            "a box without width": [4, 4, 0, 20],
            "a box of negative width": [40, 4, -9, 20],
        }.items()
    ],
)
def test_a_box_lies_in_its_image(wanted: str, row: str, tmp_path: Path) -> None:
    assert reasons_of(tmp_path, [row]) == [wanted]


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("pairs.jsonl", line(), '["{image}", "{caption}"]'),
        ("results.token", TOKENS_GOOD, "{image}\t{caption}"),
    ],
)
def test_a_bad_first_line_is_one_bad_row(name: str, good: str, bad: str, tmp_path: Path) -> None:
    corpus = Corpus(tmp_path)
    path = corpus.add("rows", name)
    write_table(corpus, "rows", path, [Row("bad", bad, "?"), *[Row("good", good, "", CAPTION)] * 5], good=None)
    main(["--sources", *corpus.sources, "--output_dir", str(tmp_path / "out"), *FLAGS])
    assert [fault["where"] for fault in quarantine_of(tmp_path / "out")] == ["line 1"]


def test_file_names_of_two_sources_have_nothing_to_do_with_each_other(tmp_path: Path) -> None:
    numbers, sources = iter(range(20)), []
    for name, split in {"left": "train", "right": "validation"}.items():
        folder = tmp_path / name
        folder.mkdir()
        for at in range(5):
            draw(next(numbers)).save(folder / f"{at}.png")
        rows = [line(image=f"{at}.png", caption=f"{name} {at}", split=split) for at in range(5)]
        (folder / "pairs.jsonl").write_text("\n".join(rows))
        sources.append(f"{folder / 'pairs.jsonl'},name={name}")
    main(["--sources", *sources, "--output_dir", str(tmp_path / "out"), *FLAGS])
    assert quarantine_of(tmp_path / "out") == []


def test_an_archive_made_on_a_mac_is_read(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "mac.tar", "w") as archive:
        for number in range(5):
            for name, content in (
                (f"{number}.png", png(draw(number))),
                (f"{number}.txt", b"a picture of %d" % number),
            ):
                add_member(archive, f"./._{name}", b"\0\5\x16\7" + bytes(80))
                add_member(archive, f"./{name}", content)
    main(["--sources", str(tmp_path / "mac.tar"), "--output_dir", str(tmp_path / "out"), *FLAGS])
    assert report_of(tmp_path / "out")["sources"][0]["kept"] == 5


def reasons_of(folder: Path, rows: list[str]) -> list[str]:
    """Reasons in the quarantine when `rows` lie between good ones."""
    corpus = Corpus(folder)
    table = [Row(f"row {at}", row, "?") for at, row in enumerate(rows)]
    write_table(corpus, "rows", corpus.add("rows", "pairs.jsonl"), table, line())
    main(["--sources", *corpus.sources, "--output_dir", str(folder / "out"), *FLAGS])
    return [fault["reason"] for fault in quarantine_of(folder / "out")]


def print_figures(corpus: Corpus, prepared: Path) -> None:
    faults, wanted = quarantine_of(prepared), {(loss.source, loss.where) for loss in corpus.losses}
    figures = {
        "kinds of faults": len({loss.kind for loss in corpus.losses}),
        "kinds of odd rows": len({pair.kind for pair in corpus.pairs}),
        "rows": corpus.rows.total(),
        "faults in quarantine": len(faults),
        "pairs that survived": sum(map(len, load_from_disk(str(prepared)).values())),
        "false alarms": sum((fault["source"], fault["where"]) not in wanted for fault in faults),
    }
    sys.stdout.write("\n" + "\n".join(f"{name:<22}{value:>6,}" for name, value in figures.items()) + "\n")
