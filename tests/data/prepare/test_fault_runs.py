"""Runs that are killed go on to the same result, and damage to a result is found."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from datasets import disable_progress_bars, load_from_disk
from tqdm.auto import tqdm

from scripts.prepare_data import main
from tests.data.prepare.fault_sources import good_rows

SCRIPT = Path(__file__).parents[3] / "scripts" / "prepare_data.py"
disable_progress_bars()


def report_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "report.json").read_text(encoding="utf-8"))


def run_until(flags: list[str], work: Path, moment: Callable[[Path], bool], delay: float) -> bool:
    """Prepare in a process group of its own and kill it, `delay` seconds after `moment`; False if it was over before.

    A fork of this process: a script of its own spends 4 s on imports.
    """
    child = os.fork()
    if child == 0:
        os.setpgid(0, 0)
        tqdm.set_lock(threading.RLock())  # its own is shared by forks, and a killed one may die with it
        try:
            main(flags)
        finally:
            os._exit(0)
    with suppress(ProcessLookupError):  # it is over
        os.setpgid(child, child)  # here too, as nobody knows who is first
    while not moment(work):
        if os.waitpid(child, os.WNOHANG)[0]:
            return False
        time.sleep(0.002)
    time.sleep(delay)
    os.killpg(child, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


def finished(work: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of the files of finished chunks."""
    done = [path.with_suffix(end) for path in work.glob("parts/*.json") for end in (".json", ".arrow")]
    return {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in done}


def has_finished(count: int) -> Callable[[Path], bool]:
    return lambda work: len(finished(work)) >= count


# Each: when a run is killed, and again the run that goes on. Chunks are two files each, eight in all.
MOMENTS: dict[str, list[Callable[[Path], bool]]] = {
    "while chunks are made": [
        lambda work: work.exists(),
        *map(has_finished, (2, 4, 8, 12)),
    ],
    "while the result is written": [
        lambda work: (work / "result").exists(),
        lambda work: (work / "result" / "dataset_dict.json").exists(),
        lambda work: (work / "result" / "report.json").exists(),
    ],
}


@pytest.mark.parametrize("when", MOMENTS)
def test_a_killed_run_goes_on_where_it_stopped_to_the_same_result(when: str, tmp_path: Path) -> None:
    corpus = good_rows(tmp_path, 64 * 8)
    flags = ["--sources", *corpus.sources, "--num_proc", "2", "--validation_fraction", "0.2", "--output_dir"]
    main([*flags, str(tmp_path / "whole")])
    output, work = tmp_path / "killed", tmp_path / "killed.partial"
    rng, before = random.Random(0), dict[str, tuple[int, int]]()
    for moment in MOMENTS[when]:
        assert run_until([*flags, str(output)], work, moment, rng.uniform(0, 0.01))
        assert not output.exists()
        after = finished(work)
        assert {name: after.get(name) for name in before} == before
        before = after
    assert before
    main([*flags, str(output)])
    whole, again = report_of(tmp_path / "whole"), report_of(output)
    assert again["fingerprint"] == whole["fingerprint"]
    assert again["splits"] == whole["splits"]
    assert again["sources"] == whole["sources"]
    assert not work.exists()
    main(["--verify", str(output)])


@pytest.mark.slow
def test_the_command_is_killed_and_given_again(tmp_path: Path) -> None:
    corpus = good_rows(tmp_path, 64 * 8)
    output = tmp_path / "killed"
    command = [
        sys.executable,
        str(SCRIPT),
        "--sources",
        *corpus.sources,
        "--num_proc",
        "2",
        "--output_dir",
        str(output),
    ]
    environment = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    first = subprocess.Popen(command, env=environment, start_new_session=True, stderr=subprocess.DEVNULL)
    while not list(tmp_path.glob("killed.partial/parts/*.json")):
        assert first.poll() is None
        time.sleep(0.002)
    os.killpg(first.pid, signal.SIGKILL)
    assert first.wait() == -signal.SIGKILL
    subprocess.run(command, env=environment, check=True, stderr=subprocess.DEVNULL)
    main(["--sources", *corpus.sources, "--num_proc", "2", "--output_dir", str(tmp_path / "whole")])
    assert report_of(output)["fingerprint"] == report_of(tmp_path / "whole")["fingerprint"]


@pytest.fixture
def result(tmp_path: Path) -> Path:
    corpus = good_rows(tmp_path, 6)
    flags = ["--sources", *corpus.sources, "--output_dir", str(tmp_path / "out"), "--validation_fraction", "0"]
    main([*flags, "--num_proc", "1"])
    return tmp_path / "out"


def flip(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :]


DAMAGE: dict[str, Callable[[bytes, dict[str, Any]], bytes]] = {
    "a bit in an image": lambda shard, row: flip(shard, shard.index(row["image"]["bytes"]) + 300),
    "a bit in a caption": lambda shard, row: flip(shard, shard.index(row["captions"][0].encode())),
    "a bit in a content id": lambda shard, row: flip(shard, shard.index(row["content_id"].encode())),
    "a shard cut in half": lambda shard, row: shard[: len(shard) // 2],
    "an empty shard": lambda shard, row: b"",
    "zeros at the end": lambda shard, row: shard[: len(shard) // 2] + bytes(len(shard) - len(shard) // 2),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_to_a_written_shard_is_found(kind: str, result: Path) -> None:
    [shard] = (result / "train").glob("*.arrow")
    row = load_from_disk(str(result))["train"][3]
    shard.write_bytes(DAMAGE[kind](shard.read_bytes(), row))
    with pytest.raises(ValueError, match="Prepare it anew") as caught:
        main(["--verify", str(result)])
    assert str(result) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_lost_shard_is_found(result: Path) -> None:
    [shard] = (result / "train").glob("*.arrow")
    shard.unlink()
    with pytest.raises(ValueError, match="Prepare it anew"):
        main(["--verify", str(result)])
