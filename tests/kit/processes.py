"""Child processes of a test, what runs of scripts leave, and processes that find each other as ranks do."""

import multiprocessing
import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist

from mm_utils import distributed
from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel
from tests.kit.jsonl import read_lines

ROOT = Path(__file__).parents[2]
PATIENCE = 240.0  # seconds, for a busy machine on which processes import a lot


def wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds, and return whether it does."""
    late = time.monotonic() + PATIENCE
    while time.monotonic() < late:
        if holds():
            return True
        time.sleep(0.05)
    return False


def kill_family(pid: int) -> None:
    """Kill a process and all that it has started, as when a machine loses power."""
    with suppress(psutil.NoSuchProcess):
        for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
            with suppress(psutil.NoSuchProcess):
                process.kill()


def on_loopback() -> dict[str, str]:
    """Return the environment of torchruns that meet on the loopback interface."""
    own = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **own, "PATH": paths, "GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": "127.0.0.1"}


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


ROUNDED = 5e-5  # a key's bias has no gradient but rounding, of which Adam makes whole steps


def rows_of(folder: Path) -> list[dict]:
    return read_lines(folder / "metrics.jsonl")


def losses(folder: Path) -> dict[int, float]:
    return logged(folder, "loss")


def logged(folder: Path, name: str) -> dict[int, float]:
    return {row["step"]: row[name] for row in rows_of(folder) if name in row}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return FusionDualEncoderModel.from_pretrained(folder).state_dict()


def launch(arguments: list[str], cwd: Path, **environment: str) -> subprocess.CompletedProcess:
    accelerate = [sys.executable, "-m", "accelerate.commands.launch"]
    return subprocess.run(
        [*accelerate, *arguments],
        cwd=cwd,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=600,
    )


# -- ranks -------------------------------------------------------------------------------------------------------------
def forks() -> Any:
    """Return the context of processes that are forked, in a fraction of a second, from a clean one that has imported `tests.kit.forked`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.kit.forked"])  # heeded by the first call of this process
    return context


def run_on_ranks(world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    """Call `function(*args)`, a module's function, in `world` gloo processes: what each returned, in rank order."""
    forks()
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _on_rank, (world, folder, function, args), nprocs=world, start_method="forkserver"
        )
        return [pickle.loads(Path(folder, f"{rank}.pickle").read_bytes()) for rank in range(world)]


def _on_rank(rank: int, world: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    meeting_point = f"file://{folder}/meeting_point"
    dist.init_process_group("gloo", meeting_point, timedelta(seconds=120), world_size=world, rank=rank)
    Path(folder, f"{rank}.pickle").write_bytes(pickle.dumps(function(*args)))
    dist.barrier()
    dist.destroy_process_group()


def let_accelerate_find_ranks() -> None:
    """Describe the process group of `run_on_ranks` in the environment, as a launcher does."""
    rank = str(distributed.rank())
    world = str(distributed.world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
