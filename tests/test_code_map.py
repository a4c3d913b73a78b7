"""`docs/code.md` is what `make map` writes, and its reading lists name files that exist."""

import pytest

from tests.kit import code_map, house


def test_the_page_is_fresh() -> None:
    assert code_map.PAGE.read_text(encoding="utf-8") == code_map.page(), "docs/code.md is stale; run `make map`"


@pytest.mark.parametrize("title", code_map.READING)
def test_a_reading_list_is_short_and_exists(title: str) -> None:
    files = code_map.READING[title][1]
    assert len(files) <= 20
    assert all((house.ROOT / name).is_file() for name in files), [n for n in files if not (house.ROOT / n).is_file()]


def test_every_room_has_a_sentence() -> None:
    missing = [path for path in house.PACKAGE.rglob("__init__.py") if not code_map.sentence(path)]
    assert not missing
