import io
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Dataset, DatasetDict
from PIL import Image

from mm_utils.data.statistics import PairStatistics
from mm_utils.data_pictures import draw_statistics, random_tiles, tiles_of_matches
from mm_utils.reporting import Tile, draw_contact_sheet


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


def test_a_match_shows_both_rows_or_the_one_that_is_left() -> None:
    pairs = DatasetDict({"train": split("a", "b", "twice"), "test": split("twice", "c")})
    assert seen(tiles_of_matches(pairs, [["c", "b"]])) == [(2, "test: c", "C"), (2, "train: b", "B")]
    assert seen(tiles_of_matches(pairs, [["a", "gone"]])) == [(1, "train: a", "A"), (0, "gone", "(removed)")]
    assert seen(tiles_of_matches(pairs, [["gone", "a"]]))[0] == (0, "gone", "(removed)")
    assert tiles_of_matches(pairs, [["gone", "lost"]]) == tiles_of_matches(pairs, []) == []
    both = [(3, "train: twice", "TWICE"), (1, "test: twice", "TWICE")]
    assert seen(tiles_of_matches(pairs, [["twice", "twice"]])) == both
    assert len(tiles_of_matches(pairs, [["a", "b"], ["a", "c"], ["lost", "gone"], ["a", "a"]])) == 6
    assert tiles_of_matches(DatasetDict({"train": pairs["train"].remove_columns("id")}), [["a", "b"]]) == []


def statistics(**counts: Any) -> PairStatistics:
    made = PairStatistics()
    for name, values in counts.items():
        getattr(made, name).update(Counter(values))
    return made


@pytest.mark.parametrize(
    "measured",
    [
        {},
        {"train": PairStatistics()},
        {"train": statistics(words=[1]), "validation": PairStatistics(), "_$x$_": statistics(words=[0, 10**7])},
        {"train": statistics(short_side=[7] * 3, aspect=[-200, 0, 300], captions_per_image=[0])},
        {
            "train": statistics(languages="a" * 9 + "bcdefghijklm"),
            **dict.fromkeys("123456", statistics(languages="z")),
        },
    ],
)
@pytest.mark.filterwarnings("error")
def test_any_statistics_can_be_drawn(tmp_path: Path, measured: dict[str, PairStatistics]) -> None:
    draw_statistics(measured, tmp_path / "statistics.png")
    with Image.open(tmp_path / "statistics.png") as image:
        assert image.width == 1650


def test_contact_sheet_grows_by_rows_and_keeps_to_its_columns(tmp_path: Path) -> None:
    def size(count: int, **layout: int) -> tuple[int, int]:
        image = Image.new("RGB", (30, 20), (200, 0, 0))
        draw_contact_sheet([Tile(image, "W" * 99, "W " * 999)] * count, tmp_path / "sheet.jpg", **layout)
        with Image.open(tmp_path / "sheet.jpg") as sheet:
            return sheet.size

    assert size(1)[0] < size(6)[0] == size(7)[0]
    assert size(1)[1] == size(6)[1] < size(7)[1] == size(12)[1]
    assert size(4, columns=4)[0] < size(4, columns=4, group=2)[0]
    with pytest.raises(ValueError, match="tiles is empty"):
        size(0)


def test_text_stays_in_its_tile(tmp_path: Path) -> None:
    draw_contact_sheet([Tile(None, "W" * 99, "W" * 999), Tile(None, "")], tmp_path / "sheet.jpg")
    with Image.open(tmp_path / "sheet.jpg") as sheet:
        pixels = np.asarray(sheet.convert("L"))
    text = pixels[210:, :]  # below the pictures
    assert text[:, 17:195].min() < 100
    assert text[:, 205:].min() > 200
