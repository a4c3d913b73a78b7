"""Failures under the real launcher: a process fails or is killed; the run ends soon, says why, and leaves no process."""

import os
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
from mm_utils import distributed
from mm_utils.run.start import make_accelerator, run_script
from tests.kit.runs import steps

def main():
    make_accelerator()
    for step, phase, _ in steps(10**6, timeout=8.0, warn_after=3.0):
        if (step, phase, distributed.rank(), sys.argv[1]) == (20, "step", 1, "fails"):
            raise KeyError("a bug")
        if step == 20:
            Path(f"{distributed.rank()}.pid").write_text(str(os.getpid()))
        time.sleep(0.01)

run_script(main)
"""

pytestmark = pytest.mark.slow


def launch(folder: Path, fault: str) -> subprocess.Popen[str]:
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(CONFIG)]
    command += ["--main_process_port", "0", "script.py", fault]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=folder, env=environment, stdout=pipe, stderr=subprocess.STDOUT, text=True)


def pid_of(rank: int, folder: Path) -> int:
    """Return the pid of a rank once it has done some steps."""
    deadline, path = time.monotonic() + 120, folder / f"{rank}.pid"
    while time.monotonic() < deadline:
        if path.exists() and path.read_text():
            return int(path.read_text())
        time.sleep(0.1)
    raise AssertionError("the processes did not start")


def end(process: subprocess.Popen[str]) -> str:
    """Return what the launcher and its processes wrote; they must end by themselves."""
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
    assert text.count("KeyError: 'a bug'\n") == 1, "the traceback"
    assert text.count("Stopped, because process 1 failed: KeyError: 'a bug'.\n") == 1
    assert "gloo" not in text


def test_a_killed_process(tmp_path: Path) -> None:
    process = launch(tmp_path, "nothing")
    os.kill(pid_of(1, tmp_path), signal.SIGKILL)
    begin = time.monotonic()
    text = end(process)
    assert process.returncode == 1
    assert time.monotonic() - begin < 60
    assert "gloo" not in text
