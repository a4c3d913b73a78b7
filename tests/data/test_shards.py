"""Shards on disk and on a server: found, counted, read from any row on, damaged or not; their rows, or why there is none."""

import errno
import json
import os
import time
from pathlib import Path
from typing import Any

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mm_utils.data.rows import tars
from mm_utils.data.rows.source import Source
from mm_utils.data.streams import shards
from mm_utils.data.streams.shards import Shard, ShardReader, check_columns, count_shards, expand, rows_from
from tests.kit import numbered_shards as kit
from tests.kit.reading import write_tar

pytestmark = pytest.mark.usefixtures("own_cache")
SOURCE = Source("shards", medium="image")


def numbers_in(rows: list[Any]) -> list[int]:
    """Return the numbers that the images show, each checked against its caption; -1 for a row that is lost."""
    known = {kit.image_of(number): number for number in range(60)}
    found = [known[row["image"]["bytes"]] if isinstance(row, dict) else -1 for row in rows]
    assert all(
        number < 0 or row["captions"][0] == kit.caption_of(number) for number, row in zip(found, rows, strict=True)
    )
    return found


@pytest.mark.parametrize("place", ["disk", "server"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "tar"])
def test_rows_are_counted_and_read_from_any_row_on_in_any_order(kind: str, place: str, tmp_path: Path) -> None:
    source = kit.write_shards(tmp_path, kind, [30])
    path = next(Path(source).glob("train/*.arrow")) if kind == "arrow" else tmp_path / f"000.{kind}"
    url = f"{kit.in_memory(path.parent)}/{path.name}" if place == "server" else str(path)
    assert count_shards([url]) == [Shard(url, 0, 30)]
    check_columns(url, Source("shards"))
    for first in (0, 1, 4, 17, 29, 30):
        assert numbers_in(list(rows_from(url, first, SOURCE))) == list(range(first, 30))
    reader = ShardReader([Shard(url, 0, 10), Shard(url, 10, 20)], SOURCE)
    for shard, start, stop in ((0, 3, 7), (0, 7, 10), (1, 0, 20), (0, 3, 7), (0, 3, 7), (1, 5, 5), (1, 19, 20)):
        assert numbers_in(reader.read(shard, start, stop)) == list(range(10 * shard + start, 10 * shard + stop))


def test_files_are_counted_by_what_lies_beside_them_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")

    def by_name(self: Any, path: str, version_id: None = None, start: int = 0, end: int | None = None) -> bytes:
        return self.open(path, "rb").read()[start:end] if version_id is None else pytest.fail("as s3fs has it")

    monkeypatch.setattr(type(files), "cat_file", by_name)
    stats = b'{"successes": 12}'
    files.pipe({"/counted/a.tar": b"never opened", "/counted/a_stats.json": stats, "/counted/b.tar": b"none"})
    assert [shard.rows for shard in count_shards(["memory://counted/a.tar", "memory://counted/b.tar"])] == [12]
    path = str(kit.write_tar(tmp_path / "a.tar", range(5)))
    assert count_shards([path])[0].rows == 5
    with monkeypatch.context() as patch:
        patch.setattr(shards, "count_rows", None)
        assert count_shards([path])[0].rows == 5
    kit.write_tar(tmp_path / "a.tar", range(7))
    assert count_shards([path])[0].rows == 7


