"""Loaders: workers and ranks change no batch, images are normalised on the device."""

import multiprocessing

import pytest
import torch
from datasets import disable_progress_bars
from torch.utils.data import DataLoader
from transformers import PreTrainedTokenizerFast

from mm_utils.arguments import parse_args
from mm_utils.data import media
from mm_utils.data.batches.loaders import DeviceLoader, LoaderArguments
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.batches.workers import end_workers, worker_loader
from tests.kit.numbered_rows import CPU, equal, loaders, rows_of

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [0, 1, 2])
def test_batches_stay_as_they_are_while_workers_go_on(workers: int, tokenizer: PreTrainedTokenizerFast) -> None:
    """Also when an iteration is broken off and another begins; with any number of workers."""
    rows = tokenize_captions(rows_of(broken=[3]), tokenizer, 16)
    order = GlobalOrder(12, BatchSizes((0,), (5,)), seed=3)
    loader = loaders(workers).train(rows, order, 0, 20)
    first = [batch for batch, _ in zip(loader, range(3), strict=False)]
    again = list(loader)
    assert len(again) == len(loader) == 20
    assert all(equal(*both) for both in zip(first, again, strict=False))
    assert all(equal(*both) for both in zip(again, loaders(0).train(rows, order, 0, 20), strict=True))


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_change_nothing_in_evaluation(tokenizer: PreTrainedTokenizerFast) -> None:
    rows = tokenize_captions(rows_of(12, broken=[3]), tokenizer, 16)
    found, expected = (list(loaders(workers).evaluation(rows, 5)) for workers in (2, 0))
    assert len(found) == 3
    assert all(equal(*both) for both in zip(found, expected, strict=True))


def test_images_are_normalised_on_the_device() -> None:
    mean, std = [0.485, 0.456, 0.406], [0.229, 0.224, 0.225]
    pixels = torch.randint(0, 256, (2, 3, 8, 8), dtype=torch.uint8)
    loader = DeviceLoader(
        DataLoader([{"pixel_values": pixels, "skipped": []}], batch_size=None), CPU, media.Image(4, mean, std)
    )
    [batch] = loader
    expected = (pixels / 255 - torch.tensor(mean).view(3, 1, 1)) / torch.tensor(std).view(3, 1, 1)
    torch.testing.assert_close(batch["pixel_values"], expected, rtol=1e-5, atol=1e-5)
    assert batch["pixel_values"].dtype == torch.float32
    assert len(loader) == 1


# -- arguments ----------------------------------------------------------------------------------------------------------
def test_workers_take_the_spare_cores_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mm_utils.distributed.available_cores", lambda: 8)
    assert LoaderArguments(dataloader_num_workers="3").num_workers == 3
    parsed = parse_args(LoaderArguments, argv=["--dataloader_num_workers", "5"])[LoaderArguments]
    assert parsed.num_workers == 5
    for local_ranks, expected in (("1", 7), ("2", 3), ("8", 0), ("64", 0)):
        monkeypatch.setenv("LOCAL_WORLD_SIZE", local_ranks)
        assert LoaderArguments().num_workers == expected
    monkeypatch.setattr("mm_utils.distributed.available_cores", lambda: 400)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    assert LoaderArguments().num_workers == 16


def test_workers_end_by_themselves_where_a_cycle_keeps_the_loader() -> None:
    """Torch's own end, of what is garbage, waits 5 seconds for each and then kills it. Killed workers: `tests/faults/test_loading.py`."""
    before = {*multiprocessing.active_children()}
    loader = worker_loader(list(range(4)), 2)
    loader.itself = loader  # type: ignore[attr-defined]
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    workers = [*{*multiprocessing.active_children()} - before]
    assert len(workers) == 2
    end_workers()
    assert [worker.exitcode for worker in workers] == [0, 0]
