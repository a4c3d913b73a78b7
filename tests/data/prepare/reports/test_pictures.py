import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict, Features, Value
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from mm_utils.data.media.pictures import picture
from mm_utils.data.prepare import pictures
from mm_utils.data.prepare.pictures import (
    PairStatistics,
    Tile,
    draw_contact_sheet,
    matched_tiles,
    mean,
    measure_pairs,
    quantile,
    random_tiles,
)
from tests.kit.media_files import clip, media_rows, tone


def split(*ids: str) -> Dataset:
    """Rows whose image is as wide as their number, from 1."""
    rows = []
    for number, name in enumerate(ids, start=1):
        data = io.BytesIO()
        Image.new("RGB", (number, 5)).save(data, format="PNG")
        rows.append({"id": name, "image": {"bytes": data.getvalue(), "path": None}, "captions": ["", name.upper()]})
    return Dataset.from_list(rows)


def seen(tiles: list[Tile]) -> list[tuple[int, str, str]]:
    return [(tile.image.width if tile.image else 0, tile.title, tile.text) for tile in tiles]


def test_random_tiles_are_distinct_rows_with_their_first_caption() -> None:
    rows = split(*"abcdefgh")
    assert seen(random_tiles(rows, 99, seed=0)) == [(n, name, name.upper()) for n, name in enumerate("abcdefgh", 1)]
    chosen = [seen(random_tiles(rows, 3, seed)) for seed in range(20)]
    assert all(len(set(tiles)) == 3 for tiles in chosen)
    assert {tile for tiles in chosen for tile in tiles} == set(seen(random_tiles(rows, 8, 0)))
    assert random_tiles(rows.select([]), 3, seed=0) == []


def test_a_match_shows_both_rows() -> None:
    pairs = DatasetDict({"train": split("a", "b", "twice"), "test": split("twice", "c")})
    assert seen(matched_tiles(pairs, [["c", "b"]])) == [(2, "test: c", "C"), (2, "train: b", "B")]
    assert matched_tiles(pairs, [["gone", "a"], ["a", "a"]]) == matched_tiles(pairs, []) == []
    both = [(3, "train: twice", "TWICE"), (1, "test: twice", "TWICE")]
    assert seen(matched_tiles(pairs, [["twice", "twice"]])) == both
    assert len(matched_tiles(pairs, [["a", "b"], ["a", "c"], ["a", "gone"]])) == 4


def statistics(**counts: Any) -> PairStatistics:
    made = PairStatistics()
    for name, values in counts.items():
        getattr(made, name).update(Counter(values))
    return made


def test_contact_sheet_grows_by_rows_and_keeps_to_its_columns(tmp_path: Path) -> None:
    def size(count: int, **layout: int) -> tuple[int, int]:
        image = Image.new("RGB", (30, 20), (200, 0, 0))
        draw_contact_sheet([Tile(image, "W" * 99, "W " * 999)] * count, tmp_path / "sheet.jpg", **layout)
        with Image.open(tmp_path / "sheet.jpg") as sheet:
            return sheet.size

    assert size(1)[0] < size(6)[0] == size(7)[0]
    assert size(1)[1] == size(6)[1] < size(7)[1] == size(12)[1]
    assert size(4, columns=4)[0] < size(4, columns=4, group=2)[0]


