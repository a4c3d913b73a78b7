"""Find shards on disk and on a server, count their rows, and read runs of them, damaged files included."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from datasets import disable_progress_bars
from hypothesis import given
from hypothesis import strategies as st

from mm_utils.data.paths import shard_kind
from mm_utils.data.rows import tars as webdataset
from mm_utils.data.rows.source import Source
from mm_utils.data.streams import shards as stream_shards
from mm_utils.data.streams.rows import read_rows
from mm_utils.data.streams.shards import Shard, ShardReader, count_shards, expand
from tests.kit.numbered_shards import (
    Server,
    caption_of,
    image_of,
    rows_of,
    serve,
    write_parquet,
    write_shards,
    write_tar,
)

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ["parquet", "arrow", "tar"]
SOURCE = Source("shards")


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """One shard of 30 rows of each kind."""
    folder = tmp_path_factory.mktemp("shards")
    urls = {kind: write_shards(folder / kind, kind, [30]).replace("*", "000") for kind in KINDS}
    return {**urls, "arrow": str(next(Path(urls["arrow"]).glob("train/*.arrow")))}


def numbers_in(rows: list[Any]) -> list[int]:
    """Return the numbers that the images show, each checked against its caption; -1 for a row that is lost."""
    found = []
    for row in rows:
        if isinstance(row, str):
            found.append(-1)
            continue
        number = next(number for number in range(60) if image_of(number) == row["image"]["bytes"])
        assert row["captions"][0] == caption_of(number)
        found.append(number)
    return found


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    with serve(tmp_path) as address:
        yield address


@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_counted_and_read_from_any_row_on(kind: str, shards: dict[str, str]) -> None:
    assert count_shards([shards[kind]]) == [Shard(shards[kind], 0, 30)]
    for first in (0, 1, 4, 17, 29, 30):
        assert numbers_in(list(read_rows(shards[kind], first, SOURCE))) == list(range(first, 30))


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_a_server_that_gives_ranges_is_read_like_the_disk(kind: str, tmp_path: Path, server: str) -> None:
    write_shards(tmp_path, kind, [30])
    url = f"{server}/000.{kind}"
    assert count_shards([url]) == [Shard(url, 0, 30)]
    assert numbers_in(ShardReader([Shard(url, 5, 20)], SOURCE).read(0, 3, 13)) == list(range(8, 18))


def test_a_server_without_ranges_and_a_missing_file_are_named(
    tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, "parquet", [3])
    with pytest.raises(
        ValueError, match=r"nothing.parquet cannot be opened .* Check its address, the credentials and the connection"
    ):
        count_shards([f"{server}/nothing.parquet"])
    monkeypatch.setattr(Server, "ranges", False)
    with pytest.raises(ValueError, match="1 of 1 shards cannot be read"):
        count_shards([f"{server}/000.parquet"])


def test_counts_are_kept_until_a_file_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(write_tar(tmp_path / "a.tar", range(5)))
    assert count_shards([path])[0].rows == 5
    with monkeypatch.context() as patch:
        patch.setattr(stream_shards, "count_rows", None)
        assert count_shards([path])[0].rows == 5
    write_tar(tmp_path / "a.tar", range(7))
    assert count_shards([path])[0].rows == 7


@pytest.mark.parametrize(
    ("pattern", "names"),
    [
        ("s-{008..011}.tar", ["s-008.tar", "s-009.tar", "s-010.tar", "s-011.tar"]),
        ("{a,b}/{0..1}.tar", ["a/0.tar", "a/1.tar", "b/0.tar", "b/1.tar"]),
        ("https://host/x.parquet?download=true", ["https://host/x.parquet?download=true"]),
    ],
)
def test_braces_are_expanded_without_asking_anyone(pattern: str, names: list[str]) -> None:
    assert expand(pattern) == names
    assert shard_kind(names[0]) in ("tar", "parquet")


def test_stars_find_files(tmp_path: Path) -> None:
    write_shards(tmp_path, "tar", [1, 1])
    assert expand(str(tmp_path / "*.tar")) == [str(tmp_path / "000.tar"), str(tmp_path / "001.tar")]
    assert expand(f"file://{tmp_path}/*.tar") == [f"file://{tmp_path}/000.tar", f"file://{tmp_path}/001.tar"]
    assert expand(str(tmp_path / "*.zip")) == [str(tmp_path / "*.zip")]  # to be named by whoever opens it


@given(st.data())
def test_runs_give_the_same_rows_in_any_order_of_reading(shards: dict[str, str], data: st.DataObject) -> None:
    kind = data.draw(st.sampled_from(KINDS))
    reader = ShardReader([Shard(shards[kind], 0, 10), Shard(shards[kind], 10, 20)], SOURCE)
    for _ in range(3):
        shard = data.draw(st.integers(0, 1))
        start = data.draw(st.integers(0, 9))
        stop = data.draw(st.integers(start, 10))
        expected = [10 * shard + row for row in range(start, stop)]
        assert numbers_in(reader.read(shard, start, stop)) == expected


def damage(path: Path) -> None:
    """A tar of 30 samples is cut off in the middle; of a Parquet file, the images of rows 16 to 19 are overwritten."""
    content = bytearray(path.read_bytes())
    if path.suffix == ".tar":
        path.write_bytes(content[: len(content) // 2])
    else:
        start = pq.read_metadata(path).row_group(4).column(0).data_page_offset
        content[start : start + 40] = bytes(40)
        path.write_bytes(content)


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_rows_lost_to_damage_do_not_depend_on_the_first_row_read(kind: str, tmp_path: Path) -> None:
    rows = rows_of(range(30))
    path = tmp_path / f"a.{kind}"
    write_parquet(path, rows) if kind == "parquet" else write_tar(path, range(30))
    damage(path)
    shard = [Shard(str(path), 0, 30)]
    straight = ShardReader(shard, SOURCE)
    whole = [numbers_in(straight.read(0, start, start + 5)) for start in range(0, 30, 5)]
    fresh = [numbers_in(ShardReader(shard, SOURCE).read(0, start, start + 5)) for start in range(0, 30, 5)]
    assert whole == fresh
    found = [number for numbers in whole for number in numbers]
    assert found[:10] == list(range(10))
    assert -1 in found
    assert all(number in (row, -1) for row, number in enumerate(found))
    if kind == "parquet":
        assert [row for row in range(30) if found[row] == -1] == [16, 17, 18, 19]
    else:
        assert found == sorted(found[: found.index(-1)]) + [-1] * (30 - found.index(-1))


def test_a_lost_row_names_its_shard_and_the_reason(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write_tar(tmp_path / "a.tar", range(30))
    damage(path)
    lost = ShardReader([Shard(str(path), 0, 30)], SOURCE).read(0, 20, 22)
    assert len(lost) == 2
    assert str(lost[0]).startswith(f"shard {path} cannot be read from row 20 on: ReadError")
    assert str(lost[0]) in caplog.text


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The standard library takes it for one, in silence."""
    path = write_tar(tmp_path / "a.tar", range(30))
    content = bytearray(path.read_bytes())
    header = len(content) // 2 // 512 * 512
    header = content.index(b"samples/", header)
    content[header : header + 100] = b"\xff" * 100
    path.write_bytes(content)
    good = write_tar(tmp_path / "b.tar", range(30, 33))
    assert count_shards([str(path), str(good)]) == [Shard(str(good), 0, 3)]
    assert "a.tar cannot be read and is left out" in caplog.text
    lost = ShardReader([Shard(str(path), 0, 30)], SOURCE).read(0, 25, 30)
    assert all(isinstance(row, str) and "the end marker is missing" in row for row in lost)


