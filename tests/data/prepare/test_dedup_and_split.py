"""Rows together: the same image found again, leaks named and resolved, splits that no image crosses, shares of sources."""

import json
import random
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data.prepare.dedup_and_split import SPLITS, ReconcileArguments, Reconciled, reconcile
from mm_utils.data.prepare.ingest import PART_SCHEMA
from mm_utils.data.prepare.perceptual_hash import fingerprint


def picture(seed: int) -> Image.Image:
    """Large smooth blobs: no two seeds look the same."""
    cells = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(cells).resize((96, 96), Image.Resampling.BICUBIC)


PICTURES = [picture(seed) for seed in range(40)]
PRINTS = [fingerprint(image) for image in PICTURES]
NEAR_PRINTS = [fingerprint(image.resize((60, 60)).point(lambda v: min(255, v + 8))) for image in PICTURES]


def row(image: int, *, near: bool = False, where: int = 0, **values: Any) -> dict[str, Any]:
    """A row that shows picture `image`, or one that looks like it."""
    return {
        "id": None,
        "image": {"bytes": b"x", "path": None},
        "width": 96,
        "height": 96,
        "captions": [f"picture {image}"],
        "source": "a",
        "where": f"line {where}",
        "split": None,
        "image_hash": f"{image:04d}{'near' if near else 'same'}" + "0" * 56,
        "stored_hash": f"{image}",
        "stored_bytes": 1,
        "original_bytes": 1,
        "fingerprint": NEAR_PRINTS[image] if near else PRINTS[image],
        **values,
    }


def decide(rows: list[dict[str, Any]], folder: Path, **arguments: Any) -> Reconciled:
    """`reconcile` over rows laid out in two parts."""
    parts = []
    for number, some in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        parts.append(folder / f"part-{number}.arrow")
        with pa.OSFile(str(parts[-1]), "wb") as file, pa.ipc.new_stream(file, PART_SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist(some, PART_SCHEMA))
    return reconcile(parts, ReconcileArguments(**arguments), folder / "leaks.jsonl")


def split_of(found: Reconciled) -> dict[int, str]:
    return {place: split for split, places in found.rows.items() for place in places.tolist()}


def test_rows_of_one_image_become_one(tmp_path: Path) -> None:
    rows = [row(0), row(1), row(0, captions=["again"]), row(2), row(0)]
    found = decide(rows, tmp_path, validation_fraction=0.0)
    assert found.rows["train"].tolist() == [0, 1, 3]
    assert found.merged == {0: [0, 2, 4]}
    assert found.duplicates["merged_rows"] == 2


def test_copies_under_other_ids_are_counted(tmp_path: Path) -> None:
    rows = [row(0, id="a"), row(0, id="b"), row(0, id="a"), row(1, id="c"), row(2, id="d")]
    found = decide(rows, tmp_path, validation_fraction=0.0)
    assert (found.duplicates["exact_rows"], found.duplicates["exact_groups"]) == (1, 1)
    found = decide([row(0), row(0), row(1), row(2)], tmp_path, validation_fraction=0.0)
    assert found.duplicates["exact_rows"] == 1


def test_a_near_copy_is_kept_or_dropped(tmp_path: Path) -> None:
    rows = [row(0, where=7), row(1), row(0, near=True), row(2)]
    assert decide(rows, tmp_path, validation_fraction=0.0).rows["train"].tolist() == [0, 1, 2, 3]
    found = decide(rows, tmp_path, validation_fraction=0.0, near_duplicates="drop")
    assert found.rows["train"].tolist() == [0, 1, 3]
    [fault] = found.faults
    assert fault["reason"] == "near_duplicate"
    assert "line 7" in fault["detail"]


@pytest.mark.parametrize("kind", ["exact", "near", "by_id", "by_group"])
def test_a_leak_stops_the_run_and_is_listed(kind: str, tmp_path: Path) -> None:
    copy = {"exact": row(0), "near": row(0, near=True), "by_id": row(5, id="x"), "by_group": row(5, group="p7")}[kind]
    rows = [
        row(0, id="x", group="p7", split="train"),
        row(1, split="train"),
        row(2, split="train"),
        copy | {"split": "test"},
    ]
    with pytest.raises(
        ValueError, match=r"1 rows have an? (image|group) that is in another split too.*--on_leakage drop"
    ):
        decide(rows, tmp_path)
    [leak] = [json.loads(line) for line in (tmp_path / "leaks.jsonl").read_text().splitlines()]
    assert leak["reason"] == "leaked"
    assert ("has the same group p7" in leak["detail"]) == (kind == "by_group")
    found = decide(rows, tmp_path, on_leakage="drop")
    assert {name: found.leakage[name] for name in ("exact", "near", "by_id", "by_group")} == {
        **dict.fromkeys(("exact", "near", "by_id", "by_group"), 0),
        kind: 1,
    }
    assert split_of(found) == {1: "train", 2: "train", 3: "test"}
    assert split_of(decide(rows, tmp_path, on_leakage="keep")) == {0: "train", 1: "train", 2: "train", 3: "test"}


