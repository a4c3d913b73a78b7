"""Sources full of faults: every good row comes out with its own picture and captions, and every bad one is named.

`prepare_data` reads the whole zoo once; training from raw files reads it by the same readers.
"""

import csv
import io
import os
import re
import tarfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_from_disk
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mm_utils.data import parquet
from mm_utils.data.arguments import DataArguments
from mm_utils.data.faults import Fault
from mm_utils.data.images import open_image
from mm_utils.data.pairs import load_pairs
from mm_utils.data.parquet import ParquetRows
from mm_utils.data.paths import MOST_FILES, expand_braces, files_of_pattern
from mm_utils.data.rows import text_files
from mm_utils.data.rows.text_files import text_rows
from scripts.prepare_data import main
from tests.kit.fault_images import draw, png
from tests.kit.reading import (
    CLOSE,
    add_member,
    content,
    pixels_apart,
    put,
    quarantine_of,
    read,
    reasons,
    report_of,
    write,
)
from tests.kit.zoo import Corpus, Pair, build, line

FLAGS = ["--num_proc", "2", "--max_bad_fraction", "1"]


def check_pairs(wanted: list[Pair], rows: list[dict[str, Any]]) -> None:
    """All of these came out, each with its own picture, and nothing else."""
    found = {tuple(row["captions"]): row for row in rows}
    assert {pair.kind for pair in wanted if pair.captions not in found} == set()
    assert set(found) == {pair.captions for pair in wanted}
    shown = {pair.kind: open_image(found[pair.captions]["image"]).resize(pair.picture.size) for pair in wanted}
    apart = {pair.kind: pixels_apart(shown[pair.kind], pair.picture) for pair in wanted}
    assert {kind: value for kind, value in apart.items() if value > CLOSE} == {}


# -- the whole zoo ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return build(tmp_path_factory.mktemp("zoo"))


@pytest.fixture(scope="module")
def prepared(zoo: Corpus) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", zoo.folder / "cache")
        words = ["--sources", *zoo.sources, "--output_dir", str(zoo.folder / "prepared")]
        main([*words, *FLAGS])
    return zoo.folder / "prepared"


def test_every_good_row_comes_out_with_its_own_picture(zoo: Corpus, prepared: Path) -> None:
    rows = [row for split in load_from_disk(str(prepared)).values() for row in split]
    for source in {pair.source for pair in zoo.pairs}:
        check_pairs(
            [pair for pair in zoo.pairs if pair.source == source], [row for row in rows if row["source"] == source]
        )
    secret = (zoo.folder / "outside" / "secret.png").read_bytes()
    assert all(row["image"]["bytes"] != secret for row in rows)
    hostile = [loss for loss in zoo.losses if loss.kind.startswith(("../", "/tmp/"))]
    names = [loss.where.removeprefix("000.tar, member ") for loss in hostile]
    assert len(names) == 2
    assert not [name for name in names if (zoo.folder / "shards/data" / f"{name}.png").exists()]  # nothing is unpacked


def test_every_bad_row_is_in_the_quarantine_and_nothing_else_is(zoo: Corpus, prepared: Path) -> None:
    kinds = {(loss.source, loss.where, loss.reason): loss.kind for loss in zoo.losses}
    found = Counter((fault["source"], fault["where"], fault["reason"]) for fault in quarantine_of(prepared))
    wanted = Counter((loss.source, loss.where, loss.reason) for loss in zoo.losses)
    assert {key: kinds[key] for key in wanted - found} == {}
    assert found - wanted == Counter()


def test_the_report_counts_the_rows(zoo: Corpus, prepared: Path) -> None:
    report = report_of(prepared)
    pairs = load_from_disk(str(prepared))
    kept = Counter(pair.source for pair in zoo.pairs)
    assert {source["name"]: source["rows"] for source in report["sources"]} == zoo.rows
    assert {source["name"]: source["kept"] for source in report["sources"]} == {name: kept[name] for name in zoo.rows}
    assert {name: split["images"] for name, split in report["splits"].items()} == {k: len(v) for k, v in pairs.items()}
    counts = Counter(loss.reason for loss in zoo.losses)
    assert {reason: found["count"] for reason, found in report["quarantined"].items()} == counts
    assert {name: count for name, count in report["notes"].items() if count} == zoo.notes


