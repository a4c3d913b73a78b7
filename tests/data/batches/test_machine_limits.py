"""Data workers find room in shared memory and in the table of open files, or the run says so at its start."""

import os
import resource
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mm_utils import distributed
from mm_utils.data import media
from mm_utils.data.batches.loaders import LoaderArguments, Loaders, check_loading
from mm_utils.data.batches.order import EQUAL_SHARES, Division

CPU = torch.device("cpu")
BATCH = 3 * 224**2 * 64  # bytes of 64 images


def with_workers(count: str, size: int = 224) -> Loaders:
    return Loaders(LoaderArguments(dataloader_num_workers=count), CPU, 0, media.Image(size))


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Leave this many bytes of shared memory free."""

    def leave(free: int) -> None:
        monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_bavail=free, f_frsize=1))

    return leave


def test_few_open_files(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 256))
    free(2**40)
    check_loading(with_workers("0"), 64, 64)
    assert not caplog.text
    check_loading(with_workers("2"), 64, 64)
    assert "ulimit -n is 256; data workers" in caplog.text
    caplog.clear()
    check_loading(with_workers("0"), 64, 64, streaming=True)
    assert "ulimit -n is 256" in caplog.text
    monkeypatch.setattr(resource, "getrlimit", lambda _: (40, 40))
    check_loading(with_workers("0"), 64, 64)
    with pytest.raises(ValueError, match=r"^ulimit -n is 40; data workers .* or pass --dataloader_num_workers 0"):
        check_loading(with_workers("2"), 64, 64)


STREAMED = {"streaming": True}
MEMORY: list[tuple[int, str, tuple[int, int], dict[str, Any], int, str, str]] = [
    # bytes that are free, workers, pairs of a step and of an evaluation, more, processes, error, warning
    (64 * 2**20, "0", (256, 256), {}, 1, "", ""),
    (64 * 2**20, "4", (256, 256), {}, 1, r"^/dev/shm has 64.0 MiB free; 4 data workers .* --dataloader_num_workers 0.$", ""),
    (9 * BATCH, "2", (64, 64), {}, 1, "", "--shm-size=1g, or pass --dataloader_num_workers 1."),
    (24 * BATCH, "2", (64, 64), {}, 1, "", ""),
    (24 * BATCH, "2", (64, 64), {}, 8, "2 data workers in each of 8 processes", ""),
    (320 * BATCH, "8", (1024, 1), {}, 1, "/dev/shm", ""),
    (320 * BATCH, "8", (1024, 1), STREAMED, 1, "", ""),  # all workers make one batch together
]  # fmt: skip


@pytest.mark.parametrize(("room", "workers", "sizes", "more", "processes", "error", "warning"), MEMORY)
def test_shared_memory(
    room: int, workers: str, sizes: tuple[int, int], more: dict[str, Any], processes: int, error: str, warning: str,
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    free(room)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(processes))
    with pytest.raises(ValueError, match=error) if error else nullcontext():
        check_loading(with_workers(workers), *sizes, **more)
    assert warning in caplog.text
    assert bool(caplog.text) == bool(warning)


def test_auto_takes_the_workers_that_find_room(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(distributed, "cores_per_process", lambda: 9)
    free(3 * 8 * BATCH + 1000)
    made = with_workers("auto")
    assert made.workers == 8
    check_loading(made, 64, 64)
    assert made.workers == 3
    assert "so there will be 3." in caplog.text


def test_batches_of_all_media_wait_at_the_same_time(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    free(
        23 * BATCH
    )  # 2 workers have 8 batches of training ahead, and 8 of evaluation, which the media do not have at once
    check_loading(with_workers("2"), 64, 64)
    check_loading(with_workers("2"), 64, 64, others=[with_workers("2", size=32)])
    assert not caplog.text
    check_loading(with_workers("2"), 64, 64, others=[with_workers("2")])
    assert "4 data workers" in caplog.text
    assert "or pass --dataloader_num_workers 2." in caplog.text
    monkeypatch.setattr(distributed, "cores_per_process", lambda: 5)
    parts = [with_workers("auto"), with_workers("auto")]
    check_loading(parts[0], 64, 64, others=parts[1:])
    assert [part.workers for part in parts] == [1, 1]
    with pytest.raises(ValueError, match="24 data workers"):
        check_loading(with_workers("8"), 64, 64, others=[with_workers("8"), with_workers("8")])


def test_the_rows_that_a_division_assigns_to_this_machine_count(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 processes, 2 on each of 2 machines, of which the first has all rows."""
    monkeypatch.setattr(distributed, "world_size", lambda: 4)
    for name, value in (("LOCAL_WORLD_SIZE", 2), ("LOCAL_RANK", 1)):
        monkeypatch.setenv(name, str(value))
    loaders = with_workers("2")
    free(6 * BATCH)
    for rank in (1, 3):
        monkeypatch.setattr(distributed, "rank", lambda rank=rank: rank)
        loaders.division = EQUAL_SHARES
        check_loading(loaders, 64, 1)
        loaders.division = Division((1.0, 0.0, 0.0, 0.0))
        if rank == 3:
            check_loading(loaders, 64, 1)
        else:
            with pytest.raises(ValueError, match="2 data workers in each of 2 processes"):
                check_loading(loaders, 64, 1)
