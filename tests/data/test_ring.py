"""Pixels that travel through the ring arrive as they were sent, for as long as is promised."""

import gc
import os
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from mm_utils.data import ring as ring_module
from mm_utils.data.ring import PixelRing

SIZE, PREFETCH = 4, 2
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


class Numbers(Dataset):
    """Image i has the value i everywhere."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> Tensor:
        if index == 200:
            os._exit(1)
        return torch.full((3, SIZE, SIZE), index, dtype=torch.uint8)


class Collate:
    def __init__(self, ring: PixelRing | None):
        self.ring = ring

    def __call__(self, images: list[Tensor]) -> dict[str, Any]:
        numbers = [int(image[0, 0, 0]) for image in images]
        return {"pixels": torch.stack(images) if self.ring is None else self.ring.stack(images), "numbers": numbers}


def loader(workers: int, count: int = 120, images: int = 3, **options: Any) -> DataLoader:
    ring = PixelRing.make(workers, PREFETCH, images, SIZE)
    assert (ring is None) == (workers == 0)
    return DataLoader(
        Numbers(),
        sampler=range(count),
        batch_size=3,
        num_workers=workers,
        collate_fn=Collate(ring),
        prefetch_factor=PREFETCH if workers else None,
        **options,
    )


def check(batch: dict[str, Any]) -> list[int]:
    assert batch["pixels"].shape == (len(batch["numbers"]), 3, SIZE, SIZE)
    assert batch["pixels"].dtype == torch.uint8
    for image, number in zip(batch["pixels"], batch["numbers"], strict=True):
        assert (image == number).all()
    return batch["numbers"]


def check_all(batches: Iterator[dict[str, Any]]) -> list[int]:
    return [number for batch in batches for number in check(batch)]


@pytest.mark.parametrize("persistent", [False, True])
@pytest.mark.parametrize("workers", [0, 1, 2, 3])
def test_what_is_sent_arrives(workers: int, persistent: bool) -> None:
    numbers = loader(workers, 110, persistent_workers=persistent and workers > 0)
    for _ in range(3):
        assert check_all(iter(numbers)) == list(range(110))


def test_pixels_lie_in_the_ring() -> None:
    numbers = loader(2)
    pixels = numbers.collate_fn.ring.pixels
    for batch in numbers:
        offset = batch["pixels"].data_ptr() - pixels.data_ptr()
        assert 0 <= offset < pixels.numel()
    assert pixels.is_shared()


@pytest.mark.parametrize("workers", [1, 2])
def test_a_batch_stays_until_its_workers_next_but_one_is_asked_for(workers: int) -> None:
    numbers = iter(loader(workers, persistent_workers=True))
    held = [next(numbers) for _ in range(2 * workers)]
    for batch in numbers:
        time.sleep(0.01)  # workers go as far ahead as they can
        held = [*held[1:], batch]
        for earlier in held[-2 * workers :]:
            check(earlier)


def test_iterations_that_are_broken_off() -> None:
    numbers = loader(2, persistent_workers=True)
    for stop in (1, 7, 2, 30):
        for place, batch in enumerate(numbers):
            check(batch)
            if place == stop:
                break
    assert check_all(iter(numbers)) == list(range(120))


def test_two_loaders_do_not_meet() -> None:
    one, other = iter(loader(2)), iter(loader(2))
    for batch, again in zip(one, other, strict=True):
        assert check(batch) == check(again)
        assert batch["pixels"].data_ptr() != again["pixels"].data_ptr()


def test_larger_batches_travel_as_ever() -> None:
    assert check_all(iter(loader(2, images=2))) == list(range(120))


def test_workers_that_are_spawned() -> None:
    assert check_all(iter(loader(1, 30, multiprocessing_context="spawn"))) == list(range(30))


def test_a_worker_that_dies_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="exited unexpectedly"):
        check_all(iter(loader(2, 240)))


def test_memory_is_given_back() -> None:
    numbers = loader(2)
    ring = weakref.ref(numbers.collate_fn.ring)
    next(iter(numbers))
    del numbers
    gc.collect()
    assert ring() is None


def test_scarce_memory_is_said_once(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(ring_module, "_free_shared_memory", lambda: 64_000_000)
    assert PixelRing.make(4, 4, 64, 224) is None
    [record] = caplog.records
    assert "0.1 GB of shared memory are free, and buffers for the loader's workers take 0.2 GB" in record.message
    assert "--shm-size" in record.message
    assert PixelRing.make(2, 4, 8, 32) is not None
    monkeypatch.setattr(ring_module, "_free_shared_memory", lambda: None)
    assert PixelRing.make(2, 4, 8, 32) is not None
