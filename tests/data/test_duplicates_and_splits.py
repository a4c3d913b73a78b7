"""Rows together: copies found, leaks named and resolved, splits that no image crosses; every index equals a plain reference."""

import io
import random
from collections import Counter, defaultdict
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image, ImageEnhance

from mm_utils.data.arguments import SPLITS
from mm_utils.data.prepare.arguments import RADIUS, ReconcileArguments
from mm_utils.data.prepare.dedup_and_split import Reconciled, check_kept, reconcile
from mm_utils.data.prepare.ingest import PART_SCHEMA, Ingested
from mm_utils.data.prepare.perceptual_hash import (
    FINGERPRINT,
    assign_splits,
    fingerprint,
    groups,
    leaks,
    near_pairs,
    pairs_within,
)
from mm_utils.data.rows.source import Source
from tests.kit.fault_images import draw, save
from tests.kit.jsonl import read_lines

# -- rows of all sources ------------------------------------------------------------------------------------------------


PICTURES = [draw(seed, (96, 96)) for seed in range(40)]
PRINTS = [fingerprint(image) for image in PICTURES]
NEAR_PRINTS = [fingerprint(image.resize((60, 60)).point(lambda v: min(255, v + 8))) for image in PICTURES]


def row(image: int, *, near: bool = False, where: int = 0, **values: Any) -> dict[str, Any]:
    """A row that shows picture `image`, or one that looks like it."""
    return {
        "id": None,
        "image": {"bytes": b"x", "path": None},
        "captions": [f"picture {image}"],
        "source": "a",
        "where": f"line {where}",
        "split": None,
        "image_hash": f"{image:04d}{'near' if near else 'same'}" + "0" * 56,
        "fingerprint": NEAR_PRINTS[image] if near else PRINTS[image],
        **values,
    }


