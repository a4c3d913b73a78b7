import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data_report import _escape, write_report

FEATURES = Features(
    {
        "id": Value("string"),
        "image": ImageFeature(decode=False),
        "width": Value("int32"),
        "height": Value("int32"),
        "captions": [Value("string")],
    }
)
SUMMARY: dict[str, Any] = {
    "format": "tandem-pairs",
    "version": 1,
    "created": "2031-02-03T04:05:06",
    "fingerprint": "0f3a9c",
    "settings": {"short_side": 258, "near": True, "flags": ["a", "b"]},
    "sources": [
        {
            "name": "one",
            "path": "a.jsonl",
            "format": "jsonl",
            "rows": 12345,
            "kept": 11000,
            "bad": 1345,
            "weight": 2.5,
        },
        {"name": "two", "path": "b", "format": "folder", "rows": 777, "kept": 777, "bad": 0, "share": 0.125},
    ],
    "splits": {"train": {"images": 30, "captions": 60, "bytes": 123_456_789}, "test": {"images": 5, "captions": 10}},
    "quarantined": {
        "image_empty": {"count": 345, "explanation": "The image has 0 bytes."},
        "image_truncated": {
            "count": 1000,
            "explanation": "The image ends too early.",
            "examples": [{"source": "a.jsonl", "where": f"line {line}", "detail": "cut"} for line in range(7, 12)],
        },
    },
    "notes": {"exif_rotated": 4321, "caption_cut": 3},
    "duplicates": {"exact_groups": 11, "near_pairs": 22, "largest_group": 33, "merged_rows": 44, "examples": []},
    "leakage": {"policy": "drop", "exact": 51, "near": 52, "by_id": 53, "dropped": {"train": 1560}},
    "captions": {
        "distinct": 21,
        "shared": [{"caption": "no image", "images": 20}],
        "languages": {"en": 61, "": 62},
        "characters": {"mean": 41.25, "p50": 40},
    },
    "storage": {"store": "jpeg", "original_bytes_per_pair": 98765.4, "psnr_db": {"mean": 41.5}, "psnr_sample": 71},
    "seconds": 81.5,
    "rows_per_second": 91.25,
}


def encoded(row: int) -> dict[str, Any]:
    data = io.BytesIO()
    Image.new("RGB", (40 + row, 30), (row * 5 % 256, 90, 200)).save(data, format="PNG")
    return {"bytes": data.getvalue(), "path": None}


def split(name: str, count: int, **changes: Any) -> Dataset:
    rows = [
        {
            "id": f"{name}-{row}",
            "image": encoded(row),
            "width": 40 + row,
            "height": 30,
            "captions": [f"caption {row}", "another"],
            **changes,
        }
        for row in range(count)
    ]
    return Dataset.from_list(rows, features=FEATURES)


@pytest.fixture(scope="module")
def pairs() -> DatasetDict:
    return DatasetDict({"train": split("train", 30), "test": split("test", 5)})