def test_mostly_damaged_shards_are_refused(tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / f"{name}.parquet").write_bytes(b"not at all")
    with pytest.raises(ValueError, match="3 of 3 shards cannot be read"):
        count_shards(expand(str(tmp_path / "*.parquet")))


@pytest.mark.parametrize("suffix", ["tar", "parquet"])
def test_a_pipe_is_no_shard(suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be waited for without end, at the start and where it takes the place of a shard during the run."""
    good = [write_tar(tmp_path / f"{name}.tar", range(3)) for name in "ab"]
    os.mkfifo(tmp_path / f"c.{suffix}")
    shards = count_shards([*map(str, good), str(tmp_path / f"c.{suffix}")])
    assert [shard.rows for shard in shards] == [3, 3]
    assert "it is not a regular file" in caplog.text
    good[0].unlink()
    os.mkfifo(good[0])
    [lost, *_] = ShardReader(shards, SOURCE).read(0, 0, 3)
    assert "it is not a regular file" in str(lost)


def test_a_shard_that_vanishes_stops_the_run(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "a.tar", range(3))
    reader = ShardReader([Shard(str(path), 0, 3)], SOURCE)
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.tar cannot be opened"):
        reader.read(0, 0, 3)


def test_a_sample_too_large_for_memory_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_tar(tmp_path / "a.tar", range(3))
    monkeypatch.setattr(webdataset, "MOST_BYTES", 40)
    rows = list(read_rows(str(path), 0, SOURCE))
    assert all(isinstance(row, str) and "too_many_bytes" in row for row in rows)
    assert len(rows) == 3
