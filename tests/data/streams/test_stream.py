"""Streams from end to end: the batch of a step for any number of readers and after a restart."""

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from datasets import disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mm_utils import distributed
from mm_utils.data import media
from mm_utils.data.batches.dataset import Collator, Pairs, TrainingTransform
from mm_utils.data.batches.order import BatchSizes
from mm_utils.data.batches.tokens import caption_key, image_key, tokenize_captions
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.data import load_validation_file
from mm_utils.data.streams.flags import StreamingArguments
from mm_utils.data.streams.loader import StreamBatches, StreamSteps, merge_parts
from mm_utils.data.streams.order import Reader
from mm_utils.data.streams.stream import Stream, open_stream
from mm_utils.model.processor import train_tokenizer
from tests.kit import numbered_shards
from tests.kit.numbered_rows import pairs_of
from tests.kit.numbered_shards import (
    FEATURES,
    caption_of,
    image_of,
    rows_of,
    serve,
    write_parquet,
    write_shards,
)
from tests.kit.reading import write_tar

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")
KINDS = ["parquet", "arrow", "tar"]
SIZES = [30, 22, 41, 9, 38, 20]
ROWS = sum(SIZES)
IMAGE_SIZE = 8
SCHEDULE = BatchSizes((0, 5), (12, 20))


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """As in the loader's workers."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([caption_of(number) for number in range(300)] + ["so", "1 2 3 4 5 6 7 8 9 0"], 300)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("shards")
    return {kind: write_shards(folder / kind, kind, SIZES) for kind in KINDS}


def open_source(source: str, sizes: BatchSizes = SCHEDULE, groups: int = 4, **given: Any) -> Stream:
    given["dataset_name" if Path(source).is_dir() else "train_file"] = source
    data = DataArguments(**given)
    return open_stream(data, StreamingArguments(True, groups, 8), sizes, 3, load_validation_file(data))


@pytest.fixture(scope="module")
def streams(sources: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Stream]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        return {kind: open_source(source) for kind, source in sources.items()}


def steps_of(stream: Stream, tokenizer: PreTrainedTokenizerFast) -> StreamSteps:
    transform = TrainingTransform(media.Image(IMAGE_SIZE, min_crop_area=0.5), seed=stream.order.seed)
    return StreamSteps(stream, tokenizer, 16, transform, Collator(0, media.Image(IMAGE_SIZE), longest_first=True))


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, f"{name} differs"


def content(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Every pair of a batch by itself, without padding, in a fixed order."""
    return sorted(pairs_of(batch))