def test_no_line_of_the_log_and_of_the_quarantine_is_made_by_a_caption(
    tmp_path: Path, own_cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rows = []
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(draw(number)))
        rows.append(line(image=f"{number}.png", caption=f"picture {number}", id=f"{number}\n12:00:00 ERROR forged"))
    rows.append(line(image="gone\n12:00:00 ERROR forged\x1b[2J.png", caption="a dog", id="x"))
    path = write(tmp_path / "pairs.jsonl", "\n".join(rows))
    with caplog.at_level("INFO"):
        main(["--sources", str(path), "--output_dir", str(tmp_path / "out"), *FLAGS])
        load_pairs(DataArguments(train_file=str(path)))
    assert [each["reason"] for each in quarantine_of(tmp_path / "out")] == ["image_missing"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "gone" in said
    assert "\x1b" not in said
    assert not any(text.startswith("12:00:00 ERROR forged") for text in said.splitlines())
    rows[1] = line(image="2.png", caption="another", id="0\n12:00:00 ERROR forged")
    path.write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"^[^\n\x1b]+$"):
        load_pairs(DataArguments(train_file=str(path)))


# -- sources that cannot be read as a whole -----------------------------------------------------------------------------
LINES = b'{"image": "0.png", "caption": "a dog"}\n{"image": "1.png", "caption": "a cat"}\n'
GONE = b'{"image": "none.png", "caption": "a dog"}\n'
BOXES = b'{"images": [], "annotations": [{"image_id": 1}]}'
SIX = (LINES * 9 + GONE * 2) * 3
FRAMES = b'{"frames": ["0.png", "1.png"], "caption": "a dog"}\n'
REFUSED = [  # file, content (None: there is none), keys and flags, the message
    ("a.jsonl", LINES.decode().encode("utf-16"), "", "a.jsonl, line 1 is UTF-16 or UTF-32 text. The text is not UTF-8"),
    ("a.json", '{"images": []}'.encode("utf-16"), ",format=coco", "UTF-16 or UTF-32 text. The text is not UTF-8. Save the file as UTF-8"),
    ("a.jsonl", png(draw(0)), "", "a.jsonl, line 1 is not UTF-8 text: byte 1 of the line."),
    ("a.jsonl", b"\n \n\n", "", "holds no rows. Give a file"),
    ("a.csv", b"image,caption\n", "", "holds no rows. Give a file"),
    ("a.json", b'[{"image": "0.png",\n"cap', "", "a.json, line 2 is not valid JSON"),
    ("a.jsonl", None, "", "there is no such file. "),
    ("{000..002}.tar", None, "", "000.tar. Check the path and the range"),
    ("a.xlsx", LINES, "", "its format is not known by '.xlsx'. Known are .jsonl"),
    ("a.jsonl", LINES, ",caption_column=captoin", "Did you mean 'caption'? The columns are"),
    ("a.csv", b"image,words\n0.png,a dog\n", "", "image, words. Write it behind the path: ,caption_column=NAME."),
    ("a.jsonl", FRAMES, "", "no image column was recognised. The columns are: frames, caption. A list of frames is not read. Join the"),
    ("a.jsonl", FRAMES, ",image_column=frames", "Frames are no medium by themselves. Join those of each row into a video"),
    ("a.json", b'[{"id": 1, "annotations": [], "data": {"image": "0.png"}}]', "", "Label Studio's full export: export JSON-MIN"),
    ("a.csv", b"image,caption,caption\n", "", "two columns caption; only one can be read. Rename one"),
    ("a.parquet", b"PAR1" + bytes(50), "", "cannot be read as Parquet"),
    ("a.db", b"no database" * 1000, "", "it cannot be read as SQLite ("),
    ("a.json", b'{"images": [{"id": 1', ",format=coco", "Copy or repair the file"),
    ("a.json", BOXES, ",format=coco", "no annotation has image_id and caption"),
    ("a.json", b"[" * 100_000, ",format=coco", "nested too deeply"),
    ("a.json", BOXES, ",medium=sound,format=coco", "coco is read for images alone"),
    ("a.csv", b'"image,caption\n', "", "a.csv, line 1 is a row that cannot be read"),
    ("a.jsonl", SIX, "", "6 of 60 rows are bad, more than"),
    ("a.jsonl", SIX, "", "is read wrongly. If not, and they shall be left out, raise --max_bad_fraction."),
    ("a.jsonl", GONE * 20, " --max_bad_fraction 1", "no row is left of any source (image_missing: 20). The first is line 1"),
    ("a.jsonl", LINES.splitlines()[0], " --validation_fraction 0", "and contrastive training needs at least 2"),
    ("a.jsonl", LINES, ",image_root=/nowhere", "Give the folder of the images"),
    ("a.jsonl", LINES, " --clip_fps 2", "--clip_fps is 2.0; a.jsonl holds images, which do not read it. Leave it out"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "text", "more", "message"), REFUSED, ids=[row[3][:40] for row in REFUSED])
