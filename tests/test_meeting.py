"""Processes of one start find each other: threads on one store, and a launcher that restarts its processes."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch.distributed as dist

from mm_utils.meeting import meet

ROOT = Path(__file__).parents[1]
LONG = 30.0


def names(store: dist.Store, world: int) -> set[str]:
    """What one meeting is called, by each that takes part."""
    with ThreadPoolExecutor(world) as pool:
        return {each.result() for each in [pool.submit(meet, store, rank, world, LONG) for rank in range(world)]}


@pytest.mark.parametrize("world", [1, 2, 5])
def test_all_give_a_meeting_one_name_and_no_two_meetings_have_the_same(world: int) -> None:
    store = dist.HashStore()
    found = [names(store, world) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_whoever_was_there_before_is_not_waited_for() -> None:
    """A start of three is over when its process 2 has come, and not 1."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(meet, store, rank, 3, 0.5) for rank in (0, 2)]
        with pytest.raises(TimeoutError, match=r"1 of 3 processes have not come within 0 s, process 1 for one"):
            ended[0].result()
        with pytest.raises(TimeoutError, match=r"process 2 has waited 0 s for process 0, or for others"):
            ended[1].result()
    assert len(names(store, 3)) == 1


def test_process_0_may_be_started_anew_while_others_wait() -> None:
    """They leave the name of a process 0 that is gone for that of the next."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(meet, store, 1, 3, LONG)
        with pytest.raises(TimeoutError):
            meet(store, 0, 3, 0.5)
        others = [pool.submit(meet, store, rank, 3, LONG) for rank in (0, 2)]
        assert len({each.result() for each in [waiting, *others]}) == 1


SCRIPT = """
import os, signal
import torch
from mm_utils import ranks
from mm_utils.run import make_accelerator

device = make_accelerator().device
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
assert ranks.any_rank(True, device)
print(f"attempt {attempt} met", flush=True)
while attempt < 4:
    if ranks.rank() == attempt % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    ranks.any_rank(True, device)
"""


@pytest.mark.slow
def test_processes_meet_after_every_restart(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    config = str(ROOT / "accelerate_configs/two_processes.yaml")
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--max_restarts", "4"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    launcher = subprocess.Popen(
        [*command, "--monitor_interval", "0.2", "--main_process_port", "0", "script.py"],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        text, _ = launcher.communicate(timeout=300)
    finally:
        launcher.send_signal(signal.SIGTERM)
    assert launcher.returncode == 0, text
    assert [text.count(f"attempt {number} met") for number in range(5)] == [2] * 5
    assert "Connection refused" not in text
