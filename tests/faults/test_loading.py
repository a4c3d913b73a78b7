"""Workers that are killed or hang, files that turn out broken, and disks that fail for a while, amid an epoch."""

import errno
import json
import os
import re
import signal
import subprocess
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import disable_progress_bars
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from mm_utils.data import media
from mm_utils.data.batches import workers as loader_workers
from mm_utils.data.batches.dataset import Collator, Pairs, TrainingTransform
from mm_utils.data.batches.loaders import DeviceLoader
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.batches.workers import MAX_RESTARTS, RestartingLoader
from mm_utils.data.pairs import load_pairs
from mm_utils.data.rows.source import DataArguments, Source
from mm_utils.extras.streams import rows as stream_rows
from mm_utils.extras.streams.flags import StreamingArguments
from mm_utils.extras.streams.loader import StreamBatches, StreamSteps
from mm_utils.extras.streams.shards import Shard, ShardReader, count_shards
from mm_utils.extras.streams.stream import open_stream
from tests.kit.fault_images import BROKEN, draw, jpeg
from tests.kit.numbered_rows import CPU, SIZE, equal, loaders, new_tokenizer, rows_of
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
        stream = open_stream(source, StreamingArguments(True, 3, 8), BatchSizes((0,), (6,)), 3)
        transform = TrainingTransform(media.Image(SIZE, min_crop_area=0.5), seed=3)
        steps = StreamSteps(stream, tokenizer, 16, transform, Collator(0, media.Image(SIZE), longest_first=True))
        ones = (1.0, 1.0, 1.0)
        return lambda workers: DeviceLoader(
            StreamBatches(steps, 2, 2 + STEPS, workers), CPU, media.Image(SIZE, ones, ones)
        )
    rows = tokenize_captions(rows_of(13, broken=[3]), tokenizer, 16)
    if request.param == "training":
        order = GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
        return lambda workers: loaders(workers).train(rows, order, 2, 2 + STEPS)
    many = rows.select(list(range(13)) * 6)
    return lambda workers: loaders(workers).evaluation(many, 3)


def children() -> set[int]:
    """Return the processes that this one has started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Struck:
    """Iterates over a loader and strikes one of its workers after some batches."""

    def __init__(self, loader: DeviceLoader, strike: Callable[[int], None], after: tuple[int, ...]):
        self.loader, self.strike, self.after = loader, strike, after

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = children()
        batches = iter(self.loader)
        for number in range(len(self.loader)):
            yield next(batches)
            if number in self.after:
                self.strike(max(children() - before))
                time.sleep(0.3)  # a step, in which nothing may be raised


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_changes_nothing(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    before = children()
    struck = Struck(make(2), kill, (1, 2, 15))
    found = list(struck)
    assert len(children() - before) <= 2  # the workers that were not killed have ended, too
    expected = list(make(0))
    assert len(found) == len(expected) >= STEPS
    assert all(equal(*both) for both in zip(found, expected, strict=True))
    warnings = [record.message for record in caplog.records if "New workers make the same batches" in record.message]
    assert 2 <= len(warnings) <= 3  # two that are killed shortly after each other may be replaced together
    assert all(re.search("(killed by signal: Killed|exited unexpectedly), when ", warning) for warning in warnings)
    assert "pass --dataloader_num_workers lower than 2, or 0." in warnings[0]


@pytest.mark.parametrize("named_to_another", [False, True])
def test_a_worker_killed_between_two_evaluations(
    named_to_another: bool, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch names it to the loader that asks next, in training; the evaluation would wait for the time limit of a batch."""
    monkeypatch.setattr(loader_workers, "TIMEOUT", 40)
    rows, order = tokenize_captions(rows_of(13), tokenizer, 16), GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
    training = iter(loaders(1).train(rows, order, 0, 10))
    next(training)
    before = children()
    loader = loaders(2).evaluation(rows, 3)
    first = list(loader)
    kill(max(children() - before))
    if named_to_another:
        time.sleep(0.3)
        assert len(list(training)) == 9
    began = time.monotonic()
    assert all(equal(*both) for both in zip(loader, first, strict=True))
    assert all(equal(*both) for both in zip(loader, first, strict=True))
    assert time.monotonic() - began < 40


