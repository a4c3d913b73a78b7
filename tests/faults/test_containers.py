"""Preparations that are killed, and two at once in one folder."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from datasets import disable_progress_bars

from mm_utils.data.prepare import report
from scripts.prepare_data import main
from tests.data.prepare.zoo import Corpus, good_rows
from tests.kit.prepared import digests, intact_rows, report_of
from tests.kit.ranks import forks

LONGEST = 120.0  # seconds of a preparation on a busy machine
disable_progress_bars()


def flags_of(zoo: Corpus, output: Path) -> list[str]:
    return ["--sources", *zoo.sources, "--num_proc", "2", "--validation_fraction", "0.2", "--output_dir", str(output)]


class Whole(NamedTuple):
    """Sources of eight chunks, and what an undisturbed preparation finds and writes."""

    zoo: Corpus
    findings: dict[str, Any]
    digests: dict[str, str]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole")
    zoo = good_rows(folder, 64 * 8)
    main(flags_of(zoo, folder / "out"))
    found = report_of(folder / "out")
    return Whole(zoo, {name: found[name] for name in ("splits", "sources")}, digests(folder / "out"))


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
    process, late = forks().Process(target=prepare, args=(flags,)), time.monotonic() + LONGEST
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


def has_finished(count: int) -> Callable[[Path], bool]:
    return lambda work: len(finished(work)) >= count


# Each: when a run is killed, and again the run that resumes. Chunks are two files each, eight in all.
MOMENTS: dict[str, list[Callable[[Path], bool]]] = {
    "while chunks are made": [lambda work: work.exists(), *map(has_finished, (2, 4, 8, 12))],
    "while the result is written": [
        lambda work: (work / "result").exists(),
        lambda work: (work / "result" / "dataset_dict.json").exists(),
        lambda work: (work / "result" / "report.json").exists(),
    ],
}


@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_run_resumes_and_gives_the_same_result(when: str, whole: Whole, tmp_path: Path) -> None:
    output, work = tmp_path / "killed", tmp_path / "killed.partial"
    flags = flags_of(whole.zoo, output)
    rng, before, kills = random.Random(0), dict[str, tuple[int, int]](), 0
    for moment in MOMENTS[when]:
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
    again = report_of(output)
    assert ({name: again[name] for name in whole.findings}, digests(output)) == (whole.findings, whole.digests)
    assert not work.exists()
    assert intact_rows(output) == 64 * 8


@pytest.mark.parametrize("delay", [0.0, 0.4])
def test_two_at_once_end_in_one_whole_data_set(delay: float, whole: Whole, tmp_path: Path) -> None:
    output = tmp_path / "both"
    processes = [forks().Process(target=prepare, args=(flags_of(whole.zoo, output),)) for _ in range(2)]
    for process in processes:
        process.start()
        time.sleep(delay)
    for process in processes:
        process.join(LONGEST)
    codes = {process.exitcode for process in processes}
    assert 0 in codes
    assert codes <= {0, 3}
    assert digests(output) == whole.digests
