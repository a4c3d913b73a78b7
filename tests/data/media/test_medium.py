"""Windows of clips and sounds: fixed shapes, a function of the generator, on the medium's own clock."""

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import ClapFeatureExtractor

from mm_utils.data.batches.dataset import Collator, EvaluationTransform, Pairs, TrainingPairs, TrainingTransform
from mm_utils.data.batches.loaders import LoaderArguments, make_loaders
from mm_utils.data.media import kind_of
from mm_utils.data.media.medium import Clip, Sound, default_seconds, kind_of_processor, settle_window
from mm_utils.data.media.riff import write_avi, write_wav
from mm_utils.model.reading import UnreadableError
from mm_utils.model.spectrograms import LogMel
from tests.kit.fault_images import save
from tests.kit.media_files import jpeg, media_rows

RATE = 1000
CPU = torch.device("cpu")


def extractor(rate: int = RATE) -> ClapFeatureExtractor:
    return ClapFeatureExtractor(
        feature_size=16, sampling_rate=rate, hop_length=50, fft_window_size=128, max_length_s=3, frequency_min=20,
        frequency_max=rate // 2, truncation="rand_trunc", padding="pad",
    )  # fmt: skip


def counting(count: int, rate: int = RATE) -> dict[str, Any]:
    """A sound whose sample says its own number."""
    return {"bytes": write_wav(np.arange(count, dtype=np.int16), rate), "path": None}


def brightening(count: int, fps: float = 4.0) -> dict[str, Any]:
    """A clip whose frame `i` is 10 i bright."""
    return {"bytes": write_avi([jpeg(10 * number) for number in range(count)], fps, (48, 32)), "path": None}


def sounds(seconds: float, rate: int = RATE, min_share: float = 1.0, jitter: float = 0.0) -> Sound:
    return Sound(LogMel.of(extractor(rate)), seconds, min_share, jitter)


def rows_of(kind: str, media: list[dict[str, Any]], seconds: list[float]) -> Dataset:
    numbers = range(len(media))
    ids = {
        "image_key": numbers,
        "input_ids": [[[1, 5 + n, 2]] for n in numbers],
        "caption_keys": [[n] for n in numbers],
    }
    return media_rows(kind, [value["bytes"] for value in media], seconds=seconds, **ids)


@given(st.integers(1, 6000), st.integers(0, 99))
@settings(max_examples=30)
def test_a_sound_begins_where_its_window_says(count: int, seed: int) -> None:
    for rng in (None, random.Random(seed)):
        shown, size, window = sounds(2.0).read(counting(count), rng)
        assert shown.shape == (2000,)
        assert shown.dtype == torch.int16
        assert size == (count / RATE, 1.0)
        first = round(window.left * count)
        there = min(2000, count - first)
        assert torch.equal(shown[:there], torch.arange(first, first + there, dtype=torch.int16))
        assert not shown[there:].any()
        assert window.right - window.left == pytest.approx(2000 / count)
        if rng is None:
            assert first == pytest.approx(max(0, count - 2000) / 2, abs=1)


@given(st.integers(20, 6000), st.integers(0, 99), st.floats(0.1, 1.0))
@settings(max_examples=30)
def test_training_windows_may_leave_a_sound_by_a_share_of_it(count: int, seed: int, share: float) -> None:
    shown, _, window = sounds(2.0, min_share=share).read(counting(count), random.Random(seed))
    first = round(window.left * count)
    expected = np.zeros(2000, np.int16)
    within = np.arange(first, first + 2000)
    is_sound = (within >= 0) & (within < count)
    expected[is_sound] = within[is_sound]
    assert np.array_equal(shown.numpy(), expected)
    assert is_sound.sum() >= min(count, share * 2000) - 2  # what is much shorter than the window is never cut
    assert torch.equal(
        sounds(2.0, min_share=share, jitter=9.0).read(counting(count), None)[0],
        sounds(2.0).read(counting(count), None)[0],
    )


def test_sounds_are_resampled_onto_the_towers_clock() -> None:
    tone = (8000 * np.sin(2 * np.pi * 50 * np.arange(6000) / 2000)).astype(np.int16)
    shown, size, window = sounds(2.0).read({"bytes": write_wav(tone, 2000), "path": None}, None)
    assert (size, shown.shape) == ((3.0, 1.0), (2000,))
    begin = round(window.left * 3 * RATE)
    expected = 8000 * np.sin(2 * np.pi * 50 * (begin + np.arange(2000)) / RATE)
    assert np.abs(shown.numpy()[50:-50] - expected[50:-50]).max() < 200