def test_patterns_find_files(tmp_path: Path) -> None:
    assert expand("https://host/x.parquet?download=true") == ["https://host/x.parquet?download=true"]
    kit.write_shards(tmp_path, "tar", [1, 1])
    for place in (str(tmp_path), f"file://{tmp_path}"):
        assert expand(f"{place}/*.tar") == [f"{place}/000.tar", f"{place}/001.tar"]
    assert expand(str(tmp_path / "*.zip")) == [str(tmp_path / "*.zip")]  # to be named by whoever opens it


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_rows_lost_to_damage_do_not_depend_on_the_first_row_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tar of 30 samples is cut off in the middle; of a Parquet file, the images of rows 16 to 19 are overwritten."""
    kit.write_shards(tmp_path, kind, [30])
    path = tmp_path / f"000.{kind}"
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(4).column(0).data_page_offset if kind == "parquet" else 0
    content[start : start + 40] = bytes(40)
    path.write_bytes(content if start else path.read_bytes()[: len(content) // 2])
    shard = [Shard(str(path), 0, 30)]
    straight = ShardReader(shard, SOURCE)
    whole = [straight.read(0, start, start + 5) for start in range(0, 30, 5)]
    fresh = [ShardReader(shard, SOURCE).read(0, start, start + 5) for start in range(0, 30, 5)]
    assert list(map(numbers_in, whole)) == list(map(numbers_in, fresh))
    found = [number for rows in whole for number in numbers_in(rows)]
    first = found.index(-1)
    assert found == [*range(first), *([-1] * 4 + [*range(20, 30)] if kind == "parquet" else [-1] * (30 - first))]
    assert 10 <= first <= 16
    reason = str(whole[first // 5][first % 5])
    assert reason.startswith(f"shard {path} cannot be read from row {first} on: ")
    assert reason in caplog.text


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The standard library takes it for one, in silence."""
    path = kit.write_tar(tmp_path / "a.tar", range(30))
    content = bytearray(path.read_bytes())
    header = content.index(b"samples/", len(content) // 2 // 512 * 512)
    content[header : header + 100] = b"\xff" * 100
    path.write_bytes(content)
    good = kit.write_tar(tmp_path / "b.tar", range(30, 33))
    assert count_shards([str(path), str(good)]) == [Shard(str(good), 0, 3)]
    assert "a.tar cannot be read and is left out" in caplog.text
    lost = ShardReader([Shard(str(path), 0, 30)], SOURCE).read(0, 25, 30)
    assert all(isinstance(row, str) and "the end marker is missing" in row for row in lost)
    with pytest.raises(ValueError, match="1 of 1 shards cannot be read"):
        count_shards([str(path)])


@pytest.mark.parametrize("suffix", ["tar", "parquet", "arrow"])
def test_a_pipe_is_no_shard(suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be waited for without end, at the start and where it takes the place of a shard during the run."""
    good = [kit.write_tar(tmp_path / f"{name}.tar", range(3)) for name in "ab"]
    os.mkfifo(tmp_path / f"c.{suffix}")
    found = count_shards([*map(str, good), str(tmp_path / f"c.{suffix}")])
    assert [shard.rows for shard in found] == [3, 3]
    assert "it is not a regular file" in caplog.text
    good[0].unlink()
    os.mkfifo(good[0])
    assert "it is not a regular file" in str(ShardReader(found, SOURCE).read(0, 0, 3)[0])


def test_a_lost_disk_stops_the_run_and_a_disk_error_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, usual, pauses = kit.write_tar(tmp_path / "a.tar", range(3)), shards.regular_file, list[float]()
    reader, errors = ShardReader([Shard(str(path), 0, 3)], SOURCE), [errno.EIO, errno.ESTALE, errno.EBUSY]

    def faltering(url: str) -> Any:
        if errors:
            raise OSError(errors.pop(), "in a bad moment", url)
        return usual(url)

    monkeypatch.setattr(shards, "regular_file", faltering)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert numbers_in(reader.read(0, 0, 3)) == [0, 1, 2]
    assert pauses == [1, 4, 16]
    errors += [errno.EIO] * 9
    again = ShardReader([Shard(str(path), 0, 3)], SOURCE).read(0, 0, 3)
    assert again == [f"shard {path} cannot be read from row 0 on: OSError: [Errno 5] in a bad moment: '{path}'"] * 3
    errors.clear()
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.tar cannot be opened"):
        reader.read(0, 1, 3)


# -- rows --------------------------------------------------------------------------------------------------------------
def test_rows_follow_the_rules_of_preparing_or_give_their_place_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path, raw = (
        str(tmp_path / "s.parquet"),
        {"bytes": b"bytes", "path": "raw:1x1"},
    )  # which says the size of stored pixels
    good = {"image": raw, "caption": ["a", None, " ", "b", "a"], "id": "7", "split": "test"}
    changes: list[tuple[dict[str, Any], str]] = [
        ({}, ""), ({"id": "8", "image": None}, "image_missing: the image is not in the shard"),
        ({"image": {"bytes": None, "path": "/etc/passwd"}}, "the image is not in the shard"),
        ({"caption": [" "]}, "caption_empty"), ({"id": None}, "id, the id, is empty"),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist([{**good, **changed} for changed, _ in changes]), path)
    first, *others = rows_from(path, 0, SOURCE)
    assert first == {"id": "7", "image": raw, "captions": ["a", "b"]}
    for at, (row, (_, reason)) in enumerate(zip(others, changes[1:], strict=True), start=1):
        assert str(row).startswith(f"shard {path}, row {at}: ")
        assert reason in str(row)
    check_columns(path, Source("shards"))
    assert "rows of all splits are trained on" in caplog.text
    pq.write_table(pa.Table.from_pylist([{"pixels": data, "text": "a"} for data in (b"x", b"x", b"y")]), path)
    one, same, other = (row["id"] for row in rows_from(path, 0, SOURCE) if isinstance(row, dict))
    assert one == same != other  # of the bytes
    monkeypatch.setattr(tars, "MOST_BYTES", 40)
    described = json.dumps({"image_id": 5, "caption": ["one", "zwei"], "split": "odd"}).encode()
    members = [("0.png", b"x"), ("0.json", described), ("1.png", bytes(50)), ("1.txt", b"a")]
    path = write_tar(tmp_path / "s.tar", members)
    row, large = rows_from(path, 0, Source("shards", medium="image", split="train"))
    assert isinstance(row, dict)
    assert (row["id"], row["captions"]) == ("5", ["one", "zwei"])
    assert str(large).startswith(f"shard {path}, row 1: too_many_bytes")
