"""Drawn clips: what captions and spans say is in the pixels."""

import hashlib
import io
import json
import random

import numpy as np
import pytest
from PIL import Image

from mm_utils.data.media.riff import read_avi
from mm_utils.data.sets.events import CLIPS, COLOURS, FPS, FRAMES, SIZE, draw_frames, load_clips
from mm_utils.data.sets.sequences import Content, captions_of, draw_contents

Clip = tuple[Content, np.ndarray, list[tuple[int, int]]]


@pytest.fixture(scope="module")
def clips() -> list[Clip]:
    """Contents, their frames, and the first frame of every span and the one after it."""
    drawn = []
    for number, content in enumerate(draw_contents(CLIPS, {"train": 60, "validation": 1, "test": 1}, seed=0)["train"]):
        frames, spans = draw_frames(content, random.Random(f"0 train {number}"))
        drawn.append((content, frames.astype(int), [(round(a * FPS), round(b * FPS)) for a, b in spans]))
    return drawn


def shown(frames: np.ndarray, colour: str) -> np.ndarray:
    """Where the thing of a colour covers a pixel wholly, `[16, 64, 64]`."""
    return np.abs(frames - COLOURS[colour]).max(axis=-1) <= 9


def test_rows_change_only_with_the_version(clips: list[Clip]) -> None:
    """Guards old caches: where the digest changes on purpose, the recipe's version must be raised with it."""
    digest = hashlib.sha256()
    for content, frames, within in clips[:20]:
        digest.update(frames.astype(np.uint8).tobytes())
        digest.update(json.dumps([content.style, captions_of(CLIPS, content, 0), within]).encode())
    assert (CLIPS.version, digest.hexdigest()[:16]) == ("1", "80fd85910a5ee225")


def test_stored_clips_show_the_frames(clips: list[Clip], tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = load_clips(num_train=4, num_eval=1, cache_dir=tmp_path_factory.mktemp("clips"))["train"]
    for row, (content, frames, within) in zip(rows, clips, strict=False):
        files, fps = read_avi(row["image"]["bytes"])
        pixels = np.stack([np.asarray(Image.open(io.BytesIO(bytes(file)))) for file in files])
        assert (fps, pixels.shape) == (FPS, (FRAMES, SIZE, SIZE, 3))
        assert np.abs(pixels - frames).mean() < 2
        assert row["id"].startswith(content.style)
        assert row["seconds"] == FRAMES / FPS
        assert [moment["span"] for moment in row["moments"]] == [[a / FPS, b / FPS] for a, b in within]
        assert [moment["phrase"] for moment in row["moments"]] == [" ".join(["a", *each]) for each in content.events]


def test_things_change_within_the_span_of_their_event_alone(clips: list[Clip]) -> None:
    undisturbed = []
    for content, frames, within in clips:
        for (colour, _, action), (begin, end) in zip(content.events, within, strict=True):
            seen = shown(frames, colour)
            changes = [at for at in range(1, FRAMES) if (seen[at] != seen[at - 1]).any()]
            if content.style == "appear":
                assert not seen[:begin].any()
                assert not seen[end:].any()
                assert seen[begin].any()
            else:
                assert seen[[0, -1]].any(axis=(1, 2)).all()
                allowed = range(begin + (action == "blinks"), end)
                undisturbed.append(set(changes) <= set(allowed))  # unless another thing passes over it
                assert max(allowed) in changes
                assert begin in changes or begin == 0 or action == "blinks"
    assert np.mean(undisturbed) > 0.95
