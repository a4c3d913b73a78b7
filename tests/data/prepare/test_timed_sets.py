"""Prepared sets of sounds and clips: from raw rows, broken ones too, to what training opens."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Audio, load_from_disk

from mm_utils.data.media import kind_of
from mm_utils.data.media.pictures import loudness_picture
from mm_utils.data.media.riff import read_avi, read_wav, store_clip
from mm_utils.data.prepare.arguments import verify
from mm_utils.data.prepare.checks import CheckArguments
from mm_utils.data.prepare.ingest import Storage, read_part
from mm_utils.data.prepare.on_disk import content_fingerprint, open_prepared, write_splits
from mm_utils.data.prepare.perceptual_hash import FINGERPRINT, fingerprint, near_pairs
from mm_utils.data.prepare.pipeline import IngestPlan, ingest_sources
from mm_utils.data.prepare.timed import TimedArguments
from mm_utils.data.rows.source import PathArguments, Source
from mm_utils.model.reading import UnreadableError, read_frames, read_sound
from scripts import prepare_data
from tests.data.prepare.fault_media import CLIPS, FRAMES, SOUNDS, Case
from tests.kit.fault_images import save
from tests.kit.made_media import animation, encoded, picture, steady, tone, video, wav


def melody(seed: int, seconds: float = 2.0, rate: int = 8000) -> np.ndarray:
    """Eight tones of random pitch and loudness with noise: int16 [n]."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate / 8)) / rate
    parts = [10 ** rng.uniform(2.5, 4) * np.sin(2 * np.pi * rng.uniform(150, 3500) * times) for _ in range(8)]
    return (np.concatenate(parts) + rng.normal(0, 60, 8 * len(times))).astype(np.int16)


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sounds")
    rows: list[dict[str, Any]] = []
    for number in range(6):
        (folder / f"{number}.wav").write_bytes(wav(melody(number)))
        rows.append({"audio": f"{number}.wav", "caption": f"melody {number}"})
    rows[5] |= {
        "split": "test",
        "moments": [{"span": [0.5, 1.0], "phrase": "a tone"}, {"span": [9, 10], "phrase": "x"}],
    }
    rows.append({"audio": "4.wav", "start": 0.5, "end": 1.5, "caption": "a part"} | {"moments": [
        {"span": [0.25, 0.75], "phrase": "begins before"}, {"span": [1.0, 1.2], "phrase": "inside"},
        {"span": [1.6, 1.9], "phrase": "behind"}]})  # fmt: skip
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def prepare(folder: Path, *flags: str) -> Path:
    output = folder / "prepared"
    prepare_data.main(["--output_dir", str(output), "--num_proc", "1", "--max_bad_fraction", "1", *flags])
    return output


def test_prepared_sounds_open_as_sounds(sounds: Path, tmp_path: Path) -> None:
    output = prepare(tmp_path, "--sources", str(sounds / "rows.jsonl"), "--sound_rate", "16000")
    assert load_from_disk(str(output))["train"].features["audio"] == Audio(decode=False)
    pairs = open_prepared(str(output), "a title")
    assert {kind_of(rows.features) for rows in pairs.values()} == {"sound"}
    assert verify(str(output)) == 7
    [row] = pairs["test"]
    samples, rate = read_wav(row["image"]["bytes"])
    assert (rate, len(samples) / rate, row["width"]) == (16_000, row["seconds"], None)
    assert row["moments"] == [{"span": [0.5, 1.0], "phrase": "a tone"}]
    everyone = {row["id"]: row for rows in pairs.values() for row in rows}
    part = everyone["4.wav#0.5-1.5"]
    assert part["seconds"] == 1.0
    assert part["moments"] == [
        {"span": [0.0, 0.25], "phrase": "begins before"},
        {"span": [pytest.approx(0.5), pytest.approx(0.7)], "phrase": "inside"},
    ]
    assert ("4.wav" in pairs["train"]["id"]) == (part["id"] in pairs["train"]["id"])  # one file, one split
    report = json.loads((output / "report.json").read_text())
    assert report["quarantined"]["span_outside"]["count"] == 1
    assert report["notes"]["moment_cut"] == 2
    again = {split: rows.with_format("arrow").iter(10) for split, rows in pairs.items()}
    written = write_splits(again, tmp_path / "again")
    assert written["train"].features == pairs["train"].features
    assert content_fingerprint(written) == content_fingerprint(pairs)
    assert "audio" in load_from_disk(str(tmp_path / "again"))["train"].features