def decide(rows: list[dict[str, Any]], folder: Path, **arguments: Any) -> Reconciled:
    """`reconcile` over rows laid out in two parts; no rows are held out unless `arguments` say so."""
    parts = []
    for number, some in enumerate((rows[: len(rows) // 2], rows[len(rows) // 2 :])):
        parts.append(folder / f"part-{number}.arrow")
        with pa.OSFile(str(parts[-1]), "wb") as file, pa.ipc.new_stream(file, PART_SCHEMA) as writer:
            writer.write_batch(pa.RecordBatch.from_pylist(some, PART_SCHEMA))
    earlier = arguments.pop("earlier", None)
    given = ReconcileArguments(**{"validation_fraction": 0.0, **arguments})
    return reconcile(parts, given, folder / "leaks.jsonl", earlier=earlier)


def split_of(found: Reconciled) -> dict[int, str]:
    return {place: split for split, places in found.rows.items() for place in places.tolist()}


def test_rows_of_one_image_become_one(tmp_path: Path) -> None:
    found = decide([row(0), row(1), row(0, captions=["again"]), row(1, near=True), row(0)], tmp_path)
    assert found.rows["train"].tolist() == [0, 1, 3]
    assert found.merged == {0: [0, 2, 4]}
    assert found.duplicates["merged_rows"] == 2


KINDS = {"exact": row(0), "near": row(0, near=True), "by_id": row(5, id="x"), "by_group": row(5, group="p7")}


@pytest.mark.parametrize("kind", KINDS)
def test_a_leak_stops_the_run_and_is_listed(kind: str, tmp_path: Path) -> None:
    rows = [row(0, id="x", group="p7"), row(1), row(2)]
    rows = [{**each, "split": "train"} for each in rows] + [{**KINDS[kind], "split": "test"}]
    message = r"1 rows have an image or group that is in another split too.*--on_leakage drop"
    with pytest.raises(ValueError, match=message):
        decide(rows, tmp_path)
    [leak] = read_lines(tmp_path / "leaks.jsonl")
    assert leak["reason"] == "leaked"
    assert ("has the same group p7" in leak["detail"]) == (kind == "by_group")
    found = decide(rows, tmp_path, on_leakage="drop")
    assert {name: found.leakage[name] for name in KINDS} == {**dict.fromkeys(KINDS, 0), kind: 1}
    assert split_of(found) == {1: "train", 2: "train", 3: "test"}
    assert split_of(decide(rows, tmp_path, on_leakage="keep")) == {0: "train", 1: "train", 2: "train", 3: "test"}


def test_ids_that_count_rows_are_no_leak(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows = [row(at, id=str(at), split="train") for at in range(12)]
    rows += [row(at + 12, id=str(at), split="validation") for at in range(12)]
    assert Counter(split_of(decide(rows, tmp_path)).values()) == {"train": 12, "validation": 12}
    assert "row numbers" in caplog.text


def test_a_small_set_has_a_fifth_for_validation_unless_a_share_is_given(tmp_path: Path) -> None:
    def held_out(rows, **flags):
        return len(decide(rows, tmp_path, **flags).rows.get("validation", ()))

    rows = [row(place) for place in range(40)]
    free = {"validation_fraction": None}
    assert [held_out(rows, **free), held_out(rows, **free, test_fraction=0.3), held_out(rows)] == [8, 8, 0]
    assert held_out(rows, validation_fraction=0.6) > 16
    rows[0]["split"] = "validation"  # then there is one
    assert held_out(rows, **free) < 8
    rows = [row(place, group=f"site {place % 2}") for place in range(40)]
    assert held_out(rows, **free) == 0, "half of the images is more than twice a fifth"


KNOWN = {"id": "x", "image_hash": row(0)["image_hash"]}
OVERWRITTEN = {
    "the image, under another id": ([row(0, id="y")], ["test"]),
    "the id, with another image": ([row(1, id="x")], ["test"]),
    "a copy beside it": ([row(0), row(0, near=True)], ["test", "test"]),
    "its group": ([row(0, group="p"), row(1, group="p")], ["test", "test"]),
    "one that joins what was in train": ([row(0, group="p"), row(2, group="p")], ["test", "test"]),
    "a split of its own": ([row(0, split="validation")], ["validation"]),
    "another image": ([row(1)], ["train"]),
}


@pytest.mark.parametrize("how", OVERWRITTEN)
def test_what_an_overwritten_set_knows_stays_in_its_split(how: str, tmp_path: Path) -> None:
    rows, splits = OVERWRITTEN[how]
    others = [{"id": "z", "image_hash": row(2)["image_hash"], "split": "train"}]
    earlier = pa.Table.from_pylist([{**KNOWN, "split": "test"}, *others])
    found = split_of(decide([*rows, row(9)], tmp_path, earlier=earlier))
    assert [found[at] for at in range(len(rows))] == splits


@pytest.mark.parametrize("name", ["validation_fraction", "test_fraction"])
def test_a_share_of_rows_that_all_say_their_split_is_refused_and_of_few_is_said(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f"--{name} is 0.3; every row says its split"):
        decide([row(place, split="train") for place in range(9)], tmp_path, **{name: 0.3})
    decide([row(0), *[row(place, split="train") for place in range(1, 9)]], tmp_path, **{name: 0.3})
    assert f"--{name} is 0.3; it divides the rows that do not say their split, 1 of 9" in caplog.text


def flipped(print_: bytes, bit: int) -> bytes:
    return bytes([print_[0] ^ 1 << bit]) + print_[1:]


FRAMES = {
    "frames": (lambda at: {"id": f"{at // 20}/p{at}.jpg", "fingerprint": flipped(PRINTS[at // 10], at % 8)}, True),
    "photographs": (lambda at: {"id": f"IMG_{at:04}.jpg", "captions": [f"scene {at}"]}, False),
    "classes": (lambda at: {"id": f"{at // 10}/{at}.jpg", "captions": [f"class {at // 10}"]}, False),
    "a film by a column": (lambda at: {"id": f"f{at}.jpg", "captions": ["a"], "group": str(at)}, False),
}


@pytest.mark.parametrize("kind", FRAMES)
def test_frames_of_a_film_in_two_splits_are_counted(kind: str, tmp_path: Path) -> None:
    values, is_film = FRAMES[kind]
    prints = [fingerprint(draw(seed, (64, 64))) for seed in range(100)]
    rows = [row(at % 40, **{"image_hash": f"{at:064}", "fingerprint": prints[at], **values(at)}) for at in range(100)]
    found = decide(rows, tmp_path, validation_fraction=0.2, near_duplicate_distance=0).duplicates["neighbours"]
    assert (found["count"] > 5) == is_film, found


def test_rows_lost_to_equal_ids_count_and_what_is_left_is_said(tmp_path: Path) -> None:
    def prepared(ids, **values):
        rows = [row(at, id=key, where=at, **values) for at, key in enumerate(ids)]
        ingested = Ingested(rows=Counter(a=len(rows)), sources={"a": Source("a")})
        check_kept(ingested, decide(rows, tmp_path), 0.05)

    prepared([*map(str, range(20)), "0"])
    for ids, values, message in (
        ([at % 3 for at in range(30)], {}, r"27 of 30 rows are bad, .*duplicate_id: 27.* name another id column"),
        (["1"] * 30, {}, "29 of 30 rows are bad, .*duplicate_id: 29"),
        (
            range(9),
            {"split": "test"},
            r"the split train has 0 of 9 rows, .* 9 in test, such as line 0 of a.*,split=train",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            prepared([*map(str, ids)], **values)


def test_an_id_is_of_one_image_of_its_source(tmp_path: Path) -> None:
    rows = [row(0, id="x", where=1), row(1, id="x", where=2), row(2, id="y"), row(0, id="x")]
    found = decide(rows, tmp_path)
    assert [(fault["where"], fault["reason"]) for fault in found.faults] == [("line 2", "duplicate_id")]
    assert found.rows["train"].tolist() == [0, 2]
    found = decide([row(0, id="x"), row(1, id="y"), row(2, id="x", source="b"), row(3, source="b")], tmp_path)
    assert not found.faults
    assert found.facts["name"].to_pylist() == ["a/x", "a/y", "b/x", "b/0003same" + "0" * 24]


def test_a_row_without_a_split_goes_where_its_image_is_and_new_rows_move_no_old_ones(tmp_path: Path) -> None:
    rows = [row(at, split="train") for at in range(3)] + [row(9, split="test"), row(9, near=True), row(0, near=True)]
    assert split_of(decide(rows, tmp_path)) == {0: "train", 1: "train", 2: "train", 3: "test", 4: "test", 5: "train"}
    rows = [row(at) for at in range(40)]
    few = split_of(decide(rows[:20], tmp_path, validation_fraction=0.3, test_fraction=0.2))
    many = split_of(decide(rows, tmp_path, validation_fraction=0.3, test_fraction=0.2))
    assert few == {place: split for place, split in many.items() if place < 20}
    assert set(many.values()) == set(SPLITS)


NAMED_SPLITS = st.sampled_from([None, *SPLITS])
NAMES = st.sampled_from([None, "p", "q"])
DRAWN = st.lists(st.tuples(st.integers(0, 9), st.booleans(), NAMED_SPLITS, NAMES, NAMES), min_size=2, max_size=24)


@given(drawn=DRAWN, seed=st.integers(0, 99))
def test_no_image_is_in_two_splits_and_none_is_lost(
    drawn: list[tuple[Any, ...]], seed: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Nor is a group of rows."""
    random.Random(seed).shuffle(drawn)
    rows = [row(image, near=near, split=split, id=name, group=of) for image, near, split, name, of in drawn]
    rows += [row(30, split="train"), row(31, split="train"), row(32)]
    found = decide(rows, tmp_path_factory.mktemp("parts"), on_leakage="drop", validation_fraction=0.3)
    splits = split_of(found)
    standing = {place: first for first, those in found.merged.items() for place in those}
    by_name = defaultdict(set)
    for place, split in splits.items():
        by_name[rows[place]["captions"][0]].add(split)
        by_name[rows[place].get("group") or place].add(split)
        assert rows[place]["split"] in (None, split)
    assert all(len(those) == 1 for those in by_name.values())
    lost = set(range(len(rows))) - set(splits) - set(standing)
    set_aside = Counter(fault["reason"] for fault in found.faults)
    assert len(lost) <= sum(set_aside.values())
    assert set(set_aside) <= {"leaked", "duplicate_id"}


# -- pictures that look the same ----------------------------------------------------------------------------------------


def compressed(image: Image.Image) -> Image.Image:
    return Image.open(io.BytesIO(save(image, "JPEG", quality=60))).convert("RGB")


def prints_of(images: list[Image.Image]) -> np.ndarray:
    return np.frombuffer(b"".join(map(fingerprint, images)), FINGERPRINT)


def hash_pairs(hashes: np.ndarray, radius: int) -> set[tuple[int, int]]:
    return as_set(pairs_within(hashes, radius, lambda pairs: pairs))


def as_set(pairs: np.ndarray) -> set[tuple[int, int]]:
    listed = [(int(first), int(second)) for first, second in pairs]
    assert len(listed) == len(set(listed))
    return set(listed)


PHOTOS = [draw(seed, (240, 180)) for seed in range(40)]
COPIES = {
    "compressed": compressed,
    "half the size": lambda image: image.resize((image.width // 2, image.height // 2), Image.Resampling.BICUBIC),
    "brighter": lambda image: ImageEnhance.Brightness(image).enhance(1.15),
    "cut by 2 %": lambda image: image.crop((2, 2, image.width - 2, image.height - 2)),
    "grey": lambda image: image.convert("L").convert("RGB"),
}


@pytest.mark.parametrize("name", COPIES)
def test_copies_are_found_and_nothing_else(name: str) -> None:
    wanted = {(at, at + len(PHOTOS)) for at in range(len(PHOTOS))}
    found = as_set(near_pairs(prints_of([*PHOTOS, *map(COPIES[name], PHOTOS)])))
    assert found <= wanted
    assert len(found) >= 0.95 * len(wanted)


def test_blank_images_and_another_colour_are_no_copies() -> None:
    plain = [Image.new("RGB", (64, 48), colour) for colour in ("white", "white", "black", "red", "green", "#fafafa")]
    speck = Image.new("RGB", (64, 48), "white")
    speck.putpixel((10, 10), (0, 0, 0))
    rng = np.random.default_rng(0)
    noisy = [Image.fromarray(rng.integers(118, 122, (48, 64, 3)).astype(np.uint8)) for _ in range(20)]
    assert not len(near_pairs(prints_of([*plain, speck, speck, *noisy])))
    images = [Image.new("RGB", (64, 64), (120, 120, 160)) for _ in range(2)]
    for image, colour in zip(images, ((200, 40, 40), (20, 130, 20)), strict=True):  # of nearly one brightness
        image.paste(colour, (8, 20, 41, 51))
    prints = prints_of(images)
    assert len(hash_pairs(prints["hash"], RADIUS)) == 1
    assert not len(near_pairs(prints))


@pytest.mark.parametrize("radius", [0, 1, 8, 14])
def test_hash_pairs_are_those_of_brute_force(radius: int) -> None:
    """A few hashes, and others that differ from one of them in up to 15 bits."""
    rng = np.random.default_rng(radius)
    hashes = rng.choice(rng.integers(0, 2**64, 4, dtype=np.uint64), 60)
    for at in range(len(hashes)):
        for bit in rng.permutation(64)[: rng.integers(0, 16)]:
            hashes[at] ^= np.uint64(1) << np.uint64(bit)
    values = [int(value) for value in hashes]
    near = {(i, j) for i, j in combinations(range(len(values)), 2) if (values[i] ^ values[j]).bit_count() <= radius}
    assert hash_pairs(hashes, radius) == near


# -- groups and splits --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(10))
def test_groups_are_the_connected_rows_and_cross_no_splits_once_leaks_are_dropped(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 40))
    pairs = rng.integers(0, count, (rng.integers(0, 60), 2))
    group = groups(count, pairs)
    smallest = list(range(count))  # the smallest row that each row reaches, one step at a time
    for _ in range(count):
        for first, second in pairs:
            smallest[first] = smallest[second] = min(smallest[first], smallest[second])
    assert group.tolist() == smallest
    splits = rng.integers(0, 3, count).astype(np.int8)
    found = leaks(splits, group)
    assert as_set(found) == {
        (at, next(other for other in range(count) if group[other] == group[at] and splits[other] == best))
        for at in range(count)
        if splits[at] < (best := max(splits[group == group[at]]))
    }
    kept = np.setdiff1d(np.arange(count), found[:, 0])
    assert all(len(set(splits[kept][group[kept] == name])) == 1 for name in set(group))


def test_splits_have_their_shares_and_no_group_crosses_them() -> None:
    keys = [f"image-{at}" for at in range(5000)]
    shares = (0.8, 0.1, 0.1)
    group = groups(5000, np.random.default_rng(0).integers(0, 5000, (1500, 2)))
    alone = np.bincount(assign_splits(np.arange(5000), keys, shares), minlength=3) / 5000
    assert alone == pytest.approx(shares, abs=0.02)
    assert not (assign_splits(group, keys, (0, 1, 0)) != 1).any()
