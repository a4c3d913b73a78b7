"""The number of workers is the smallest that is nearly as fast as the best; they end on request.

Killed workers: `tests/faults/test_loading.py`.
"""

import multiprocessing

import pytest
from torch.utils.data import DataLoader

from mm_utils.data.batches.workers import RestartingLoader, choose_workers, end_workers

RATES = {
    "as good as it gets with four": ({1: 100, 2: 190, 4: 300, 8: 310}, 4),
    "the more the better": ({1: 100, 2: 190, 4: 370, 8: 700, 12: 1000}, 12),
    "nearly the best is enough": ({1: 100, 2: 115, 4: 125}, 2),
    "one is enough": ({1: 100, 2: 105}, 1),
    "more only get in the way": ({1: 100, 2: 60}, 1),
}


@pytest.mark.parametrize("name", RATES)
def test_the_smallest_number_near_the_best_is_chosen(name: str, caplog: pytest.LogCaptureFixture) -> None:
    rates, best = RATES[name]
    tried: list[int] = []

    def rate(workers: int) -> float:
        tried.append(workers)
        return rates[workers]

    with caplog.at_level("INFO"):
        assert choose_workers(12, rate) == best
    assert tried == list(rates)
    [record] = caplog.records
    assert record.message.startswith(f"Loader workers: {best}; images per second: 100 with 1, {rates[2]} with 2")


def test_workers_end_by_themselves_where_a_cycle_keeps_the_loader() -> None:
    """Torch's own end, of what is garbage, waits 5 seconds for each and then kills it."""
    loader = RestartingLoader(
        lambda number: DataLoader(list(range(4)), num_workers=2, persistent_workers=True), 4, str, 2
    )
    loader.itself = loader  # type: ignore[attr-defined]
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    workers = multiprocessing.active_children()
    assert len(workers) == 2
    end_workers()
    assert [worker.exitcode for worker in workers] == [0, 0]
