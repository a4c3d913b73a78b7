"""Clips and sounds in tables, folders and tars: what is read as what, and what is asked when it is not clear."""

import json
import time
from pathlib import Path
from typing import Any

import pytest
from datasets import Dataset

from mm_utils.data.paths import Limits
from mm_utils.data.rows.caption_files import read_cues
from mm_utils.data.rows.records import FramesImage, Record
from mm_utils.data.rows.source import Source
from tests.kit import reading
from tests.kit.reading import Member, reasons, write_tar


def read(path: Path, **values: Any) -> list[Record]:
    good, bad = reading.read(path, **values)
    assert not bad
    return good


def files(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(name.encode())


def jsonl(folder: Path, *rows: dict[str, Any]) -> Path:
    return reading.write(folder / "rows.jsonl", reading.lines(*rows))


@pytest.mark.parametrize(
    ("column", "file", "medium"),
    [
        ("audio", "a.wav", "sound"),
        ("Speech", "a.ogg", "sound"),
        ("wav", "a.wav", "sound"),
        ("video", "a.mp4", "clip"),
        ("gif", "a.gif", "clip"),
        ("path", "a.flac", "sound"),
        ("file_name", "a.webm", "clip"),
        ("file_name", "a.gif", "image"),
        ("image", "a.png", "image"),
    ],
)
def test_the_columns_say_the_medium(column: str, file: str, medium: str, tmp_path: Path) -> None:
    files(tmp_path, file)
    [record] = read(jsonl(tmp_path, {column: file, "caption": "a dog"}))
    assert (record.medium, record.id, record.image.read(Limits())) == (medium, file, file.encode())


def test_columns_of_two_kinds_are_a_question(tmp_path: Path) -> None:
    files(tmp_path, "a.wav", "a.png")
    path = jsonl(tmp_path, {"image": "a.png", "audio": "a.wav", "caption": "a dog"})
    with pytest.raises(ValueError, match=r"columns .*audio.* may all be the medium. Set ,medium="):
        read(path)
    assert read(path, medium="sound")[0].image.name.endswith("a.wav")
    assert read(path, medium="image")[0].image.name.endswith("a.png")
    assert read(path, image_column="audio")[0].medium == "sound"
    with pytest.raises(ValueError, match=r"no clip column was recognised. The columns are: image, audio, caption"):
        read(path, medium="clip")
    with pytest.raises(ValueError, match=r"medium=sounds; known are auto, image, clip, sound. Did you mean 'sound'"):
        Source("a.jsonl", medium="sounds")


def test_parts_of_a_file_are_media_of_their_own(tmp_path: Path) -> None:
    files(tmp_path, "a.mp4")
    rows = [{"video": "a.mp4", "start": 0.5, "end": 2, "caption": "a"}, {"video": "a.mp4", "end": 1, "caption": "b"}]
    assert [(r.id, r.cut) for r in read(jsonl(tmp_path, *rows))] == [
        ("a.mp4#0.5-2", (0.5, 2)),
        ("a.mp4#-1", (None, 1)),
    ]
    table = tmp_path / "rows.csv"
    table.write_text("video,start,end,caption\na.mp4,0.5,2,a\na.mp4,,,b\n")
    assert [(r.id, r.cut) for r in read(table)] == [("a.mp4#0.5-2.0", (0.5, 2.0)), ("a.mp4", (None, None))]


def test_a_list_of_frames_is_one_reference(tmp_path: Path) -> None:
    files(tmp_path, "0.jpg", "1.jpg")
    row = {"frames": ["0.jpg", "1.jpg"], "times": [0, 1.5], "caption": "a jump", "moments": [{"span": [0, 1]}]}
    [record] = read(jsonl(tmp_path, row))
    assert isinstance(record.image, FramesImage)
    assert (record.image.times, record.image.read(Limits()), record.moments) == (
        (0, 1.5),
        b"0.jpg1.jpg",
        row["moments"],
    )
    Dataset.from_dict({name: [value] for name, value in row.items() if name != "moments"}).to_parquet(
        tmp_path / "a.parquet"
    )
    assert read(tmp_path / "a.parquet")[0].image == record.image


def test_class_folders_of_sounds(tmp_path: Path) -> None:
    files(tmp_path, "train/dog_bark/a.wav", "train/rain/b.mp3", "test/rain/c.wav")
    found = read(tmp_path)
    assert {(r.medium, r.split, r.captions[0]) for r in found} == {
        ("sound", "train", "the sound of a dog bark."),
        ("sound", "train", "the sound of a rain."),
        ("sound", "test", "the sound of a rain."),
    }
    assert read(tmp_path, templates=("{} is heard",))[0].captions in (["rain is heard"], ["dog bark is heard"])


SRT = "1\n00:00:01,000 --> 00:00:02,500\n<i>Hello</i>\nthere\n\n2\n00:00:03,000 --> 00:00:04,000\nGood bye\n"
VTT = "WEBVTT\n\n00:01.000 --> 00:02.500 align:start\nHello there\n\n00:03.000 --> 00:04.000\nGood bye\n"


@pytest.mark.parametrize(("name", "text"), [("a.srt", SRT), ("a.vtt", VTT), ("a.srt", SRT.replace("\n", "\r\n"))])
def test_subtitles_are_moments(name: str, text: str, tmp_path: Path) -> None:
    files(tmp_path, "a.mp4", "b.mp4")
    (tmp_path / name).write_bytes(text.encode())
    (tmp_path / "b.txt").write_text("a cat\na small cat\n")
    first, second = read(tmp_path)
    assert first.captions == ["Hello there Good bye"]
    assert first.moments == [{"span": [1.0, 2.5], "phrase": "Hello there"}, {"span": [3.0, 4.0], "phrase": "Good bye"}]
    assert (second.captions, second.moments) == (["a cat", "a small cat"], None)


def test_a_folder_of_two_kinds_is_a_question(tmp_path: Path) -> None:
    files(tmp_path, "a.mp4", "a.wav")
    (tmp_path / "a.txt").write_text("a dog")
    with pytest.raises(ValueError, match=r"1 clips and 1 sounds. Set ,medium=clip or sound"):
        read(tmp_path, title="--sources has a folder")


@pytest.mark.parametrize("text", ["1" * 40_000, "00:00:01,000 --> 00:00:02,000 " * 8_000], ids=["digits", "a line"])
def test_subtitles_take_time_by_their_size(text: str) -> None:
    began = time.process_time()
    assert read_cues(text) == []
    assert time.process_time() - began < 20  # CPU seconds; by squares it would be minutes


# -- tars ----------------------------------------------------------------------------------------------------------------


def pair(key: str, suffix: str, content: bytes = b"medium", **values: Any) -> list[Member]:
    described = [(f"{key}.json", json.dumps(values).encode())] if values else []
    return [(f"{key}.{suffix}", content), *described, (f"{key}.txt", f"caption of {key}".encode())]


@pytest.mark.parametrize(
    ("suffix", "medium"),
    [("flac", "sound"), ("MP3", "sound"), ("ogg", "sound"), ("mp4", "clip"), ("webm", "clip"), ("gif", "image")],
)
def test_the_members_say_the_medium(suffix: str, medium: str, tmp_path: Path) -> None:
    [record], bad = reading.read(write_tar(tmp_path / "s.tar", [("0.txt", b"alone"), *pair("1", suffix)]))
    assert (record.medium, record.id, record.captions) == (medium, "s/1", ["caption of 1"])
    assert (record.image.read(Limits()), reasons(bad)) == (b"medium", [("s.tar, member 0", "incomplete_sample")])
    assert bad[0].fault.detail == f"0 has no {medium} among its members (0.txt)"


def test_samples_of_two_kinds_are_a_question(tmp_path: Path) -> None:
    """As video2dataset writes them: a picture, and perhaps the sound, beside the video."""
    both = [("0.jpg", b"picture"), *pair("0", "mp4", b"video")]
    path = write_tar(tmp_path / "s.tar", [*both, ("1.m4a", b"sound"), *pair("1", "mp4", b"video")])
    with pytest.raises(ValueError, match=r"--sources has .*; its samples hold images and clips and sounds, such as .*s.tar, "
        r"member 0.jpg and .* Set ,medium=image or clip or sound"):  # fmt: skip
        reading.read(path)
    found = {medium: reading.read(path, medium=medium) for medium in ("image", "clip", "sound")}
    contents = {medium: [each.image.read(Limits()) for each in good] for medium, (good, _) in found.items()}
    assert contents == {"image": [b"picture"], "clip": [b"video"] * 2, "sound": [b"video", b"sound"]}
    assert [reasons(bad) for _, bad in found.values()] == [[("s.tar, member 1", "incomplete_sample")], [], []]
    [record], _ = reading.read(write_tar(tmp_path / "g.tar", pair("0", "gif")), medium="clip")
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
    good, _ = reading.read(write_tar(tmp_path / "s.tar", members), classes=str(tmp_path / "names.txt"))
    assert [(each.id, each.cut, each.moments) for each in good[:3]] == [
        ("s/0#0.5-2", (0.5, 2), moments),
        ("s/1#-1", (None, 1), None),
        ("s/2", (None, None), None),
    ]
    assert (good[2].captions, good[2].split) == (["one", "two"], "test")
    assert good[3].captions[0] == "the sound of a dog bark."
