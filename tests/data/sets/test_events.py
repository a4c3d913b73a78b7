"""Drawn clips: what captions and spans say is in the pixels."""

import hashlib
import io
import json
import random

import numpy as np
import pytest
from PIL import Image

from mm_utils.data.media.riff import read_avi
from mm_utils.data.sets.events import ACTIONS, CLIPS, COLOURS, FPS, FRAMES, MOVES, SIZE, draw_frames, load_clips
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


def test_actions_are_seen(clips: list[Clip]) -> None:
    found = set()
    for content, frames, within in clips:
        colour, _, action = content.events[-1]  # drawn over the others
        begin, end = within[-1]
        seen = shown(frames, colour)
        before = seen[begin if content.style == "appear" or action == "blinks" else max(0, begin - 1)]
        after = seen[end - 1]
        if action in MOVES:
            first, last = (np.argwhere(mask).mean(axis=0)[::-1] for mask in (before, after))
            assert (last - first) @ MOVES[action] > 5
            assert abs((last - first) @ MOVES[action][::-1]) < 2
        elif action == "blinks":
            assert not seen[begin + 1 : end - 1].any()
            assert (before == after).all()
        else:
            ratio = after.sum() / before.sum()
            assert ratio > 1.6 if action == "grows" else ratio < 0.6
        found.add(action)
    assert found == set(ACTIONS)


def test_no_frame_before_them_tells_the_events(clips: list[Clip]) -> None:
    """Where things stand there all the time, all have about one size and stand near one of four places."""
    for content, frames, within in clips:
        if content.style == "stay" and within[0][0] > 0:
            for colour, _, _ in content.events:
                rows, columns = np.nonzero(shown(frames[:1], colour)[0])
                centre = np.array([(rows.min() + rows.max()) / 2, (columns.min() + columns.max()) / 2])
                assert np.minimum(abs(centre - 18), abs(centre - 46)).max() < 3.5
                assert 10 <= max(np.ptp(rows), np.ptp(columns)) <= 16
