"""Data workers that are killed, exit or hang amid an epoch end the loop."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from datasets import disable_progress_bars
from transformers import PreTrainedTokenizerFast

from mm_utils.data.batches import workers as loader_workers
from mm_utils.data.batches.dataset import Pairs
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.stream import open_stream, train_stream
from tests.kit.numbered_rows import loaders, new_tokenizer, rows_of
from tests.kit.numbered_shards import write_shards

disable_progress_bars()
pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc"),
]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


def children() -> set[int]:
    """Return the processes that this one has started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


ENDED = r"DataLoader worker \(pid(\(s\))? \d+\) (is killed by signal: (Killed|Bus error)|exited unexpectedly)"


@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (lambda: kill(os.getpid()), ENDED),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), ENDED),
        (lambda: os._exit(3), ENDED),
        (lambda: time.sleep(600), "DataLoader timed out after 2 seconds"),
    ],
    ids=["killed", "bus error", "exit", "hangs"],
)
def test_a_row_that_ends_its_worker_ends_the_run(
    deed: Callable[[], Any], message: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "TIMEOUT", 2)
    # As long, torch waits for each worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    usual = Pairs.__getitems__

    def read(pairs: Pairs, draws: Any) -> Any:
        if any(drawn == 5 for drawn, _ in draws):
            deed()
        return usual(pairs, draws)

    monkeypatch.setattr(Pairs, "__getitems__", read)
    rows = tokenize_captions(rows_of(10), tokenizer, 16)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        list(loaders(2).evaluation(rows, 2))


@pytest.mark.parametrize("kind", ["training", "a stream"])
def test_a_killed_worker_ends_the_loop(kind: str, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Torch raises wherever the main thread is, here or in the loader."""
    if kind == "training":
        rows = tokenize_captions(rows_of(13, broken=[3]), tokenizer, 16)
        loader: Any = loaders(2).train(rows, GlobalOrder(13, BatchSizes((0,), (5,)), seed=3), 2, 26)
    else:
        source = DataArguments(train_file=write_shards(tmp_path, "parquet", [30, 30, 30]))
        loader = train_stream(loaders(2), open_stream(source, BatchSizes((0,), (6,)), 3, 3, 8), tokenizer, 2, 26)
    before = children()
    with pytest.raises(RuntimeError, match=ENDED):  # noqa: PT012
        for number, _ in enumerate(loader):
            if number == 1:
                kill(max(children() - before))
                time.sleep(0.5)