def test_a_source_that_cannot_be_read_is_refused_in_one_line(
    name: str, text: bytes | None, more: str, message: str, tmp_path: Path
) -> None:
    for number in range(2):
        draw(number).save(tmp_path / f"{number}.png")
    if text is not None:
        (tmp_path / name).write_bytes(text)
    keys, *flags = more.split(" ")
    output = str(tmp_path / "out")
    with pytest.raises(ValueError, match=re.escape(message)) as caught:
        main(["--sources", f"{tmp_path / name}{keys}", "--output_dir", output, "--num_proc", "1", *flags])
    assert "\n" not in str(caught.value)
    assert not Path(output).exists()


# -- folders ------------------------------------------------------------------------------------------------------------
TREES = {  # with names as people and cameras write them, and their faults
    "classes": (("cat/0.png", "dog/0.png", "___/0.png"), ["caption_empty"]),
    "imagefolder": (("0.JPG", "0.Txt", "0.NEF", "dog/1.png", "dog/1.txt"), ["not_read"]),
    "parquet": (("0.parquet", "dog/1.parquet"), []),
    "webdataset": (("0.tar", "dog/1.tar"), []),
}


@pytest.mark.parametrize("kind", TREES)
def test_a_folder_that_is_a_link_or_cannot_be_listed_is_a_bad_row(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names, others = TREES[kind]
    put(*names)(tmp_path / "set")
    (tmp_path / "set/dog").rename(tmp_path / "elsewhere")
    (tmp_path / "set/dog").symlink_to(tmp_path / "elsewhere")
    for reason in ("linked_folder", "permission_denied"):
        good, bad = read(tmp_path / "set", format=kind)
        assert (len(good), sorted(row.fault.reason for row in bad)) == (1, sorted([*others, reason]))
        assert ("folder dog", reason) in reasons(bad)
        if reason == "linked_folder":
            (tmp_path / "set/dog").unlink()
            (tmp_path / "elsewhere").rename(tmp_path / "set/dog")
            monkeypatch.setattr(os, "scandir", closed(os.scandir))


def closed(scandir: Callable[..., Any]) -> Callable[..., Any]:
    def refuse(place="."):
        if os.fspath(place).rstrip("/").endswith("dog"):
            raise PermissionError(13, "Permission denied", str(place))
        return scandir(place)

    return refuse


def test_a_pattern_leaves_out_no_folder_in_silence_and_has_an_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put("cat/0.parquet", "dog/1.parquet")(tmp_path)
    names = ("cat/*.parquet", "*/*.parquet", "**/*.parquet", "{cat,dog}/*.parquet", "**/1.parquet")
    assert [len(files_of_pattern(str(tmp_path / name))) for name in names] == [1, 2, 2, 2, 1]
    monkeypatch.setattr(os, "scandir", closed(os.scandir))
    assert len(files_of_pattern(str(tmp_path / "cat/*.parquet"))) == 1
    for name in names[1:]:
        with pytest.raises(PermissionError, match="dog"):
            files_of_pattern(str(tmp_path / name))
    numbered = [f"{name}-{number}" for name in "abac" for number in ("08", "09", "10")]
    assert sorted(expand_braces("{a,{b,c}}-{08..10}")) == sorted(numbered)
    for pattern in ("w-{000..99999999999}.tar", "{0..999}{0..999}{0..999}"):
        with pytest.raises(ValueError, match=f"stands for more than {MOST_FILES:,} files"):
            expand_braces(pattern)


# -- tables -------------------------------------------------------------------------------------------------------------


def test_a_cell_that_is_no_text_stops_nothing(tmp_path: Path) -> None:
    put("a.png", "b.png", "c.png")(tmp_path)
    images = [b"a.png", b"b.png", b"\xff"]
    captions = [b"a", b"\xff", b"c"]
    columns = {
        "image": pa.array(images),
        "caption": pa.array(captions),
        "x": pa.array([[("a", 1)]] * 3, pa.map_(pa.string(), pa.int8())),
    }
    texts = {name: pa.Array.from_buffers(pa.string(), 3, columns[name].buffers()) for name in ("image", "caption")}
    pq.write_table(pa.table(columns | texts), tmp_path / "t.parquet")
    good, bad = read(tmp_path / "t.parquet")
    assert ([record.id for record in good], reasons(bad)) == (
        ["a.png"],
        [("row 1", "bad_encoding"), ("row 2", "bad_encoding")],
    )


def test_a_parquet_file_is_read_in_batches_of_bounded_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "_BATCH_BYTES", 12 << 20)
    rows = [{"n": at, "caption": f"a dog and {at} cats" + "x" * (1 << 20)} for at in range(40)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "p.parquet", use_dictionary=False, compression=None)
    assert len(next(ParquetRows(str(tmp_path / "p.parquet"), "p").batches(0, ["caption"], 1000))) <= 16
    rows = [{"n": at, "caption": f"a dog and {at} cats"} for at in range(30_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "r.parquet", row_group_size=7000)
    assert list(ParquetRows(str(tmp_path / "r.parquet"), "r").cells(["n", "caption"], 1000, first=6999)) == rows[6999:]


# -- text files ---------------------------------------------------------------------------------------------------------


def rows_in(path: Path, text: bytes | str) -> tuple[list[tuple[int, Any]], dict[int, str]]:
    """The good rows of a file of this text, and the reasons of the bad ones, by number."""
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    rows = [(int(place.split()[1]), row) for place, row in text_rows(path)]
    bad = {number: row.reason for number, row in rows if isinstance(row, Fault)}
    return [(number, row) for number, row in rows if number not in bad], bad


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    cells=st.lists(st.tuples(*[st.text(st.characters(exclude_categories=["Cs"]), max_size=5)] * 2), max_size=6),
    tabs=st.booleans(),
)
def test_csv_is_read_as_the_standard_library_does(tmp_path: Path, cells: list[tuple[str, str]], tabs: bool) -> None:
    delimiter = "\t" if tabs else ","
    text = io.StringIO(newline="")
    csv.writer(text, delimiter=delimiter, quoting=csv.QUOTE_ALL).writerows([("n", "m"), *cells])
    expected = list(csv.DictReader(io.StringIO(text.getvalue(), newline=""), delimiter=delimiter, strict=True))
    rows, _ = rows_in(tmp_path / ("p.tsv" if tabs else "p.csv"), text.getvalue())
    assert [row for _, row in rows] == expected


