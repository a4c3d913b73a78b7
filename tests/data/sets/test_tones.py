"""Made sounds: what captions and spans say is in the samples."""

import hashlib
import json
import random

import numpy as np
import pytest

from mm_utils.data.media.riff import read_wav
from mm_utils.data.sets.sequences import Content, captions_of, draw_contents
from mm_utils.data.sets.tones import RATE, SECONDS, SOUNDS, load_sounds, make_samples

Sound = tuple[Content, np.ndarray, list[tuple[int, int]]]


@pytest.fixture(scope="module")
def sounds() -> list[Sound]:
    """Contents, their samples in [-1, 1], and the spans in samples."""
    made = []
    for number, content in enumerate(
        draw_contents(SOUNDS, {"train": 60, "validation": 1, "test": 1}, seed=0)["train"]
    ):
        samples, spans = make_samples(content, random.Random(f"0 train {number}"))
        made.append((content, samples / 32768, [(round(a * RATE), round(b * RATE)) for a, b in spans]))
    return made


def test_rows_change_only_with_the_version(sounds: list[Sound]) -> None:
    """Guards old caches: where the digest changes on purpose, the recipe's version must be raised with it."""
    digest = hashlib.sha256()
    for content, samples, within in sounds[:20]:
        digest.update((samples * 32768).astype("<i2").tobytes())
        digest.update(json.dumps([captions_of(SOUNDS, content, 0), within]).encode())
    assert (SOUNDS.version, digest.hexdigest()[:16]) == ("1", "195201fcb662e263")


def test_stored_sounds_hold_the_samples(sounds: list[Sound], tmp_path_factory: pytest.TempPathFactory) -> None:
    rows = load_sounds(num_train=4, num_eval=1, cache_dir=tmp_path_factory.mktemp("sounds"))["train"]
    for row, (_, samples, within) in zip(rows, sounds, strict=False):
        stored, rate = read_wav(row["image"]["bytes"])
        assert (rate, len(stored), row["seconds"]) == (RATE, SECONDS * RATE, SECONDS)
        assert np.array_equal(stored, samples * 32768)
        assert [moment["span"] for moment in row["moments"]] == [[a / RATE, b / RATE] for a, b in within]


def test_sound_is_within_the_spans_alone(sounds: list[Sound]) -> None:
    for _, samples, within in sounds:
        silent = np.ones(len(samples), bool)
        for begin, end in within:
            silent[begin:end] = False
            assert np.abs(samples[begin:end]).max() > 0.1
            assert all(np.abs(part).max() > 0.015 for part in (samples[begin : begin + 320], samples[end - 320 : end]))
        assert np.abs(samples[silent]).max() <= 0.0021
        assert silent[: RATE // 10].all()
        assert silent[-RATE // 10 :].all()
