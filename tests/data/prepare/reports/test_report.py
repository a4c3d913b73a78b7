import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from PIL import Image

from mm_utils.data.prepare.report import write_report
from tests.kit.media_files import clip, media_rows, tone

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
            "share": 0.875,
        },
        {
            "name": "two",
            "path": "b",
            "format": "folder",
            "rows": 777,
            "kept": 777,
            "bad": 0,
            "weight": None,
            "share": 0.125,
        },
    ],
    "splits": {
        "train": {"images": 30, "captions": 60, "bytes": 123_456_789},
        "test": {"images": 5, "captions": 10, "bytes": 999},
    },
    "quarantined": {
        "image_empty": {"count": 345, "explanation": "The image has 0 bytes.", "examples": []},
        "image_truncated": {
            "count": 1000,
            "explanation": "The image ends too early.",
            "examples": [{"source": "a.jsonl", "where": f"line {line}", "detail": "cut"} for line in range(7, 10)],
        },
    },
    "notes": {"exif_rotated": 4321, "caption_cut": 3},
    "duplicates": {"exact_groups": 11, "near_pairs": 22, "largest_group": 33, "merged_rows": 44, "examples": []},
    "leakage": {"policy": "drop", "exact": 51, "near": 52, "by_id": 53, "dropped": {"train": 1560}, "examples": []},
    "captions": {
        "distinct": 21,
        "shared": [{"caption": "no image", "images": 20}],
        "characters": {"mean": 41.25, "p50": 40},
    },
    "storage": {"store": "jpeg", "original_bytes_per_pair": 98765.4, "psnr_db": {"mean": 41.5}, "psnr_sample": 71},
    "seconds": 81.5,
}


@pytest.fixture
def empty_pictures() -> None:
    """Here they are drawn."""


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


def test_tables_hold_the_values_of_the_summary(tmp_path: Path, pairs: DatasetDict) -> None:
    text = report(tmp_path, pairs, SUMMARY)
    assert cells(text, "What it holds") == {
        "train": ["30", "60", "2.00", "30 (30 to 30)", "1 (1 to 2)", "7 (7 to 10)", "123.5 MB"],
        "test": ["5", "10", "2.00", "30 (30 to 30)", "1 (1 to 2)", "7 (7 to 9)", "999.0 B"],
    }
    assert cells(text, "Sources") == {
        "one": ["a.jsonl", "jsonl", "12,345", "11,000", "1,345", "2.50", "0.88"],
        "two": ["b", "folder", "777", "777", "0", "–", "0.12"],
    }
    lines = "; ".join(f"a.jsonl, line {line}, cut" for line in (7, 8, 9))
    assert cells(text, "Set aside") == {
        "image_truncated": ["1,000", "The image ends too early.", lines],
        "image_empty": ["345", "The image has 0 bytes.", "–"],
    }
    assert cells(text, "Converted")["exif_rotated"] == ["4,321", "The camera's rotation was applied."]
    assert [cell for [cell] in cells(text, "Duplicates").values()] == ["11", "22", "33", "44"]
    assert cells(text, "Leakage between splits") == {
        **{"policy": ["drop"], "exact": ["51"], "near": ["52"], "by id": ["53"]},
        "dropped, train": ["1,560"],
    }
    assert cells(text, "Captions") == {
        **{"distinct": ["21"], "characters, mean": ["41.25"], "characters, p50": ["40"]},
    }
    assert cells(text, "Captions of several images") == {"no image": ["20"]}
    assert cells(text, "Storage") == {
        **{"store": ["jpeg"], "original bytes per pair": ["98,765.40"]},
        **{"psnr db, mean": ["41.50"], "psnr sample": ["71"]},
    }
    assert cells(text, "How it was made") == {"short side": ["258"], "near": ["True"], "flags": ["\\['a', 'b'\\]"]}


def test_the_opening_and_the_warnings_say_what_matters(tmp_path: Path, pairs: DatasetDict) -> None:
    text = report(tmp_path, pairs, SUMMARY)
    opening, warnings = text.split("\n\n")[1], text.split("## Look at this first\n\n")[1].split("\n\n")[0]
    assert opening == (
        "**35 images with 70 captions** were kept from 13,122 rows of 2 sources. Set aside: 1,345 rows or captions. "
        "Merged: 44 rows of equal images. Copies across splits: 156 images; dropped: 1,560 rows."
    )
    for part in (
        "10.9 % of the rows of one were set aside",
        "20 images share one caption",
        "Of 70 captions only 21 are distinct",
        "One image occurs 33 times",
        "The split train has 30 images",
        "the 95 % interval of a recall near 50 % is ±43.8 points",
        "100.0 % of the images are shorter than 112 pixels",
    ):
        assert part in warnings
    assert "leak" not in warnings
    assert "cannot be decoded" not in warnings


def test_leaks_left_in_come_first(tmp_path: Path, undrawn: DatasetDict) -> None:
    leakage = {**SUMMARY["leakage"], "exact": 1, "near": 0, "by_id": 0, "dropped": {}}
    text = report(tmp_path, undrawn, {**SUMMARY, "leakage": leakage})
    assert "**Copies across splits: 1 image, none dropped.**" in text
    assert text.split("## Look at this first\n\n")[1].startswith("- **The splits leak**")