def test_long_lines_and_large_documents_are_faults_that_take_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_files, "LONGEST_LINE", 1000)
    for suffix, header, good, long in (
        (".jsonl", "", '{"n": 1}\n', f'{{"n": "{"x" * 5000}"}}\n'),
        (".csv", "n\n", "1\n", "x" * 5000 + "\n"),
    ):
        rows, bad = rows_in(tmp_path / f"p{suffix}", f"{header}{good}{long}\n{good}")
        assert bad == {2 + bool(header): "malformed_row"}
        assert [str(row["n"]) for _, row in rows] == ["1", "1"]
    monkeypatch.setattr(text_files, "LONGEST_DOCUMENT", 30)
    assert not rows_in(tmp_path / "p.json", '[{"n": 0}]')[1]
    assert rows_in(tmp_path / "p.json", '[{"n": 0}, {"n": 1}, {"n": 2}, {}]')[1] == {1: "malformed_row"}


# -- archives -----------------------------------------------------------------------------------------------------------


def test_an_archive_cut_or_flipped_anywhere_gives_only_whole_samples(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "whole.tar", "w") as archive:
        for number in range(6):
            add_member(archive, f"{number}.txt", b"picture %d" % number)
            add_member(archive, f"{number}.png", png(draw(number, (16, 16))))
    whole = (tmp_path / "whole.tar").read_bytes()
    end = len(whole.rstrip(b"\0"))
    begin = whole.index(b"3.txt")
    begins = [whole.index(f"{number}.txt".encode()) for number in range(1, 6)]  # whose headers end the samples before
    damaged = [(cut, whole[:cut]) for cut in (*range(512, end, 512), *range(700, end, 1700))]
    for place in (0, 1, 100, 124, 130, 135, 148, 150, 156, 257, 345, 500):
        at = begin + place
        damaged.append((begin, whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :]))
    for cut, archive in damaged:
        (tmp_path / "0.tar").write_bytes(archive)
        good, bad = read(tmp_path / "0.tar")
        for record in good:
            number = int(record.captions[0].removeprefix("picture "))
            assert content(record) == png(draw(number, (16, 16)))
        [said] = [row.fault.detail for row in bad if row.fault.reason == "truncated_archive"]
        before = sum(at + 512 <= cut for at in begins)
        assert f"{before} whole samples come before" in said
        assert len(good) == before
    assert len(read(tmp_path / "whole.tar")[0]) == 6
