"""What records of shards become, and which become nothing."""

from typing import Any

import pyarrow as pa
import pytest

from mm_utils.data.raw.columns import Columns
from mm_utils.data.stream.rows import features_of, make_row, name_by_bytes, name_by_id, needed_columns

COLUMNS = Columns("image", "caption", "id", "languages")
GOOD = {"image": b"bytes", "caption": "a picture", "id": 7, "languages": "en"}


def row_of(record: Any, columns: Columns = COLUMNS) -> Any:
    return make_row(record, columns, features_of(columns), "shard s, row 3")


@pytest.mark.parametrize(
    ("changed", "captions", "languages"),
    [
        ({}, ["a picture"], ["en"]),
        ({"caption": ["a", "b", "a"]}, ["a", "b"], ["en", "en"]),
        ({"caption": ["a", None, " ", "b"], "languages": ["en", "en", "en", "de"]}, ["a", "b"], ["en", "de"]),
        ({"caption": ["a", "broken \ud83d"], "languages": None}, ["a"], [""]),
    ],
)
def test_usable_captions_are_kept_with_their_languages(
    changed: dict[str, Any], captions: list[str], languages: list[str]
) -> None:
    row = row_of({**GOOD, **changed})
    assert row == {
        "id": "7",
        "image": {"bytes": b"bytes", "path": None},
        "captions": captions,
        "languages": languages,
    }
    pa.Table.from_pylist([row], features_of(COLUMNS).arrow_schema)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"image": None}, "the image is not in the shard"),
        ({"image": "photo.jpg"}, "the image is not in the shard"),
        ({"image": {"bytes": None, "path": "/etc/passwd"}}, "the image is not in the shard"),
        ({"caption": None}, "the caption is empty"),
        ({"caption": [3, {}]}, "the caption is empty"),
        ({"id": None}, "the id is empty or no text"),
        ({"id": "\ud83d"}, "the id is empty or no text"),
        ({"caption": ["a", "b"], "languages": ["en"]}, "2 captions have 1 languages"),
    ],
)
def test_an_unusable_record_says_where_and_why(changed: dict[str, Any], reason: str) -> None:
    found = row_of({**GOOD, **changed})
    assert isinstance(found, str)
    assert found.startswith("shard s, row 3: ")
    assert reason in found


def test_a_lost_record_keeps_its_reason() -> None:
    assert row_of("shard s cannot be read") == "shard s cannot be read"


def test_stored_pixels_keep_the_path_that_says_their_size() -> None:
    image = {"bytes": b"123", "path": "raw:1x1"}
    assert row_of({**GOOD, "image": image})["image"] == image


def test_without_an_id_equal_bytes_have_equal_ids() -> None:
    columns = Columns("image", "caption")
    first, same, other = (row_of({"image": content, "caption": "a"}, columns) for content in (b"x", b"x", b"y"))
    assert first["id"] == same["id"] != other["id"]
    assert name_by_bytes(first) == name_by_bytes(same) != name_by_bytes(other)
    assert name_by_id(first) == name_by_id(same) != name_by_id(other)
    assert needed_columns(columns) == ["image", "caption"]
    assert "languages" not in first
