"""The processes of one start find each other, after restarts by real launchers, too."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from mm_utils.run.rendezvous import rendezvous
from tests.kit.processes import free_port

ROOT = Path(__file__).parents[2]
LONG = 30.0


def prefixes(store: dist.Store, world_size: int) -> set[str]:
    """Return the prefixes that the ranks of one start get."""
    with ThreadPoolExecutor(world_size) as pool:
        return set(pool.map(lambda rank: rendezvous(store, rank, world_size, LONG), range(world_size)))


@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_all_ranks_of_a_start_get_one_prefix_and_every_start_another(world_size: int) -> None:
    store = dist.HashStore()
    found = [prefixes(store, world_size) for _ in range(3)]
    assert [len(each) for each in found] == [1, 1, 1]
    assert len(set.union(*found)) == 3


def test_a_start_does_not_wait_for_processes_of_the_start_before() -> None:
    """The first start ends because its rank 1 is missing."""
    store = dist.HashStore()
    with ThreadPoolExecutor(2) as pool:
        ended = [pool.submit(rendezvous, store, rank, 3, 0.5) for rank in (0, 2)]
        with pytest.raises(TimeoutError, match="process 0 waited 0 s for process 1, or for others"):
            ended[0].result()
        with pytest.raises(TimeoutError, match="process 2 waited 0 s for process 0, or for others"):
            ended[1].result()
    assert len(prefixes(store, 3)) == 1


def test_rank_0_may_be_restarted_while_others_wait() -> None:
    """They drop the prefix of the rank 0 that is gone for that of the next."""
    store = dist.HashStore()
    with ThreadPoolExecutor(3) as pool:
        waiting = pool.submit(rendezvous, store, 1, 3, LONG)
        with pytest.raises(TimeoutError):
            rendezvous(store, 0, 3, 0.5)
        others = [pool.submit(rendezvous, store, rank, 3, LONG) for rank in (0, 2)]
        assert len({each.result() for each in [waiting, *others]}) == 1


SCRIPT = """
import os, signal, sys
from pathlib import Path
from mm_utils import distributed
from mm_utils.run.start import make_accelerator

starts = 5
device = make_accelerator().device
assert distributed.any_rank(True, device)
file = Path(f"{distributed.rank()}.starts")
start = len(file.read_text()) if file.exists() else 0
file.write_text("." * (start + 1))
print(f"start {start} met, {os.environ['TORCHELASTIC_RESTART_COUNT']} restarts counted", flush=True)
while start < starts - 1:
    if distributed.rank() == start % 2:
        os.kill(os.getpid(), signal.SIGKILL)
    distributed.any_rank(True, device)
"""


@pytest.mark.slow
@pytest.mark.parametrize("machines", [1, 2])
def test_processes_meet_after_every_restart(machines: int, tmp_path: Path) -> None:
    """Also those of two launchers with c10d, each of which counts the failures of its own processes only."""
    (tmp_path / "script.py").write_text(SCRIPT)
    words = ["accelerate.commands.launch", "--config_file", str(ROOT / "accelerate_configs/two_processes.yaml")]
    words += ["--main_process_port", "0"]
    if machines == 2:
        words = ["torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1", "--rdzv_backend", "c10d"]
        words += ["--rdzv_id", "run", "--local_addr", "localhost", "--rdzv_endpoint", f"localhost:{free_port()}"]
    command = [sys.executable, "-m", *words, "--max_restarts", "8", "--monitor_interval", "0.2", "script.py"]
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    launchers = [subprocess.Popen(command, cwd=tmp_path, env=environment, **pipes) for _ in range(machines)]
    try:
        text = "".join(launcher.communicate(timeout=400)[0] for launcher in launchers)
    finally:
        for launcher in launchers:
            launcher.send_signal(signal.SIGTERM)
    assert [launcher.returncode for launcher in launchers] == [0] * machines, text
    assert [text.count(f"start {number} met") for number in range(5)] == [2] * 5
    counted = [set(re.findall(rf"start {number} met, (\d+) restarts", text)) for number in range(5)]
    assert machines == 1 or any(len(counts) == 2 for counts in counted), (
        "a prefix from TORCHELASTIC_RESTART_COUNT would do"
    )
