"""Streams of sounds and clips, as prepared sets keep them: the rows of a data set on disk, in the order of a stream."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator
from datasets import Dataset, DatasetDict
from transformers import ClapFeatureExtractor, PreTrainedTokenizerFast, ProcessorMixin

from mm_utils.arguments import Parsed
from mm_utils.data.batches.dataset import Collator, Pairs, TrainingTransform
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media import COLUMNS, FEATURES, kind_of
from mm_utils.data.media.log_mel import LogMel
from mm_utils.data.media.medium import Clip, Medium, Sound
from mm_utils.data.media.riff import write_wav
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.data import open_streamed
from mm_utils.data.streams.flags import StreamingArguments
from mm_utils.data.streams.loader import StreamSteps
from mm_utils.data.streams.order import Reader
from mm_utils.data.streams.stream import Stream, open_stream
from mm_utils.model.arguments import ModelArguments
from mm_utils.model.processor import load_processor, train_tokenizer
from tests.kit.media_files import COLOURS, clip, media_rows, tone
from tests.kit.reading import write_tar

pytestmark = pytest.mark.usefixtures("own_cache")
ROWS, RATE = 44, 1000
SIZES = BatchSizes((0,), (10,))


def contents(medium: str) -> list[bytes]:
    """Sounds and clips of several lengths, no two alike."""
    if medium == "sound":
        return [tone(20 + 7 * at, 0, rate=RATE, each=0.6 + 0.02 * at) for at in range(ROWS)]
    shown = [[COLOURS[at // 4**place % 4] for place in range(3)] for at in range(ROWS)]
    return [clip([*colours, *colours[: at % 3]]) for at, colours in enumerate(shown)]


def timed_of(medium: str) -> Medium:
    if medium == "clip":
        return Clip(8, min_crop_area=0.6, frames=3, seconds=0.5)
    extractor = ClapFeatureExtractor(
        feature_size=16, sampling_rate=RATE, hop_length=50, fft_window_size=128, max_length_s=3, frequency_min=20,
        frequency_max=RATE // 2, truncation="rand_trunc", padding="pad",
    )  # fmt: skip
    return Sound(LogMel.of(extractor), 0.4, 0.8, 6.0)


def write_shards(folder: Path, kind: str, rows: Dataset, medium: str) -> dict[str, str]:
    """Three shards, and the flag that names them."""
    stored = rows.rename_column("image", COLUMNS[medium])
    if kind == "arrow":
        DatasetDict(train=stored).save_to_disk(folder, num_shards={"train": 3})
        return {"dataset_name": str(folder)}
    folder.mkdir()
    for place in range(3):
        part = stored.shard(3, place, contiguous=True)
        path = folder / f"{place}.{kind}"
        if kind == "parquet":
            part.to_parquet(path)
            continue
        suffix = "wav" if medium == "sound" else "avi"
        members = [
            member
            for row in part.with_format("arrow").to_pandas().to_dict("records")
            for member in (
                (f"{row['id']}.{suffix}", row[COLUMNS[medium]]["bytes"]),
                (f"{row['id']}.json", json.dumps({"id": row["id"], "caption": list(row["captions"])}).encode()),
            )
        ]
        write_tar(path, members)
    return {"train_file": str(folder / f"*.{kind}")}


def opened(given: dict[str, str], **more: Any) -> Stream:
    return open_stream(DataArguments(**given, **more), StreamingArguments(True, 3, 4), SIZES, 3)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(["number 0 1 2 3 4 5 6 7 8 9"] * 3, 100)


def steps_of(stream: Stream, tokenizer: PreTrainedTokenizerFast, medium: str) -> StreamSteps:
    timed = timed_of(medium)
    transform = TrainingTransform(timed, seed=stream.order.seed)
    return StreamSteps(stream, tokenizer, 16, transform, Collator(0, timed, longest_first=True))


def shown(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What a batch shows, each row by itself, in a fixed order."""
    columns = (batch["image_ids"], batch["ids"].tolist(), batch["pixel_values"].flatten(1).tolist())
    return sorted(zip(batch["rows"].tolist(), *columns, strict=True))


