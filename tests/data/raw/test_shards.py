"""Tar shards: what a sample is, and what no archive may do."""

import io
import json
import tarfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mm_utils.data.raw.faults import Fault
from mm_utils.data.raw.formats import Source, read_source
from mm_utils.data.raw.paths import Limits, PathArguments
from mm_utils.data.raw.records import BadRow, Record
from mm_utils.data.raw.shards import read_shard

SAFE = PathArguments()
Member = tuple[str, bytes | tarfile.TarInfo]


def write_tar(path: Path, members: Sequence[Member], kind: int = tarfile.PAX_FORMAT) -> str:
    with tarfile.open(path, "w", format=kind) as archive:
        for name, content in members:
            if isinstance(content, tarfile.TarInfo):
                content.name = name
                archive.addfile(content)
            else:
                info = tarfile.TarInfo(name)
                info.size = len(content)
                archive.addfile(info, io.BytesIO(content))
    return str(path)


def special(kind: bytes, target: str = "") -> tarfile.TarInfo:
    info = tarfile.TarInfo()
    info.type, info.linkname = kind, target
    return info


def pair(key: str, caption: str | None = None) -> list[Member]:
    return [(f"{key}.jpg", f"bytes of {key}".encode()), (f"{key}.txt", (caption or f"caption of {key}").encode())]


def read(path: str | Path, **settings: Any) -> tuple[list[Record], list[BadRow]]:
    items = list(read_source(Source(str(path), **settings), SAFE))
    return [item for item in items if isinstance(item, Record)], [item for item in items if isinstance(item, BadRow)]


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
    described = json.dumps(
        {"text": ["one", "zwei"], "languages": ["en", "de"], "split": "val", "regions": [1]}
    ).encode()
    path = write_tar(
        tmp_path / "s.tar",
        [
            *(("0.png", image[0]), ("0.json", described)),
            *(("1.png", image[0]), ("1.json", described), ("1.txt", b"\xef\xbb\xbfplain")),
            *(("2.png", image[0]), ("2.cls", b"1\n")),
            *(("3.png", image[0]), ("3.unknown", b"?")),
            ("4.txt", b"alone"),
            *(("5.png", image[0]), ("5.json", b'{"text": "a", "text": "b"}')),
            *(("6.png", image[0]), ("6.txt", b"\xff")),
        ],
    )
    (tmp_path / "names.txt").write_text("goldfish\ngreat_white_shark, white shark\n")
    good, bad = read(path, classes=str(tmp_path / "names.txt"), templates=("a {}.", "{}"))
    assert [record.captions for record in good] == [
        ["one", "zwei"],
        ["plain"],
        ["a great white shark.", "great white shark"],
    ]
    assert (good[0].languages, good[0].split, good[0].regions) == (["en", "de"], "validation", [1])
    assert [(row.where[-1], row.fault.reason) for row in bad] == [
        ("3", "unmatched_image"),
        ("4", "image_missing"),
        ("5", "duplicate_key"),
        ("6", "bad_encoding"),
    ]


def test_keys_are_joined_within_one_shard_only(tmp_path: Path) -> None:
    write_tar(tmp_path / "s-00.tar", [*pair("a"), pair("b")[0]])
    write_tar(tmp_path / "s-01.tar", [pair("b")[1], *pair("a", "another a")])
    for place in (tmp_path, tmp_path / "s-{00..01}.tar", tmp_path / "s-*.tar"):
        good, bad = read(place)
        assert {record.id: record.captions for record in good} == {
            "s-00/a": ["caption of a"],
            "s-01/a": ["another a"],
        }
        assert [row.fault.reason for row in bad] == ["unmatched_image", "image_missing"]
    with pytest.raises(ValueError, match=r"there is no .*s-02\.tar"):
        read(tmp_path / "s-{00..02}.tar")


