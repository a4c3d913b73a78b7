"""What a preparation says of itself: its figures, report.md with pictures, the data card and its push to a stand-in for the Hub."""

import io
import json
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from huggingface_hub import DatasetCard
from PIL import Image

from mm_utils.data.prepare.report import measure, write_report
from scripts.prepare_data import main
from tests.kit.corpora import write_corpus
from tests.kit.media_files import clip, media_rows, tone

FEATURES = Features({
    "id": Value("string"), "image": ImageFeature(decode=False), "width": Value("int32"), "height": Value("int32"),
    "captions": [Value("string")],
})  # fmt: skip
SOURCE = {"name": "one", "path": "a.jsonl", "format": "jsonl", "rows": 1000, "bad": 109, "kept": 891}
LINE = {"source": "a.jsonl", "where": "line 7", "detail": "cut"}
SUMMARY: dict[str, Any] = {
    "settings": {"short_side": 258, "near": True},
    "medium": "image",
    "sources": [SOURCE],
    "quarantined": {"image_truncated": {"count": 109, "explanation": "The image ends too early.", "examples": [LINE]}},
    "notes": {"exif_rotated": 4321},
    "duplicates": {"near_pairs": 22, "largest_group": 33, "merged_rows": 44, "examples": []},
    "leakage": {"policy": "drop", "exact": 51, "near": 52, "by_id": 53, "dropped": {"train": 1560}, "examples": []},
    "storage": {"store": "jpeg"},
}


@pytest.fixture
def empty_pictures() -> None:
    """Here they are drawn."""


def split(name: str, count: int, **changes: Any) -> Dataset:
    rows = []
    for row in range(count):
        data = io.BytesIO()
        Image.new("RGB", (40 + row, 30), (row * 5 % 256, 90, 200)).save(data, format="PNG")
        image, captions = {"bytes": data.getvalue(), "path": None}, [f"caption {row}", "another"]
        rows.append(
            {"id": f"{name}-{row}", "image": image, "width": 40 + row, "height": 30, "captions": captions, **changes}
        )
    return Dataset.from_list(rows, features=FEATURES)


def report(folder: Path, pairs: DatasetDict, **changes: Any) -> str:
    folder.mkdir(exist_ok=True)
    splits, captions = measure(pairs)
    write_report(folder, pairs, {**SUMMARY, "splits": splits, "captions": captions, **changes})
    text = (folder / "report.md").read_text(encoding="utf-8")
    for name in re.findall(r"!\[[^\]]*\]\(([^)]*)\)", text):
        assert (folder / name).is_file(), name
    return text


def test_the_report_shows_its_figures_and_says_what_matters_first(tmp_path: Path) -> None:
    pairs = DatasetDict({"train": split("train", 30), "test": split("test", 5)})
    text = report(tmp_path, pairs)
    for part in (
        "**35 images with 70 captions** were kept from 1,000 rows of 1 source. Set aside: 109 rows or captions.",
        "Merged: 44 rows of equal images. Copies across splits: 156 images; dropped: 1,560 rows.",
        "10.9% of the rows of one were set aside",
        "35 images share one caption, which tells none from the others: another",
        "One image occurs 33 times",
        "The split train has 30 images, few to train on",
        "The validation split has 0 images",
        "| train | 30 | 60 | 0.0 MiB |",
        "| image_truncated | 109 | The image ends too early. | a.jsonl, line 7, cut |",
        "| exif_rotated | 4,321 | The camera's rotation was applied. |",
    ):
        assert part in text.replace("\\_", "_")
    assert "The splits leak" not in text
    text = report(tmp_path, pairs, leakage={**SUMMARY["leakage"], "exact": 1, "near": 0, "by_id": 0, "dropped": {}})
    assert text.split("## Look at this first\n\n")[1].startswith("- The splits leak")
    for kind, contents in {"clip": [clip(), clip(fps=8)], "sound": [tone(300, 900), tone(300)]}.items():
        text = report(tmp_path, DatasetDict(train=media_rows(kind, contents, seconds=[60.0, 30.04])), medium=kind)
        assert f"**2 {kind}s with 2 captions** were kept" in text
        assert f"| split | {kind}s | captions |" in text


HOSTILE = [
    "<script>alert(1)</script> <img src=x onerror=y>",
    "a | b \\| c `code` **bold** [link](http://evil.example) ![i](x.png) www.evil.example",
    "$x^2$ \\frac{1 $",
    "line\nbreak\r\n# heading\u2028- item\x00\x1b[31m\u202egnp",
    "W" * 3000,
    "桌子上的红色圆圈 😀 قطة " * 9,
]


@pytest.mark.filterwarnings("error")
def test_hostile_captions_ids_and_names_stay_text(tmp_path: Path) -> None:
    rows = [split("train", 1, id=text, captions=[text] * 2)[0] for text in [*HOSTILE, ""]]
    pairs = DatasetDict({"../up|b](x)": Dataset.from_list(rows, features=FEATURES)})
    copies = {**SUMMARY["duplicates"], "examples": [[text, HOSTILE[0]] for text in HOSTILE]}
    shared = {"distinct": 1, "shared": [{"caption": text, "images": 20} for text in HOSTILE]}
    sources = [{**SOURCE, "name": text, "path": text, "format": text} for text in HOSTILE]
    text = report(tmp_path, pairs, duplicates=copies, captions=shared, sources=sources)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pairs.jpg", "report.md"]
    assert not re.search(r"<|[\x00\x1b\u202e]|(?<!\\)\]\(http|http://|www\.|(?<!\\)\$", text)
    assert {
        line.replace("\\|", "").count("|") for line in text.split("## Sources")[1].split("##")[0].splitlines()
    } == {0, 7}


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_corpus(tmp_path_factory.mktemp("raw"))
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows.append({**rows[0], "image": "images/nowhere.png", "captions": ["of nobody"]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    folder = tmp_path_factory.mktemp("out") / "my pairs"
    flags = ["--on_leakage", "keep", "--max_bad_fraction", "1", "--num_proc", "1"]
    main(["--sources", str(path), "--output_dir", str(folder), *flags])
    return folder


def test_the_card_shows_the_report_and_datasets_opens_the_folder_by_it(prepared: Path, tmp_path: Path) -> None:
    card = DatasetCard.load(prepared / "README.md")
    assert (prepared / "report.md").read_text().partition("\n")[2].strip() in card.text
    found = datasets.load_dataset(str(prepared), cache_dir=str(tmp_path))
    stored = datasets.load_from_disk(str(prepared))
    assert found["train"][0]["image"].size == (stored["train"][0]["width"], stored["train"][0]["height"])
    assert {name: rows["content_id"][:] for name, rows in found.items()} == {
        name: rows["content_id"][:] for name, rows in stored.items()
    }
