"""Shards of a real S3 server, moto's on the loopback: what is fetched, one line for each error, a server that goes and comes back."""

import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.rows.source import DataArguments, Source
from mm_utils.data.streams import shards as stream_shards
from mm_utils.data.streams.shards import ShardReader, count_shards, expand
from mm_utils.data.streams.stream import open_stream
from scripts import prepare_data
from tests.kit.numbered_shards import write_shards

PATTERN = "s3://bucket/*.tar"


class Store:
    """A server that can be stopped and started; its objects stay."""

    def __init__(self) -> None:
        self.start(0)

    def start(self, port: int) -> None:
        from moto.server import ThreadedMotoServer

        self.server: Any = ThreadedMotoServer("127.0.0.1", port, verbose=False)
        self.server.start()
        self.port = self.server.get_host_and_port()[1]


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    pytest.importorskip("moto.server")
    s3fs = pytest.importorskip("s3fs")
    logging.getLogger("werkzeug").setLevel("ERROR")
    found = Store()
    for name, value in (
        ("AWS_ACCESS_KEY_ID", "someone"),
        ("AWS_SECRET_ACCESS_KEY", "secret"),
        ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{found.port}"),
        ("AWS_MAX_ATTEMPTS", "1"),
        ("AWS_EC2_METADATA_DISABLED", "true"),
    ):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(stream_shards, "_PAUSES", (0.1, 0.4, 1.6))
    s3fs.S3FileSystem.clear_instance_cache()
    files = s3fs.S3FileSystem()
    if files.exists("bucket"):  # moto keeps objects as long as the process lives
        files.rm("bucket", recursive=True)
    files.mkdir("bucket")
    write_shards(tmp_path / "shards", "tar", [12, 9])
    for path in (tmp_path / "shards").iterdir():
        files.put(str(path), f"bucket/{path.name}")
    yield found
    found.server.stop()
    s3fs.S3FileSystem.clear_instance_cache()


def test_a_server_that_comes_back_is_used_again(store: Store, caplog: pytest.LogCaptureFixture) -> None:
    urls = expand(PATTERN)
    shards = count_shards(urls)
    whole, reader = (ShardReader(shards, Source("shards", medium="image")) for _ in range(2))
    expected = whole.read(0, 0, 12) + whole.read(1, 0, 9)
    found = reader.read(0, 0, 5)
    store.server.stop()
    fsspec.filesystem("s3").invalidate_cache()
    starting = threading.Timer(0.8, store.start, (store.port,))
    starting.start()
    found += reader.read(1, 0, 9) + reader.read(0, 5, 12)
    starting.join()
    assert found[:5] + found[14:] + found[5:14] == expected
    assert "cannot be read" not in caplog.text


def test_a_set_is_streamed_from_a_store(store: Store, tmp_path: Path) -> None:
    def streamed(name: str) -> list[Any]:
        stream = open_stream(DataArguments(dataset_name=name), BatchSizes((0,), (2,)), seed=0)
        reader = ShardReader(stream.shards, stream.source)
        return [row for at, shard in enumerate(stream.shards) for row in reader.read(at, 0, shard.rows)]

    words = ["--image_size", "16", "--max_bad_fraction", "0.5", "--num_proc", "1", "--validation_fraction", "0.3"]
    prepare_data.main(["--sources", str(tmp_path / "shards/*.tar"), "--output_dir", str(tmp_path / "local"), *words])
    with pytest.raises(ValueError, match="s3://bucket/set; it has no training shards"):
        streamed("s3://bucket/set")
    files = fsspec.filesystem("s3")
    files.put(str(tmp_path / "local"), "bucket/set", recursive=True)
    files.invalidate_cache()
    assert streamed("s3://bucket/set") == streamed(str(tmp_path / "local")) != []


def test_each_error_of_a_store_is_one_line(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    import s3fs

    monkeypatch.setattr(stream_shards, "_PAUSES", (0.1,))
    reader = ShardReader(count_shards(expand(PATTERN)), Source("shards", medium="image"))
    for wrong in ("s3://bucket/999.tar", "s3://nowhere/000.tar"):
        with pytest.raises(ValueError, match=rf"shard {wrong} cannot be opened \(.*\). Check its address"):
            count_shards([wrong])
    store.server.stop()
    s3fs.S3FileSystem.clear_instance_cache()
    for use in (lambda: reader.read(0, 0, 3), lambda: count_shards(["s3://bucket/000.tar"]), lambda: expand(PATTERN)):
        with pytest.raises(ValueError, match=r"s3://bucket/.* cannot be (opened|listed) \(.*\). Check .* credentials"):
            use()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    s3fs.S3FileSystem.clear_instance_cache()
    with pytest.raises(ValueError, match=r"s3://bucket/000.tar cannot be opened \(.*[Cc]redentials"):
        count_shards(["s3://bucket/000.tar"])
    store.start(store.port)
