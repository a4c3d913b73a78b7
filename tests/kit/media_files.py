"""Small sounds and clips as prepared sets store them, and rows of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Features
from PIL import Image

from mm_utils.data.media import FEATURES
from mm_utils.data.media.riff import read_avi, write_avi, write_wav
from tests.kit.fault_images import save

COLOURS = ("red", "lime", "blue", "white")


def tone(*hertz: float, rate: int = 16000, each: float = 0.5) -> bytes:
    """Return a WAV of tones one after the other; 0 is silence."""
    times = np.arange(round(each * rate)) / rate
    samples = np.concatenate([8000 * np.sin(2 * np.pi * pitch * times) for pitch in hertz])
    return write_wav(samples.astype(np.int16), rate)


def clip(colours: Sequence[str] = COLOURS, size: tuple[int, int] = (32, 24), fps: float = 4) -> bytes:
    """Return an AVI with a frame of each colour."""
    frames = [save(Image.new("RGB", size, colour), "JPEG", quality=95) for colour in colours]
    return write_avi(frames, fps, size)


def damaged(content: bytes, frames: int) -> bytes:
    """Return a clip whose first `frames` frames cannot be decoded."""
    for frame in list(map(bytes, read_avi(content)[0]))[:frames]:
        content = content.replace(frame, frame[:2] + bytes(len(frame) - 2))
    return content


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


def rows_with_moments(moments: list[Any], contents: Sequence[bytes] = (), seconds: Sequence[float] = ()) -> Dataset:
    """A sound for each list of moments, with their phrases as caption; by default of 8 seconds, and not to be read."""
    captions = [[", then ".join(moment["phrase"] for moment in listed or []) or "picture"] for listed in moments]
    columns = {"captions": captions, "seconds": seconds or [8.0] * len(moments), "moments": moments}
    return media_rows("sound", contents or [b""] * len(moments), **columns)