def report(folder: Path, pairs: DatasetDict, summary: dict[str, Any], seed: int = 0) -> str:
    folder.mkdir(exist_ok=True)
    write_report(folder, pairs, summary, seed=seed)
    text = (folder / "report.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (folder / name).is_file(), name
    return text


def cells(text: str, section: str) -> dict[str, list[str]]:
    """The table below a heading: the first cell of each row -> the others."""
    body = text.split(f"## {section}\n\n")[1].split("\n\n")[0]
    rows = [re.split(r"(?<!\\)\|", line)[1:-1] for line in body.splitlines()[2:]]
    return {row[0].strip(): [cell.strip() for cell in row[1:]] for row in rows}


def test_tables_hold_the_numbers_of_the_summary(tmp_path: Path, pairs: DatasetDict) -> None:
    text = report(tmp_path, pairs, SUMMARY)
    assert cells(text, "What it holds")["train"] == [
        *("30", "60", "2.00", "30 (30 to 30)", "1 (1 to 2)", "7 (7 to 10)", "123.5 MB"),
    ]
    assert cells(text, "What it holds")["test"][-1] == "–"
    assert cells(text, "Sources") == {
        "one": ["a.jsonl", "jsonl", "12,345", "11,000", "1,345", "2.50", "–"],
        "two": ["b", "folder", "777", "777", "0", "–", "12.5 %"],
    }
    truncated, empty = cells(text, "Set aside").items()
    assert truncated[0] == "`image_truncated`"
    assert truncated[1][:2] == ["1,000", "The image ends too early."]
    assert truncated[1][2] == "<br>".join(f"a.jsonl, line {line}, cut" for line in (7, 8, 9))
    assert empty == ("`image_empty`", ["345", "The image has 0 bytes.", "–"])
    assert cells(text, "Converted")["exif_rotated"] == ["4,321", "The camera's rotation was applied."]
    assert [cell for [cell] in cells(text, "Duplicates").values()] == ["11", "22", "33", "44"]
    assert [cell for [cell] in cells(text, "Leakage between splits").values()] == ["drop", "51", "52", "53", "1,560"]
    assert cells(text, "Captions")["distinct"] == ["21"]
    assert cells(text, "Captions of several images") == {"no image": ["20"]}
    assert cells(text, "Languages") == {"unknown": ["62"], "en": ["61"]}
    assert cells(text, "Storage") == {
        **{"store": ["jpeg"], "original bytes per pair": ["98.8 kB"]},
        **{"PSNR in dB, mean": ["41.50"], "PSNR sample": ["71"]},
    }
    assert cells(text, "How it was made")["fingerprint"] == ["0f3a9c"]


def test_opening_and_warnings_say_what_matters(tmp_path: Path, pairs: DatasetDict) -> None:
    text = report(tmp_path, pairs, SUMMARY)
    opening, warnings = text.split("\n\n")[1], text.split("## Look at this first\n\n")[1].split("\n\n")[0]
    assert "**35 images with 70 captions** were kept from 13,122 rows of 2 sources." in opening
    assert "Set aside: 1,345 rows or captions, of which 1,000 for `image_truncated`, 345 for `image_empty`." in opening
    assert "Merged: 44 rows" in opening
    assert "Copies across splits: 156 images; dropped: 1,560 rows." in opening
    for part in (
        "10.9 % of the rows of one were set aside",
        "20 images share one caption",
        "Of 70 captions only 21 are distinct",
        "Cut when they were read: 3 captions",
        "One image occurs 33 times",
        "The split train has 30 images",
        "a recall near 50 % is uncertain by ±22.4 points",
        "100.0 % of the images are shorter than 112 pixels",
    ):
        assert part in warnings
    assert "leak" not in warnings
    assert "cannot be decoded" not in warnings


@pytest.mark.parametrize("dropped", [{}, {"train": 0}, None])
def test_leaks_left_in_come_first(tmp_path: Path, undrawn: DatasetDict, dropped: dict[str, int] | None) -> None:
    summary = {**SUMMARY, "leakage": {"policy": "keep", "exact": 1, "dropped": dropped}}
    text = report(tmp_path, undrawn, summary)
    assert "**Copies across splits: 1 image, none dropped.**" in text
    assert text.split("## Look at this first\n\n")[1].startswith("- **The splits leak**")


@pytest.fixture
def undrawn(pairs: DatasetDict, monkeypatch: pytest.MonkeyPatch) -> DatasetDict:
    """The pairs without what takes most of the time: their pictures."""
    monkeypatch.setattr("mm_utils.data_report.draw_statistics", lambda measured, path: path.touch())
    return pairs.remove_columns("image")


def test_every_part_of_the_summary_is_optional(tmp_path: Path, undrawn: DatasetDict) -> None:
    pairs = undrawn
    text = report(tmp_path / "none", pairs, {})
    assert "35 images with 70 captions**. Whether the splits share images was not checked." in text
    assert re.findall("^## (.*)", text, re.MULTILINE) == ["Look at this first", "What it holds"]
    for name in SUMMARY:
        report(tmp_path / name, pairs, {part: value for part, value in SUMMARY.items() if part != name})
    assert "Nothing was set aside. No image of one split was found" in report(
        tmp_path / "clean", pairs, {"quarantined": {}, "leakage": {}}
    )


def test_columns_and_rows_are_optional_too(tmp_path: Path, pairs: DatasetDict) -> None:
    bare = DatasetDict({"train": Dataset.from_dict({"captions": [["a"], None]}), "test": split("test", 1).select([])})
    text = report(tmp_path, bare, SUMMARY)
    assert "The split test is empty." in text
    assert not (tmp_path / "pairs_train.jpg").exists()
    assert "0 images with 0 captions" in report(tmp_path / "empty", DatasetDict(), {})


HOSTILE = [
    "<script>alert(1)</script> <img src=x onerror=y>",
    "a | b \\| c `code` **bold** [link](http://evil.example) ![i](x.png) www.evil.example",
    "$x^2$ \\frac{1 $",
    "line\nbreak\r\n# heading\u2028- item\x00\x1b[31m\u202egnp",
    "word " * 5000,
    "W" * 3000,
    "桌子上的红色圆圈 😀 قطة " * 9,
    "&lt;b&gt; &#60;",
    "",
]


@pytest.mark.filterwarnings("error")
def test_hostile_captions_and_ids_are_drawn_as_text(tmp_path: Path) -> None:
    rows = [split("train", 1, id=text, captions=[text])[0] for text in HOSTILE]
    pairs = DatasetDict({"train": Dataset.from_list(rows, features=FEATURES)})
    report(tmp_path, pairs, {"duplicates": {"examples": [[text, HOSTILE[0]] for text in HOSTILE]}})
    assert (tmp_path / "duplicates.jpg").exists()


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_hostile_text_stays_text(tmp_path: Path, undrawn: DatasetDict, text: str) -> None:
    source = {**SUMMARY["sources"][0], "name": text, "path": text, "format": text}
    reason = {"count": 1000, "explanation": text, "examples": [{"source": text, "where": text, "detail": text}]}
    captions = {"shared": [{"caption": text, "images": 20}], "languages": {text: 1, "": 0}}
    hostile = {
        "sources": [source, SUMMARY["sources"][1]],
        "quarantined": {text: reason, "image_empty": {"count": 345}},
        "notes": {text: 4321, "caption_cut": 3},
        "captions": {**SUMMARY["captions"], **captions},
        "settings": {**SUMMARY["settings"], "flags": text},
    }
    found, calm = (report(tmp_path, undrawn, {**SUMMARY, **changes}) for changes in (hostile, {}))
    shapes = [[line.replace("\\|", "").count("|") for line in report.splitlines()] for report in (found, calm)]
    assert shapes[0] == shapes[1]
    assert not re.search(r"<(?!br>)|[\x00\x1b\u202e]|(?<!\\)\]\(http|http://|www\.|(?<!\\)\$", found)
    assert len(found) < 20_000


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=200))
def test_escaped_text_is_one_short_line_without_active_signs(text: str) -> None:
    found = _escape(text, 50)
    assert found.isprintable()
    assert not re.search(r"[<>]|(?<!\\)(?:\\\\)*[`*\[\]|~#$]", found)
    assert len(re.sub(r"\\(?=[^\w\s])|&(amp|lt|gt);", "", found)) <= 50


