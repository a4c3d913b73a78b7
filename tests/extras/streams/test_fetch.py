"""Sources at a store are copied, once, and prepared like a local copy."""

import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pytest

from mm_utils.data.rows.source import Source
from mm_utils.distributed import RunError
from mm_utils.extras.streams import fetch
from mm_utils.extras.streams.fetch import fetched
from scripts import prepare_data
from tests.kit.numbered_shards import caption_of, image_of, rows_of, write_parquet, write_tar

TOP = "memory:///bucket/set"


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Path]:
    """Files of a folder, which a store in memory has, too."""
    folder, files = tmp_path / "set", fsspec.filesystem("memory")
    for split, numbers in (("train", range(12)), ("val", range(12, 16))):
        (folder / split).mkdir(parents=True)
        write_tar(folder / split / "000.tar", numbers)
        write_tar(folder / split / "001.tar", [100 + number for number in numbers])
    (folder / "rows").mkdir()
    write_parquet(folder / "rows/000.parquet", rows_of(range(30, 40)))
    (folder / "photos").mkdir()
    (folder / "photos/metadata.jsonl").write_text(
        "\n".join(
            json.dumps({"file_name": f"{number}.png", "caption": caption_of(number)}) for number in range(50, 58)
        )
    )
    for number in range(50, 58):
        (folder / f"photos/{number}.png").write_bytes(image_of(number))
    files.put(str(folder), "/bucket/set", recursive=True)
    yield folder
    files.rm("/bucket", recursive=True)


def prepared(sources: list[str], output: Path) -> dict[str, Any]:
    words = ["--image_size", "16", "--max_rows", "100", "--num_proc", "1"]
    prepare_data.main(["--sources", *sources, "--output_dir", str(output), *words])
    found = {path.relative_to(output).as_posix(): path.read_bytes() for path in output.rglob("*.arrow")}
    return found | {"fingerprint": json.loads((output / "report.json").read_text())["fingerprint"]}


@pytest.mark.parametrize(
    "names", [["train/*.tar"], ["*/00{0..1}.tar"], ["rows/000.parquet", "photos"], ["rows", "val/000.tar"]]
)
def test_a_store_is_prepared_like_a_local_copy(names: list[str], local: Path, tmp_path: Path) -> None:
    at_store = prepared([f"{TOP}/{name}" for name in names], tmp_path / "one")
    assert at_store == prepared([f"{local}/{name}" for name in names], tmp_path / "other")
    assert not (tmp_path / "one.partial").exists()
    assert "partial" not in (tmp_path / "one/report.json").read_text()


def test_only_what_is_new_is_fetched_again(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, came = fsspec.filesystem("memory"), []
    plain = type(files).get_file
    monkeypatch.setattr(type(files), "get_file", lambda self, *args: came.append(args[0]) or plain(self, *args))
    source = Source(f"{TOP}/train")
    for wanted in (["000.tar", "001.tar"], [], ["001.tar"], ["002.tar"]):
        if wanted == ["001.tar"]:
            write_tar(local / "train/001.tar", range(7))
            files.put(str(local / "train/001.tar"), "/bucket/set/train/001.tar")
        if wanted == ["002.tar"]:
            files.mv("/bucket/set/train/001.tar", "/bucket/set/train/002.tar")
        came.clear()
        copy = fetched(source, tmp_path / "fetched")
        assert sorted(path.rpartition("/")[2] for path in came) == wanted
        assert copy.name == source.name == "train"
    assert sorted(path.name for path in Path(copy.path).iterdir()) == ["000.tar", "002.tar"]
    with tarfile.open(Path(copy.path, "002.tar")) as archive:
        assert len({name.partition(".")[0] for name in archive.getnames()}) == 7
    assert fetched(Source(str(local)), tmp_path).path == str(local)


def test_what_cannot_be_fetched_is_a_line(local: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = fsspec.filesystem("memory")
    plain = type(files).get_file
    with pytest.raises(ValueError, match=r"set/no.tar cannot be opened"):
        fetched(Source(f"{TOP}/no.tar"), tmp_path / "a")
    with monkeypatch.context() as patch:
        patch.setattr(type(files), "find", lambda *_, **__: ["/bucket/set/train/../../evil.tar"])
        with pytest.raises(ValueError, match=r"\.\./evil.tar cannot be copied from it"):
            fetched(Source(f"{TOP}/train"), tmp_path / "b")
    monkeypatch.setattr(fetch, "_ROOM", 1 << 60)
    with pytest.raises(RunError, match=r"GiB are free where they are copied to"):
        fetched(Source(f"{TOP}/train/000.tar"), tmp_path / "c")
    monkeypatch.setattr(fetch, "_ROOM", 0)
    monkeypatch.setattr(type(files), "get_file", lambda self, *args: Path(args[1]).write_bytes(b"half"))
    with pytest.raises(
        ValueError, match=r"000.tar cannot be fetched \(OSError: 4 of [0-9,]+ bytes came\).*goes on with what has"
    ):
        fetched(Source(f"{TOP}/train/000.tar"), tmp_path / "d")
    monkeypatch.setattr(type(files), "get_file", plain)
    copy = fetched(Source(f"{TOP}/train/000.tar"), tmp_path / "d")
    assert Path(copy.path).read_bytes() == (local / "train/000.tar").read_bytes()