@pytest.mark.parametrize(
    "member",
    [
        ("../x.jpg", b"x"),
        ("a/../../x.jpg", b"x"),
        ("/etc/x.jpg", b"x"),
        ("x.jpg", special(tarfile.SYMTYPE, "/etc/passwd")),
        ("x.jpg", special(tarfile.LNKTYPE, "0.jpg")),
        ("x.jpg", special(tarfile.CHRTYPE)),
        ("x.jpg", special(tarfile.FIFOTYPE)),
        ("x.pyd", b"cos\nsystem\n(S'touch canary'\ntR."),
        ("x.pkl", b""),
        ("x.meta.pickle", b""),
    ],
    ids=lambda member: str(member[0]),
)
def test_an_unsafe_member_sets_its_sample_aside_and_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: Member
) -> None:
    monkeypatch.chdir(tmp_path)
    path = write_tar(tmp_path / "s.tar", [*pair("0"), member, ("x.txt", b"a caption"), *pair("1")])
    good, bad = read(path)
    assert [record.id for record in good] == ["s/0", "s/1"]
    assert bad[0].fault.reason == "unsafe_member"
    assert {path.name for path in tmp_path.iterdir()} == {"s.tar"}


def test_a_key_that_comes_back_is_a_duplicate(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "s.tar", [*pair("0"), *pair("1"), *pair("0", "other"), *pair("2"), pair("2")[1]])
    good, bad = read(path)
    assert [record.id for record in good] == ["s/0", "s/1"]
    assert [(row.where, row.fault.reason) for row in bad] == [
        ("s.tar, member 0", "duplicate_id"),
        ("s.tar, member 2", "duplicate_id"),
    ]


def test_wherever_an_archive_is_cut_the_whole_samples_are_read_and_the_cut_is_told(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "s.tar", [member for key in "abc" for member in pair(key)]))
    content = path.read_bytes()
    whole = [sample.key for sample in read_shard(str(path))]
    assert whole == ["a", "b", "c"]
    data_end = 6 * 1024  # each member: a block of header, a block of data
    for cut in (0, 1, 511, 512, 700, 1024, 2048, 2049, 3000, 4096, data_end - 1, data_end, data_end + 511):
        path.write_bytes(content[:cut])
        *samples, last = read_shard(str(path))
        assert last.fault is not None, cut
        assert last.fault.reason == "truncated_archive", cut
        assert f"{len(samples)} whole samples" in last.fault.detail
        assert [sample.key for sample in samples] == whole[: len(samples)]
        assert all(len(sample.texts) == 1 and sample.image is not None for sample in samples)
    path.write_bytes(content[: data_end + 512])
    assert len(list(read_shard(str(path)))) == 3


def test_a_damaged_header_is_no_silent_end(tmp_path: Path) -> None:
    path = Path(write_tar(tmp_path / "s.tar", [*pair("a"), *pair("b")]))
    content = bytearray(path.read_bytes())
    content[2048:2058] = b"\xff" * 10
    path.write_bytes(content)
    samples = list(read_shard(str(path)))
    assert [sample.key for sample in samples] == [""]
    assert samples[0].fault is not None
    assert samples[0].fault.reason == "truncated_archive"


def test_what_is_no_archive_is_told(tmp_path: Path) -> None:
    (tmp_path / "s.tar").write_bytes(b"<html>404</html>" * 100)
    _, bad = read(tmp_path / "s.tar")
    assert [row.fault.reason for row in bad] == ["truncated_archive"]


def test_a_member_larger_than_allowed_is_not_read(tmp_path: Path) -> None:
    good, _ = read(write_tar(tmp_path / "s.tar", [("0.jpg", b"x" * 2000), ("0.txt", b"a")]))
    with pytest.raises(Fault) as fault:
        good[0].image.read(Limits(max_bytes=1999))
    assert fault.value.reason == "too_many_bytes"


def test_an_address_in_json_stands_for_an_image_where_downloads_are_allowed(tmp_path: Path) -> None:
    (tmp_path / "local.jpg").write_bytes(b"x")
    rows = [{"url": "https://a.example/b.jpg", "caption": "a"}, {"url": "local.jpg", "caption": "b"}]
    members = [(f"{at}.json", json.dumps(row).encode()) for at, row in enumerate(rows)]
    path = write_tar(tmp_path / "s.tar", members)
    assert [row.fault.reason for row in read(path)[1]] == ["image_missing", "image_missing"]
    items = list(read_source(Source(path), PathArguments(allow_download=True)))
    assert [type(item) for item in items] == [Record, BadRow]
    assert isinstance(items[0], Record)
    assert items[0].image.name == "https://a.example/b.jpg"
