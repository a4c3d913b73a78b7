"""Workers that are killed or hang, files that turn out broken, and disks that falter, in the middle of an epoch."""

import errno
import json
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from datasets import disable_progress_bars
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerFast

from mm_utils.data import restarts
from mm_utils.data.batches import Collator, Pairs
from mm_utils.data.loaders import DeviceLoader
from mm_utils.data.order import BatchSizes, GlobalOrder
from mm_utils.data.restarts import RestartingLoader
from mm_utils.data.ring import PixelRing
from mm_utils.data.sources import DataArguments, load_pairs
from mm_utils.data.stream import files as stream_files
from mm_utils.data.stream import formats as stream_formats
from mm_utils.data.stream.files import Shard, ShardReader, count_shards
from mm_utils.data.stream.loader import StreamBatches, StreamSteps
from mm_utils.data.stream.stream import StreamingArguments, open_stream
from mm_utils.data.tokens import tokenize_captions
from tests.data.numbered_rows import CPU, SIZE, equal, loaders, new_tokenizer, rows_of
from tests.data.prepare.fault_images import BROKEN, draw, jpeg
from tests.data.stream.numbered_shards import write_shards
from tests.faults.conftest import Record

disable_progress_bars()
pytestmark = [
    pytest.mark.faults,
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
    pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="finds workers in /proc"),
]
STEPS = 24


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    return new_tokenizer()


Make = Callable[[int], DeviceLoader]