def test_prepared_clips_open_as_clips(tmp_path: Path) -> None:
    (tmp_path / "a.mkv").write_bytes(video(steady(10, 2), [(1.0, 1.2)], size=(64, 48)))
    (tmp_path / "b.gif").write_bytes(animation(8))
    rows = [
        {
            "video": "a.mkv",
            "id": "a",
            "caption": f"a flash {at}",
            "moments": [{"span": [1, 1.2 + at / 4], "phrase": f"a flash {at}"}],
        }
        for at in range(2)
    ]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "b.jsonl").write_text(json.dumps({"video": "b.gif", "caption": "a bar"}) + "\n")
    names = [str(tmp_path / f"{name}.jsonl") for name in "ab"]
    output = prepare(
        tmp_path, "--sources", *names, "--clip_fps", "5", "--image_size", "32", "--validation_fraction", "0"
    )
    pairs = open_prepared(str(output), "a title")
    first = next(row for rows in pairs.values() for row in rows if row["id"] == "a.jsonl/a")
    frames, fps = read_avi(first["image"]["bytes"])
    assert (fps, len(frames), first["seconds"], first["width"], first["height"]) == (5.0, 10, 2.0, 49, 37)
    assert first["captions"] == ["a flash 0", "a flash 1"]
    assert [moment["span"] for moment in first["moments"]] == [[1.0, 1.2], [1.0, 1.45]]


