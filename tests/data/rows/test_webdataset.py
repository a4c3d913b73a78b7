"""Tar shards: members of one key become one record; hostile archives are in `tests.faults.test_data`."""

import json
import tarfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mm_utils.data.paths import Limits
from mm_utils.data.rows.detect import read_rows
from mm_utils.data.rows.records import BadRow, Record
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.data.rows.tars import read_shard
from mm_utils.data.streams.shards import rows_from
from tests.kit.fault_images import grey
from tests.kit.reading import Member, check_closed, check_linked, content, put, read, write_tar


def pair(key: str, caption: str | None = None) -> list[Member]:
    return [(f"{key}.jpg", f"bytes of {key}".encode()), (f"{key}.txt", (caption or f"caption of {key}").encode())]


@pytest.mark.parametrize("kind", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_members_of_one_key_are_one_sample(tmp_path: Path, kind: int) -> None:
    path = write_tar(tmp_path / "s-0.tar", [*pair("000"), *pair("a/b"), *pair("ảnh" if kind else "img")], kind)
    good, bad = read(path)
    assert not bad
    assert [record.id for record in good][:2] == ["s-0/000", "s-0/a/b"]
    assert [record.captions for record in good][:2] == [["caption of 000"], ["caption of a/b"]]
    assert [record.image.read(Limits()) for record in good][:2] == [b"bytes of 000", b"bytes of a/b"]
    assert good[0].where == "s-0.tar, member 000"


def test_captions_come_from_text_then_json_then_the_class(tmp_path: Path) -> None:
    image = (b"image",)
    described = json.dumps({"text": ["one", "zwei"], "split": "val", "regions": [1], "negatives": ["x"]}).encode()
    path = write_tar(
        tmp_path / "s.tar",
        [
            *(("0.png", image[0]), ("0.json", described)),
            *(("1.png", image[0]), ("1.json", described), ("1.txt", b"\xef\xbb\xbfplain")),
            *(("2.png", image[0]), ("2.cls", b"1\n")),
        ],
    )
    (tmp_path / "names.txt").write_text("goldfish\ngreat_white_shark, white shark\n")
    good, bad = read(path, classes=str(tmp_path / "names.txt"), templates=("a {}.", "{}"))
    assert [record.captions for record in good] == [
        ["one", "zwei"],
        ["plain"],
        ["a great white shark.", "great white shark"],
    ]
    assert (good[0].split, good[0].regions, good[0].negatives) == ("validation", [1], ["x"])
    assert not bad


def test_an_address_in_json_stands_for_an_image_where_downloads_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "local.jpg").write_bytes(b"x")
    rows = [{"url": "https://a.example/b.jpg", "caption": "a"}, {"url": "local.jpg", "caption": "b"}]
    members = [(f"{at}.json", json.dumps(row).encode()) for at, row in enumerate(rows)]
    path = write_tar(tmp_path / "s.tar", members)
    assert [row.fault.reason for row in read(path)[1]] == ["incomplete_sample", "incomplete_sample"]
    items = list(read_rows(Source(path), PathArguments(allow_download=True)))
    assert [type(item) for item in items] == [Record, BadRow]
    assert isinstance(items[0], Record)
    assert items[0].image.name == "https://a.example/b.jpg"


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_large_extended_header_is_refused_before_it_is_searched(kind: bytes, tmp_path: Path) -> None:
    """Python before 3.11.10 searches digits in quadratic time (CVE-2024-6232): a megabyte takes a quarter of an hour."""
    head = tarfile.TarInfo("x")
    head.type, head.size = kind, 1 << 20
    content = head.tobuf(tarfile.USTAR_FORMAT) + b"1" * head.size
    (tmp_path / "a.tar").write_bytes(content + tarfile.TarInfo("a.txt").tobuf(tarfile.USTAR_FORMAT) + bytes(1024))
    began = time.process_time()
    [sample] = read_shard(str(tmp_path / "a.tar"))
    assert time.process_time() - began < 20
    assert "an extended header has 1,048,576 bytes" in str(sample.fault)


def test_a_long_name_is_read(tmp_path: Path) -> None:
    name = "/".join(["folder"] * 100)
    for number, form in enumerate((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT)):
        write_tar(tmp_path / f"{number}.tar", [(f"{name}/a.jpg", b"x"), (f"{name}/a.txt", b"a")], form)
        [sample] = read_shard(str(tmp_path / f"{number}.tar"))
        assert (sample.key, sample.fault) == (f"{name}/a", None)


