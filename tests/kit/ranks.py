"""Processes that find each other, as the ranks of a run do."""

import multiprocessing
import os
import pickle
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from mm_utils import distributed

# One clean process imports everything once; the processes of all files are forked from it in a fraction of a second.
PRELOADED = ["hypothesis", "tests.faults.rank_runs", "tests.distributed.test_signature"]


def forks() -> Any:
    """Return the context of processes that are forked from the one that has imported all of `PRELOADED`."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)  # heeded by the first call of this process
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
    rank, world = str(distributed.rank()), str(distributed.world_size())
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ |= {"ACCELERATE_USE_CPU": "true", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}
