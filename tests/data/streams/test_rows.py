"""Rows of shards become training rows, or a reason why there is none."""

import json
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.rows.source import Source
from mm_utils.data.streams.rows import FEATURES, check_columns, count_rows, read_rows
from tests.kit import numbered_shards
from tests.kit.reading import write_tar

GOOD = {"image": b"bytes", "caption": "a picture", "id": 7, "languages": "en"}  # the last one is not read


def rows_of(folder: Path, *records: dict[str, Any], **columns: str) -> list[Any]:
    pq.write_table(pa.Table.from_pylist(list(records)), folder / "s.parquet")
    return list(read_rows(str(folder / "s.parquet"), 0, Source("shards", **columns)))


@pytest.mark.parametrize(
    ("changed", "captions"),
    [
        ({}, ["a picture"]),
        ({"caption": ["a", "b", "a"]}, ["a", "b"]),
        ({"caption": ["a", None, " ", "b"]}, ["a", "b"]),
        ({"caption": ["two  spaces", "cat.jpg"]}, ["two spaces"]),
    ],
)
def test_usable_captions_are_kept(changed: dict[str, Any], captions: list[str], tmp_path: Path) -> None:
    [row] = rows_of(tmp_path, {**GOOD, **changed})
    assert row == {
        "id": "7",
        "image": {"bytes": b"bytes", "path": None},
        "captions": captions,
    }
    pa.Table.from_pylist([row], FEATURES.arrow_schema)


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"image": None}, "image_missing: the image is not in the shard"),
        ({"image": "photo.jpg"}, "the image is not in the shard"),
        ({"image": {"bytes": None, "path": "/etc/passwd"}}, "the image is not in the shard"),
        ({"caption": None}, "caption_null"),
        ({"caption": [3, 4]}, "caption_not_text"),
        ({"id": None}, "id, the id, is empty"),
    ],
)
def test_an_unusable_row_gives_its_place_and_the_reason(changed: dict[str, Any], reason: str, tmp_path: Path) -> None:
    [found] = rows_of(tmp_path, {**GOOD, **changed})
    assert found.startswith(f"shard {tmp_path / 's.parquet'}, row 0: ")
    assert reason in found


def test_stored_pixels_keep_the_path_that_says_their_size(tmp_path: Path) -> None:
    image = {"bytes": b"123", "path": "raw:1x1"}
    assert rows_of(tmp_path, {**GOOD, "image": image})[0]["image"] == image


def test_without_an_id_equal_bytes_have_equal_ids(tmp_path: Path) -> None:
    first, same, other = rows_of(tmp_path, *({"image": content, "caption": "a"} for content in (b"x", b"x", b"y")))
    assert first["id"] == same["id"] != other["id"]


def test_columns_are_found_by_their_names_or_their_type(tmp_path: Path) -> None:
    record = {"pixels": b"x", "words": "a", "caption": "b"}
    assert rows_of(tmp_path, record)[0]["captions"] == ["b"]
    assert rows_of(tmp_path, record, caption_column="words")[0]["captions"] == ["a"]
    with pytest.raises(ValueError, match="caption_column is word; there is no such column"):
        check_columns(str(tmp_path / "s.parquet"), Source("shards", caption_column="word"))


@pytest.mark.parametrize("split", [{}, {"split": "test"}])
def test_a_column_of_splits_is_named(split: dict[str, str], tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    rows_of(tmp_path, {**GOOD, **split})
    assert check_columns(str(tmp_path / "s.parquet"), Source("shards")) == "image"
    assert ("rows of all splits are trained on" in caplog.text) is bool(split)


def test_a_sample_of_a_tar_is_read_by_the_rules_of_preparing(tmp_path: Path) -> None:
    described = {"image_id": 5, "caption": ["of json", "zweite"]}
    members = {
        "0": {"png": b"x", "json": json.dumps(described).encode(), "txt": b"of txt"},
        "1": {"png": b"x", "json": json.dumps(described).encode()},
        "2": {"png": b"x", "txt": b"\xff"},
        "3": {"png": b"x", "txt": b"a", "pkl": b"."},
        "4": {"txt": b"alone"},
        "5": {"png": b"x", "json": b"[" * 10_000, "txt": b"a"},
    }
    flat = [(f"{key}.{suffix}", content) for key, sample in members.items() for suffix, content in sample.items()]
    path = write_tar(tmp_path / "s.tar", flat)
    plain, both, *bad = read_rows(path, 0, Source("shards"))
    assert isinstance(plain, dict)
    assert isinstance(both, dict)
    assert (plain["id"], plain["captions"]) == ("5", ["of txt"])
    assert both["captions"] == ["of json", "zweite"]
    reasons = ("bad_encoding", "unsafe_member", "image_missing", "too_nested")
    for number, (row, reason) in enumerate(zip(bad, reasons, strict=True), 2):
        assert isinstance(row, str)
        assert row.startswith(f"shard {path}, row {number}: {reason}")
    assert list(read_rows(path, 1, Source("shards"))) == [both, *bad]


@pytest.mark.parametrize(("rows", "batch"), [(7, 3), (300, 64), (1, 5)])
def test_an_arrow_file_of_a_server_is_read_from_any_row(rows: int, batch: int, tmp_path: Path) -> None:
    """Counted by the headers of its batches; one that is damaged is named."""
    table = pa.Table.from_pylist(numbered_shards.rows_of(range(rows)), numbered_shards.FEATURES.arrow_schema)
    local, there, files = tmp_path / "a.arrow", "memory://arrow/a.arrow", fsspec.filesystem("memory")
    with pa.OSFile(str(local), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=batch)
    files.put(str(local), "/arrow/a.arrow")
    assert count_rows(there) == rows
    assert check_columns(there, Source("shards")) == "image"
    for first in (0, 1, rows // 2, rows - 1, rows):
        found = list(read_rows(there, first, Source("shards")))
        assert found == list(read_rows(str(local), first, Source("shards")))
        assert len(found) == rows - first
    files.pipe("/arrow/a.arrow", b"no arrow" + local.read_bytes()[8:])
    with pytest.raises(ValueError, match="byte 0 does not begin a message of an Arrow stream"):
        count_rows(there)
    files.rm("/arrow", recursive=True)