def test_rows_of_a_group_come_into_one_split_also_through_others(tmp_path: Path) -> None:
    rows = [row(place, group=f"p{place // 4}") for place in range(38)]
    rows += [row(3, group="p9"), row(38, group=None)]  # one image of two groups joins them
    found = split_of(decide(rows, tmp_path, validation_fraction=0.3, test_fraction=0.3))
    of_group = {
        name: {found[at] for at in found if rows[at]["group"] == name} for name in (f"p{n}" for n in range(10))
    }
    assert all(len(splits) == 1 for splits in of_group.values())
    assert of_group["p0"] == of_group["p9"]
    assert len(set.union(*of_group.values())) == 3


def test_rows_that_all_hang_together_are_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(place % 40, group="one", where=place) | {"image_hash": f"{place:064d}"} for place in range(102)]
    assert (
        set(decide(rows, tmp_path, validation_fraction=0.3).rows) == {"train"} or "come into one split" in caplog.text
    )
    assert "102 of 102 rows come into one split" in caplog.text


def test_ids_that_count_rows_are_no_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(at, id=str(at), split="train") for at in range(12)]
    rows += [row(at + 12, id=str(at), split="validation") for at in range(12)]
    found = decide(rows, tmp_path)
    assert Counter(split_of(found).values()) == {"train": 12, "validation": 12}
    assert "row numbers" in caplog.text


def test_a_small_set_has_a_fifth_for_validation_unless_a_share_is_given(tmp_path: Path) -> None:
    rows = [row(place) for place in range(40)]
    sizes = [
        len(decide(rows, tmp_path, **flags).rows.get("validation", ()))
        for flags in ({}, {"test_fraction": 0.3}, {"validation_fraction": 0.0}, {"validation_fraction": 0.6})
    ]
    assert sizes[:3] == [8, 8, 0]
    assert sizes[3] > 16
    rows[0]["split"] = "validation"  # then there is one
    assert len(decide(rows, tmp_path).rows["validation"]) < 8
    rows = [row(place, group=f"site {place % 2}") for place in range(40)]
    assert set(decide(rows, tmp_path).rows) == {"train"}, "half of the images is more than twice a fifth"


def test_an_id_is_of_one_image(tmp_path: Path) -> None:
    rows = [row(0, id="x", where=1), row(1, id="x", where=2), row(2, id="y"), row(0, id="x")]
    found = decide(rows, tmp_path, validation_fraction=0.0)
    assert [(fault["where"], fault["reason"]) for fault in found.faults] == [("line 2", "duplicate_id")]
    assert found.rows["train"].tolist() == [0, 2]


def test_sources_do_not_share_ids(tmp_path: Path) -> None:
    rows = [row(0, id="x"), row(1, id="y"), row(2, id="x", source="b"), row(3, source="b")]
    found = decide(rows, tmp_path, validation_fraction=0.0)
    assert not found.faults
    assert found.facts["name"].to_pylist() == ["a/x", "a/y", "b/x", "b/0003same" + "0" * 24]


def test_a_row_without_a_split_goes_where_its_image_is(tmp_path: Path) -> None:
    rows = [row(at, split="train") for at in range(3)] + [row(9, split="test"), row(9, near=True), row(0, near=True)]
    assert split_of(decide(rows, tmp_path)) == {0: "train", 1: "train", 2: "train", 3: "test", 4: "test", 5: "train"}


def test_new_rows_move_no_old_ones(tmp_path: Path) -> None:
    rows = [row(at) for at in range(40)]
    few = split_of(decide(rows[:20], tmp_path, validation_fraction=0.3, test_fraction=0.2))
    many = split_of(decide(rows, tmp_path, validation_fraction=0.3, test_fraction=0.2))
    assert few == {place: split for place, split in many.items() if place < 20}
    assert set(many.values()) == set(SPLITS)


def test_too_little_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="fewer than 2 training images"):
        decide([row(0), row(0)], tmp_path, validation_fraction=0.0)


@pytest.mark.parametrize(
    "values",
    [
        {"validation_fraction": 1.0},
        {"validation_fraction": 0.5, "test_fraction": 0.5},
        {"near_duplicate_distance": 40},
    ],
)
def test_arguments_that_cannot_be(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="--"):
        ReconcileArguments(**values)


@given(
    drawn=st.lists(
        st.tuples(
            st.integers(0, 9), st.booleans(), st.sampled_from([None, *SPLITS]), st.sampled_from([None, "p", "q"])
        ),
        min_size=2,
        max_size=24,
    ),
    seed=st.integers(0, 99),
)
@settings(max_examples=60)
def test_no_image_is_in_two_splits_and_none_is_lost(
    drawn: list[tuple[int, bool, str | None, str | None]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Beside a plain reference: sets of rows connected by look or id."""
    random.Random(seed).shuffle(drawn)
    rows = [row(image, near=near, split=split, id=name) for image, near, split, name in drawn]
    rows += [row(30, split="train"), row(31, split="train")]
    found = decide(rows, tmp_path_factory.mktemp("parts"), on_leakage="drop", validation_fraction=0.3)
    splits = split_of(found)
    standing = {place: first for first, those in found.merged.items() for place in those}
    by_image = defaultdict(set)
    for place, split in splits.items():
        by_image[rows[place]["captions"][0]].add(split)
    assert all(len(those) == 1 for those in by_image.values())
    lost = set(range(len(rows))) - set(splits) - set(standing)
    set_aside = Counter(fault["reason"] for fault in found.faults)
    assert len(lost) <= sum(set_aside.values())
    assert set(set_aside) <= {"leaked", "duplicate_id"}
    for place, split in splits.items():
        given_split = rows[place]["split"]
        assert given_split in (None, split)
