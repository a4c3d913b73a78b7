"""Real captioned photographs, where the environment variable TANDEM_REAL_DATA names their folder."""

import json
import os
from pathlib import Path

import pytest
from PIL import Image

from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from scripts import prepare_data

DATA = Path(os.environ.get("TANDEM_REAL_DATA", "no such folder"))
pytestmark = pytest.mark.skipif(not DATA.is_dir(), reason="TANDEM_REAL_DATA is not set")


@pytest.mark.parametrize(
    ("name", "captions", "near", "bad"),
    [
        ("aerial_en", 5, 0, 0),
        *(pytest.param(*row, marks=pytest.mark.slow) for row in (("photos_en", 1, 2, 0), ("photos_vi", 5, 1, 2))),
    ],
)
def test_every_good_row_is_loaded_and_preparing_finds_what_is_known(name, captions, near, bad, tmp_path):
    """The leaks are real, and were looked at; the bad rows have a full stop as their only caption."""
    source, output = DATA / name / "captions.jsonl", tmp_path / "out"
    pairs = load_pairs(DataArguments(train_file=str(source)))
    assert set(pairs) == {"train", "validation", "test"}
    assert sum(map(len, pairs.values())) == len(list((DATA / name / "images").iterdir())) - bad
    assert max(len(row["captions"]) for row in pairs["validation"].select_columns("captions")) >= captions
    prepare_data.main(["--sources", str(source), "--output_dir", str(output), "--on_leakage", "keep"])
    report = json.loads((output / "report.json").read_text())
    assert report["leakage"]["near"] == near
    found = {reason: part["count"] for reason, part in report["quarantined"].items()}
    assert found == ({"caption_empty": bad} if bad else {})
    left = len(source.read_text().splitlines()) - bad - report["duplicates"]["merged_rows"]
    assert sum(part["images"] for part in report["splits"].values()) == left


def test_planted_leaks_are_all_found_and_nothing_else_is(tmp_path):
    """60 training photographs come again in test: the same file, compressed anew, at half size, brighter, in grey."""
    lines = (DATA / "photos_en/captions.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines if json.loads(line)["split"] == "train"][:300]
    planted = []
    for place, row in enumerate(rows):
        row["image"] = str(DATA / "photos_en" / row["image"])
        if place % 5 == 0:
            image = Image.open(row["image"]).convert("RGB")
            changed = [
                image,
                image.resize((image.width // 2, image.height // 2)),
                image.point(lambda value: min(255, round(1.15 * value))),
                image.convert("L").convert("RGB"),
            ][place // 5 % 4]
            changed.save(tmp_path / f"{place}.jpg", quality=60)
            planted.append({"id": f"copy-{place}", "image": f"{place}.jpg", "captions": ["again"], "split": "test"})
    sources = []
    for name, part in (("train", rows), ("test", planted)):
        path = tmp_path / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in part))
        sources.append(str(path))
    flags = ["--sources", *sources, "--allow_outside_root", "--output_dir", str(tmp_path / "out")]
    prepare_data.main([*flags, "--on_leakage", "drop"])
    quarantine = (tmp_path / "out/quarantine.jsonl").read_text().splitlines()
    dropped = {json.loads(line)["raw"] for line in quarantine if json.loads(line)["reason"] == "leaked"}
    assert dropped == {f"train.jsonl/{row['id']}" for row in rows[::5]}
