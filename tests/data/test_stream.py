"""Streams from end to end, for any number of readers and after a restart; and their shards, damaged or not."""

import errno
import json
import os
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from mm_utils import distributed
from mm_utils.data import media
from mm_utils.data.arguments import DataArguments, LoaderArguments
from mm_utils.data.batches.dataset import Collator, Pairs, TrainingTransform
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.rows import tars
from mm_utils.data.rows.source import Source
from mm_utils.data.streams import shards as shard_files
from mm_utils.data.streams.order import InterleavedOrder
from mm_utils.data.streams.shards import Shard, ShardReader, check_columns, count_shards, expand, rows_from
from mm_utils.data.streams.stream import Stream, StreamLoader, open_stream
from mm_utils.model.processor import train_tokenizer
from tests.kit import numbered_shards as shards
from tests.kit.numbered_rows import pairs_of
from tests.kit.reading import write_tar

pytestmark = pytest.mark.usefixtures("own_cache")
SIZES = [30, 22, 41, 9, 38, 20]
SCHEDULE = BatchSizes((0, 5), (12, 20))
IMAGE = media.Image(8, min_crop_area=0.5)
KINDS = ("tar", "one file")


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer(
        [shards.caption_of(number) for number in range(300)] + ["so number 1 2 3 4 5 6 7 8 9 0"], 300
    )


def opened(source: str, sizes: BatchSizes = SCHEDULE, groups: int = 4, **flags: Any) -> Stream:
    flags["dataset_name" if Path(source).is_dir() else "train_file"] = source
    return open_stream(DataArguments(**flags), sizes, 3, groups, 8)


def steps_of(stream: Stream, tokenizer: PreTrainedTokenizerFast) -> StreamLoader:
    arguments = LoaderArguments(16, dataloader_num_workers="0")
    return StreamLoader(stream, Loaders(arguments, torch.device("cpu"), 0, IMAGE), tokenizer, 3, 9)


def batches_of(steps: StreamLoader, start: int, stop: int, part: int = 0, parts: int = 1) -> list[dict[str, Any]]:
    collate = Collator(0, IMAGE, longest_first=True)
    return [collate(steps.examples(step, part, parts)) for step in range(start, stop)]


@pytest.fixture(scope="module", params=KINDS)
def case(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[Stream, datasets.Dataset]]:
    """A stream, and the rows of its shards in one table on disk."""
    folder = tmp_path_factory.mktemp("shards")
    kind = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        rows = datasets.Dataset.from_list(shards.rows_of(range(sum(SIZES))), features=shards.FEATURES)
        if kind == "tar":  # whose samples have one caption
            rows = rows.map(lambda row: {"captions": row["captions"][:1]})
        if kind == "one file":
            source = str(shards.write_parquet(folder / "a.parquet", shards.rows_of(range(sum(SIZES)))))
        else:
            source = shards.write_shards(folder, kind, SIZES)
        yield opened(source), rows


def content(batch: dict[str, Any]) -> list[tuple[Any, ...]]:
    """Every pair of a batch by itself, without padding, in a fixed order."""
    return sorted(pairs_of(batch))