@pytest.fixture
def undrawn(pairs: DatasetDict, monkeypatch: pytest.MonkeyPatch) -> DatasetDict:
    """The pairs, without their pictures, which take most of the time."""
    monkeypatch.setattr("mm_utils.data.prepare.report._draw_sheets", lambda *arguments: ([], []))
    return pairs


def test_an_empty_split_is_named(tmp_path: Path, pairs: DatasetDict) -> None:
    text = report(tmp_path, DatasetDict({**pairs, "test": pairs["test"].select([])}), SUMMARY)
    assert "The split test has 0 images" in text
    assert not (tmp_path / "pairs_test.jpg").exists()


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
    examples = [[text, HOSTILE[0]] for text in HOSTILE]
    report(tmp_path, pairs, {**SUMMARY, "duplicates": {**SUMMARY["duplicates"], "examples": examples}})
    assert (tmp_path / "duplicates.jpg").exists()


@pytest.mark.parametrize("text", HOSTILE[:-1])
def test_hostile_text_stays_text(tmp_path: Path, undrawn: DatasetDict, text: str) -> None:
    source = {**SUMMARY["sources"][0], "name": text, "path": text, "format": text}
    reason = {"count": 1000, "explanation": text, "examples": [{"source": text, "where": text, "detail": text}]}
    captions = {"shared": [{"caption": text, "images": 20}]}
    hostile = {
        "sources": [source, SUMMARY["sources"][1]],
        "quarantined": {text: reason, "image_empty": SUMMARY["quarantined"]["image_empty"]},
        "notes": {text: 4321, "caption_cut": 3},
        "captions": {**SUMMARY["captions"], **captions},
        "settings": {**SUMMARY["settings"], "flags": text},
    }
    found, calm = (report(tmp_path, undrawn, {**SUMMARY, **changes}) for changes in (hostile, {}))
    shapes = [[line.replace("\\|", "").count("|") for line in report.splitlines()] for report in (found, calm)]
    assert shapes[0] == shapes[1]
    assert not re.search(r"<|[\x00\x1b\u202e]|(?<!\\)\]\(http|http://|www\.|(?<!\\)\$", found)
    assert len(found) < 20_000


def test_a_seed_decides_what_is_shown(tmp_path: Path, pairs: DatasetDict) -> None:
    first, again, other = (tmp_path / name for name in ("first", "again", "other"))
    for folder, seed in ((first, 0), (again, 0), (other, 1)):
        report(folder, pairs, SUMMARY, seed)
    files = sorted(path.name for path in first.iterdir())
    assert files == ["pairs_test.jpg", "pairs_train.jpg", "report.md"]
    for name in files:
        assert (first / name).read_bytes() == (again / name).read_bytes()
    assert (first / "pairs_train.jpg").read_bytes() != (other / "pairs_train.jpg").read_bytes()
    assert all((first / name).stat().st_size < 300_000 for name in files)


@pytest.mark.parametrize("kind", ["clip", "sound"])
def test_a_report_speaks_of_its_medium(tmp_path: Path, kind: str) -> None:
    contents = [clip(), clip(fps=8)] if kind == "clip" else [tone(300, 900), tone(300)]
    pairs = DatasetDict(train=media_rows(kind, contents, seconds=[60.0, 30.04]))
    summary = {**SUMMARY, "splits": {"train": {"images": 2, "captions": 2, "bytes": 9}}}
    text = report(tmp_path / "report", pairs, summary)
    assert f"**2 {kind}s with 2 captions** were kept" in text
    assert f"| split | {kind}s | captions | captions per {kind} | seconds | minutes in all |" in text
    assert "| train | 2 | 2 | 1.00 | 30 (30 to 60) | 1.5 |" in text
    assert "Seconds, words and characters" in text


def test_raw_pixels_are_shown_and_damaged_images_are_named(tmp_path: Path) -> None:
    red = np.full((30, 40, 3), (220, 10, 10), np.uint8).tobytes()
    rows = [split("good", 1, image={"bytes": red, "path": "raw:40x30"})[0]]
    rows += [split("bad", 1, id=f"bad-{at}", image=image)[0] for at, image in enumerate([
        {"bytes": red[:-1], "path": "raw:40x30"}, {"bytes": b"none", "path": None}, None,
    ])]  # fmt: skip
    text = report(tmp_path, DatasetDict({"train": Dataset.from_list(rows, features=FEATURES)}), SUMMARY)
    assert "- **3 images of those below cannot be decoded**: bad-0, bad-1, bad-2" in text
    with Image.open(tmp_path / "pairs_train.jpg") as sheet:
        pixels = np.asarray(sheet.convert("RGB")).astype(int)
    assert (abs(pixels - (220, 10, 10)).max(axis=-1) < 12).sum() > 10_000


def test_names_of_splits_cannot_leave_the_folder(tmp_path: Path) -> None:
    pairs = DatasetDict({"../up": split("a", 2), "a|b](x)": split("b", 2), "__$x$": split("c", 2)})
    summary = {**SUMMARY, "splits": dict.fromkeys(pairs, SUMMARY["splits"]["train"])}
    text = report(tmp_path / "inside", pairs, summary)
    assert sorted(path.name for path in tmp_path.rglob("*.jpg")) == ["pairs_0.jpg", "pairs_1.jpg", "pairs_2.jpg"]
    assert not list(tmp_path.glob("*.jpg"))
    assert "Random pairs of a\\|b\\](x)" in text
