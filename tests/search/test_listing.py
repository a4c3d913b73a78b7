"""Images of tar shards for an index: every image once, with its captions; what cannot be taken is named."""

from pathlib import Path

from mm_utils.search.listing import list_folder, shard_listing, stamps
from tests.kit.fault_images import grey
from tests.kit.reading import write_tar


def write_shards(folder: Path, shade: int = 20) -> str:
    first = [("a.png", grey(10)), ("b.png", grey(shade)), ("b.txt", b"a grey\nsquare")]
    write_tar(folder / "web-0.tar", first)
    write_tar(folder / "web-1.tar", [("a.png", grey(30)), ("a.json", b'{"caption": "dark"}'), ("c.txt", b"alone")])
    return str(folder / "web-{0..1}.tar")


def test_images_come_with_and_without_captions(tmp_path: Path, own_cache: Path) -> None:
    found = shard_listing(write_shards(tmp_path))
    assert found.ids == ["web-0/a", "web-0/b", "web-1/a"]
    assert [row["image"]["bytes"] for row in found.rows] == [grey(10), grey(20), grey(30)]
    assert found.rows["captions"][:] == [[], ["a grey square"], ["dark"]]
    assert [(line["id"], line["reason"]) for line in found.skipped] == [("web-1/c", "image_missing")]


def test_raw_photographs_are_named_and_not_passed_over(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.NEF", "b.cr2", ".c.nef", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    names, skipped = list_folder(str(tmp_path))
    assert names == ["a.jpg"]
    assert [(line["id"], line["reason"]) for line in skipped] == [
        (name, "image_unknown_format") for name in ("a.NEF", "b.cr2")
    ]


def test_only_changed_images_have_another_hash(tmp_path: Path, own_cache: Path) -> None:
    before = stamps(shard_listing(write_shards(tmp_path)))["content_hash"].to_pylist()
    (tmp_path / "web-0.tar").unlink()
    after = stamps(shard_listing(write_shards(tmp_path, shade=200)))["content_hash"].to_pylist()
    assert [one == other for one, other in zip(before, after, strict=True)] == [True, False, True]


def test_shards_of_one_name_and_empty_images_do_no_harm(tmp_path: Path, own_cache: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        write_tar(tmp_path / folder / "0.tar", [("a.png", grey(10)), ("b.png", b"")])
    found = shard_listing(str(tmp_path / "*/0.tar"))
    assert found.ids == ["one/0/a", "one/0/b", "two/0/a", "two/0/b"]
    assert stamps(found)["size"].to_pylist()[1::2] == [-1, -1]  # gone, for the embedder