@pytest.mark.parametrize("length", [10, 28, 29, 500])
def test_an_id_is_shown_whole_or_by_its_ends(length: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    title, texts = "".join(chr(ord("a") + place % 26) for place in range(length)), list[str]()
    monkeypatch.setattr(pictures, "draw_text", lambda ax, x, y, text, **_: texts.append(text))
    draw_contact_sheet([Tile(None, title, "a fox")], tmp_path / "sheet.jpg")
    assert texts[0] == (title if length <= 28 else f"{title[:9]}…{title[-18:]}")


def test_text_stays_in_its_tile(tmp_path: Path) -> None:
    draw_contact_sheet([Tile(None, "W" * 99, "W" * 999), Tile(None, "")], tmp_path / "sheet.jpg")
    with Image.open(tmp_path / "sheet.jpg") as sheet:
        pixels = np.asarray(sheet.convert("L"))
    text = pixels[210:, :]  # below the pictures
    assert text[:, 17:195].min() < 100
    assert text[:, 205:].min() > 200


# -- statistics ---------------------------------------------------------------------------------------------------------

TEXT = st.text(st.characters(exclude_categories=["Cs"]) | st.sampled_from(" \t\n\x0b\x1c\x85\u00a0\u3000aé中かж"))
CAPTIONS = st.none() | st.lists(st.none() | TEXT, max_size=4)
ROWS = st.lists(
    st.fixed_dictionaries(
        {"width": st.none() | st.integers(0, 5000), "height": st.none() | st.integers(0, 5000), "captions": CAPTIONS}
    ),
    max_size=12,
)
FEATURES = Features({"width": Value("int32"), "height": Value("int32"), "captions": [Value("string")]})


def rows_of(rows: list[dict[str, Any]], features: Features = FEATURES) -> Dataset:
    return Dataset.from_dict({name: [row[name] for row in rows] for name in features}, features=features)


@given(ROWS)
def test_every_count_equals_a_plain_loop(rows: list[dict[str, Any]]) -> None:
    found = measure_pairs(rows_of(rows))
    captions = [caption for row in rows for caption in row["captions"] or [] if caption is not None]
    sizes = [(row["width"], row["height"]) for row in rows if row["width"] and row["height"]]
    assert (found.images, found.captions) == (len(rows), len(captions))
    assert found.short_side == Counter(min(size) for size in sizes)
    assert found.aspect == Counter(int(np.round(10 * np.log2(width / height))) for width, height in sizes)
    assert found.captions_per_image == Counter(len(row["captions"] or []) for row in rows)
    assert found.words == Counter(len(caption.split()) for caption in captions)
    assert found.characters == Counter(map(len, captions))


@given(st.lists(st.integers(0, 50), min_size=1), st.floats(0.01, 1))
def test_quantile_and_mean_are_numpys(values: list[int], share: float) -> None:
    assert quantile(Counter(values), share) == np.quantile(values, share, method="inverted_cdf")
    assert np.isclose(mean(Counter(values)), np.mean(values))


def test_nothing_has_no_quantile() -> None:
    assert (quantile(Counter(), 0.5), mean(Counter())) == (0, 0)


def test_original_sizes_win_over_stored_ones() -> None:
    sizes = {"width": [258], "height": [300], "original_width": [3000], "original_height": [1500]}
    found = measure_pairs(Dataset.from_dict({**sizes, "captions": [["a"]]}))
    assert found.original
    assert found.short_side == {1500: 1}
    assert found.aspect == {10: 1}


def test_batches_indices_and_formats_do_not_matter() -> None:
    rows: list[dict[str, Any]] = [
        {"width": 1 + at % 7, "height": 3, "captions": ["word " * (at % 5)] * (at % 3)} for at in range(9001)
    ]
    plain = rows_of(rows)
    shuffled = plain.shuffle(seed=0).with_format("numpy")
    assert measure_pairs(shuffled) == measure_pairs(plain)
    assert measure_pairs(plain.select([5, 5, 7])).images == 3


@pytest.mark.parametrize("kind", ["clip", "sound"])
def test_seconds_of_media_are_counted_and_tiles_show_them(tmp_path: Path, kind: str) -> None:
    contents = [clip(), clip(fps=8)] if kind == "clip" else [tone(300, 900), tone(300)]
    rows = media_rows(kind, contents, seconds=[1.04, 0.5])
    found = measure_pairs(rows)
    assert (found.kind, found.images, found.seconds) == (kind, 2, Counter({10: 1, 5: 1}))
    tiles = random_tiles(rows, 2, seed=0)
    assert [tile.text for tile in tiles] == ["number 0", "number 1"]
    for tile, content in zip(tiles, contents, strict=True):
        assert tile.image == picture({"bytes": content}, kind)
