"""Workers that are killed or hang, files that turn out broken, and disks that fail for a while, amid an epoch."""

import json
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
from mm_utils.data.batches.loaders import DeviceLoader
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.streams.stream import open_stream, train_stream
from tests.kit.fault_images import UNDECODABLE, draw, jpeg
from tests.kit.numbered_rows import loaders, new_tokenizer, rows_of
from tests.kit.numbered_shards import write_shards

disable_progress_bars()
pytestmark = [
    pytest.mark.usefixtures("own_cache"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc"),
]
STEPS = 24


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


Make = Callable[[int], DeviceLoader]


@pytest.fixture(params=["training", "evaluation", "a stream"])
def make(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Make:
    """Makes a loader of at least `STEPS` batches with this many workers."""
    if request.param == "a stream":
        source = DataArguments(train_file=write_shards(tmp_path, "parquet", [30, 30, 30]))
        stream = open_stream(source, BatchSizes((0,), (6,)), 3, 3, 8)
        return lambda workers: train_stream(loaders(workers), stream, tokenizer, 2, 2 + STEPS)
    rows = tokenize_captions(rows_of(13, broken=[3]), tokenizer, 16)
    if request.param == "training":
        order = GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
        return lambda workers: loaders(workers).train(rows, order, 2, 2 + STEPS)
    many = rows.select(list(range(13)) * 6)
    return lambda workers: loaders(workers).evaluation(many, 3)


def children() -> set[int]:
    """Return the processes that this one has started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_ends_the_loop(make: Make) -> None:
    before = children()

    def strike() -> None:
        for number, _ in enumerate(make(2)):
            if number == 1:
                kill(max(children() - before))
                time.sleep(0.5)  # torch raises wherever the main thread is, here or in the loader

    with pytest.raises(RuntimeError, match=ENDED):
        strike()


# -- faults of a row ---------------------------------------------------------------------------------------------


def at_row(row: int, deed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every process that reads this row do something first."""
    usual = Pairs.__getitems__

    def read(pairs: Pairs, draws: Any) -> Any:
        if any(drawn == row for drawn, _ in draws):
            deed()
        return usual(pairs, draws)

    monkeypatch.setattr(Pairs, "__getitems__", read)


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
    at_row(5, deed, monkeypatch)
    rows = tokenize_captions(rows_of(10), tokenizer, 16)
    with pytest.raises(RuntimeError, match=f"^{message}"):
        list(loaders(2).evaluation(rows, 2))


# -- files --------------------------------------------------------------------------------------------------------------


def test_broken_files_of_unprepared_data_are_replaced(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    broken = UNDECODABLE[::3]  # `test_images.py` opens each
    good = 4 * len(broken)
    lines = []
    for number, content in enumerate([jpeg(draw(seed)) for seed in range(good)] + [c.make(draw(1)) for c in broken]):
        name = f"{number:03d}.png"
        (tmp_path / name).write_bytes(content)
        lines.append(
            json.dumps({"image": name, "caption": f"picture one {number}", "id": str(number), "split": "train"})
        )
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rows = load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")), need_train=False)["train"]
    rows = tokenize_captions(rows, tokenizer, 16)
    order = GlobalOrder(len(rows), BatchSizes((0,), (len(rows) // 2,)), seed=0)
    one, other = loaders(0).train(rows, order, 0, 2)
    assert len(one["rows"]) == len(other["rows"]) == len(rows) // 2
    named = {*one["skipped_ids"], *other["skipped_ids"]}
    bad = {str(number) for number in range(good, len(rows))}
    drawn = {str(rows[row]["id"]) for step in (0, 1) for row, _ in order.batch(step)}
    assert named == bad & drawn
    assert len(named) >= len(bad) - 1  # an odd number of rows leaves one to the next epoch
    shown = {*one["image_ids"], *other["image_ids"]}
    assert not shown & bad
    assert all("\n" not in reason for reason in one["skipped"] + other["skipped"])
