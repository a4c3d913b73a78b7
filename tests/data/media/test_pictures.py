"""Pictures of clips and sounds show what is in them, where and when."""

import io
import tracemalloc

import numpy as np
import pytest
from PIL import Image

from mm_utils.data.media.pictures import animation, picture
from mm_utils.data.media.riff import write_wav
from mm_utils.model.reading import UnreadableError
from tests.kit.media_files import clip, damaged, tone


def heights(image: Image.Image) -> np.ndarray:
    """Return the brightest row of each column of a spectrogram, without its axis."""
    return np.asarray(image.convert("L"))[:176].argmax(0)


def test_a_tone_stands_at_its_time_and_its_place_on_the_mel_scale_at_any_rate() -> None:
    for rate in (8000, 16000, 44100):
        found = picture({"bytes": tone(1000, 3000, rate=rate)}, "sound")
        assert found.size == (256, 192)
        top = 2595 * np.log10(1 + rate / 2 / 700)
        for hertz, columns in ((1000, slice(8, 120)), (3000, slice(136, 248))):
            shares = 1 - heights(found)[columns] / 175
            assert shares == pytest.approx(2595 * np.log10(1 + hertz / 700) / top, abs=0.02)


def test_silence_is_dark_and_a_short_sound_is_shown() -> None:
    silent = np.asarray(picture({"bytes": tone(0)}, "sound"))[:176]
    assert (silent == silent[0, 0]).all()
    assert silent.mean() < 60
    assert picture({"bytes": write_wav(np.full(3, 9000, np.int16), 8000)}, "sound").size == (256, 192)


def test_a_long_sound_takes_little_memory() -> None:
    """Its file has 19 MB; the windows of all of it would have 300."""
    content = write_wav(np.tile(np.arange(-6000, 6000, dtype=np.int16), 800), 16000)
    tracemalloc.start()
    picture({"bytes": content}, "sound")
    assert tracemalloc.get_traced_memory()[1] < 100e6
    tracemalloc.stop()


def test_the_axis_counts_seconds() -> None:
    def ticks(seconds: float) -> np.ndarray:
        row = np.asarray(picture({"bytes": tone(500, rate=1000, each=seconds)}, "sound").convert("L"))[178]
        return np.flatnonzero(row < 200)

    assert ticks(4).tolist() == [0, 64, 128, 192, 255]
    assert ticks(60).tolist() == pytest.approx([0, 85, 171, 255], abs=1)


def test_a_clip_shows_four_frames_in_reading_order() -> None:
    found = picture({"bytes": clip([each for each in ("red", "lime", "blue", "white") for _ in range(5)])}, "clip")
    assert found.size == (66, 50)
    spots = [found.getpixel(spot) for spot in ((10, 10), (50, 10), (10, 40), (50, 40))]
    wanted = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)]
    assert np.abs(np.array(spots) - np.array(wanted)).max() < 8
    assert picture({"bytes": clip(["red"])}, "clip").getpixel((50, 40))[0] > 247


def test_a_clip_moves_in_its_own_time() -> None:
    for count, fps in ((4, 4), (100, 10)):
        content = clip([("red", "blue")[place >= count // 2] for place in range(count)], fps=fps)
        with Image.open(io.BytesIO(animation(content))) as moving:
            frames, first = moving.n_frames, moving.convert("RGB").getpixel((10, 10))
            lasts = 0
            for at in range(frames):
                moving.seek(at)
                moving.load()
                lasts += moving.info["duration"]
            last = moving.convert("RGB").getpixel((10, 10))
        assert frames <= 32
        assert lasts == pytest.approx(1000 * count / fps, rel=0.02)
        assert first[0] > 200 > last[0]


@pytest.mark.parametrize("kind", ["clip", "sound"])
@pytest.mark.parametrize("content", [None, b"", b"RIFF", b"no medium at all"])
def test_damage_is_named(kind: str, content: bytes | None) -> None:
    with pytest.raises(UnreadableError):
        picture({"bytes": content, "path": None}, kind)


def test_a_clip_moves_without_its_damaged_frames() -> None:
    with Image.open(io.BytesIO(animation(damaged(clip(), 1)))) as moving:
        assert moving.n_frames == 3
        assert np.asarray(moving.convert("RGB"))[0, 0].argmax() == 1  # lime, the second colour
    with pytest.raises(UnreadableError, match="none of its frames"):
        animation(damaged(clip(), 4))