def test_a_killed_worker_of_another_loader_loses_no_batch(
    tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "TIMEOUT", 5)
    rows = tokenize_captions(rows_of(13), tokenizer, 16)
    order = GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
    before = children()
    other = iter(loaders(2).evaluation(rows, 1))
    next(other)
    pid = max(children() - before)
    for number, batch in enumerate(loaders(2).train(rows, order, 0, 10)):
        assert len(batch["rows"]) == 5
        subprocess.run(["false"], check=False)  # the end of any other child does not matter
        if number == 3:
            kill(pid)
    assert len(list(other)) == 12


# -- faults that come again ---------------------------------------------------------------------------------------------


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
    ("deed", "restarts", "message"),
    [
        (lambda: kill(os.getpid()), MAX_RESTARTS, ENDED),
        (lambda: os.kill(os.getpid(), signal.SIGBUS), MAX_RESTARTS, ENDED),
        (lambda: os._exit(3), MAX_RESTARTS, ENDED),
        (lambda: time.sleep(600), 0, "DataLoader timed out after 2 seconds"),
    ],
    ids=["killed", "bus error", "exit", "hangs"],
)
def test_a_repeated_fault_ends_the_run(
    deed: Callable[[], Any],
    restarts: int,
    message: str,
    tokenizer: PreTrainedTokenizerFast,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """With one line that names the batch."""
    monkeypatch.setattr(loader_workers, "TIMEOUT", 2)
    monkeypatch.setattr(
        "torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5
    )  # as long, torch waits for each worker
    at_row(5, deed, monkeypatch)
    rows = tokenize_captions(rows_of(10), tokenizer, 16)
    with pytest.raises(ValueError, match=f"^{message}") as caught:
        list(loaders(2).evaluation(rows, 2))
    due = r"when batch [123] of 5 of an evaluation \(2 images: id-\d, id-\d\) was due"
    remedy = r"If this happens again, pass --dataloader_num_workers lower than 2, or 0\."
    assert re.search(rf", {due}\. {remedy}$", str(caught.value))
    assert "\n" not in str(caught.value)
    assert len([record for record in caplog.records if "New workers" in record.message]) == restarts


def test_faults_far_apart_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_workers, "RESTART_WINDOW", 4)
    others = forks()
    loader = RestartingLoader(lambda number: numbers(range(number, 40)), 40, str, 1)
    found = []
    for number in loader:
        found.append(int(number))
        if number % 5 == 4:
            [worker] = forks() - others
            kill(worker)
    assert found == list(range(40))


def numbers(values: range, size: int = 1) -> DataLoader:
    return DataLoader(Numbers(values, size), batch_size=None, num_workers=1, persistent_workers=True)


class Numbers(Dataset):
    """Items of this many bytes, which travel inside the message."""

    def __init__(self, values: range, size: int):
        self.values, self.size = values, size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> Any:
        if self.size == 1:
            return self.values[place]
        return np.full(self.size, self.values[place], np.uint8).tobytes()


def forks() -> set[int]:
    """Return the forks of this process, which have its command line."""
    own = Path("/proc/self/cmdline").read_bytes()
    return {pid for pid in children() if Path(f"/proc/{pid}/cmdline").read_bytes() == own}


def test_a_worker_killed_in_the_middle_of_a_message() -> None:
    """A pipe holds 64 kB; a process that has read the first half waits for the rest."""
    others = forks()
    loader = RestartingLoader(lambda number: numbers(range(number, 12), 300_000), 12, str, 1)
    for number, item in enumerate(loader):
        assert item == bytes([number]) * 300_000
        if number == 3:
            time.sleep(0.5)
            [worker] = forks() - others
            kill(worker)
    assert number == 11