@given(st.integers(1, 24), st.integers(1, 12), st.sampled_from([None, 0.6, 2.0, 9.0]), st.integers(0, 99))
@settings(max_examples=30)
def test_frames_lie_on_the_clips_clock(count: int, frames: int, seconds: float | None, seed: int) -> None:
    for rng in (None, random.Random(seed)):
        shown, (length, _), window = Clip(16, frames=frames, seconds=seconds).read(brightening(count), rng)
        assert shown.shape == (frames, 3, 16, 16)
        assert shown.dtype == torch.uint8
        assert length == count / 4
        numbers = (shown.float().mean((1, 2, 3)) / 10).round().tolist()
        assert numbers == sorted(numbers)
        if rng is None:
            times = window.left * length + (np.arange(frames) + 0.5) / frames * (seconds or length)
            assert numbers == np.minimum((times * 4).astype(int), count - 1).tolist()
        elif seconds is None:
            assert window == (0.0, 0.0, 1.0, 1.0)


def test_all_frames_are_cropped_alike() -> None:
    ramp = np.tile(np.arange(64, dtype=np.uint8)[None, :, None] * 4, (48, 1, 3))
    frame = save(Image.fromarray(ramp), "JPEG", quality=100)
    value = {"bytes": write_avi([frame] * 5, 5, (64, 48)), "path": None}
    clips = Clip(16, min_crop_area=0.3, frames=5)
    shown = clips.read(value, random.Random(3))[0]
    assert all(torch.equal(frame, shown[0]) for frame in shown)
    assert not torch.equal(shown, clips.read(value, random.Random(4))[0])


def test_damage_is_named_and_replaced() -> None:
    media = [counting(3000), {"bytes": counting(3000)["bytes"][:50], "path": None}, counting(2500), counting(100)]
    rows = rows_of("sound", media, [3.0, 3.0, 2.5, 0.1])
    transform = TrainingTransform(sounds(2.0))
    pairs = TrainingPairs(rows, transform)
    examples = pairs.__getitems__([(row, 0) for row in range(4)])
    assert [example.get("skipped_id") for example in examples] == [None, "m1", None, None]
    assert "6 of 6,000 bytes" in examples[1]["skipped"]
    batch = Collator(0, transform.medium, longest_first=True)(examples)
    assert batch["pixel_values"].shape == (4, 2000)
    assert batch["pixel_values"].dtype == torch.int16
    assert Collator(0, transform.medium)([])["pixel_values"].shape == (0, 2000)
    with pytest.raises(UnreadableError):
        Clip(16, frames=2).read(counting(10), None)


@pytest.mark.parametrize("kind", ["clip", "sound"])
def test_an_example_is_a_function_of_seed_epoch_and_id(kind: str) -> None:
    if kind == "clip":
        rows = rows_of(kind, [brightening(number + 5) for number in range(4)], [2.0] * 4)
        transform = TrainingTransform(Clip(16, min_crop_area=0.5, frames=3, seconds=1.0), seed=1, horizontal_flip=True)
    else:
        rows = rows_of(kind, [counting(2000 + number) for number in range(4)], [2.0] * 4)
        transform = TrainingTransform(sounds(2.0, jitter=6.0), seed=1)
    pairs, moved = TrainingPairs(rows, transform), TrainingPairs(rows.select([2, 0]), transform)
    for place, row in enumerate([2, 0]):
        assert torch.equal(moved[place, 7]["pixel_values"], pairs[row, 7]["pixel_values"])
    shown = [pairs[2, epoch]["pixel_values"] for epoch in range(4)]
    assert not all(torch.equal(shown[0], other) for other in shown[1:])


