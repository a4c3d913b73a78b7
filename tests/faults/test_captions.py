"""Rows, captions and ids that are malformed, odd or hostile, in JSON lines, CSV and TSV."""

import json
from pathlib import Path

import pytest

from mm_utils.data.sources import DataArguments, iterate_captions, load_pairs
from scripts.prepare_data import main
from tests.data.prepare.fault_corpus import Corpus
from tests.data.prepare.fault_images import Make, draw, jpeg, png
from tests.data.prepare.fault_rows import CAPTIONS, COMMAS, IDS, LAST_LINE, LINES, REGIONS, TABLE, TOKENS, Row, line
from tests.data.prepare.test_fault_sources import REFUSED
from tests.faults.conftest import Record
from tests.faults.outcomes import check_kept, check_set_aside, train_on

TABLES = {
    "lines": [*LINES, LAST_LINE],
    "captions": CAPTIONS,
    "ids": IDS,
    "regions": REGIONS,
    "csv": TABLE,
    "tsv": [row for row in TABLE if row.kind != "a cell too many"],
    "flickr30k": TOKENS,
    "flickr8k": COMMAS,
}
ROWS = [pytest.param(source, row, id=f"{source}-{row.kind}") for source, rows in TABLES.items() for row in rows]
# What says nothing about an image is looked for when data are prepared; training takes any text.
_ONLY_PREPARED = {"caption_nan", "caption_is_file_name", "bad_regions", "caption_empty"}
STRUCTURE = [
    pytest.param(source, row, id=f"{source}-{row.kind}")
    for source in ("lines", "captions", "ids")
    for row in TABLES[source]
    if row.reasons and not row.kept and not set(row.reasons.split()) & _ONLY_PREPARED and row.reasons != "duplicate_id"
]


@pytest.mark.parametrize(("source", "row"), ROWS)
def test_what_is_wrong_is_set_aside_and_what_is_odd_is_kept(
    source: str, row: Row, fault: Record, zoo: Corpus, prepared: Path
) -> None:
    fault("captions", f"prepared, {source}: {row.kind}")
    if row.reasons:
        check_set_aside(zoo, prepared, source, row.kind)
    else:
        check_kept(zoo, prepared, source, row.kind)


@pytest.mark.parametrize(("source", "row"), STRUCTURE)
def test_training_names_the_line_that_is_wrong(source: str, row: Row, fault: Record, zoo: Corpus) -> None:
    """A line that cannot be read stops it, a row that cannot be used is skipped."""
    fault("captions", f"trained on, {source}: {row.kind}")
    number, images, said = train_on(zoo, source, "pairs.jsonl", row.kind)
    assert f"line {number}" in said
    assert images in (0, 3)
    if not images:
        assert ".jsonl" in said
        assert "\n" not in said


@pytest.mark.parametrize("kind", REFUSED)
def test_a_source_that_is_wrong_as_a_whole_is_refused_in_one_line(kind: str, fault: Record, tmp_path: Path) -> None:
    fault("captions", f"prepared: {kind}")
    name, content, more, message = REFUSED[kind]
    for number in range(2):
        draw(number).save(tmp_path / f"{number}.png")
    if content is not None:
        (tmp_path / name).write_bytes(content)
    keys, *flags = more.split(" ")
    output = tmp_path / "out"
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        main(["--sources", f"{tmp_path / name}{keys}", "--output_dir", str(output), "--num_proc", "1", *flags])
    assert message in str(caught.value)
    assert not output.exists()


WHOLE_FILES = {
    "UTF-16": (lambda text: text.encode("utf-16"), "is UTF-16 text. Save it as UTF-8"),
    "UTF-16 without a mark": (lambda text: text.encode("utf-16-le"), "is UTF-16 text. Save it as UTF-8"),
    "nothing": (lambda text: b"", "holds no rows"),
    "blank lines": (lambda text: b"\n \n\n", "holds no rows"),
    "binary": (lambda text: png(draw(0)), "is not UTF-8 text"),
    "a single pair": (lambda text: text.splitlines()[0].encode(), "at least 2 pairs"),
    "a marked file that ends lines as Windows does": (lambda text: text.replace("\n", "\r\n").encode("utf-8-sig"), ""),
    "no line break at its end": (lambda text: text.rstrip("\n").encode(), ""),
}