def test_a_seed_decides_what_is_shown(tmp_path: Path, pairs: DatasetDict) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for folder, seed in ((first, 0), (again, 0), (other, 1)):
        report(folder, pairs, SUMMARY, seed)
    files = sorted(path.name for path in first.iterdir())
    assert files == ["pairs_test.jpg", "pairs_train.jpg", "report.md", "statistics.png"]
    for name in files:
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "pairs_train.jpg").read_bytes() != (other / "pairs_train.jpg").read_bytes()
    assert all((first / name).stat().st_size < 300_000 for name in files)


def test_raw_pixels_are_shown_and_damaged_images_are_named(tmp_path: Path) -> None:
    red = np.full((30, 40, 3), (220, 10, 10), np.uint8).tobytes()
    rows = [split("good", 1, image={"bytes": red, "path": "raw:40x30"})[0]]
    rows += [split("bad", 1, id=f"bad-{at}", image=image)[0] for at, image in enumerate([
        {"bytes": red[:-1], "path": "raw:40x30"}, {"bytes": b"none", "path": None}, None,
    ])]  # fmt: skip
    text = report(tmp_path, DatasetDict({"train": Dataset.from_list(rows, features=FEATURES)}), {})
    assert "- **3 images of those below cannot be decoded**: bad-0, bad-1, bad-2" in text
    with Image.open(tmp_path / "pairs_train.jpg") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    assert (abs(pixels - (220, 10, 10)).max(axis=-1) < 12).sum() > 10_000


def test_names_of_splits_cannot_leave_the_folder(tmp_path: Path) -> None:
    pairs = DatasetDict({"../up": split("a", 2), "a|b](x)": split("b", 2), "__$x$": split("c", 2)})
    text = report(tmp_path / "inside", pairs, {})
    assert sorted(path.name for path in tmp_path.rglob("*.jpg")) == ["pairs_0.jpg", "pairs_1.jpg", "pairs_2.jpg"]
    assert not list(tmp_path.glob("*.jpg"))
    assert "Random pairs of a\\|b\\](x)" in text
