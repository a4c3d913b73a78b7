"""What a folder holds: RAW photographs are named and not passed over."""

from pathlib import Path

from mm_utils.search.listing import list_folder


def test_raw_photographs_are_named_and_not_passed_over(tmp_path: Path) -> None:
    for name in ("a.jpg", "a.NEF", "b.cr2", ".c.nef", "notes.txt"):
        (tmp_path / name).write_bytes(b"x")
    names, skipped = list_folder(str(tmp_path))
    assert names == ["a.jpg"]
    assert [(line["id"], line["reason"]) for line in skipped] == [
        (name, "image_unknown_format") for name in ("a.NEF", "b.cr2")
    ]
