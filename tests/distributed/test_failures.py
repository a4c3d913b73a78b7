"""Failures under the real launcher: one process fails, is killed or hangs; the run ends soon, says why, and leaves nobody."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "accelerate_configs" / "two_processes.yaml"
SCRIPT = """
import os, sys, time
from pathlib import Path
import torch
from mm_utils import ranks
from mm_utils.run import make_accelerator, run_script
from mm_utils.watchdog import Watchdog

def main():
    device = make_accelerator().device
    with Watchdog(8.0, device, patience=3.0) as watchdog:
        for step in range(10**6):
            watchdog.at(step, "data")
            if (step, ranks.rank(), sys.argv[1]) == (20, 1, "hangs"):
                time.sleep(1000)
            watchdog.at(step, "step")
            if (step, ranks.rank(), sys.argv[1]) == (20, 1, "fails"):
                raise KeyError("a bug")
            ranks.any_rank(False, device)
            if step == 20:
                Path(f"{ranks.rank()}.pid").write_text(str(os.getpid()))
            time.sleep(0.01)

run_script(main)
"""

pytestmark = [pytest.mark.faults, pytest.mark.slow]


def launch(folder: Path, fault: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
    command += ["--main_process_port", "0", "script.py", fault]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def pid_of(rank: int, folder: Path) -> int:
    """Its pid, once it has done some steps."""
    until, path = time.monotonic() + 120, folder / f"{rank}.pid"
    while time.monotonic() < until:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.1)
    raise AssertionError("the processes did not start")


def end(process: subprocess.Popen[str]) -> str:
    """What the launcher and all its processes wrote; they must end by themselves."""
    family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    try:
        text, _ = process.communicate(timeout=150)
        _, alive = psutil.wait_procs(family, timeout=10)
        assert not alive
        return text
    finally:
        for member in family:
            if member.is_running():
                member.kill()


def test_a_failing_process(tmp_path: Path) -> None:
    process = launch(tmp_path, "fails")
    text = end(process)
    assert process.returncode == 1
    assert text.count("Process 1 failed") == 1
    assert text.count("KeyError: 'a bug'\n") == 2, "the traceback, and the other's one line"
    assert "Stopped, because process 1 failed: KeyError: 'a bug'" in text
    assert "gloo" not in text


def test_a_killed_process(tmp_path: Path) -> None:
    process = launch(tmp_path, "nothing")
    os.kill(pid_of(1, tmp_path), signal.SIGKILL)
    begin = time.monotonic()
    text = end(process)
    assert process.returncode == 1
    assert time.monotonic() - begin < 60
    assert "gloo" not in text


def test_a_hanging_process(tmp_path: Path) -> None:
    process = launch(tmp_path, "hangs")
    text = end(process)
    assert process.returncode == 1
    assert re.search(
        r"Stopped, because process 1 \(host .*\) has been in 'data' of step 20 for \d+ s, at script.py", text
    )
    assert text.count("What process 1 is doing") == 1
    assert "time.sleep(1000)" in text
    assert "gloo" not in text
