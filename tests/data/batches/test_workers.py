"""Workers end on request. Killed workers: `tests/faults/test_loading.py`."""

import multiprocessing

from torch.utils.data import DataLoader

from mm_utils.data.batches.workers import WorkerLoader, end_workers


def test_workers_end_by_themselves_where_a_cycle_keeps_the_loader() -> None:
    """Torch's own end, of what is garbage, waits 5 seconds for each and then kills it."""
    before = {*multiprocessing.active_children()}
    loader = WorkerLoader(DataLoader(list(range(4)), num_workers=2, persistent_workers=True), 4, str, 2)
    loader.itself = loader  # type: ignore[attr-defined]
    assert [int(batch) for batch in loader] == [0, 1, 2, 3]
    workers = [*{*multiprocessing.active_children()} - before]
    assert len(workers) == 2
    end_workers()
    assert [worker.exitcode for worker in workers] == [0, 0]