@pytest.fixture(params=["training", "evaluation", "a stream"])
def make(request: pytest.FixtureRequest, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Make:
    """A loader with so many workers, of at least `STEPS` batches."""
    if request.param == "a stream":
        source = DataArguments(train_file=write_shards(tmp_path, "parquet", [30, 30, 30]))
        stream = open_stream(source, StreamingArguments(True, 3, 8), BatchSizes((0,), (6,)), 3)
        pairs = partial(Pairs, image_size=SIZE, train=True, min_crop_area=0.5, seed=3)
        steps = StreamSteps(stream, tokenizer, 16, pairs, Collator(0, SIZE, longest_first=True))
        ones = (1.0, 1.0, 1.0)
        return lambda workers: DeviceLoader(StreamBatches(steps, 2, 2 + STEPS, workers), CPU, ones, ones)
    rows = tokenize_captions(rows_of(13, broken=[3]), tokenizer, 16)
    if request.param == "training":
        order = GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
        return lambda workers: loaders(workers).train(rows, order, 2, 2 + STEPS)
    many = rows.select(list(range(13)) * 6)
    return lambda workers: loaders(workers).evaluation(many, 3)


def children() -> set[int]:
    """Processes that this one has started."""
    return {int(pid) for pid in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()}


class Struck:
    """Goes through a loader and lets something happen to its workers after some batches."""

    def __init__(self, loader: DeviceLoader, strike: Callable[[int], None], after: tuple[int, ...]):
        self.loader, self.strike, self.after = loader, strike, after
        self.slowest = 0.0

    def __iter__(self) -> Iterator[dict[str, Any]]:
        before = children()
        batches = iter(self.loader)
        for number in range(len(self.loader)):
            start = time.monotonic()
            yield next(batches)
            self.slowest = max(self.slowest, time.monotonic() - start)
            if number in self.after:
                self.strike(max(children() - before))
                time.sleep(0.3)  # a step, in which nothing may be raised


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def test_a_killed_worker_changes_nothing(make: Make, fault: Record, caplog: pytest.LogCaptureFixture) -> None:
    injected = fault("loading", "three workers killed (SIGKILL)")
    struck = Struck(make(2), kill, (1, 2, 15))
    found = list(struck)
    injected.detection_seconds = struck.slowest
    expected = list(make(0))
    assert len(found) == len(expected) >= STEPS
    assert all(equal(*both) for both in zip(found, expected, strict=True))
    said = [record.message for record in caplog.records if "of the loader" in record.message]
    assert len(said) == 3
    assert "was killed by signal 9, most likely because memory ran out, while" in said[0]
    assert "set --dataloader_num_workers lower than 2" in said[0]


def test_a_worker_that_stops_is_replaced(
    make: Make, fault: Record, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    injected = fault("loading", "a worker stopped (SIGSTOP)")
    monkeypatch.setattr(restarts, "HANG_SECONDS", 3.0)
    struck = Struck(make(2), lambda pid: os.kill(pid, signal.SIGSTOP), (4,))
    found = list(struck)
    injected.detection_seconds = struck.slowest
    assert all(equal(*both) for both in zip(found, make(0), strict=True))
    [said] = [record.message for record in caplog.records if "gave nothing" in record.message]
    assert said.startswith("the loader's workers gave nothing for 3 s, while ")


def test_a_worker_killed_between_two_evaluations(tokenizer: PreTrainedTokenizerFast, fault: Record) -> None:
    fault("loading", "a worker killed between two evaluations")
    rows = tokenize_captions(rows_of(13), tokenizer, 16)
    before = children()
    loader = loaders(2).evaluation(rows, 3)
    first = list(loader)
    kill(max(children() - before))
    assert all(equal(*both) for both in zip(loader, first, strict=True))
    assert all(equal(*both) for both in zip(loader, first, strict=True))


def test_the_end_of_another_child_does_not_matter(tokenizer: PreTrainedTokenizerFast, fault: Record) -> None:
    fault("loading", "a worker of another loader killed")
    rows = tokenize_captions(rows_of(13), tokenizer, 16)
    order = GlobalOrder(13, BatchSizes((0,), (5,)), seed=3)
    before = children()
    other = iter(loaders(2).evaluation(rows, 1))
    next(other)
    pid = max(children() - before)
    for number, batch in enumerate(loaders(2).train(rows, order, 0, 10)):
        assert len(batch["rows"]) == 5
        subprocess.run(["false"], check=False)
        if number == 3:
            kill(pid)
    assert len(list(other)) == 12


def test_shared_memory_is_given_back_before_more_is_taken(
    tokenizer: PreTrainedTokenizerFast, fault: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("loading", "two workers killed where shared memory holds one ring of buffers")
    usual, held = PixelRing.make, []  # type: Callable[..., PixelRing | None], list[int]

    def make(*sizes: int) -> PixelRing | None:
        held.append(sum(ring() is not None for ring in made))
        found = usual(*sizes)
        assert found is not None
        made.append(weakref.ref(found))
        return found

    made: list[weakref.ref[PixelRing]] = []
    monkeypatch.setattr(PixelRing, "make", make)
    rows = tokenize_captions(rows_of(13), tokenizer, 16)
    loader = loaders(2).train(rows, GlobalOrder(13, BatchSizes((0,), (5,)), seed=3), 0, STEPS)
    assert len(list(Struck(loader, kill, (3, 9)))) == STEPS
    assert held == [0, 0, 0]


# -- faults that come again ---------------------------------------------------------------------------------------------


def at_row(row: int, deed: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever makes an example of this row does something first."""
    usual = Pairs.attempt

    def attempt(pairs: Pairs, draws: Any) -> Any:
        if any(drawn == row for drawn, _ in draws):
            deed()
        return usual(pairs, draws)

    monkeypatch.setattr(Pairs, "attempt", attempt)


@pytest.mark.parametrize(
    ("deed", "times", "message"),
    [
        (
            lambda: os.kill(os.getpid(), signal.SIGKILL),
            restarts.MOST_KILLED,
            r"^worker \d+ of the loader was killed by signal 9, most likely because memory ran out, 4 times in short "
            r"succession, while batch \d of 5 of an evaluation \(2 images: id-\d, id-\d\) was waited for\. .* or to 0\.$",
        ),
        (
            lambda: os.kill(os.getpid(), signal.SIGBUS),
            restarts.MOST_KILLED,
            "was killed by signal 7, most likely because /dev/shm is full, or a file became shorter while it was read, 4",
        ),
        (lambda: os._exit(3), restarts.MOST_KILLED, r"worker \d+ of the loader ended with exit code 3, 4 times in"),
        (
            lambda: time.sleep(600),
            restarts.MOST_HUNG,
            r"^the loader's workers gave nothing for 2 s, 2 times in short succession, while batch 3 of 5 of an evaluation "
            r"\(2 images: id-4, id-5\) was waited for\. .* set --dataloader_num_workers lower than 2, or to 0\.$",
        ),
    ],
    ids=["killed", "bus error", "exit", "hangs"],
)
def test_a_fault_that_comes_again_ends_the_run(
    deed: Callable[[], Any],
    times: int,
    message: str,
    tokenizer: PreTrainedTokenizerFast,
    fault: Record,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    fault("loading", "a worker ends or hangs at the same image again and again")
    monkeypatch.setattr(restarts, "HANG_SECONDS", 2.0)
    at_row(5, deed, monkeypatch)
    seen = []
    with pytest.raises(ValueError, match=message) as caught:
        seen += [
            batch["image_ids"] for batch in loaders(2).evaluation(tokenize_captions(rows_of(10), tokenizer, 16), 2)
        ]
    assert "\n" not in str(caught.value)
    assert len([record for record in caplog.records if "started again" in record.message]) == times


def test_faults_far_apart_are_forgotten(fault: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    fault("loading", "eight workers killed, far apart")
    monkeypatch.setattr(restarts, "ENOUGH", 4)
    loader = RestartingLoader(lambda number: numbers(range(number, 40)), 40, str)
    found = []
    for number in loader:
        found.append(int(number))
        if number % 5 == 4:
            [worker] = workers_of(os.getpid())
            kill(worker)
    assert found == list(range(40))


def numbers(values: range, size: int = 1) -> DataLoader:
    return DataLoader(Numbers(values, size), batch_size=None, num_workers=1, persistent_workers=True)


class Numbers(Dataset):
    """Items of so many bytes, which travel inside the message."""

    def __init__(self, values: range, size: int):
        self.values, self.size = values, size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, place: int) -> Any:
        if self.size == 1:
            return self.values[place]
        return np.full(self.size, self.values[place], np.uint8).tobytes()


def workers_of(process: int) -> list[int]:
    """Its forks, which have its command line."""
    own = Path(f"/proc/{process}/cmdline").read_bytes()
    return [pid for pid in children() if Path(f"/proc/{pid}/cmdline").read_bytes() == own]


@pytest.mark.parametrize("deed", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_a_worker_struck_in_the_middle_of_a_message(
    deed: signal.Signals, fault: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pipe holds 64 kB; who reads the first half waits for the rest."""
    injected = fault("loading", f"a worker with half a message sent: {deed.name}")
    monkeypatch.setattr(restarts, "HANG_SECONDS", 2.0)
    loader = RestartingLoader(lambda number: numbers(range(number, 12), 300_000), 12, str)
    struck_at = 0.0
    for number, item in enumerate(loader):
        assert item == bytes([number]) * 300_000
        if number == 4:
            injected.detection_seconds = time.monotonic() - struck_at
        if number == 3:
            time.sleep(0.5)
            [worker] = workers_of(os.getpid())
            os.kill(worker, deed)
            struck_at = time.monotonic()
    assert number == 11


@pytest.mark.parametrize("kind", [RuntimeError, OSError, ValueError])
def test_an_error_in_a_worker_is_no_fault_of_the_worker(
    kind: type[Exception], tokenizer: PreTrainedTokenizerFast, fault: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("loading", "an exception in a worker")

    def fail() -> None:
        raise kind("of its own")

    at_row(5, fail, monkeypatch)
    with pytest.raises(kind, match="of its own"):
        list(loaders(2).evaluation(tokenize_captions(rows_of(10), tokenizer, 16), 2))


# -- files --------------------------------------------------------------------------------------------------------------

# What only preparing finds, and what decoders accept.
_SHOWN = {"too_small", "extreme_aspect", "too_many_parts", "a JPEG whose end is zeros, as a power failure leaves it"}
UNREADABLE = [case for case in BROKEN if not {case.reason, case.kind} & _SHOWN]


def test_broken_files_of_data_that_nobody_prepared_are_replaced(
    tokenizer: PreTrainedTokenizerFast, fault: Record, tmp_path: Path
) -> None:
    """Among them bombs of 9000 x 9000 pixels, truncated files, text, EPS and nothing at all."""
    for case in UNREADABLE:
        fault("loading", f"a pair of data not prepared: {case.kind}")
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
    """Opens files, but for the first attempts of which it says that the disk does not answer."""

    def __init__(self, usual: Callable[[str], Any], code: int, failures: int):
        self.usual, self.code, self.failures = usual, code, failures

    def __call__(self, url: str) -> Any:
        if self.failures > 0:
            self.failures -= 1
            raise OSError(self.code, os.strerror(self.code), url)
        return self.usual(url)


@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ECONNRESET])
@pytest.mark.parametrize("kind", ["tar", "parquet"])
def test_a_shard_on_a_disk_that_falters_is_read_again(
    kind: str, code: int, fault: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("loading", f"a shard on a disk that falters three times: {errno.errorcode[code]}")
    write_shards(tmp_path, kind, [8])
    path, pauses = str(tmp_path / f"000.{kind}"), []  # type: tuple[str, list[float]]
    expected = ShardReader([Shard(path, 0, 8)], ["image", "captions"]).read(0, 0, 8)
    monkeypatch.setattr(stream_files.time, "sleep", pauses.append)
    monkeypatch.setattr(stream_formats, "_open", Faltering(stream_formats._open, code, 3))
    assert ShardReader([Shard(path, 0, 8)], ["image", "captions"]).read(0, 0, 8) == expected
    assert pauses == [1, 4, 16]
    monkeypatch.setattr(stream_formats, "_open", Faltering(stream_formats._open, code, 3))
    assert count_shards([path]) == [Shard(path, 0, 8)]


def test_a_shard_on_a_disk_that_stays_silent_is_lost_with_its_reason(
    fault: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault("loading", "a shard that cannot be read any more: EIO")
    write_shards(tmp_path, "parquet", [8])
    path = str(tmp_path / "000.parquet")
    monkeypatch.setattr(stream_files.time, "sleep", lambda _: None)
    monkeypatch.setattr(stream_formats, "_open", Faltering(stream_formats._open, errno.EIO, 1000))
    lost = ShardReader([Shard(path, 0, 8)], ["image", "captions"]).read(0, 0, 8)
    assert lost == [f"shard {path} cannot be read from row 0 on: OSError: [Errno 5] Input/output error: '{path}'"] * 8
    with pytest.raises(ValueError, match=r"000\.parquet; 1 of 1 shards cannot be read"):
        count_shards([path])


def test_a_shard_that_is_deleted_in_mid_epoch_costs_its_own_rows(
    tokenizer: PreTrainedTokenizerFast, fault: Record, tmp_path: Path
) -> None:
    fault("loading", "a shard deleted in mid-epoch")
    source = DataArguments(train_file=write_shards(tmp_path, "tar", [30, 30, 30]))
    stream = open_stream(source, StreamingArguments(True, 3, 8), BatchSizes((0,), (6,)), 3)
    pairs = partial(Pairs, image_size=SIZE, train=True, seed=3)
    steps = StreamSteps(stream, tokenizer, 16, pairs, Collator(0, SIZE, longest_first=True))
    gone = stream.shards[stream.order.batch(9)[0].shard].url
    whole = list(StreamBatches(steps, 0, 10, 0))
    Path(gone).unlink()
    for batch, expected in zip(StreamBatches(steps, 0, 10, 2), whole, strict=True):
        assert len(batch["rows"]) + len(batch["skipped"]) == 6
        assert all(gone in reason for reason in batch["skipped"])
        kept = {*zip(batch["rows"].tolist(), batch["image_ids"], strict=True)}
        assert kept <= {*zip(expected["rows"].tolist(), expected["image_ids"], strict=True)}
        assert batch["skipped"]