def test_a_prepared_set_is_of_one_kind(sounds: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gif").write_bytes(animation(8))
    (tmp_path / "rows.jsonl").write_text(json.dumps({"video": "a.gif", "caption": "a bar"}) + "\n")
    sources = [str(sounds / "rows.jsonl"), f"{tmp_path / 'rows.jsonl'},name=clips"]
    with pytest.raises(
        ValueError, match=r"clips holds clips, and rows.jsonl sounds; a prepared data set is of one kind"
    ):
        prepare(tmp_path, "--sources", *sources)
    with pytest.raises(ValueError, match=r"--store is png; clips are kept as JPEG frames, sounds as WAV"):
        prepare(tmp_path, "--sources", sources[0], "--store", "png")


def test_copies_of_a_sound_are_found_and_others_are_not() -> None:
    melodies = [melody(seed, 3.0, 16_000) for seed in range(40)]
    one = melodies[7]
    copies = [
        (one * 0.4).astype(np.int16),
        one[480:],
        read_sound(encoded(one, 16_000, "mp3", "libmp3lame"), 16_000),
        np.concatenate([np.zeros(8000, np.int16), one, np.zeros(4000, np.int16)]),
    ]
    prints = b"".join(fingerprint(loudness_picture(samples, 16_000)) for samples in [*melodies, *copies])
    found = {tuple(pair) for pair in near_pairs(np.frombuffer(prints, FINGERPRINT)).tolist()}
    assert {(7, 40 + at) for at in range(len(copies))} <= found
    assert not {pair for pair in found if pair[1] < 40}


def test_damaged_bytes_are_a_fault_or_a_medium() -> None:
    """Cuts and flips at random places; nothing else is raised, and no process ends."""
    rng = np.random.default_rng(0)
    files = [wav(), encoded(tone(), 8000, "flac", "flac"), encoded(tone(rate=16_000), 16_000, "mp3", "libmp3lame")]
    files += [video(steady(10, 1)), video(steady(10, 1), form="mp4", sound=tone()), animation(6)]
    outcomes = set()
    for content in files:
        for _ in range(12):
            damaged = bytearray(content[: rng.integers(8, len(content) + 1)])
            for at in rng.integers(0, len(damaged), rng.integers(0, 20)):
                damaged[at] = rng.integers(0, 256)
            for read in (lambda data: read_sound(data, 16_000), lambda data: store_clip(read_frames(data, 4), 4, 32)):
                try:
                    read(bytes(damaged))
                    outcomes.add("read")
                except UnreadableError as fault:
                    outcomes.add(fault.reason)
    assert {"read", "medium_truncated", "medium_unreadable"} <= outcomes


# -- broken rows ---------------------------------------------------------------------------------------------------------
PLAN = IngestPlan(CheckArguments(max_image_pixels=10_000), Storage("jpeg", 24, TimedArguments(max_seconds=5)), 1, 1.0)


def write_rows(folder: Path, cases: list[Case], column: str) -> Path:
    """A good row, then each case and another good row behind it."""
    media = folder / "media"
    media.mkdir()
    for name, bright in (("a", False), ("b", True)):
        (folder / f"{name}.png").write_bytes(save(picture(bright), "PNG"))
    (folder / "cut.png").write_bytes(save(picture(False), "PNG")[:60])
    rows = []
    for number, case in enumerate([_GOOD, *(each for one in cases for each in (one, _GOOD))]):
        name = f"media/{number}{case.suffix}"
        content = case.content() if callable(case.content) else case.content
        if case.kind == "good":
            content = wav(tone(0.5, pitch=200 + number)) if column == "audio" else animation(3, flash=number % 3)
        (folder / name).write_bytes(content)
        medium = {column: ["a.png", "b.png"] if column == "frames" else name}
        rows.append({"id": str(number), "caption": f"row {number}"} | medium | case.columns)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


_GOOD = Case("good", "", b"")


@pytest.mark.parametrize(
    ("column", "medium", "cases"), [("audio", "sound", SOUNDS), ("video", "clip", CLIPS), ("frames", "clip", FRAMES)]
)
def test_bad_media_are_set_aside_and_good_ones_are_kept(
    column: str, medium: str, cases: list[Case], tmp_path: Path
) -> None:
    path = write_rows(tmp_path, cases, column)
    found = ingest_sources([Source(str(path))], PathArguments(), PLAN, tmp_path)
    rows = [
        row for part in found.parts for row in read_part(part, ["captions", "image", "seconds", "moments"]).to_pylist()
    ]
    kept = {row["captions"][0]: row for row in rows}
    reasons: dict[str, list[str]] = {}
    for fault in found.faults:
        reasons.setdefault(fault["where"], []).append(fault["reason"])
    wrong: list[Any] = []
    for at, case in enumerate(cases):
        number, place = 2 * at + 1, f"line {2 * at + 2}"
        got = reasons.pop(place, [])
        if not (set(got) <= set(case.reason.split()) and bool(got) == bool(case.reason)):
            wrong.append((case.kind, case.reason, [f for f in found.faults if f["where"] == place]))
        if (f"row {number}" in kept) != case.stays:
            wrong.append((case.kind, "kept" if case.stays else "set aside"))
    assert not wrong, "\n".join(map(str, wrong))
    assert not reasons
    assert {f"row {number}" for number in range(0, 2 * len(cases) + 1, 2)} <= set(kept)
    for row in rows:
        content = row["image"]["bytes"]
        samples, rate = read_wav(content) if medium == "sound" else read_avi(content)
        assert row["seconds"] == pytest.approx(len(samples) / rate)
        assert all(0 <= a < b <= row["seconds"] for a, b in (moment["span"] for moment in row["moments"] or []))