def test_examples_are_those_of_a_set_on_disk_and_every_image_comes_once_an_epoch(
    case: tuple[Stream, datasets.Dataset], tokenizer: PreTrainedTokenizerFast
) -> None:
    stream, rows = case
    steps = steps_of(stream, tokenizer)
    sizes = stream.order.sizes
    last = sizes.step_of(2 * stream.order.num_rows) + 1
    straight = batches_of(steps, 0, last)
    held = stream.validation["id"]
    assert len(held) == min(30, len(rows) // 5)
    pairs = Pairs(tokenize_captions(rows, tokenizer, 16), TrainingTransform(IMAGE, seed=3))
    places = {name: at for at, name in enumerate(rows["id"])}
    shown = [[], [], []]
    for step, batch in enumerate(straight):
        epochs = {slot.position: slot.epoch for slot in stream.order.batch(step)}
        drawn = [epochs[position] for position in batch["rows"].tolist()]
        for name, epoch in zip(batch["image_ids"], drawn, strict=True):
            shown[epoch].append(name)
        draws = [(places[name], epoch) for name, epoch in zip(batch["image_ids"], drawn, strict=True)]
        expected = Collator(0, IMAGE, longest_first=True)(pairs.__getitems__(draws))
        assert (len(batch["rows"]), batch["skipped"]) == (sizes.at(step), [])
        for name in ("pixel_values", "input_ids", "attention_mask", "ids", "lengths", "all_input_ids"):
            assert torch.equal(torch.as_tensor(batch[name]), torch.as_tensor(expected[name])), name
    assert sorted(shown[0]) == sorted(shown[1]) == sorted(set(rows["id"]) - set(held))
    assert shown[0] != shown[1]


# -- rows that cannot be used --------------------------------------------------------------------------------------


@given(start=st.integers(0, 5), parts=st.integers(1, 12), bad=st.sets(st.integers(0, 79)))
@settings(max_examples=6)
def test_another_row_of_its_block_takes_the_place_of_a_bad_one_the_same_for_any_parts(
    start: int,
    parts: int,
    bad: set[int],
    tmp_path_factory: pytest.TempPathFactory,
    tokenizer: PreTrainedTokenizerFast,
) -> None:
    folder = tmp_path_factory.mktemp("bad")
    rows = shards.rows_of(range(80))
    for number in bad:
        broken = rows[number]["image"]["bytes"][:40]
        faults = [{"captions": [" "]}, {"image": {"bytes": None}}, {"image": {"bytes": broken}}]
        rows[number] |= faults[number % 3]
    for place in range(4):
        shards.write_parquet(folder / f"{place}.parquet", rows[20 * place : 20 * place + 20])
    (folder / "validation").mkdir()
    validation = str(shards.write_parquet(folder / "validation" / "a.parquet", shards.rows_of(range(200, 204))))
    stream = opened(str(folder / "*.parquet"), BatchSizes((0,), (23,)), validation_file=validation)
    assert stream.order.num_rows == 80  # nothing is held out
    steps = steps_of(stream, tokenizer)
    straight = batches_of(steps, 0, start + 2)
    for step, batch in enumerate(straight):
        slots = {slot.position: slot for slot in stream.order.batch(step)}
        shard_of = {position: stream.shards[slot.shard] for position, slot in slots.items()}
        drawn = {
            position: 20 * int(Path(shard.url).stem) + shard.first + slots[position].row
            for position, shard in shard_of.items()
        }
        assert len(batch["skipped"]) == sum(number in bad for number in drawn.values())
        for position, image_id in zip(batch["rows"].tolist(), batch["image_ids"], strict=True):
            number = int(image_id.removeprefix("id-"))
            assert number not in bad
            assert number == drawn[position] or (drawn[position] in bad and abs(number - drawn[position]) < 8)
    resumed = zip(*(batches_of(steps, start, start + 2, part, parts) for part in range(parts)), strict=True)
    for whole, parts in zip(straight[start:], resumed, strict=True):
        assert sorted(pair for part in parts for pair in pairs_of(part)) == content(whole)
        assert sorted(name for part in parts for name in part["skipped"]) == sorted(whole["skipped"])


def test_images_of_validation_are_kept_out_of_training(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    rows = shards.rows_of(range(60))
    rows[30]["id"] = "id-0"  # another image under an id that is held out
    rows[40]["image"] = rows[1]["image"]  # a held-out image under another id
    path = str(shards.write_parquet(tmp_path / "a.parquet", rows))
    stream = opened(path, BatchSizes((0,), (10,)), 1, max_eval_samples=1)
    # Twelve are held out, whatever is evaluated
    assert (stream.validation["id"], stream.order.num_rows) == (["id-0"], 48)
    batches = batches_of(steps_of(stream, tokenizer), 0, 48)
    shown = [image_id for batch in batches for image_id in batch["image_ids"]]
    assert set(shown) == {f"id-{number}" for number in range(12, 60) if number not in (30, 40)}
    assert len(shown) == 480  # others take their places
    assert {reason for batch in batches for reason in batch["skipped"]} == {
        f"shard {path}, row {row}: its image is one of validation's" for row in (30, 40)
    }
    said = {caption.removesuffix(" so") for caption in stream.captions()}
    assert said == {rows[number]["captions"][0] for number in range(12, 60) if number not in (30, 40)}
    assert len(list(stream.captions(20))) == 20


def test_more_processes_than_groups_end_the_run(
    tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = opened(shards.write_shards(tmp_path, "tar", [40, 40]), BatchSizes((0,), (10,)), groups=2)
    monkeypatch.setattr(distributed, "world_size", lambda: 3)
    with pytest.raises(ValueError, match="the stream has 2 groups of shards, and 3 processes train"):
        steps_of(stream, tokenizer)


# -- sources ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_fingerprint_changes_with_rows_sizes_and_content(kind: str, tmp_path: Path) -> None:
    source = shards.write_shards(tmp_path, kind, SIZES)
    before = opened(source)
    assert opened(source).fingerprint == before.fingerprint
    shard = tmp_path / f"002.{kind}"
    others = range(1000, 1000 + SIZES[2])
    size = shard.stat().st_size
    shards.write_tar(shard, others) if kind == "tar" else shards.write_parquet(shard, shards.rows_of(others))
    assert kind != "tar" or shard.stat().st_size == size
    after = opened(source)
    assert [each.rows for each in after.shards] == [each.rows for each in before.shards]
    assert after.fingerprint != before.fingerprint
    shard.unlink()
    assert opened(source).fingerprint not in (before.fingerprint, after.fingerprint)


@pytest.mark.parametrize("whole", [10**9, 0])
def test_a_change_in_the_middle_is_read_and_another_stream(
    whole: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shard_files, "_WHOLE", whole)
    streams = []
    for text in (b"text 1", b"text 2"):
        texts = {20: text}
        members = [(f"{at:02}.{end}", bytes(9000) if end == "png" else texts.get(at, b"text 0"))
                   for at in range(40) for end in ("png", "txt")]  # fmt: skip
        path = str(write_tar(tmp_path / "a.tar", members))
        streams.append(opened(path, validation_file=path))
    assert streams[0].fingerprint != streams[1].fingerprint
    assert [stream.validation[20]["captions"] for stream in streams] == [["text 1"], ["text 2"]]


def test_a_large_file_is_cut_into_shards_so_that_distant_rows_meet(tmp_path: Path) -> None:
    stream = opened(str(shards.write_parquet(tmp_path / "a.parquet", shards.rows_of(range(300)), 10)), groups=64)
    first = [stream.shards[slot.shard].first + slot.row for slot in stream.order.batch(0)]
    assert stream.order.groups == len(stream.shards) > 30
    assert max(first) - min(first) > 100


def test_all_parts_of_a_split_are_read_and_another_split_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    numbers = {"train": range(30), "restval": range(30, 50), "dev": range(50, 55), "val": range(55, 58), "extra": [60]}
    rows = {
        split: datasets.Dataset.from_list(shards.rows_of(each), shards.FEATURES) for split, each in numbers.items()
    }
    datasets.DatasetDict(rows).save_to_disk(tmp_path / "saved")
    stream = opened(str(tmp_path / "saved"), groups=2)
    assert (stream.order.num_rows, len(stream.validation)) == (50, 8)
    assert "its split extra is none of train, validation, test, and is not read" in caplog.text
    address = shards.in_memory(tmp_path / "saved")  # as of a store, where the folders of splits have their usual names
    remote = open_stream(DataArguments(dataset_name=address), BatchSizes((0,), (2,)), 0, 2, 8)
    assert remote.order.num_rows + len(remote.validation) == 30
    with pytest.raises(ValueError, match="memory://nothing; it has no training shards"):
        open_stream(DataArguments(dataset_name="memory://nothing"), SCHEDULE, 0)
    names = {"train-0": "train", "TRAINING/1": "restval", "Val/0": "dev", ".hidden/train-1": "extra"}
    for name, split in names.items():
        (path := tmp_path / "folder" / f"{name}.parquet").parent.mkdir(parents=True, exist_ok=True)
        empty = [{**row, "captions": [""]} for row in shards.rows_of(range(split == "dev"))]
        shards.write_parquet(path, [*shards.rows_of(numbers[split]), *empty])
    stream = opened(str(tmp_path / "folder"), groups=1)
    assert (stream.order.num_rows, len(stream.validation)) == (50, 5)
    assert "1 rows of validation cannot be used, such as shard" in caplog.text
    assert "1 hidden folders and files" in caplog.text


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({}, "--streaming is set; the embedded scenes have no shards"),
        ({"train_file": "no/such-*.tar"}, r"shard no/such-\*.tar cannot be opened .* Check the path"),
        ({"train_file": "pairs.jsonl"}, "pairs.jsonl cannot be streamed, only .parquet"),
        ({"train_file": "a.tar", "image_root": "x"}, "--image_root is x; images are read from the shards"),
        ({"train_file": "a.tar", "image_column": "x"}, "image_column=x; the format webdataset does not read that"),
        ({"dataset_name": "no/such"}, "--dataset_name is no/such; it could not be loaded"),
    ],
)
def test_a_source_that_cannot_be_streamed_is_refused_in_one_line(flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        open_stream(DataArguments(**flags), SCHEDULE, 0)
    assert "\n" not in str(caught.value)


# -- the order, against a plain reference that lists all rows of an epoch -----------------------------------------------
@st.composite
def orders(draw: st.DrawFn) -> InterleavedOrder:
    rows = draw(st.lists(st.integers(1, 30), min_size=1, max_size=12).filter(lambda rows: sum(rows) >= 2))
    small = draw(st.integers(2, min(9, sum(rows))))
    large = draw(st.integers(small, min(17, sum(rows))))
    sizes = BatchSizes((0, draw(st.integers(1, 9))), (small, large))
    return InterleavedOrder(
        rows, sizes, draw(st.integers(0, 2**31)), draw(st.integers(1, len(rows))), draw(st.integers(1, 12))
    )


def plain_epoch(order: InterleavedOrder, epoch: int) -> list[tuple[int, int]]:
    """Shard and row of all draws: the groups filled one shard after the other, then sorted by where their rows stand."""
    groups = [[] for _ in range(order.groups)]
    for shard in np.random.default_rng([order.seed, epoch]).permutation(len(order.rows)).tolist():
        least = min(groups, key=len)
        rows = list(range(order.rows[shard]))
        for block, first in enumerate(range(0, len(rows), order.block_size)):
            inside = rows[first : first + order.block_size]
            shuffled = np.random.default_rng([order.seed, epoch, shard, block]).permutation(len(inside))
            least += [(shard, inside[place]) for place in shuffled]
    placed = [
        ((turn + 0.5) / len(rows), group, row) for group, rows in enumerate(groups) for turn, row in enumerate(rows)
    ]
    return [row for _, _, row in sorted(placed)]


@given(orders(), st.integers(0, 20))
def test_any_step_is_that_part_of_the_epochs_one_after_the_other(order: InterleavedOrder, step: int) -> None:
    first = order.sizes.before(step)
    size = order.sizes.at(step)
    epochs = range(first // order.num_rows, (first + size) // order.num_rows + 1)
    listed = [(epoch, *row) for epoch in epochs for row in plain_epoch(order, epoch)]
    begin = first - epochs[0] * order.num_rows
    slots = pickle.loads(pickle.dumps(order)).batch(step)
    assert [(slot.epoch, slot.shard, slot.row) for slot in slots] == listed[begin : begin + size]
    assert [slot.position for slot in slots] == list(range(first, first + size))


def test_a_stream_of_many_billion_rows_is_found_at_once() -> None:
    order = InterleavedOrder([10**8 + shard for shard in range(64)], BatchSizes((0,), (4096,)), 0, 64, 256)
    slots = order.batch(order.num_rows // 4096 - 2)
    assert len({(slot.shard, slot.row) for slot in slots}) == 4096
    assert len({slot.group for slot in slots}) == 64


# -- shards ------------------------------------------------------------------------------------------------------------
SOURCE = Source("shards", medium="image")


def numbers_in(rows: list[Any]) -> list[int]:
    """Return the numbers that the images show, each checked against its caption; -1 for a row that is lost."""
    known = {shards.image_of(number): number for number in range(60)}
    found = [known[row["image"]["bytes"]] if isinstance(row, dict) else -1 for row in rows]
    assert all(
        number < 0 or row["captions"][0] == shards.caption_of(number) for number, row in zip(found, rows, strict=True)
    )
    return found


@pytest.mark.parametrize("place", ["disk", "server"])
@pytest.mark.parametrize("kind", ["parquet", "arrow", "tar"])
def test_rows_are_counted_and_read_from_any_row_on_in_any_order(kind: str, place: str, tmp_path: Path) -> None:
    source = shards.write_shards(tmp_path, kind, [30])
    path = next(Path(source).glob("train/*.arrow")) if kind == "arrow" else tmp_path / f"000.{kind}"
    url = f"{shards.in_memory(path.parent)}/{path.name}" if place == "server" else str(path)
    assert count_shards([url]) == [Shard(url, 0, 30)]
    check_columns(url, Source("shards"))
    for first in (0, 1, 4, 17, 29, 30):
        assert numbers_in(list(rows_from(url, first, SOURCE))) == list(range(first, 30))
    reader = ShardReader([Shard(url, 0, 10), Shard(url, 10, 20)], SOURCE)
    for shard, start, stop in ((0, 3, 7), (0, 7, 10), (1, 0, 20), (0, 3, 7), (0, 3, 7), (1, 5, 5), (1, 19, 20)):
        assert numbers_in(reader.read(shard, start, stop)) == list(range(10 * shard + start, 10 * shard + stop))


def test_files_are_counted_by_what_lies_beside_them_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = fsspec.filesystem("memory")
    stats = b'{"successes": 12}'

    def by_name(self, path, version_id=None, start=0, end=None):
        return self.open(path, "rb").read()[start:end] if version_id is None else pytest.fail("as s3fs has it")

    monkeypatch.setattr(type(files), "cat_file", by_name)
    files.pipe({"/counted/a.tar": b"never opened", "/counted/a_stats.json": stats, "/counted/b.tar": b"none"})
    assert [shard.rows for shard in count_shards(["memory://counted/a.tar", "memory://counted/b.tar"])] == [12]
    path = str(shards.write_tar(tmp_path / "a.tar", range(5)))
    assert count_shards([path])[0].rows == 5
    with monkeypatch.context() as patch:
        patch.setattr(shard_files, "count_rows", None)
        assert count_shards([path])[0].rows == 5
    shards.write_tar(tmp_path / "a.tar", range(7))
    assert count_shards([path])[0].rows == 7


def test_patterns_find_files(tmp_path: Path) -> None:
    assert expand("https://host/x.parquet?download=true") == ["https://host/x.parquet?download=true"]
    shards.write_shards(tmp_path, "tar", [1, 1])
    for place in (str(tmp_path), f"file://{tmp_path}"):
        assert expand(f"{place}/*.tar") == [f"{place}/000.tar", f"{place}/001.tar"]
    assert expand(str(tmp_path / "*.zip")) == [str(tmp_path / "*.zip")]  # to be named by whoever opens it


# -- damage ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["parquet", "tar"])
def test_the_rows_lost_to_damage_do_not_depend_on_the_first_row_read(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tar of 30 samples is cut off in the middle; of a Parquet file, the images of rows 16 to 19 are overwritten."""
    shards.write_shards(tmp_path, kind, [30])
    path = tmp_path / f"000.{kind}"
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(4).column(0).data_page_offset if kind == "parquet" else 0
    content[start : start + 40] = bytes(40)
    path.write_bytes(content if start else path.read_bytes()[: len(content) // 2])
    shard = [Shard(str(path), 0, 30)]
    straight = ShardReader(shard, SOURCE)
    whole = [straight.read(0, start, start + 5) for start in range(0, 30, 5)]
    fresh = [ShardReader(shard, SOURCE).read(0, start, start + 5) for start in range(0, 30, 5)]
    assert list(map(numbers_in, whole)) == list(map(numbers_in, fresh))
    found = [number for rows in whole for number in numbers_in(rows)]
    first = found.index(-1)
    assert found == [*range(first), *([-1] * 4 + [*range(20, 30)] if kind == "parquet" else [-1] * (30 - first))]
    assert 10 <= first <= 16
    reason = str(whole[first // 5][first % 5])
    assert reason.startswith(f"shard {path} cannot be read from row {first} on: ")
    assert reason in caplog.text


def test_a_damaged_header_is_not_the_end_of_a_tar(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The standard library takes it for one, in silence."""
    path = shards.write_tar(tmp_path / "a.tar", range(30))
    content = bytearray(path.read_bytes())
    header = content.index(b"samples/", len(content) // 2 // 512 * 512)
    content[header : header + 100] = b"\xff" * 100
    path.write_bytes(content)
    good = shards.write_tar(tmp_path / "b.tar", range(30, 33))
    assert count_shards([str(path), str(good)]) == [Shard(str(good), 0, 3)]
    assert "a.tar cannot be read and is left out" in caplog.text
    lost = ShardReader([Shard(str(path), 0, 30)], SOURCE).read(0, 25, 30)
    assert all(isinstance(row, str) and "the end marker is missing" in row for row in lost)
    with pytest.raises(ValueError, match="1 of 1 shards cannot be read"):
        count_shards([str(path)])


@pytest.mark.parametrize("suffix", ["tar", "parquet", "arrow"])
def test_a_pipe_is_no_shard(suffix: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It would be waited for without end, at the start and where it takes the place of a shard during the run."""
    good = [shards.write_tar(tmp_path / f"{name}.tar", range(3)) for name in "ab"]
    os.mkfifo(tmp_path / f"c.{suffix}")
    found = count_shards([*map(str, good), str(tmp_path / f"c.{suffix}")])
    assert [shard.rows for shard in found] == [3, 3]
    assert "it is not a regular file" in caplog.text
    good[0].unlink()
    os.mkfifo(good[0])
    assert "it is not a regular file" in str(ShardReader(found, SOURCE).read(0, 0, 3)[0])


def test_a_lost_disk_stops_the_run_and_a_disk_error_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = shards.write_tar(tmp_path / "a.tar", range(3))
    usual = shard_files.regular_file
    pauses = []
    reader = ShardReader([Shard(str(path), 0, 3)], SOURCE)
    errors = [errno.EIO, errno.ESTALE, errno.EBUSY]

    def faltering(url):
        if errors:
            raise OSError(errors.pop(), "in a bad moment", url)
        return usual(url)

    monkeypatch.setattr(shard_files, "regular_file", faltering)
    monkeypatch.setattr(time, "sleep", pauses.append)
    assert numbers_in(reader.read(0, 0, 3)) == [0, 1, 2]
    assert pauses == [1, 4, 16]
    errors += [errno.EIO] * 9
    again = ShardReader([Shard(str(path), 0, 3)], SOURCE).read(0, 0, 3)
    assert again == [f"shard {path} cannot be read from row 0 on: OSError: [Errno 5] in a bad moment: '{path}'"] * 3
    errors.clear()
    path.unlink()
    with pytest.raises(ValueError, match=r"a\.tar cannot be opened"):
        reader.read(0, 1, 3)


# -- rows --------------------------------------------------------------------------------------------------------------
def test_rows_follow_the_rules_of_preparing_or_give_their_place_and_the_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = str(tmp_path / "s.parquet")
    raw = {"bytes": b"bytes", "path": "raw:1x1"}  # which says the size of stored pixels
    good = {"image": raw, "caption": ["a", None, " ", "b", "a"], "id": "7", "split": "test"}
    changes = [
        ({}, ""), ({"id": "8", "image": None}, "image_missing: the image is not in the shard"),
        ({"image": {"bytes": None, "path": "/etc/passwd"}}, "the image is not in the shard"),
        ({"caption": [" "]}, "caption_empty"), ({"id": None}, "id, the id, is empty"),
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist([{**good, **changed} for changed, _ in changes]), path)
    first, *others = rows_from(path, 0, SOURCE)
    assert first == {"id": "7", "image": raw, "captions": ["a", "b"]}
    for at, (row, (_, reason)) in enumerate(zip(others, changes[1:], strict=True), start=1):
        assert str(row).startswith(f"shard {path}, row {at}: ")
        assert reason in str(row)
    check_columns(path, Source("shards"))
    assert "rows whose column split says another one than" in caplog.text
    assert str(next(rows_from(path, 0, Source("shards", file_split="train")))).endswith("of another split")
    pq.write_table(pa.Table.from_pylist([{"pixels": data, "text": "a"} for data in (b"x", b"x", b"y")]), path)
    one, same, other = (row["id"] for row in rows_from(path, 0, SOURCE) if isinstance(row, dict))
    assert one == same != other  # of the bytes
    monkeypatch.setattr(tars, "MOST_BYTES", 40)
    described = json.dumps({"image_id": 5, "caption": ["one", "zwei"], "split": "odd"}).encode()
    members = [("0.png", b"x"), ("0.json", described), ("1.png", bytes(50)), ("1.txt", b"a")]
    path = write_tar(tmp_path / "s.tar", members)
    row, large = rows_from(path, 0, Source("shards", medium="image", split="train"))
    assert isinstance(row, dict)
    assert (row["id"], row["captions"]) == ("5", ["one", "zwei"])
    assert str(large).startswith(f"shard {path}, row 1: too_many_bytes")
