"""WAV and AVI files without a codec: what is written is read again, other players read it too, and damage is named."""

import contextlib
import io
import wave

import numpy as np
import pytest
from PIL import Image

from mm_utils.data.media.riff import read_avi, read_wav, write_avi, write_wav
from mm_utils.model.reading import MOST_RATE, UnreadableError
from tests.kit.fault_images import save
from tests.kit.made_media import wav
from tests.kit.media_files import jpeg

FRAMES = [jpeg(0), jpeg(90), b"", jpeg(200), b""]


def test_samples_survive() -> None:
    samples = np.random.default_rng(0).integers(-32768, 32768, 999).astype(np.int16)
    content = write_wav(samples, 22_050)
    found, rate = read_wav(content)
    assert (found.tolist(), rate) == (samples.tolist(), 22_050)
    with wave.open(io.BytesIO(content)) as stock:
        assert (stock.getnchannels(), stock.getsampwidth(), stock.getframerate()) == (1, 2, 22_050)
        assert stock.readframes(1000) == found.tobytes()


def test_chunks_of_others_are_stepped_over() -> None:
    """Writers put notes, of odd sizes, before and behind the samples."""
    content = write_wav(np.arange(5, dtype=np.int16), 8000)
    note = b"LIST\x03\0\0\0abc\0"
    longer = content[:36] + note + content[36:] + note
    longer = longer[:4] + (len(longer) - 8).to_bytes(4, "little") + longer[8:]
    assert read_wav(longer)[0].tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("fps", [1.0, 4.0, 25.0, 29.97, 30000 / 1001, 0.1])
def test_frames_survive(fps: float) -> None:
    frames, found = read_avi(write_avi(FRAMES, fps, (48, 32)))
    assert [bytes(frame) for frame in frames] == [FRAMES[0], FRAMES[1], FRAMES[1], FRAMES[3], FRAMES[3]]
    assert found == pytest.approx(fps, rel=1e-9)


def test_a_stock_player_shows_the_same_frames_at_the_same_times() -> None:
    av = pytest.importorskip("av")
    with av.open(io.BytesIO(write_avi(FRAMES, 29.97, (48, 32)))) as container:
        stream = container.streams.video[0]
        shown = [(frame.time, frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(stream)]
        assert float(stream.average_rate) == pytest.approx(29.97)
        assert (stream.width, stream.height) == (48, 32)
    times, greys = zip(*shown, strict=True)
    assert times == pytest.approx([0, 1 / 29.97, 3 / 29.97], abs=1e-6)
    assert greys == pytest.approx([0, 90, 200], abs=2)


@pytest.mark.parametrize("content", [write_wav(np.arange(9, dtype=np.int16), 8000), write_avi(FRAMES, 4, (48, 32))])
def test_damage_is_an_error(content: bytes) -> None:
    """Cut anywhere, or of another kind: never anything but the one error, and never part of a medium."""
    read = read_wav if content[8:12] == b"WAVE" else read_avi
    for end in [*range(min(64, len(content))), *range(64, len(content), 97)]:
        with pytest.raises(UnreadableError):
            read(content[:end])
    rng = np.random.default_rng(0)
    for _ in range(300):
        broken = bytearray(content)
        broken[rng.integers(len(broken))] = rng.integers(256)
        with contextlib.suppress(UnreadableError):
            read(bytes(broken))


def test_other_sounds_are_refused() -> None:
    with pytest.raises(UnreadableError, match="it is no WAV file of one channel"):
        read_wav(wav(channels=2))


@pytest.mark.parametrize("rate", [MOST_RATE + 1, 4_294_967_291])
def test_a_rate_that_would_fill_the_memory_is_refused(rate: int) -> None:
    """Changing it to that of a tower takes a filter of twenty numbers for every sample of a second."""
    content = bytearray(write_wav(np.arange(5, dtype=np.int16), 8000))
    content[24:28] = rate.to_bytes(4, "little")
    with pytest.raises(UnreadableError, match="samples a second"):
        read_wav(bytes(content))


def test_more_frames_than_a_clip_has_are_refused() -> None:
    """Eight bytes of the file each, and two hundred of memory."""
    content = write_avi([FRAMES[0], *[b""] * 300_000], 4, (48, 32))
    with pytest.raises(UnreadableError, match="more than 250,000 parts"):
        read_avi(content)


def test_frames_of_another_kind_are_refused() -> None:
    """A PNG is decoded whole, whatever is asked for: 512 of 40 million pixels would be 60 GB."""
    buffer = save(Image.new("RGB", (48, 32)), "PNG")
    with pytest.raises(UnreadableError, match="not JPEG"):
        read_avi(write_avi([FRAMES[0], buffer], 4, (48, 32)))