@pytest.mark.parametrize("kind", [RuntimeError, OSError, ValueError])
def test_an_exception_in_a_worker_is_raised(
    kind: type[Exception], tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:

    def fail() -> None:
        raise kind("of its own")

    at_row(5, fail, monkeypatch)
    with pytest.raises(kind, match="of its own") as caught:
        list(loaders(2).evaluation(tokenize_captions(rows_of(10), tokenizer, 16), 2))
    traceback.clear_frames(caught.tb)  # left to the garbage collector, torch waits 5 seconds for each worker


# -- files --------------------------------------------------------------------------------------------------------------

# What only preparing finds, and what decoders accept.
_SHOWN = {"too_small", "extreme_aspect", "too_many_parts", "a JPEG whose end is zeros, as a power failure leaves it"}
UNREADABLE = [case for case in BROKEN if not {case.reason, case.kind} & _SHOWN]


def test_broken_files_of_unprepared_data_are_replaced(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Among them bombs of 9000 x 9000 pixels, truncated files, text, EPS and nothing at all."""
    good = 4 * len(UNREADABLE)
    lines = []
    for number, content in enumerate(
        [jpeg(draw(seed)) for seed in range(good)] + [c.make(draw(1)) for c in UNREADABLE]
    ):
        name = f"{number:03d}.png"
        (tmp_path / name).write_bytes(content)
        lines.append(
            json.dumps({"image": name, "caption": f"picture one {number}", "id": str(number), "split": "train"})
        )
    (tmp_path / "pairs.jsonl").write_text("\n".join(lines))
    rows = load_pairs(DataArguments(train_file=str(tmp_path / "pairs.jsonl")), need_train=False)["train"]
    rows = tokenize_captions(rows, tokenizer, 16)
    order = GlobalOrder(len(rows), BatchSizes((0,), (len(rows) // 2,)), seed=0)
    start = time.perf_counter()
    one, other = loaders(0).train(rows, order, 0, 2)
    assert time.perf_counter() - start < 60  # decoding a single bomb takes most of that
    assert len(one["rows"]) == len(other["rows"]) == len(rows) // 2
    named = {*one["skipped_ids"], *other["skipped_ids"]}
    bad = {str(number) for number in range(good, len(rows))}
    drawn = {str(rows[row]["id"]) for step in (0, 1) for row, _ in order.batch(step)}
    assert named == bad & drawn
    assert len(named) >= len(bad) - 1  # an odd number of rows leaves one to the next epoch
    shown = {*one["image_ids"], *other["image_ids"]}
    assert not shown & bad
    assert all("\n" not in reason for reason in one["skipped"] + other["skipped"])


class Faltering:
    """Opens files; the first attempts fail as if the disk did not answer."""

    def __init__(self, usual: Callable[[str], Any], code: int, failures: int):
        self.usual, self.code, self.failures = usual, code, failures

    def __call__(self, url: str) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(self.code, os.strerror(self.code), url)
        return self.usual(url)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_shard_is_read_again_after_a_disk_error(
    kind: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, kind, [8])
    path, pauses = str(tmp_path / f"000.{kind}"), []  # type: tuple[str, list[float]]
    expected = ShardReader([Shard(path, 0, 8)], Source("shards")).read(0, 0, 8)
    monkeypatch.setattr(time, "sleep", pauses.append)
    monkeypatch.setattr(stream_rows, "open_shard", Faltering(stream_rows.open_shard, code, 3))
    assert ShardReader([Shard(path, 0, 8)], Source("shards")).read(0, 0, 8) == expected
    assert pauses == [1, 4, 16]
    monkeypatch.setattr(stream_rows, "open_shard", Faltering(stream_rows.open_shard, code, 3))
    assert count_shards([path]) == [Shard(path, 0, 8)]


def test_a_shard_that_stays_unreadable_is_skipped_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_shards(tmp_path, "parquet", [8])
    path = str(tmp_path / "000.parquet")
    monkeypatch.setattr(time, "sleep", lambda _: None)
    monkeypatch.setattr(stream_rows, "open_shard", Faltering(stream_rows.open_shard, errno.EIO, 1000))
    lost = ShardReader([Shard(path, 0, 8)], Source("shards")).read(0, 0, 8)
    assert lost == [f"shard {path} cannot be read from row 0 on: OSError: [Errno 5] Input/output error: '{path}'"] * 8
    with pytest.raises(ValueError, match=r"000\.parquet; 1 of 1 shards cannot be read"):
        count_shards([path])


def test_a_shard_deleted_amid_an_epoch_loses_only_its_rows(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    source = DataArguments(train_file=write_shards(tmp_path, "tar", [30, 30, 30]))
    stream = open_stream(source, StreamingArguments(True, 3, 8), BatchSizes((0,), (6,)), 3)
    transform = TrainingTransform(media.Image(SIZE), seed=3)
    steps = StreamSteps(stream, tokenizer, 16, transform, Collator(0, media.Image(SIZE), longest_first=True))
    gone = stream.shards[stream.order.batch(9)[0].shard].url
    whole = list(StreamBatches(steps, 0, 10, 0))
    Path(gone).unlink()
    for batch, expected in zip(StreamBatches(steps, 0, 10, 2), whole, strict=True):
        assert len(batch["rows"]) + len(batch["skipped"]) == 6
        assert all(gone in reason for reason in batch["skipped"])
        kept = {*zip(batch["rows"].tolist(), batch["image_ids"], strict=True)}
        assert kept <= {*zip(expected["rows"].tolist(), expected["image_ids"], strict=True)}
        assert batch["skipped"]