@pytest.mark.parametrize("kind", KINDS)
def test_every_image_comes_once_an_epoch_with_its_own_caption(
    kind: str, streams: dict[str, Stream], tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = streams[kind]
    held = {int(image_id.removeprefix("id-")) for image_id in stream.validation["id"]}
    assert len(held) == min(30, ROWS // 5)
    assert stream.num_rows == ROWS - len(held)
    last = SCHEDULE.step_of(2 * stream.num_rows)
    seen: dict[int, int] = {}
    for batch in steps_of(stream, tokenizer).batches(0, last + 1, Reader()):
        assert not batch["skipped"]
        for place, image_id in enumerate(batch["image_ids"]):
            number = int(image_id.removeprefix("id-"))
            assert batch["pixel_values"][place, :, 0, 0].tolist() == [number % 256, number // 256, 77]
            said = tokenizer.decode(batch["input_ids"][place], skip_special_tokens=True)
            assert said in (caption_of(number), caption_of(number) + " so")
            seen[batch["rows"][place].item()] = number
    in_turn = [seen[position] for position in sorted(seen)]
    epochs = [in_turn[: stream.num_rows], in_turn[stream.num_rows : 2 * stream.num_rows]]
    assert [Counter(epoch) for epoch in epochs] == [Counter(set(range(ROWS)) - held)] * 2
    assert np.corrcoef(epochs[0], epochs[1])[0, 1] < 0.9
    assert epochs[0] != sorted(epochs[0])


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_batch_of_a_step_does_not_depend_on_ranks_and_workers(
    world_size: int, workers: int, streams: dict[str, Stream], tokenizer: PreTrainedTokenizerFast
) -> None:
    steps = steps_of(streams["parquet"], tokenizer)
    expected = list(steps.batches(0, 8, Reader()))
    shares = [
        list(
            zip(
                *(steps.batches(0, 8, Reader(rank, world_size, part, workers)) for part in range(workers)),
                strict=True,
            )
        )
        for rank in range(world_size)
    ]
    for step, whole in enumerate(expected):
        assert len(whole["image_ids"]) == SCHEDULE.at(step)
        merged = [merge_parts(list(share[step]), 0) for share in shares]
        if world_size == 1:
            assert_same(merged[0], whole)
        assert sorted(pair for batch in merged for pair in content(batch)) == content(whole)


@pytest.fixture(scope="module")
def straight(streams: dict[str, Stream], tokenizer: PreTrainedTokenizerFast) -> dict[str, list[Any]]:
    """Steps 0 to 29 as one reader yields them, without interruption."""
    return {
        kind: [content(batch) for batch in steps_of(stream, tokenizer).batches(0, 30, Reader())]
        for kind, stream in streams.items()
    }


@settings(max_examples=25)
@given(kind=st.sampled_from(KINDS), start=st.integers(0, 28), world_size=st.integers(1, 4), workers=st.integers(1, 2))
def test_a_stream_resumed_by_any_number_of_readers_gives_the_same_batches(
    kind: str,
    start: int,
    world_size: int,
    workers: int,
    streams: dict[str, Stream],
    straight: dict[str, list[Any]],
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    steps = steps_of(streams[kind], tokenizer)
    readers = [Reader(rank, world_size, part, workers) for rank in range(world_size) for part in range(workers)]
    resumed = zip(*(steps.batches(start, start + 2, reader) for reader in readers), strict=True)
    found = [sorted(pair for part in parts for pair in content(part)) for parts in resumed]
    assert found == straight[kind][start : start + 2]


@pytest.mark.parametrize("workers", [0, 2])
def test_worker_processes_change_nothing(
    workers: int, streams: dict[str, Stream], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = steps_of(streams["tar"], tokenizer)
    loader = StreamBatches(steps, 3, 9, workers)
    assert len(loader) == 6
    for _ in range(2):
        for found, expected in zip(loader, steps.batches(3, 9, Reader()), strict=True):
            assert_same(found, expected)
    monkeypatch.setattr(distributed, "rank", lambda: 1)
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    mine = list(StreamBatches(steps, 3, 9, workers))
    assert [content(batch) for batch in mine] == [content(batch) for batch in steps.batches(3, 9, Reader(1, 2))]


def test_a_server_gives_the_same_batches_as_the_disk(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    here = steps_of(open_source(write_shards(tmp_path, "parquet", [20, 20]), groups=2), tokenizer)
    with serve(tmp_path) as address:
        there = steps_of(open_source(f"{address}/{{000..001}}.parquet", groups=2), tokenizer)
        for found, expected in zip(StreamBatches(there, 1, 4, 2), here.batches(1, 4, Reader()), strict=True):
            assert_same(found, expected)


def test_examples_are_those_of_a_data_set_on_disk(
    streams: dict[str, Stream], tokenizer: PreTrainedTokenizerFast
) -> None:
    """Caption, crop, tokens and keys are a function of (seed, epoch, image id), however the row was read."""
    stream = streams["parquet"]
    rows = tokenize_captions(datasets.Dataset.from_list(rows_of(range(ROWS)), features=FEATURES), tokenizer, 16)
    pairs = Pairs(rows, TrainingTransform(media.Image(IMAGE_SIZE, min_crop_area=0.5), seed=stream.order.seed))
    step = SCHEDULE.step_of(stream.num_rows)  # it reaches over the end of the first epoch
    batch = next(steps_of(stream, tokenizer).batches(step, step + 1, Reader()))
    epoch = {slot.position: slot.epoch for slot in stream.order.batch(step)}
    draws = [
        (int(image_id.removeprefix("id-")), epoch[position])
        for image_id, position in zip(batch["image_ids"], batch["rows"].tolist(), strict=True)
    ]
    expected = Collator(0, media.Image(IMAGE_SIZE))(pairs.__getitems__(draws))
    assert {epoch for _, epoch in draws} == {0, 1}
    # Of a stream's captions only the one that is shown is tokenised.
    assert torch.equal(batch.pop("all_input_ids")[:, 0], batch["input_ids"])
    assert torch.equal(batch.pop("all_attention_mask").sum(1), batch["attention_mask"])
    assert_same({**batch, "rows": expected["rows"]}, expected)


def unusable_rows(tmp_path: Path, sizes: BatchSizes) -> Stream:
    """20 is broken, 21 has no caption, 22 no image; blocks of 8 rows."""
    rows = rows_of(range(40))
    rows[20]["image"]["bytes"] = rows[20]["image"]["bytes"][:40]
    rows[21]["captions"] = [" "]
    rows[22]["image"]["bytes"] = None
    return open_source(str(write_parquet(tmp_path / "a.parquet", rows)), sizes, 1)


def test_another_row_of_its_block_takes_the_place_of_an_unusable_one(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast
) -> None:
    stream = unusable_rows(tmp_path, BatchSizes((0,), (13,)))
    batches = list(steps_of(stream, tokenizer).batches(0, stream.num_rows, Reader()))
    assert {len(batch["rows"]) for batch in batches} == {13}
    reasons = [reason for batch in batches for reason in batch["skipped"]]
    last_words = Counter("broken" if "image id-20: " in reason else reason.split(": ")[-2] for reason in reasons)
    # Steps of 13 rows, as many steps as rows: 13 epochs.
    assert last_words == {"broken": 13, "caption_empty": 13, "image_missing": 13}
    shard = f"shard {tmp_path / 'a.parquet'}, row"
    named = Counter(name for batch in batches for name in batch["skipped_ids"])
    assert named == {"id-20": 13, f"{shard} 21": 13, f"{shard} 22": 13}
    slots = {slot.position: slot for step in range(len(batches)) for slot in stream.order.batch(step)}
    stand_ins = []
    for batch in batches:
        for position, image_id in zip(batch["rows"].tolist(), batch["image_ids"], strict=True):
            slot = slots[position]
            first = stream.shards[slot.shard].first
            shown, drawn = int(image_id.removeprefix("id-")) - first, slot.row
            assert shown // stream.order.block_size == drawn // stream.order.block_size
            assert shown == drawn or first + drawn in (20, 21, 22)
            stand_ins += [shown] if shown != drawn else []
    assert len(stand_ins) == 39
    assert len(set(stand_ins)) > 3


@given(
    start=st.integers(0, 12), world_size=st.integers(1, 4), workers=st.integers(1, 3), bad=st.sets(st.integers(0, 79))
)
@settings(max_examples=25)
def test_replacement_rows_of_a_stream_are_the_same_for_any_readers_and_after_a_restart(
    start: int,
    world_size: int,
    workers: int,
    bad: set[int],
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    """Also where a reader is beyond a block when a row of it turns out broken."""
    folder = tmp_path_factory.mktemp("bad")
    rows = rows_of(range(80))
    for number in bad:
        rows[number]["image"]["bytes"] = rows[number]["image"]["bytes"][:40]
    for place in range(4):
        write_parquet(folder / f"{place}.parquet", rows[20 * place : 20 * place + 20])
    stream = open_source(str(folder / "*.parquet"), BatchSizes((0,), (23,)), 4, validation_file=valid(folder))
    steps = steps_of(stream, tokenizer)
    straight = list(steps.batches(0, start + 2, Reader()))[start:]
    readers = [Reader(rank, world_size, part, workers) for rank in range(world_size) for part in range(workers)]
    resumed = zip(*(steps.batches(start, start + 2, reader) for reader in readers), strict=True)
    for whole, parts in zip(straight, resumed, strict=True):
        assert sorted(pair for part in parts for pair in content(part)) == content(whole)
        assert sorted(name for part in parts for name in part["skipped_ids"]) == sorted(whole["skipped_ids"])
        if not bad:
            assert not whole["skipped_ids"]


def valid(folder: Path) -> str:
    """A validation file, so that nothing is held out."""
    (folder / "validation").mkdir()
    return str(write_parquet(folder / "validation" / "a.parquet", rows_of(range(200, 204))))


def test_images_of_validation_are_kept_out_of_training(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = rows_of(range(60))
    rows[30]["id"] = "id-0"  # another image under an id that is held out
    rows[40]["image"] = rows[1]["image"]  # a held-out image under another id
    path = str(write_parquet(tmp_path / "a.parquet", rows))
    stream = open_source(path, BatchSizes((0,), (10,)), 1, max_eval_samples=1)
    assert stream.validation["id"] == ["id-0"]
    assert stream.num_rows == 48  # twelve are held out, whatever --max_eval_samples says
    batches = list(steps_of(stream, tokenizer).batches(0, 48, Reader()))
    shown = Counter(image_id for batch in batches for image_id in batch["image_ids"])
    assert set(shown) == {f"id-{number}" for number in range(12, 60) if number not in (30, 40)}
    assert (min(shown.values()), sum(shown.values())) == (10, 480)  # others take their places
    assert {reason for batch in batches for reason in batch["skipped"]} == {
        f"shard {path}, row {row}: its image is one of validation's" for row in (30, 40)
    }


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_a_given_validation_file_is_read_and_nothing_is_held_out(suffix: str, tmp_path: Path) -> None:
    source = write_shards(tmp_path / "train", "tar", [20, 20])
    if suffix == "parquet":
        path = write_parquet(tmp_path / "v.parquet", rows_of(range(100, 110)))
    else:
        (tmp_path / "100.png").write_bytes(image_of(100))
        path = tmp_path / "v.jsonl"
        path.write_text(json.dumps({"image": "100.png", "caption": "a picture"}) + "\n")
    stream = open_source(source, groups=2, validation_file=str(path), max_eval_samples=3)
    assert len(stream.validation) == (3 if suffix == "parquet" else 1)
    assert {"id", "image", "captions"} <= set(stream.validation.column_names)
    assert stream.num_rows == 40


def test_shards_of_one_row_can_be_held_out(tmp_path: Path) -> None:
    stream = open_source(write_shards(tmp_path, "tar", [1] * 20), BatchSizes((0,), (4,)), groups=2)
    assert (len(stream.validation), stream.num_rows) == (4, 16)


def test_rows_without_an_id_are_known_by_their_bytes(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = [{"image": row["image"], "captions": row["captions"]} for row in rows_of([*range(30), 29])]
    table = datasets.Dataset.from_list(rows)
    table.to_parquet(tmp_path / "a.parquet")
    stream = open_source(str(tmp_path / "a.parquet"), BatchSizes((0,), (25,)), 1)
    batch = next(steps_of(stream, tokenizer).batches(0, 1, Reader()))
    image_ids: list[str] = batch["image_ids"]
    (repeated,) = [image_id for image_id, count in Counter(image_ids).items() if count > 1]
    same = batch["ids"][[image_id == repeated for image_id in image_ids]].tolist()
    assert same == [[image_key(repeated), same[0][1]]] * 2
    assert same[0][1] in (caption_key(caption_of(29)), caption_key(caption_of(29) + " so"))


def test_a_damaged_shard_costs_its_own_rows_only(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    source = write_shards(tmp_path, "tar", [40, 40])
    stream = open_source(source, BatchSizes((0,), (10,)), 2)
    steps = steps_of(stream, tokenizer)
    before = [content(batch) for batch in steps.batches(0, 7, Reader())]
    broken = tmp_path / "001.tar"
    os.truncate(broken, broken.stat().st_size // 2)
    after = list(steps.batches(0, 7, Reader()))
    shard_of = {slot.position: slot.shard for step in range(7) for slot in stream.order.batch(step)}
    lost = replaced = 0
    for old, batch in zip(before, after, strict=True):
        new = content(batch)
        assert [pair for pair in old if shard_of[pair[0]] == 0] == [pair for pair in new if shard_of[pair[0]] == 0]
        stand_ins = [pair for pair in new if pair not in old]
        assert {shard_of[position] for position, *_ in stand_ins} <= {1}
        assert len(new) - len(stand_ins) + len(batch["skipped"]) == 10
        replaced += len(stand_ins)
        lost += len(batch["skipped"])
    assert 0 < lost < 40
    assert 0 < replaced < lost  # of a block that is lost as a whole, nothing is left to stand in
    resumed = [content(batch) for batch in steps.batches(4, 7, Reader())]
    assert resumed == [content(batch) for batch in after[4:]]


def test_a_large_file_is_cut_into_shards_so_that_distant_rows_meet(tmp_path: Path) -> None:
    path = write_parquet(tmp_path / "a.parquet", rows_of(range(300)), 10)
    stream = open_source(str(path), groups=0)
    assert stream.order.groups == len(stream.shards) > 30
    first = [stream.shards[slot.shard].first + slot.row for slot in stream.order.batch(0)]
    assert max(first) - min(first) > 100


def test_captions_for_the_tokenizer_leave_validation_out(streams: dict[str, Stream]) -> None:
    stream = streams["parquet"]
    captions = list(stream.captions())
    assert {caption.removesuffix(" so") for caption in captions} == {
        caption_of(number) for number in range(ROWS) if f"id-{number}" not in stream.validation["id"]
    }
    few = list(stream.captions(20))
    assert len(few) == 20
    assert set(few) <= set(captions)


def test_the_fingerprint_changes_with_the_rows(
    sources: dict[str, str], streams: dict[str, Stream], tmp_path: Path
) -> None:
    assert open_source(sources["parquet"]).fingerprint == streams["parquet"].fingerprint
    other = write_shards(tmp_path, "parquet", [*SIZES[:-1], SIZES[-1] - 1])
    assert open_source(other).fingerprint != streams["parquet"].fingerprint


def test_the_fingerprint_changes_with_the_pairs_of_a_shard_of_as_many_rows(tmp_path: Path) -> None:
    others = range(1000, 1000 + SIZES[2])
    for kind in ("parquet", "tar"):
        source = write_shards(tmp_path / kind, kind, SIZES)
        before = open_source(source)
        assert open_source(source).fingerprint == before.fingerprint
        shard = tmp_path / kind / f"002.{kind}"
        size = shard.stat().st_size
        numbered_shards.write_tar(shard, others) if kind == "tar" else write_parquet(shard, rows_of(others))
        after = open_source(source)
        assert [each.rows for each in after.shards] == [each.rows for each in before.shards]
        assert kind != "tar" or shard.stat().st_size == size
        assert after.fingerprint != before.fingerprint


def test_only_the_first_rows_are_streamed_on_request(sources: dict[str, str]) -> None:
    assert open_source(sources["tar"], groups=1, max_train_samples=33).num_rows == 33


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({}, "--streaming is set; it needs shards"),
        ({"train_file": "no/such-*.tar"}, r"shard no/such-\*.tar cannot be opened .* Check its address"),
        ({"train_file": "pairs.jsonl"}, "pairs.jsonl cannot be streamed, only .parquet"),
        ({"dataset_name": "no/such"}, "--dataset_name is no/such; it could not be found"),
        ({"train_file": "a.tar", "test_file": "b.tar"}, "--test_file is b.tar; a stream has no test split"),
        ({"dataset_dir": "somewhere"}, "--streaming is set; it needs shards"),
        ({"dataset_name": "sounds"}, "--streaming is set; sounds is made on this machine .* Drop --streaming"),
        ({"dataset_name": "clips"}, "--streaming is set; clips is made on this machine .* Drop --streaming"),
    ],
)
def test_a_source_that_cannot_be_streamed_is_refused_in_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_stream(DataArguments(**given), StreamingArguments(True), SCHEDULE, 0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "message"),
    [({"stream_interleave": -1}, "stream_interleave"), ({"shuffle_block_size": 0}, "shuffle_block_size")],
)
def test_flags_are_checked(given: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingArguments(True, **given)


def test_shards_without_captions_are_refused(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"image": b"x", "number": 1}] * 30).to_parquet(tmp_path / "a.parquet")
    with pytest.raises(ValueError, match="no caption column was recognised"):
        open_source(str(tmp_path / "a.parquet"))
    members = [(f"{number}.png", image_of(number)) for number in range(30)]
    with pytest.raises(ValueError, match=r"none of its first samples can be used .* has no caption among its members"):
        open_source(write_tar(tmp_path / "a.tar", members))


def test_a_data_set_of_shards_in_a_folder_has_its_splits(tmp_path: Path) -> None:
    write_parquet(tmp_path / "train-00000.parquet", rows_of(range(30)))
    write_parquet(tmp_path / "validation-00000.parquet", rows_of(range(40, 45)))
    stream = open_source(str(tmp_path), groups=1)
    assert (stream.num_rows, len(stream.validation)) == (30, 5)
    write_shards(tmp_path / "tars", "tar", [20, 20])
    assert open_source(str(tmp_path / "tars"), groups=2).num_rows == 32