@pytest.mark.parametrize("first", ["jpg", "txt"])
def test_a_cut_leaves_out_the_sample_that_it_goes_through_alone(tmp_path: Path, first: str) -> None:
    second = {"jpg": "txt", "txt": "jpg"}[first]
    members = [(f"{key}.{kind}", key.encode() * 900) for key in "abc" for kind in (first, second)]
    whole = Path(write_tar(tmp_path / "whole.tar", members, tarfile.USTAR_FORMAT)).read_bytes()
    each = 512 + 1024  # bytes of a header and of a content
    for at, known in ((4 * each + 600, "ab"), (5 * each + 600, "ab"), (4 * each + 300, "a"), (3 * each + 600, "a")):
        (tmp_path / "cut.tar").write_bytes(whole[:at])
        *found, last = read_shard(str(tmp_path / "cut.tar"))
        assert ([sample.key for sample in found], last.key) == (list(known), "")
        assert all(set(sample.media) | set(sample.texts) == {"image", "txt"} for sample in found)
        assert last.fault is not None
        assert f"{len(known)} whole samples come before" in last.fault.detail


# -- files and folders of archives --------------------------------------------------------------------------------------
SHARDS = put("0.tar", "dog/1.tar")


def test_a_folder_that_cannot_be_listed_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check_closed(SHARDS, "webdataset", tmp_path, monkeypatch)


def test_a_linked_folder_is_a_bad_row(tmp_path: Path) -> None:
    check_linked(SHARDS, "webdataset", tmp_path)


def samples(*keys: str) -> list[tuple[str, bytes]]:
    return [member for key in keys for member in ((f"{key}.png", grey(1)), (f"{key}.txt", b"a"))]


def archive(tmp_path: Path, *keys: str) -> bytes:
    return Path(write_tar(tmp_path / "part.tar", samples(*keys))).read_bytes()


@pytest.mark.parametrize(
    ("join", "keys", "bad"),
    [
        (lambda a, b: a + b, ["a", "b", "c", "d"], []),
        (lambda a, b: a + bytes(512 * 7) + b, ["a", "b", "c", "d"], []),
        (lambda a, b: a + b[:-2000] if len(b.rstrip(b"\0")) > len(b) - 2000 else a + b[:700], ["a", "b"], ["truncated_archive"]),
        (lambda a, b: a + b"garbage" * 100, ["a", "b"], ["truncated_archive"]),
    ],
)  # fmt: skip
def test_archives_that_follow_each_other_in_a_file_are_all_read(
    join: Callable[[bytes, bytes], bytes], keys: list[str], bad: list[str], tmp_path: Path
) -> None:
    joined = tmp_path / "both.tar"
    joined.write_bytes(join(archive(tmp_path, "a", "b"), archive(tmp_path, "c", "d")))
    good, found = read(joined)
    assert [record.where.rpartition(" ")[2] for record in good] == keys
    assert all(content(record) == grey(1) for record in good)
    assert [row.fault.reason for row in found] == bad
    if not bad:  # a stream reads the same rows, from any on
        rows = list(rows_from(str(joined), 3, Source(str(joined), medium="image")))
        assert [isinstance(row, dict) for row in rows] == [True]


@pytest.mark.parametrize("module", ["gzip", "bz2", "lzma"])
def test_a_compressed_archive_is_called_so(module: str, tmp_path: Path) -> None:
    compress = __import__(module).compress
    (tmp_path / "a.tar").write_bytes(compress(archive(tmp_path, "a")))
    assert [row.fault.reason for row in read(tmp_path / "a.tar")[1]] == ["compressed_archive"]


@pytest.mark.parametrize("pattern", ["{a,b}/*.tar", "a/0.tar {a,b}/{0..1}.tar", "a/[5-9].tar", "a/{0..3}.tar"])
def test_a_pattern_that_finds_less_than_it_says_is_refused(pattern: str, tmp_path: Path) -> None:
    put("a/0.tar", "a/1.tar")(tmp_path)
    with pytest.raises(ValueError, match="there is no "):
        read(tmp_path / pattern.rpartition(" ")[2], format="webdataset")
    assert len(read(tmp_path / "a/{0..1}.tar")[0]) == 2
    put("train/0.tar", "Training/0.tar")(tmp_path / "splits")
    for path in (tmp_path / "splits", tmp_path / "splits/{train,Training}/0.tar"):
        assert {record.id for record in read(path)[0]} == {"train/0/a", "Training/0/a"}
