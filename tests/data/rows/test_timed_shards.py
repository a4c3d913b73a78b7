"""Tar shards of sounds and clips: what a sample's medium is, its captions, parts and moments, and what is set aside."""

import json
from pathlib import Path
from typing import Any

import pytest

from mm_utils.data.paths import Limits
from tests.kit.reading import Member, read, reasons, write_tar


def pair(key: str, suffix: str, content: bytes = b"medium", **values: Any) -> list[Member]:
    described = [(f"{key}.json", json.dumps(values).encode())] if values else []
    return [(f"{key}.{suffix}", content), *described, (f"{key}.txt", f"caption of {key}".encode())]


@pytest.mark.parametrize(
    ("suffix", "medium"),
    [("flac", "sound"), ("MP3", "sound"), ("ogg", "sound"), ("mp4", "clip"), ("webm", "clip"), ("gif", "image")],
)
def test_the_members_say_the_medium(suffix: str, medium: str, tmp_path: Path) -> None:
    [record], bad = read(write_tar(tmp_path / "s.tar", [("0.txt", b"alone"), *pair("1", suffix)]))
    assert (record.medium, record.id, record.captions) == (medium, "s/1", ["caption of 1"])
    assert (record.image.read(Limits()), reasons(bad)) == (b"medium", [("s.tar, member 0", "incomplete_sample")])
    assert bad[0].fault.detail == f"0 has no {medium} among its members (0.txt)"


def test_samples_of_two_kinds_are_a_question(tmp_path: Path) -> None:
    """As video2dataset writes them: a picture, and perhaps the sound, beside the video."""
    both = [("0.jpg", b"picture"), *pair("0", "mp4", b"video")]
    path = write_tar(tmp_path / "s.tar", [*both, ("1.m4a", b"sound"), *pair("1", "mp4", b"video")])
    with pytest.raises(ValueError, match=r"--sources has .*; its samples hold images and clips and sounds, such as .*s.tar, "
        r"member 0.jpg and .* Set ,medium=image or clip or sound"):  # fmt: skip
        read(path)
    with pytest.raises(ValueError, match=r"--train_file is it; .* Set --medium image or clip"):
        read(path, title="--train_file is it")
    found = {medium: read(path, medium=medium) for medium in ("image", "clip", "sound")}
    contents = {medium: [each.image.read(Limits()) for each in good] for medium, (good, _) in found.items()}
    assert contents == {"image": [b"picture"], "clip": [b"video"] * 2, "sound": [b"video", b"sound"]}
    assert [reasons(bad) for _, bad in found.values()] == [[("s.tar, member 1", "incomplete_sample")], [], []]
    [record], _ = read(write_tar(tmp_path / "g.tar", pair("0", "gif")), medium="clip")
    assert record.medium == "clip"


def test_parts_and_moments_come_from_json(tmp_path: Path) -> None:
    moments = [{"span": [1, 2], "phrase": "a bark"}]
    members = [
        *pair("0", "wav", start=0.5, end=2, moments=moments),
        *pair("1", "wav", end=1),
        ("2.wav", b"x"),
        ("2.json", json.dumps({"text": ["one", "two"], "split": "test", "language": "en"}).encode()),
        *(("3.wav", b"x"), ("3.cls", b"1")),
    ]
    (tmp_path / "names.txt").write_text("cat\ndog_bark\n")
    good, _ = read(write_tar(tmp_path / "s.tar", members), classes=str(tmp_path / "names.txt"))
    assert [(each.id, each.cut, each.moments) for each in good[:3]] == [
        ("s/0#0.5-2", (0.5, 2), moments),
        ("s/1#-1", (None, 1), None),
        ("s/2", (None, None), None),
    ]
    assert (good[2].captions, good[2].split) == (["one", "two"], "test")
    assert good[3].captions[0] == "the sound of a dog bark."
