"""Sounds and clips: their times in what is stored, broken files beside good ones, and what training opens."""

import json
import random
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import Audio, load_from_disk
from transformers import Wav2Vec2FeatureExtractor

from mm_utils.data.images import open_image
from mm_utils.data.media import kind_of
from mm_utils.data.media.medium import Sound
from mm_utils.data.media.riff import read_avi, read_wav, store_clip, write_wav
from mm_utils.data.prepare.arguments import CheckArguments, TimedArguments
from mm_utils.data.prepare.ingest import IngestPlan, Storage, ingest_sources, read_part
from mm_utils.data.prepare.on_disk import open_prepared
from mm_utils.data.rows.source import Source
from mm_utils.model.reading import UnreadableError, read_frames, read_sound
from scripts import prepare_data
from tests.kit.fault_images import save
from tests.kit.jsonl import write_lines
from tests.kit.media_files import animation, clicking, encoded, picture, steady, video, wav
from tests.kit.reading import intact_rows

# -- times --------------------------------------------------------------------------------------------------------------
CLICKS = (0.35, 0.8)
_LONG = (14.0, 8_000, (12.5,))
_WITH_SOUND = {"sound": clicking(1.4, clicks=(0.7,)), "delay": 0.5}
_CODECS = [
    ("ogg", "libopus", 48_000, 2),
    ("mp3", "libmp3lame", 44_100, 1),
    ("ipod", "aac", 44_100, 2),
    ("aiff", "pcm_s16be", 22_050, 1),
]
_RATES = {f"{r} Hz": (lambda r=r: wav(clicking(1.2, r, CLICKS), r), {}, CLICKS) for r in (8_000, 44_100)}
HEARD = {
    **_RATES,
    **{
        codec: (lambda f=form, c=codec, r=rate, n=channels: encoded(clicking(1.2, r, CLICKS), r, f, c, n), {}, CLICKS)
        for form, codec, rate, channels in _CODECS
    },
    "a part": (lambda: wav(clicking(2.0, 8_000, CLICKS)), {"start": 0.3, "end": 1.5}, (0.05, 0.5)),
    "far inside": (lambda: encoded(clicking(*_LONG), 8_000, "flac", "flac"), {"start": 12.0, "end": 13.0}, (0.5,)),
    "a late track": (lambda: video(steady(25, 2), form="mp4", **_WITH_SOUND), {}, (1.2,)),
}