@pytest.mark.parametrize("kind", WHOLE_FILES)
def test_training_refuses_or_reads_a_whole_file(kind: str, fault: Record, tmp_path: Path) -> None:
    fault("captions", f"trained on: {kind}")
    make, message = WHOLE_FILES[kind]
    for number in range(4):
        draw(number).save(tmp_path / f"{number}.png")
    text = "".join(line(image=f"{number}.png", caption=f"caf\u00e9 {number}") + "\n" for number in range(4))
    path = tmp_path / "pairs.jsonl"
    path.write_bytes(make(text))
    arguments = DataArguments(train_file=str(path))
    if not message:
        pairs = load_pairs(arguments)
        captions = [caption for rows in pairs.values() for caption in iterate_captions(rows)]
        assert sorted(captions) == [f"caf\u00e9 {number}" for number in range(4)]
        return
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        load_pairs(arguments)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_one_id_of_two_images_names_both_lines(fault: Record, tmp_path: Path) -> None:
    fault("captions", "trained on: one id of two images")
    rows = []
    for number in range(4):
        draw(number).save(tmp_path / f"{number}.png")
        rows.append(line(image=f"{number}.png", caption="a", id=number % 3))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"lines 1 and 4 of .*pairs\.jsonl"):
        load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")))


@pytest.mark.parametrize("make", [png, jpeg], ids=["the same file", "the same picture, saved anew"])
def test_a_picture_in_two_splits_stops_the_preparation(make: Make, fault: Record, tmp_path: Path) -> None:
    fault("captions", "prepared: a picture in train and in validation")
    rows = []
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(draw(number)))
        rows.append(line(image=f"{number}.png", caption=f"picture {number}", split="train"))
    (tmp_path / "again.image").write_bytes(make(draw(2)))
    rows.append(line(image="again.image", caption="another", split="validation"))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"line 3 of .* in train and line 7 of .* in validation"):
        main(["--sources", str(tmp_path / "pairs.jsonl"), "--output_dir", str(tmp_path / "out"), "--num_proc", "1"])
    assert not (tmp_path / "out").exists()


def test_no_line_of_the_log_and_of_the_quarantine_is_made_by_a_caption(
    fault: Record, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fault("captions", "prepared: line breaks and terminal escapes in captions, paths and ids")
    rows = []
    for number in range(6):
        (tmp_path / f"{number}.png").write_bytes(png(draw(number)))
        rows.append(line(image=f"{number}.png", caption=f"picture {number}", id=f"{number}\n12:00:00 ERROR forged"))
    rows.append(line(image="gone\n12:00:00 ERROR forged\x1b[2J.png", caption="a dog", id="x"))
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    flags = ["--num_proc", "1", "--max_bad_fraction", "1"]
    with caplog.at_level("INFO"):
        main(["--sources", str(tmp_path / "pairs.jsonl"), "--output_dir", str(tmp_path / "out"), *flags])
    lines = (tmp_path / "out" / "quarantine.jsonl").read_text().splitlines()
    assert [json.loads(each)["reason"] for each in lines] == ["image_missing"]
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert not any(text.startswith("12:00:00 ERROR forged") for text in said.splitlines())
    assert "\x1b" not in said
    with pytest.raises(ValueError, match=r"^[^\n]+$") as caught:
        main(["--sources", str(tmp_path / "pairs.jsonl"), "--output_dir", str(tmp_path / "2"), "--num_proc", "1"])
    assert "\x1b" not in str(caught.value)
    with caplog.at_level("INFO"):
        load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")))
    rows[1] = line(image="2.png", caption="another", id="0\n12:00:00 ERROR forged")
    (tmp_path / "pairs.jsonl").write_text("\n".join(rows))
    with pytest.raises(ValueError, match=r"^[^\n\x1b]+$"):
        load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")))
