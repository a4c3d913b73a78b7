"""The table counts what was injected and what was survived, failures before the first word included."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

INNER = """
import pytest

@pytest.mark.parametrize("number", range(3))
def test_good(fault, number):
    injected = fault("images", f"number {number}", detection_seconds=0.5)
    injected.detection_seconds = float(number)

def test_of_training(fault):
    with fault("checkpoints", "a bit", steps_lost=3, save_interval=5, bytes_lost=0):
        pass
    fault("checkpoints", "a byte", steps_lost=4, save_interval=5, bytes_lost=7, silent_corruptions=1)

def test_bad(fault):
    with fault("images", "one that kills"):
        raise RuntimeError

def test_bad_at_once():
    raise RuntimeError

@pytest.fixture
def falls():
    yield
    raise RuntimeError

def test_bad_at_the_end(fault, falls):
    fault("images", "one that kills later")

def test_skipped(fault):
    fault("images", "not here")
    pytest.skip()

@pytest.mark.xfail(strict=True)
def test_known(fault):
    fault("images", "one that is known to kill")
    raise RuntimeError

@pytest.mark.slow
def test_long(fault):
    fault("hub", "a slow one")

def test_without_fault():
    pass
"""
REPORT = """\
| area | injected | survived | steps lost (most) | save interval | acknowledged bytes lost | \
detection seconds (median, most) | silent corruptions |
| --- | --- | --- | --- | --- | --- | --- | --- |
| checkpoints | 2 | 2 | 4 | 5 | 7 |  | 1 |
| images | 6 | 3 |  |  |  | 1, 2 | 0 |
| inner | 1 | 0 |  |  |  |  | 0 |
| total | 9 | 5 | 4 | 5 | 7 | 1, 2 | 1 |
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    folder = tmp_path / "faults"
    folder.mkdir()
    shutil.copy(Path(__file__).with_name("conftest.py"), folder)
    with (folder / "conftest.py").open("a") as file:
        file.write("\n\npytest_collection_modifyitems = leave_long_tests_out\n")
    (folder / "test_inner.py").write_text(INNER)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers =\n    slow\n    faults\n")
    return folder


def run(folder: Path, *flags: str) -> str:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(folder), *flags]
    done = subprocess.run(command, cwd=folder.parent, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


def test_every_fault_is_counted_once_with_its_outcome(folder: Path, tmp_path: Path) -> None:
    output = run(folder, "--faults_report", str(tmp_path / "report.md"))
    assert (tmp_path / "report.md").read_text() == REPORT
    assert "not survived: images: one that kills later" in output
    assert "1 long tests left out" in output


def test_long_ones_are_run_when_asked_for(folder: Path) -> None:
    output = run(folder, "-m", "faults and slow")
    assert "1 passed" in output
    assert "hub    1         1" in output
