"""Every reader yields every pair once and the right image, and what is measured of it is what it did. No time is judged."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.data.loading import CONTESTANTS
from benchmarks.rivals import pair_stores
from benchmarks.rivals.reader_bench import Bench, Task
from benchmarks.rivals.reader_process import Consumer, Process, epoch, fault, prepared_colours
from benchmarks.rivals.readers import READERS

IMAGES, BATCH, SIZE = 32, 8, 32
INSTALLED = [name for name in READERS if pair_stores.is_installed(name)]


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


def task(contestant: str, cache: Path, **changes) -> Task:
    common = {"train_file": None, "cache_dir": str(cache), "images": IMAGES, "batch_size": BATCH, "image_size": SIZE}
    return Task(contestant, **{**common, "num_workers": 0, **changes})


@pytest.fixture(scope="module")
def bench(cache: Path) -> Bench:
    return Bench(task("tandem_jpeg", cache))


def test_the_script_knows_all_readers() -> None:
    assert list(READERS) == CONTESTANTS.split(",")


@pytest.mark.parametrize("name", INSTALLED)
def test_a_reader_gives_every_pair_once_an_epoch_and_the_right_image(name: str, bench: Bench) -> None:
    rows, colours = epoch(READERS[name](bench), bench)
    assert sorted(rows) == list(range(IMAGES))
    assert fault(rows, colours, prepared_colours(bench)) is None


def test_workers_change_nothing(bench: Bench, cache: Path) -> None:
    with_workers = Bench(task("tandem_jpeg", cache, num_workers=2))
    alone, shared = (epoch(READERS["tandem_jpeg"](of), of) for of in (bench, with_workers))
    assert alone[0] == shared[0]
    assert np.array_equal(alone[1], shared[1])


@pytest.mark.parametrize(
    "name", sorted(name for name in set(INSTALLED) - {"datasets", "tandem_originals"} if "fixed" not in name)
)
def test_readers_of_one_encoding_give_the_same_pixels(name: str, bench: Bench) -> None:
    def colours_of(name: str) -> np.ndarray:
        rows, colours = epoch(READERS[name](bench), bench)
        return colours[np.argsort(rows)]

    like = "tandem_raw" if name in ("tandem_raw", "memmap") else "tandem_jpeg"
    assert np.array_equal(colours_of(name), colours_of(like))


def test_captions_come_with_their_image(bench: Bench) -> None:
    for name in ("datasets", "tandem_jpeg", "tandem_stream", "memmap"):
        batch = next(READERS[name](bench))
        assert batch["pixel_values"].shape == (BATCH, 3, SIZE, SIZE)
        for row, ids, mask in zip(batch["rows"].tolist(), batch["input_ids"], batch["attention_mask"], strict=True):
            assert ids[mask.bool()].tolist() == bench.tokens[row]


def test_a_reader_that_leaves_a_pair_out_or_swaps_images_is_found() -> None:
    expected = np.random.default_rng(0).uniform(0, 255, (8, 3))
    rows = list(range(7, -1, -1))
    assert fault(rows, expected[::-1] + 3, expected) is None
    assert "of 8 pairs, 1 did not come" in str(fault([*rows[:-1], 7], expected[::-1], expected))
    assert "of 8 pairs, 0 did not come" in str(fault([*rows, 3], expected[::-1], expected))
    assert "mean colours" in str(fault(rows, expected, expected))


def test_the_consumer_counts_what_comes_between_begin_and_end() -> None:
    batches = ({"pixel_values": torch.zeros(4, 3, 2, 2, dtype=torch.uint8)} for _ in range(100))
    consumer = Consumer(batches)
    turn = consumer.turn(5)
    assert (turn["images"], turn["moved"]) == (20, 20 * 12)
    assert turn["seconds"] > 0
    assert turn["cpu_seconds"] > 0
    assert sum(1 for _ in batches) == 100 - 5 - 2  # two to begin with, which are not counted


def test_the_process_checks_opens_and_takes_turns(cache: Path) -> None:
    process = Process()
    answer = process(vars(task("memmap", cache)))
    assert answer["pairs"] == IMAGES
    assert answer["bytes_per_pair"] > 0
    assert process({"check": True}) == {"fault": None}
    assert process({"open": True}).keys() == {"first_batch"}
    assert process({"batches": 3})["images"] == 3 * BATCH


def test_a_source_of_ones_own(tmp_path: Path) -> None:
    source = pair_stores.photographs(tmp_path / "mine", 12)
    rows = [json.loads(line) for line in source.read_text().splitlines()]
    source.write_text("".join(json.dumps({"image": row["image"], "caption": row["caption"]}) + "\n" for row in rows))
    mine = Bench(task("datasets", tmp_path / "cache", train_file=str(source), batch_size=4))
    assert mine.count in (8, 12)  # of 14, some are held out; batches are whole
    for name in ("datasets", "tandem_originals"):
        rows, colours = epoch(READERS[name](mine), mine)
        assert fault(rows, colours, prepared_colours(mine)) is None
