"""Sounds and frames keep their times in what is stored, whatever the file."""

from fractions import Fraction

import numpy as np
import pytest

from mm_utils.data.images import open_image
from mm_utils.data.media.riff import StoredClip, read_avi, store_clip, write_wav
from mm_utils.model.reading import read_frames, read_sound
from tests.kit.made_media import animation, click_times, encoded, steady, tone, video, wav

NEAR = 0.02  # seconds
CLICKS = (0.35, 0.8)


def read_clip(content: bytes, fps: float, start: float | None = None, end: float | None = None) -> StoredClip:
    return store_clip(read_frames(content, fps, start, end), fps)


def flashes(clip: StoredClip, fps: float) -> list[bool]:
    """Which stored frames are white."""
    frames, rate = read_avi(clip.content)
    assert (rate, len(frames)) == (pytest.approx(fps), len(clip.jpegs))
    return [np.asarray(open_image({"bytes": bytes(frame)})).mean() > 160 for frame in frames]


def heard(content: bytes, **cut: float) -> list[float]:
    """The times of the clicks in what is stored."""
    return click_times(read_sound(content, 16_000, **cut), 16_000)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 44_100, 48_000])
def test_clicks_stay_where_they_are_at_every_rate(rate: int) -> None:
    assert heard(wav(tone(1.2, rate, CLICKS), rate)) == pytest.approx(CLICKS, abs=NEAR / 4)


@pytest.mark.parametrize(("channels", "width"), [(1, 1), (2, 2), (1, 3), (2, 4)])
def test_wav_files_of_all_widths_are_read_alike(channels: int, width: int) -> None:
    wanted = tone(0.5, 16_000, (0.2,))
    found = read_sound(wav(wanted, 16_000, channels, width), 16_000)
    assert abs(found.astype(int) - wanted).max() <= (256 if width == 1 else 1)


CODECS = [("flac", "flac", 44_100, 2), ("ogg", "libopus", 48_000, 2), ("mp3", "libmp3lame", 44_100, 1)]
CODECS += [("ipod", "aac", 44_100, 2), ("matroska", "pcm_s16le", 8_000, 1), ("aiff", "pcm_s16be", 22_050, 1)]


@pytest.mark.parametrize(("form", "codec", "rate", "channels"), CODECS)
def test_codecs_shift_no_time(form: str, codec: str, rate: int, channels: int) -> None:
    content = encoded(tone(1.2, rate, CLICKS), rate, form, codec, channels)
    samples = read_sound(content, 16_000)
    assert len(samples) / 16_000 == pytest.approx(1.2, abs=0.06)
    assert click_times(samples, 16_000, 6000) == pytest.approx(CLICKS, abs=NEAR)


@pytest.mark.parametrize("fps", [24.0, 25.0, 30_000 / 1001])
def test_the_frame_of_a_time_is_the_one_that_was_visible(fps: float) -> None:
    """A flash at 1.00 to 1.26 s is seen at 1.00 and 1.25, in frames that begin up to a period later."""
    stamps = steady(fps, 2)
    content = video(stamps, [(1.0, 1.26)], rate=Fraction(fps).limit_denominator(1001))
    clip = read_clip(content, 20)
    shown = [max((t for t in stamps if t <= at / 20 + 1e-3), default=0.0) for at in range(len(clip.jpegs))]
    assert flashes(clip, 20) == [1.0 <= t < 1.26 for t in shown]
    assert len(clip.jpegs) / 20 == pytest.approx(2, abs=0.06)


def test_a_variable_rate_is_read_by_its_time_stamps() -> None:
    stamps = [0.033, 0.1, 0.5, 0.55, 0.6, 1.4, 1.45, 1.9]
    clip = read_clip(video(stamps, [(0.5, 0.56), (1.4, 1.44)]), 10)
    shown = [max((t for t in stamps if t <= at / 10 + 1e-3), default=0.033) for at in range(len(clip.jpegs))]
    assert flashes(clip, 10) == [0.5 <= t < 0.56 or 1.4 <= t < 1.44 for t in shown]
    assert [len(jpeg) == 0 for jpeg in clip.jpegs][1:3] == [False, True]  # shown for longer, stored once


@pytest.mark.parametrize("form", ["matroska", "mp4"])
def test_sound_and_pictures_meet_although_the_sound_begins_later(form: str) -> None:
    """A flash and a click at 1.2 s, of a sound that begins at 0.5 s."""
    content = video(steady(25, 2), [(1.2, 1.3)], form, sound=tone(1.4, clicks=(0.7,)), delay=0.5)
    samples = read_sound(content, 16_000)
    assert click_times(samples, 16_000, 6000) == pytest.approx([1.2], abs=NEAR)
    assert abs(samples[:7_000]).max() <= 100
    assert np.flatnonzero(flashes(read_clip(content, 25), 25))[0] / 25 == pytest.approx(1.2, abs=1e-6)


def test_a_cut_of_a_recording_counts_from_its_first_frame() -> None:
    content = video(steady(25, 1, begin=40.0), [(40.4, 40.6)])
    assert np.flatnonzero(flashes(read_clip(content, 25), 25))[0] / 25 == pytest.approx(0.4)
    stream = video(steady(25, 1), [(0.4, 0.6)], "mpegts", "mpeg4")  # whose stamps start at 1.4 s
    assert np.flatnonzero(flashes(read_clip(stream, 25), 25))[0] / 25 == pytest.approx(0.4, abs=0.05)


def test_a_part_begins_at_its_start() -> None:
    content = wav(tone(2.0, 8_000, CLICKS))
    assert heard(content, start=0.3, end=1.5) == pytest.approx([0.05, 0.5], abs=NEAR / 4)
    assert heard(encoded(tone(2.0, 16_000, CLICKS), 16_000, "flac", "flac"), start=0.5) == pytest.approx(
        [0.3], abs=NEAR
    )
    clip = read_clip(video(steady(25, 2), [(1.2, 1.6)]), 10, 1.0, 2.0)
    assert flashes(clip, 10) == [False] * 2 + [True] * 4 + [False] * 4


def test_a_part_far_inside_is_found_by_seeking() -> None:
    long = tone(14.0, 8_000, (12.5,))
    for content in (encoded(long, 8_000, "matroska", "pcm_s16le"), encoded(long, 8_000, "flac", "flac")):
        assert heard(content, start=12.0, end=13.0) == pytest.approx([0.5], abs=NEAR)
    clip = read_clip(video(steady(10, 14), [(12.5, 12.8)]), 10, 12.0, 13.0)
    assert flashes(clip, 10) == [False] * 5 + [True] * 3 + [False] * 2


@pytest.mark.parametrize("form", ["GIF", "WEBP", "PNG"])
def test_animations_are_read_without_a_codec(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    clip = read_clip(animation(8, form, 100, flash=5), 20)
    assert flashes(clip, 20) == [at // 2 == 5 for at in range(16)]
    assert len(clip.jpegs) == 16


def test_resampling_keeps_tones_and_removes_what_the_rate_cannot_hold() -> None:
    times = np.arange(44_100) / 44_100
    low, high = np.sin(2 * np.pi * 1_000 * times), np.sin(2 * np.pi * 12_000 * times)
    found = read_sound(write_wav((8_000 * (low + high)).astype(np.int16), 44_100), 16_000)
    wanted = 8_000 * np.sin(2 * np.pi * 1_000 * np.arange(16_000) / 16_000)
    assert len(found) == 16_000
    assert abs(found - wanted)[500:-500].max() < 100
