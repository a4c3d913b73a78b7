"""Data workers find room in shared memory and in the table of open files, or the run says so at its start."""

import os
import resource
from collections.abc import Callable
from types import SimpleNamespace

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


def test_little_shared_memory_is_an_error(free: Callable[[int], None], caplog: pytest.LogCaptureFixture) -> None:
    free(64 * 2**20)
    check_loading(with_workers("0"), 256, 256)
    check_loading(with_workers("1", size=32), 64, 64)
    assert not caplog.text
    with pytest.raises(
        ValueError, match=r"^/dev/shm has 64.0 MiB free; 4 data workers .* --dataloader_num_workers 0.$"
    ):
        check_loading(with_workers("4"), 256, 256)


def test_shared_memory_for_training_alone_is_a_warning(
    free: Callable[[int], None], caplog: pytest.LogCaptureFixture
) -> None:
    free(9 * BATCH)
    check_loading(with_workers("2"), 64, 64)
    assert "or pass --dataloader_num_workers 1." in caplog.text
    assert "--shm-size=1g" in caplog.text


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


def test_the_processes_of_a_machine_share_its_memory(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    free(24 * BATCH)
    check_loading(with_workers("2"), 64, 64)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    with pytest.raises(ValueError, match="2 data workers in each of 8 processes"):
        check_loading(with_workers("2"), 64, 64)


def test_a_streamed_batch_is_made_by_all_workers_together(free: Callable[[int], None]) -> None:
    free(20 * 3 * 224**2 * 1024)
    with pytest.raises(ValueError, match="/dev/shm"):
        check_loading(with_workers("8"), 1024, 1)
    check_loading(with_workers("8"), 1024, 1, streaming=True)


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


def test_the_rows_that_a_division_deals_to_this_machine_count(
    free: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 processes, 2 on each of 2 machines, of which the first has all images."""
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
