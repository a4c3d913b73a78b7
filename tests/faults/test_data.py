"""Hostile images that training meets, data workers that end, preparations that are killed, and two at once in one folder."""

import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest
from PIL import Image
from transformers import PreTrainedTokenizerFast

from mm_utils.data.batches import workers as loader_workers
from mm_utils.data.batches.dataset import Pairs
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.images import open_image
from mm_utils.data.prepare import report
from mm_utils.model.reading import UnreadableError
from scripts.prepare_data import main
from tests.kit.numbered_rows import loaders, rows_of
from tests.kit.processes import forks
from tests.kit.reading import digests, intact_rows, report_of
from tests.kit.tiny_run import alone
from tests.kit.zoo import Corpus, good_rows

LONGEST = 120.0  # seconds of a preparation on a busy machine
pytestmark = pytest.mark.usefixtures("own_cache")

# -- images -------------------------------------------------------------------------------------------------------------


def measured(paths: list[Path]) -> list[int]:
    """Kilobytes by which the greatest memory of this process grew until each file was refused."""
    found = []
    for path in paths:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        with pytest.raises(UnreadableError):
            open_image({"bytes": None, "path": str(path)}, 224)
        found.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    return found


def test_a_file_of_a_terabyte_or_that_unpacks_to_gigabytes_is_refused_before_it_is_read(tmp_path: Path) -> None:
    """In a process of its own, whose greatest memory tells."""
    paths = [tmp_path / f"{side}.png" for side in (6_400, 13_300)]
    for path in paths:
        Image.new("1", (int(path.stem),) * 2, 1).save(path)
    paths.append(tmp_path / "large.png")
    with paths[-1].open("wb") as file:
        file.truncate(1 << 40)
    _, found = alone(measured, paths)
    assert all(kilobytes < 20_000 for kilobytes in found)


# -- data workers -------------------------------------------------------------------------------------------------------
ENDED = r"DataLoader worker \(pid(\(s\))? \d+\) (is killed by signal: (Killed|Bus error)|exited unexpectedly)"


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("deed", "message"),
    [
        (lambda: os.kill(os.getpid(), signal.SIGBUS), ENDED),
        (lambda: time.sleep(600), "DataLoader timed out after 2 s"),
    ],
    ids=["bus error", "hangs"],
)
def test_a_row_that_ends_its_worker_ends_the_run(
    deed: Callable[[], Any], message: str, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader_workers, "TIMEOUT", 2)
    # As long, torch waits for each worker.
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.5)
    usual = Pairs.__getitems__

    def read(pairs, draws):
        if any(drawn == 5 for drawn, _ in draws):
            deed()
        return usual(pairs, draws)

    monkeypatch.setattr(Pairs, "__getitems__", read)
    said = ""
    # Not `pytest.raises`, which would keep the loader: until it is gone, torch raises anew whenever a child of this process ends.
    try:
        list(loaders(2).evaluation(tokenize_captions(rows_of(10), tokenizer, 16), 2))
    except RuntimeError as error:
        said = str(error)
    assert re.match(message, said)


# -- preparations -------------------------------------------------------------------------------------------------------


def flags_of(zoo: Corpus, output: Path) -> list[str]:
    return ["--sources", *zoo.sources, "--num_proc", "2", "--validation_fraction", "0.2", "--output_dir", str(output)]


class Whole(NamedTuple):
    """Sources of eight chunks, and the findings of an undisturbed preparation."""

    zoo: Corpus
    findings: dict[str, Any]


def findings(output: Path) -> dict[str, Any]:
    found = report_of(output)
    return {**{name: found[name] for name in ("splits", "sources")}, **digests(output)}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    zoo = good_rows(folder, 64 * 8)
    main(flags_of(zoo, folder / "out"))
    return Whole(zoo, findings(folder / "out"))


def prepare(flags: list[str]) -> None:
    """In a process group of its own, without pictures; the status is 3 if it is refused in one line."""
    os.setpgid(0, 0)
    report.draw_contact_sheet = lambda *given, **_: given[-1].touch()
    try:
        main(flags)
    except ValueError as error:
        raise SystemExit(4 if "\n" in str(error) else 3) from error


def run_until(flags: list[str], work: Path, moment: Callable[[Path], bool], delay: float) -> bool:
    """Prepare in a process group and kill it, `delay` seconds after `moment`; False if it ended before."""
    process = forks().Process(target=prepare, args=(flags,))
    late = time.monotonic() + LONGEST
    process.start()
    while process.is_alive() and time.monotonic() < late and not moment(work):
        time.sleep(0.002)
    time.sleep(delay)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join(10)
    return bool(process.exitcode == -signal.SIGKILL)


def finished(work: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the files of finished chunks."""
    done = [path.with_suffix(end) for path in work.glob("parts/*.json") for end in (".json", ".arrow")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done}


LARGE_BATCHES = """
import os, sys, time
from mm_utils.data.batches.workers import worker_loader

class Large:
    def __len__(self):
        return 99
    def __getitem__(self, row):
        return os.getpid(), b"0" * 10**6  # more than a pipe holds

batches = iter(worker_loader(Large(), 2, batch_size=None))
print(next(batches)[0], next(batches)[0], flush=True)
time.sleep(60)
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", LARGE_BATCHES], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    workers = [psutil.Process(int(pid)) for pid in parent.stdout.readline().split()]
    assert len(workers) == 2
    parent.kill()
    parent.wait()
    _, living = psutil.wait_procs(workers, timeout=20)
    assert not living


def test_a_killed_run_resumes_and_gives_the_same_result(whole: Whole, tmp_path: Path) -> None:
    """Killed after two of eight chunks, of two files each, and again when the result is written."""
    output = tmp_path / "killed"
    work = tmp_path / "killed.partial"
    flags = flags_of(whole.zoo, output)
    rng = random.Random(0)
    before = {}
    kills = 0
    for moment in (
        lambda work: len(finished(work)) >= 4,
        lambda work: (work / "result" / "dataset_dict.json").exists(),
    ):
        if not run_until(flags, work, moment, rng.uniform(0, 0.01)):  # it ended first, on a busy machine: begin anew
            shutil.rmtree(output)
            before = {}
            continue
        kills += 1
        assert not output.exists()
        after = finished(work)
        assert {name: after.get(name) for name in before} == before
        before = after
    assert kills
    main(flags)
    assert findings(output) == whole.findings
    assert not work.exists()
    assert intact_rows(output) == 64 * 8


def test_two_at_once_end_in_one_whole_data_set(whole: Whole, tmp_path: Path) -> None:
    output = tmp_path / "both"
    processes = [forks().Process(target=prepare, args=(flags_of(whole.zoo, output),)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(LONGEST)
    codes = {process.exitcode for process in processes}
    assert 0 in codes
    assert codes <= {0, 3}
    assert digests(output).items() <= whole.findings.items()
