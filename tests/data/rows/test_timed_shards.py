"""Tar shards of sounds and clips: what a sample's medium is, its captions, parts and moments, and what is set aside."""

import io
import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mm_utils.data.media.riff import read_avi, read_wav
from mm_utils.data.pairs import load_pairs
from mm_utils.data.paths import Limits
from mm_utils.data.prepare.on_disk import open_prepared
from mm_utils.data.rows.source import DataArguments
from scripts import prepare_data
from tests.kit.media_files import clip, tone
from tests.kit.reading import Member, read, reasons, write_tar


def pair(key: str, suffix: str, content: bytes = b"medium", **values: Any) -> list[Member]:
    described = [(f"{key}.json", json.dumps(values).encode())] if values else []
    return [(f"{key}.{suffix}", content), *described, (f"{key}.txt", f"caption of {key}".encode())]


def gif(*colours: str) -> bytes:
    buffer = io.BytesIO()
    frames = [Image.new("RGB", (32, 24), colour) for colour in colours]
    frames[0].save(buffer, "GIF", save_all=True, append_images=frames[1:], duration=250)
    return buffer.getvalue()


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


def test_faults_are_set_aside_with_their_place(tmp_path: Path) -> None:
    good = [member for at in range(6) for member in pair(f"good{at}", "wav", tone(200 + 150 * at, 300 + 90 * at))]
    (tmp_path / "shards").mkdir()
    write_tar(
        tmp_path / "shards/a.tar",
        [
            *good,
            ("uncaptioned.wav", tone(440)),
            *pair("cut", "wav", tone(440)[:2000]),
            *pair("text", "wav", b"<html>404"),
            *pair("part", "wav", tone(440, 500), start=0.75, end=0.25),
            *pair("moment", "wav", tone(300, 950), moments=[{"span": [5, 6], "phrase": "a bark"}]),
            *pair("ended", "wav", tone(700, 150, 1200), start=0.5, moments=[{"span": [0.75, 1.25], "phrase": "low"}]),
            *pair("deep", "wav", tone(440))[:1],
            ("deep.json", b"[" * 5000),
            *pair("vocal", "jpg"),
        ],
    )
    members = [each for at in range(3) for each in pair(str(at), "wav", tone(100 + 200 * at, 600))]
    cut = Path(write_tar(tmp_path / "shards/b.tar", members))
    os.truncate(cut, cut.stat().st_size - 20_000)
    output = tmp_path / "prepared"
    flags = ["--num_proc", "1", "--max_bad_fraction", "1", "--validation_fraction", "0"]
    prepare_data.main(["--sources", f"{tmp_path / 'shards'},medium=sound", "--output_dir", str(output), *flags])
    pairs = open_prepared(str(output), "it")
    rows = {row["id"]: row for split in pairs.values() for row in split}
    assert set(rows) == {*(f"a/good{at}" for at in range(6)), "a/moment", "a/ended#0.5-", "b/0", "b/1"}
    assert rows["a/ended#0.5-"]["moments"] == [{"span": [0.25, 0.75], "phrase": "low"}]
    assert (rows["a/ended#0.5-"]["seconds"], len(read_wav(rows["b/0"]["image"]["bytes"])[0])) == (1.0, 16_000)
    faults = [json.loads(line) for line in (output / "quarantine.jsonl").read_text().splitlines()]
    assert Counter((fault["where"], fault["reason"]) for fault in faults) == Counter(
        [
            ("a.tar, member uncaptioned", "incomplete_sample"),
            ("a.tar, member cut", "medium_truncated"),
            ("a.tar, member text", "medium_unknown_format"),
            ("a.tar, member part", "span_reversed"),
            ("a.tar, member moment", "span_outside"),
            ("a.tar, member deep", "too_nested"),
            ("a.tar, member vocal", "incomplete_sample"),
            ("b.tar", "truncated_archive"),
        ]
    )


def test_shards_of_clips_are_prepared_at_the_first_start(tmp_path: Path, own_cache: Path) -> None:
    colours = ["red", "lime", "blue", "white", "black"]
    members = [each for at in range(4) for each in pair(str(at), "gif", gif(*colours[at : at + 2], "gray"))]
    path = write_tar(tmp_path / "s.tar", members)
    args = DataArguments(train_file=path, medium="clip", preprocessing_num_workers=1)
    pairs = load_pairs(args)
    [row] = pairs["validation"]
    frames, fps = read_avi(row["image"]["bytes"])
    assert (len(frames), fps, row["seconds"], len(pairs["train"])) == (3, 4.0, 0.75, 3)


def test_videos_take_a_codec(tmp_path: Path, own_cache: Path) -> None:
    pytest.importorskip("av")
    from tests.kit.made_media import steady, video

    files = [video(steady(10, 1), [(at / 4, at / 4 + 0.2)], form="mp4") for at in range(3)]
    members = [*pair("0", "mp4", files[0]), *pair("1", "avi", clip()), *pair("2", "mp4", files[2])]
    pairs = load_pairs(DataArguments(train_file=write_tar(tmp_path / "s.tar", members), preprocessing_num_workers=1))
    assert {row["id"]: row["seconds"] for rows in pairs.values() for row in rows} == dict.fromkeys(
        ("s/0", "s/1", "s/2"), 1.0
    )