@pytest.mark.parametrize("kind", ["arrow", "parquet", "tar"])
@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_examples_are_those_of_a_data_set_on_disk(
    medium: str, kind: str, tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Window, loudness, crop and caption, in every kind of shard, for any readers, and after a restart."""
    rows = media_rows(medium, contents(medium))
    stream = opened(write_shards(tmp_path / "shards", kind, rows, medium))
    steps, timed = steps_of(stream, tokenizer, medium), timed_of(medium)
    assert (kind_of(stream.validation.features), len(stream.validation)) == (medium, 8)
    transform = TrainingTransform(timed, seed=3)
    pairs, held = Pairs(tokenize_captions(rows, tokenizer, 16), transform), set(stream.validation["id"])
    places, last = {name: at for at, name in enumerate(rows["id"])}, SIZES.step_of(stream.num_rows)
    epochs = {slot.position: slot.epoch for step in range(last + 1) for slot in stream.order.batch(step)}
    straight = list(steps.batches(0, last + 1, Reader()))
    seen: list[str] = []
    for batch in straight:
        assert not batch["skipped"]
        draws = [
            (places[name], epochs[at]) for name, at in zip(batch["image_ids"], batch["rows"].tolist(), strict=True)
        ]
        expected = Collator(0, timed)(pairs.__getitems__(draws))
        for name in ("pixel_values", "input_ids", "ids"):
            assert torch.equal(batch[name], expected[name]), name
        seen += [name for name, (_, epoch) in zip(batch["image_ids"], draws, strict=True) if not epoch]
    assert sorted(seen) == sorted(set(rows["id"]) - held)
    parts = zip(*(steps.batches(2, last + 1, Reader(rank, 3)) for rank in range(3)), strict=True)
    for whole, shares in zip(straight[2:], parts, strict=True):
        assert sorted(row for share in shares for row in shown(share)) == shown(whole)


@pytest.mark.parametrize("medium", ["sound", "clip"])
def test_a_run_has_the_window_and_the_input_of_its_tower(medium: str, tmp_path: Path) -> None:
    given = write_shards(tmp_path / "shards", "arrow", media_rows(medium, contents(medium)), medium)
    schedule: Any = SimpleNamespace(seed=3, per_device_eval_batch_size=4, batch_sizes=SIZES)

    def make(captions: Iterator[str], medium: str, seconds: float | None) -> ProcessorMixin:
        return load_processor(ModelArguments(image_size=32), captions, medium, seconds)

    flags = DataArguments(**given), StreamingArguments(True, 3, 4), LoaderArguments(dataloader_num_workers="0")
    data = open_streamed(Accelerator(cpu=True), Parsed(flags), schedule, make)
    held = data.splits["validation"]
    seconds = dict(zip(held["id"], held["seconds"], strict=True))
    assert (data.medium, len(seconds)) == (medium, 8)
    assert held.features["image"] == FEATURES[medium]
    assert [seconds["m0"], seconds["m15"]] == ([1.2, 1.8] if medium == "sound" else [0.75, 0.75])
    window = 3.0 if medium == "sound" else None  # the tower counts whole seconds
    assert getattr(data.loaders.medium, "seconds", None) == window
    [batch] = data.train_batches(0, 1)
    assert data.eval_loader is not None
    evaluated, *_ = data.eval_loader
    assert batch["pixel_values"].shape == data.loaders.blank(10).shape
    assert evaluated["pixel_values"].shape == data.loaders.blank(4).shape
    assert batch["pixel_values"].is_floating_point()


def test_what_a_stream_does_not_decode_is_refused_with_the_remedy(tmp_path: Path) -> None:
    stereo = bytearray(tone(440))
    stereo[22:24] = b"\2\0"
    parts = [(f"{at}.json", b'{"start": 0.5, "caption": "a bark"}') for at in range(20)]
    captions = [(f"{at}.txt", b"a bark") for at in range(20)]
    for content, suffix, others, message in (
        (b"ID3" + bytes(99), "mp3", captions, r"row 0: medium_unknown_format: it is not in the format WAVE"),
        (bytes(stereo), "wav", captions, r"a WAV file of 2 channels of 16 bits; prepared sounds are mono, 16 bits"),
        (b"....ftyp" + bytes(99), "mp4", captions, r"it is not in the format AVI"),
        (tone(440), "wav", parts, r"span_outside: it is a part of its sound, by start and end, and not cut out"),
    ):
        members = [each for at in range(20) for each in ((f"{at}.{suffix}", content), others[at])]
        path = write_tar(tmp_path / "s.tar", members)
        with pytest.raises(
            ValueError, match=f"none of its first samples can be used .*{message}.* Run scripts/prepare"
        ):
            opened({"train_file": path})
    table = Dataset.from_dict({"video": [b"\x1aE\xdf\xa3"] * 20, "caption": ["a cat"] * 20})
    table.to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"it is not in the format AVI.* Run scripts/prepare_data.py, and"):
        opened({"train_file": str(tmp_path / "a.parquet")})
    cut = Dataset.from_dict({"audio": [tone(440)] * 20, "caption": ["a cat"] * 20, "start": [None, *[1.0] * 19]})
    cut.to_parquet(tmp_path / "a.parquet")
    stream = opened({"train_file": str(tmp_path / "a.parquet")}, validation_file=str(tmp_path / "a.parquet"))
    assert [row if isinstance(row, str) else row["seconds"] for row in stream.reader().read(0, 0, 2)] == [
        0.5,
        f"shard {tmp_path / 'a.parquet'}, row 1: span_outside: it is a part of its sound, by start and end, and not cut out",
    ]


def test_a_sound_that_cannot_be_read_is_replaced(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    files = contents("sound")
    files[20], files[21] = files[20][:40], write_wav(np.zeros(0, np.int16), RATE)
    stream = opened(write_shards(tmp_path / "shards", "tar", media_rows("sound", files), "sound"))
    batches = list(steps_of(stream, tokenizer, "sound").batches(0, 5, Reader()))
    assert {len(batch["rows"]) for batch in batches} == {10}
    reasons = sorted(reason.split(": ", 1)[1] for batch in batches for reason in batch["skipped"])
    assert reasons[0] == "a WAV file of no samples"
    assert "medium_unknown_format" in reasons[-1]
    assert {name for batch in batches for name in batch["skipped_ids"]} >= {"m21"}


def test_the_kind_is_one_and_is_asked_for_where_it_is_not_clear(tmp_path: Path) -> None:
    members = [
        each for at in range(20) for each in ((f"{at}.wav", tone(440)), (f"{at}.jpg", b"x"), (f"{at}.txt", b"a"))
    ]
    path = write_tar(tmp_path / "s.tar", members)
    with pytest.raises(ValueError, match=r"its samples hold sounds and images.* Set --medium sound or image"):
        opened({"train_file": path})
    given, flags = DataArguments(train_file=path, medium="sound"), StreamingArguments(True, 1, 4)
    assert open_stream(given, flags, SIZES, 3).num_rows == 16
    with pytest.raises(ValueError, match=r"--validation_file is v.csv; it holds no sounds, and the stream does"):
        open_stream(replace(given, validation_file="v.csv"), flags, SIZES, 3, media_rows("image", [b"x"]))