def click_times(samples: np.ndarray, rate: int, least: float = 12000) -> list[float]:
    """The begins of the clicks of `clicking`, in seconds."""
    loud = np.flatnonzero(abs(samples.astype(int)) > least)
    return [int(at) / rate for at, before in zip(loud, [-rate, *loud], strict=False) if at - before > rate // 20]


@pytest.mark.parametrize("case", HEARD)
def test_clicks_stay_where_they_are(case: str) -> None:
    make, cut, wanted = HEARD[case]
    assert click_times(read_sound(make(), 16_000, **cut), 16_000, 6000) == pytest.approx(wanted, abs=0.02)


def flashes(content: bytes, fps: float, start: float | None = None, end: float | None = None) -> list[bool]:
    """Which frames that are stored of a clip are white."""
    stored, row = store_clip(read_frames(content, fps, start, end), fps)
    frames, rate = read_avi(stored)
    assert (rate, len(frames) / fps) == (pytest.approx(fps), row["seconds"])
    return [np.asarray(open_image({"bytes": bytes(frame)})).mean() > 160 for frame in frames]


_VARIABLE = [0.033, 0.1, 0.5, 0.55, 0.6, 1.4, 1.45, 1.9]
SEEN = {
    **{f"{fps:.2f}": (steady(fps, 2), [(1.0, 1.26)], 20, 0.0, None) for fps in (24.0, 25.0, 30_000 / 1001)},
    "a variable rate": (_VARIABLE, [(0.5, 0.56), (1.4, 1.44)], 10, 0.0, None),
    "a part": (steady(25, 2), [(1.2, 1.6)], 10, 1.0, 2.0),
    "far inside": (steady(10, 14), [(12.5, 12.8)], 10, 12.0, 13.0),
}


@pytest.mark.parametrize("case", SEEN)
def test_the_frame_of_a_time_is_the_one_that_was_visible(case: str) -> None:
    stamps, white, fps, start, end = SEEN[case]
    rate = Fraction(float(case)).limit_denominator(1001) if case[0].isdigit() else Fraction(25)
    seen = flashes(video(stamps, white, rate=rate), fps, start or None, end)
    assert len(seen) / fps == pytest.approx((end or 2) - start, abs=0.11)
    times = [start + at / fps + 1e-3 for at in range(len(seen))]
    shown = [max((stamp for stamp in stamps if stamp <= time), default=stamps[0]) for time in times]
    assert seen == [any(begin <= stamp < stop for begin, stop in white) for stamp in shown]


def test_a_cut_of_a_recording_counts_from_its_first_frame() -> None:
    content = video(steady(25, 1, begin=40.0), [(40.4, 40.6)])
    assert np.flatnonzero(flashes(content, 25))[0] / 25 == pytest.approx(0.4)
    stream = video(steady(25, 1), [(0.4, 0.6)], "mpegts", "mpeg4")  # whose stamps start at 1.4 s
    assert np.flatnonzero(flashes(stream, 25))[0] / 25 == pytest.approx(0.4, abs=0.05)


# -- prepared sets ------------------------------------------------------------------------------------------------------
def melody(seed: int, seconds: float = 2.0, rate: int = 8000) -> np.ndarray:
    """Eight tones of random pitch and loudness with noise: int16 [n]."""
    rng = np.random.default_rng(seed)
    times = np.arange(round(seconds * rate / 8)) / rate
    parts = [10 ** rng.uniform(2.5, 4) * np.sin(2 * np.pi * rng.uniform(150, 3500) * times) for _ in range(8)]
    return (np.concatenate(parts) + rng.normal(0, 60, 8 * len(times))).astype(np.int16)


def moment(start: Any, end: Any, phrase: Any = "a click") -> dict[str, Any]:
    return {"span": [start, end], "phrase": phrase}


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("sounds")
    rows = []
    for number in range(6):
        (folder / f"{number}.wav").write_bytes(wav(melody(number)))
        rows.append({"audio": f"{number}.wav", "caption": f"melody {number}"})
    rows[5] |= {"split": "test", "moments": [moment(0.5, 1.0), moment(9, 10)]}
    parts = [moment(0.25, 0.75, "begins before"), moment(1.0, 1.2, "inside"), moment(1.6, 1.9, "behind")]
    rows.append({"audio": "4.wav", "start": 0.5, "end": 1.5, "caption": "a part", "moments": parts})
    return write_lines(folder / "rows.jsonl", rows)


def prepare(folder: Path, *flags: str) -> Path:
    output = folder / "prepared"
    prepare_data.main(["--output_dir", str(output), "--num_proc", "1", "--max_bad_fraction", "1", *flags])
    return output


def test_prepared_sounds_open_as_sounds(sounds: str, tmp_path: Path) -> None:
    output = prepare(tmp_path, "--sources", sounds, "--sound_rate", "16000")
    assert load_from_disk(str(output))["train"].features["audio"] == Audio(decode=False)
    pairs = open_prepared(str(output), "a title")
    assert {kind_of(rows.features) for rows in pairs.values()} == {"sound"}
    assert intact_rows(output) == 7
    [row] = pairs["test"]
    samples, rate = read_wav(row["image"]["bytes"])
    assert (rate, len(samples) / rate, row["width"]) == (16_000, row["seconds"], None)
    assert row["moments"] == [moment(0.5, 1.0)]
    part = next(row for rows in pairs.values() for row in rows if row["id"] == "4.wav#0.5-1.5")
    assert part["seconds"] == 1.0
    wanted = [moment(0.0, 0.25, "begins before"), moment(pytest.approx(0.5), pytest.approx(0.7), "inside")]
    assert part["moments"] == wanted
    assert ("4.wav" in pairs["train"]["id"]) == (part["id"] in pairs["train"]["id"])  # one file, one split
    report = json.loads((output / "report.json").read_text())
    assert report["quarantined"]["span_outside"]["count"] == 1
    assert report["notes"]["moment_cut"] == 2


def test_prepared_clips_open_as_clips_and_a_set_is_of_one_kind(sounds: str, tmp_path: Path) -> None:
    (tmp_path / "a.mkv").write_bytes(video(steady(10, 2), [(1.0, 1.2)], size=(64, 48)))
    (tmp_path / "b.gif").write_bytes(animation(8))
    rows = [
        {"video": "a.mkv", "id": "a", "caption": f"a flash {at}", "moments": [moment(1, 1.2 + at / 4, f"flash {at}")]}
        for at in range(2)
    ]
    first = write_lines(tmp_path / "a.jsonl", rows)
    second = write_lines(tmp_path / "b.jsonl", [{"video": "b.gif", "caption": "a bar"}])
    flags = ["--clip_fps", "5", "--image_size", "32", "--validation_fraction", "0"]
    pairs = open_prepared(str(prepare(tmp_path, "--sources", first, second, *flags)), "a title")
    row = next(row for rows in pairs.values() for row in rows if row["id"] == "a.jsonl/a")
    frames, fps = read_avi(row["image"]["bytes"])
    assert (fps, len(frames), row["seconds"], row["width"], row["height"]) == (5.0, 10, 2.0, 49, 37)
    assert row["captions"] == ["a flash 0", "a flash 1"]
    assert [each["span"] for each in row["moments"]] == [[1.0, 1.2], [1.0, 1.45]]
    with pytest.raises(ValueError, match=r"clips holds clips, and rows.jsonl sounds; .* is of one kind"):
        prepare(tmp_path / "both", "--sources", sounds, f"{second},name=clips")


# -- broken rows --------------------------------------------------------------------------------------------------------
def riff_wav(
    data: bytes, tag: int = 1, channels: int = 1, rate: int = 8000, bits: int = 16, size: int | None = None
) -> bytes:
    """A WAV file whose header says anything."""
    frame = channels * bits // 8
    layout = struct.pack("<HHIIHH", tag, channels, rate, (rate * frame) % 2**32, frame % 2**16, bits)
    length = len(data) if size is None else size
    body = b"WAVEfmt " + struct.pack("<I", 16) + layout + b"data" + struct.pack("<I", length) + data
    return b"RIFF" + struct.pack("<I", len(body) % 2**32) + body


def patched(content: bytes, at: int, new: bytes) -> bytes:
    return content[:at] + new + content[at + len(new) :]


def many_streams() -> bytes:
    """An AVI file that declares a thousand streams."""
    stream = b"strl" + b"strh" + struct.pack("<I", 56) + b"vidsMJPG" + bytes(48)
    headers = b"hdrl" + b"avih" + struct.pack("<I", 56) + bytes(56)
    headers += 1000 * (b"LIST" + struct.pack("<I", len(stream)) + stream)
    body = b"AVI LIST" + struct.pack("<I", len(headers)) + headers
    return b"RIFF" + struct.pack("<I", len(body)) + body


SOUND = wav(clicking(1.0, clicks=(0.5,)))
CLIP = animation(8)
FLAC = encoded(clicking(2.0), 8000, "flac", "flac")
MP3 = encoded(clicking(2.0, 16_000), 16_000, "mp3", "libmp3lame")
MKV = video(steady(10, 2))
MP4 = video(steady(10, 2), form="mp4")
NOISE = np.random.default_rng(0).bytes(4000)
PCM = clicking(1.0).tobytes()
PAGE = b"<!doctype html><title>404</title>"
STILL = save(picture(False), "JPEG")
PLAYLIST = b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n"


def moments(start: Any, end: Any, phrase: str = "a click") -> dict[str, Any]:
    """One moment, and a good one behind it."""
    return {"moments": [moment(start, end, phrase), moment(0.2, 0.6, "a tone")]}


# By reason: files, or a whole file and further columns; a row with bad moments is kept, as are those without a reason.
Cases = dict[str, list[bytes | tuple[bytes, dict[str, Any]]]]
SOUNDS = {
    "medium_empty": [b"", riff_wav(b""), (b"", {"audio": None})],
    "medium_unknown_format": [PAGE, PLAYLIST],
    "medium_truncated": [
        SOUND[: len(SOUND) // 2],
        FLAC[: len(FLAC) * 19 // 20],
        MP4[: MP4.index(b"moov") - 4],
        riff_wav(PCM, size=8000 * 2 * 3600),  # a header of an hour
    ],
    "medium_unreadable": [
        MP4[: len(MP4) // 2],
        b"OggS" + NOISE,
        riff_wav(PCM, bits=40),
        riff_wav(np.full(800, np.nan, "<f4").tobytes(), 3, bits=32),
    ],
    "bad_sound_rate": [riff_wav(PCM, rate=rate) for rate in (0, 100)],
    "silent": [
        wav(np.zeros(8000, np.int16)),
        wav((np.arange(8000) % 3 - 1).astype(np.int16)),  # the noise of dither
        (wav(np.concatenate([np.zeros(8000, np.int16), clicking()])), {"start": 0, "end": 0.9}),
    ],
    "no_audio_stream": [MKV],
    "too_long": [encoded(clicking(6.0, 16_000), 16_000, "mp3", "libmp3lame"), (SOUND, {"start": 0, "end": 7})],
    "span_outside": [
        (MP3, {"start": 4, "end": 4.5}),
        (SOUND, {"start": -1, "end": 0.5}),
        (SOUND, moments(3, 4)),
    ],
    "span_empty": [(SOUND, {"start": 0.5, "end": 0.5}), (SOUND, moments(0.6, 0.6))],
    "span_reversed": [(SOUND, {"start": 0.7, "end": 0.2})],
    "bad_times": [(SOUND, {"start": float("inf")}), (SOUND, {"end": 10**400}), (SOUND, moments("early", "late"))],
    "bad_moments": [
        (SOUND, {"moments": [{"span": [1], "phrase": "x"}]}),
        (SOUND, {"moments": "0.2-0.6: a click"}),
        (SOUND, moments(0.2, 0.6, " ")),
    ],
    "outside_root": [(b"", {"audio": "../../../etc/hostname"})],
    "": [
        wav(width=1),
        wav(width=3, channels=2),
        riff_wav((clicking() / 32768).astype("<f8").tobytes(), 3, bits=64),
        riff_wav(PCM, size=0xFFFFFFFF),
        SOUND + b"LIST\4\0\0\0junk",
        encoded(clicking(), 8000, "wav", "pcm_mulaw"),
        (SOUND, {"start": "0.1", "end": "1.2"}),
        video(steady(10, 1), sound=clicking(1.0)),
        (wav(clicking(2.0)), {"moments": [moment(0, 2, "a tone")]}),
        (SOUND, {"moments": json.dumps([moment(0.2, 0.6)])}),  # as a CSV file has it
    ],
}
CLIPS = {
    "medium_empty": [b""],
    "medium_unknown_format": [PAGE, STILL],
    "no_video_stream": [encoded(clicking(), 8000, "matroska", "pcm_s16le"), SOUND],
    "medium_truncated": [CLIP[: len(CLIP) // 2], CLIP[:11], MKV[: len(MKV) // 2]],
    "medium_unreadable": [MP4[: len(MP4) // 2]],
    "too_many_parts": [many_streams()],
    "too_long": [video(steady(5, 6))],
    "too_many_pixels": [video([0.0, 0.1], size=(128, 128)), patched(CLIP, 6, struct.pack("<HH", 7200, 7200))],
    "span_outside": [(MKV, {"start": 1, "end": 4}), (CLIP, moments(30, 40))],
    "": [
        video(steady(10, 1), form="avi", codec="mjpeg"),
        video([0.0]),
        video(steady(25, 1), form="mpegts"),
        (MKV, {"start": 0.4, "end": 2.1}),
        video(steady(10, 1), codec="mjpeg", size=(34, 50)),
    ],
}
PLAN = IngestPlan(CheckArguments(max_image_pixels=10_000), Storage("jpeg", 24, TimedArguments(max_seconds=5)), 1, 1.0)


@pytest.mark.parametrize(("column", "cases"), [("audio", SOUNDS), ("video", CLIPS)])
def test_bad_media_are_set_aside_and_good_ones_are_kept(column: str, cases: Cases, tmp_path: Path) -> None:
    """A good row, then each case and another good row behind it."""
    (tmp_path / "media").mkdir()
    listed = [(reason, case) for reason, those in cases.items() for case in those]
    rows = []
    wanted = {}
    kept = set()

    def add(content, columns, reason, stays):
        number = len(rows)
        (tmp_path / f"media/{number}.bin").write_bytes(content)
        rows.append({"id": str(number), "caption": f"row {number}", column: f"media/{number}.bin", **columns})
        kept.update([number] if stays else [])
        wanted.update({f"line {number + 1}": set(reason.split())} if reason else {})

    for at, (reason, case) in enumerate([("", b""), *listed]):
        content, columns = case if isinstance(case, tuple) else (case, {})
        if at:
            add(content, columns, reason, not reason or "moments" in columns)
        good = wav(clicking(0.5, pitch=200 + 2 * at)) if column == "audio" else animation(3, flash=at % 3)
        add(good, {}, "", True)
    found = ingest_sources([Source(write_lines(tmp_path / "rows.jsonl", rows))], PLAN, tmp_path)
    parts = [read_part(part, ["captions", "image", "seconds", "moments"]).to_pylist() for part in found.parts]
    got = [row for part in parts for row in part]
    faults = {fault["where"]: fault for fault in found.faults}
    assert {
        where: fault["reason"] for where, fault in faults.items() if fault["reason"] not in wanted.get(where, ())
    } == {}
    assert [(where, rows[int(where[5:]) - 1]) for where in wanted if where not in faults] == []
    assert {int(row["captions"][0][4:]) for row in got} == kept
    for row in got:
        samples, rate = read_wav(row["image"]["bytes"]) if column == "audio" else read_avi(row["image"]["bytes"])
        assert row["seconds"] == pytest.approx(len(samples) / rate)
        assert all(0 <= a < b <= row["seconds"] for a, b in (moment["span"] for moment in row["moments"] or []))


def test_silence_before_a_sound_is_as_long_as_its_window_says_at_another_rate() -> None:
    sound = Sound(Wav2Vec2FeatureExtractor(1, 1000, do_normalize=False), 2.0, min_share=0.5)
    two_seconds = write_wav(np.full(8000, 9000, np.int16), 4000)  # at four times the rate
    value = {"bytes": two_seconds, "path": None}
    silences = []
    for seed in range(20):
        shown, (_, window) = sound.read(value, random.Random(seed))
        silences.append(max(0, round(-window.left * 2000)))
        assert int((shown.abs() > 0.1).nonzero()[0]) == pytest.approx(silences[-1], abs=15)
    assert max(silences) > 100

def test_a_span_behind_the_end_is_told_no_wrong_length() -> None:
    flac = encoded(clicking(2.0, 16_000), 16_000, "flac", "flac")
    for content, start, end, message in (
        (MP3, 9.0, 12.0, "it ends before 9 s"),
        (flac, 9.0, None, "it ends before 9 s"),
        (flac, 1.0, 12.0, "1 to 12 s of 2.000 s"),
    ):
        with pytest.raises(UnreadableError, match=message):
            read_sound(content, 8000, start, end)
