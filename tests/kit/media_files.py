"""Small sounds and clips: as prepared sets store them, rows of them, and files of many kinds with clicks and flashes."""

import io
import wave
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
import pyarrow as pa
from datasets import Dataset, Features
from PIL import Image

from mm_utils.data.media import FEATURES
from mm_utils.data.media.riff import write_avi, write_wav
from tests.kit.fault_images import save

COLOURS = ("red", "lime", "blue", "white")
SIDE = 32


def tone(*hertz: float, rate: int = 16000, each: float = 0.5) -> bytes:
    """Return a WAV of tones one after the other; 0 is silence."""
    times = np.arange(round(each * rate)) / rate
    samples = np.concatenate([8000 * np.sin(2 * np.pi * pitch * times) for pitch in hertz])
    return write_wav(samples.astype(np.int16), rate)


def clip(colours: Sequence[str] = COLOURS, size: tuple[int, int] = (32, 24), fps: float = 4) -> bytes:
    """Return an AVI with a frame of each colour."""
    frames = [save(Image.new("RGB", size, colour), "JPEG", quality=95) for colour in colours]
    return write_avi(frames, fps, size)


_TYPES = {
    "image": pa.struct({"bytes": pa.binary(), "path": pa.string()}),
    "moments": pa.list_(pa.struct({"span": pa.list_(pa.float64()), "phrase": pa.string()})),
}


def media_rows(kind: str, contents: Sequence[bytes], **columns: Sequence[Any]) -> Dataset:
    """Return rows of the one schema, with ids and a caption each unless `columns` has them."""
    names = {
        "id": [f"m{at}" for at in range(len(contents))],
        "captions": [[f"number {at}"] for at in range(len(contents))],
    }
    media = {"image": [{"bytes": content, "path": None} for content in contents]}
    cells = {**media, **names, **columns}
    table = pa.table({name: pa.array(list(column), _TYPES.get(name)) for name, column in cells.items()})
    features = Features.from_arrow_schema(table.schema)
    features["image"] = FEATURES[kind]
    return Dataset(table.cast(features.arrow_schema))


def jpeg(grey: int, size: tuple[int, int] = (48, 32)) -> bytes:
    return save(Image.new("RGB", size, (grey, grey, grey)), "JPEG")


def clicking(seconds: float = 1.0, rate: int = 8000, clicks: Sequence[float] = (), pitch: float = 440.0) -> np.ndarray:
    """A faint tone with clicks of full scale, 4 ms long: int16 [n]."""
    times = np.arange(round(seconds * rate)) / rate
    samples = 1000 * np.sin(2 * np.pi * pitch * times)
    for click in clicks:
        samples[round(click * rate) : round((click + 0.004) * rate)] = 30000
    return samples.astype(np.int16)


def wav(samples: np.ndarray | None = None, rate: int = 8000, channels: int = 1, width: int = 2) -> bytes:
    """A WAV file of the standard library; every channel has the samples."""
    values = clicking(rate=rate) if samples is None else samples
    wide = values.astype(np.int32) << 16
    data = {
        1: ((wide >> 24) + 128).astype("u1"),
        2: values.astype("<i2"),
        3: (wide >> 8).astype("<i4").view("u1").reshape(-1, 4)[:, :3],
        4: wide.astype("<i4"),
    }[width]
    frames = np.repeat(data.reshape(len(values), -1), channels, axis=0)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setparams((channels, width, rate, 0, "NONE", ""))
        file.writeframes(frames.tobytes())
    return buffer.getvalue()


def encoded(samples: np.ndarray, rate: int, form: str, codec: str, channels: int = 1) -> bytes:
    """A file of sound of any codec."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.layout = "mono" if channels == 1 else "stereo"
        _mux_sound(container, stream, samples, rate, 0.0)
    return buffer.getvalue()


def _mux_sound(container: av.container.OutputContainer, stream, samples: np.ndarray, rate: int, delay: float) -> None:
    plane = np.repeat(samples[None], stream.codec_context.layout.nb_channels, axis=0).T.reshape(1, -1)
    frame = av.AudioFrame.from_ndarray(
        np.ascontiguousarray(plane), format="s16", layout=stream.codec_context.layout.name
    )
    frame.rate = rate
    frame.pts = round(delay * rate)
    frame.time_base = Fraction(1, rate)
    size = stream.codec_context.frame_size or 1024
    resampler = av.AudioResampler(stream.codec_context.format, stream.codec_context.layout.name, rate, size)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(part))
    container.mux(stream.encode(None))


def picture(bright: bool, at: float = 0.0) -> Image.Image:
    """White for a flash; else dark, with a bar whose place says the time."""
    if bright:
        return Image.new("RGB", (SIDE, SIDE), "white")
    image = Image.new("RGB", (SIDE, SIDE), (20, 20, 40))
    image.paste((90, 30, 30), (int(at * 8) % SIDE, 8, int(at * 8) % SIDE + 6, 24))
    return image


def video(
    times: Sequence[float],
    flashes: Sequence[tuple[float, float]] = (),
    form: str = "matroska",
    codec: str = "mpeg4",
    sound: np.ndarray | None = None,
    delay: float = 0.0,
    size: tuple[int, int] = (SIDE, SIDE),
    rate: Fraction = Fraction(25),
) -> bytes:
    """A video whose frames have these time stamps, white within the flashes; perhaps a sound that begins later."""
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=form) as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height = size
        stream.pix_fmt = "yuvj420p" if codec == "mjpeg" else "yuv420p"
        stream.codec_context.time_base = Fraction(1, 12000)
        stream.codec_context.max_b_frames = 0
        track = None
        if sound is not None:
            track = container.add_stream("pcm_s16le" if form == "matroska" else "aac", rate=8000)
            track.layout = "mono"
        for time in times:
            bright = any(begin <= time < end for begin, end in flashes)
            frame = av.VideoFrame.from_image(picture(bright, time).resize(size))
            frame.pts = round(time * 12000)
            frame.time_base = Fraction(1, 12000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
        if track is not None:
            _mux_sound(container, track, sound, 8000, delay)
    return buffer.getvalue()


def steady(fps: float, seconds: float, begin: float = 0.0) -> list[float]:
    """The time stamps of a constant rate."""
    return [begin + at / fps for at in range(round(seconds * fps))]


def animation(count: int = 8, duration: int = 100, flash: int = -1) -> bytes:
    """A GIF whose frame `flash` is white."""
    frames = [picture(at == flash, at / 4) for at in range(count)]
    return save(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=duration)