def test_rows_with_the_same_captions_are_no_negatives_in_training() -> None:
    rows = rows_of("sound", [counting(2000)] * 4, [2.0] * 4)
    captions = {
        "input_ids": [[[1, 5, 2], [1, 6, 2]]] * 3 + [[[1, 5, 2]]],
        "caption_keys": [[7, 8], [8, 7], [7, 9], [7]],
    }
    rows = rows.remove_columns(["input_ids", "caption_keys"])
    rows = concatenate_datasets([rows, Dataset.from_dict(captions)], axis=1)
    of_training = TrainingPairs(rows, TrainingTransform(sounds(2.0)))
    keys = [of_training[row, 0]["image_key"] for row in range(4)]
    assert keys[0] == keys[1]
    assert len(set(keys[1:])) == 3
    in_evaluation = Pairs(rows, EvaluationTransform(sounds(2.0)))
    assert [in_evaluation[row, 0]["image_key"] for row in range(4)] == [0, 1, 2, 3]


def processor(kind: str) -> Any:
    """What a processor says of its media."""
    tokenizer = SimpleNamespace(pad_token_id=0)
    if kind == "sound":
        return SimpleNamespace(feature_extractor=extractor(), tokenizer=tokenizer)
    images = SimpleNamespace(crop_size={"height": 16}, image_mean=[0.5] * 3, image_std=[0.25] * 3)
    return SimpleNamespace(image_processor=images, tokenizer=tokenizer)


def made(owner: Any, **flags: Any) -> Any:
    return make_loaders(LoaderArguments(dataloader_num_workers="0", **flags), CPU, owner).medium


def test_the_processor_knows_the_window() -> None:
    sound, clip, image = processor("sound"), processor("clip"), processor("image")
    rows = rows_of("sound", [counting(2500)] * 2, [2.5, 2.5])
    settle_window(sound, "sound", default_seconds("sound", rows), None)
    assert made(sound).shape == (2500,)
    settle_window(sound, "sound", 7.0, None)  # of a trained model, on other data
    assert made(sound).shape == (2500,)
    settle_window(clip, "clip", default_seconds("clip", rows), 5)
    assert made(clip).shape == (5, 3, 16, 16)
    settle_window(image, "image", None, None)
    assert made(image).shape == (3, 16, 16)
    assert [kind_of_processor(each) for each in (image, clip, sound)] == ["image", "clip", "sound"]
    for owner, flags, message in (
        (image, {"clip_frames": 2}, "--clip_frames is 2; these are images"),
        (sound, {"clip_frames": 4}, "--clip_frames is 4; these are sounds"),
        (clip, {"clip_frames": 4}, "--clip_frames is 4; the model takes 5"),
    ):
        with pytest.raises(ValueError, match=message):
            made(owner, **flags)


def test_batches_on_the_device_are_what_the_tower_takes() -> None:
    owner = processor("sound")
    settle_window(owner, "sound", 2.0, None)
    loaders = make_loaders(LoaderArguments(dataloader_num_workers="0"), CPU, owner)
    rows = rows_of("sound", [counting(3000), counting(400)], [3.0, 0.4])
    [batch] = loaders.evaluation(rows, 2)
    raw = [Pairs(rows, EvaluationTransform(loaders.medium))[row, 0]["pixel_values"] for row in (0, 1)]
    expected = owner.feature_extractor(
        [sound.numpy() / np.float32(32768) for sound in raw], sampling_rate=RATE, return_tensors="pt"
    )["input_features"]
    torch.testing.assert_close(batch["pixel_values"], expected.float(), atol=1e-3, rtol=0)
    assert loaders.blank(3).shape[1:] == expected.shape[1:]
    owner = processor("clip")
    settle_window(owner, "clip", None, 2)
    loaders = make_loaders(LoaderArguments(dataloader_num_workers="0"), CPU, owner)
    clips = rows_of("clip", [brightening(8)], [2.0])
    [batch] = loaders.evaluation(clips, 2)
    whole = Pairs(clips, EvaluationTransform(loaders.medium))[0, 0]["pixel_values"]
    torch.testing.assert_close(batch["pixel_values"][0], (whole / 255 - 0.5) / 0.25, atol=1e-5, rtol=0)
    assert kind_of(clips.features) == "clip"
    with pytest.raises(ValueError, match="the data are sounds, and the model is for clips"):
        loaders.evaluation(rows, 2)
    loaders.check_medium(rows.remove_columns("image"))  # cached features stand for it


def test_flags_of_images_are_refused() -> None:
    owner = processor("sound")
    settle_window(owner, "sound", 1.0, None)
    with pytest.raises(ValueError, match=r"--horizontal_flip is .*; these are sounds"):
        make_loaders(LoaderArguments(horizontal_flip=True), CPU, owner)
