"""A script for agents that come and go: a tiny run that writes down who takes which step.

torchrun --nnodes 1:2 ... -m tests.launchers.agents FOLDER [--resume_from_checkpoint latest]
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import torch

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import RunArguments, run_script, start_run
from mm_utils.training.arguments import TrainingArguments
from tests.kit.tiny_run import TinyRun, build

ROOT = Path(__file__).parents[2]
STEPS, SAVE_STEPS = 12, 4
ARGUMENTS = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "eval_steps": STEPS}
HELD = 3  # the step of every process that lasts until a signal comes or FOLDER/hold is gone
PATIENCE = 240.0  # seconds; agents and their processes import a lot


class Note(NamedTuple):
    """A step that was taken, by how many processes, and the pid of the first of them."""

    step: int
    world: int
    pid: int


def history(folder: Path) -> list[Note]:
    path = folder / "history"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Note(*map(int, line.split())) for line in lines]


def wait_until(holds: Callable[[], bool]) -> bool:
    """Wait until a condition holds, and return whether it does."""
    late = time.monotonic() + PATIENCE
    while not holds() and time.monotonic() < late:
        time.sleep(0.1)
    return holds()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--resume_from_checkpoint")
    given = parser.parse_args()
    torch.set_num_threads(1)
    output = given.folder / "run"
    args = TrainingArguments(output_dir=str(output), resume_from_checkpoint=given.resume_from_checkpoint)
    start_run("tiny", Parsed([args, RunArguments()]))

    taken = 0

    def strike(place: str, step: int) -> None:
        nonlocal taken
        if place != "end":
            return
        taken += 1
        if distributed.rank() == 0:
            with open(given.folder / "history", "a") as file:
                file.write(f"{step} {distributed.world_size()} {os.getpid()}\n")
        while taken == HELD and (given.folder / "hold").exists() and not trainer.signals.number:
            time.sleep(0.05)

    trainer = build(TinyRun(output, strike=strike, dropout=0.0, exact=True, arguments=ARGUMENTS), [])
    trainer.callbacks.callbacks.append(RestartRecord())
    trainer.train(find_checkpoint(args.resume_from_checkpoint, output))


def environment() -> dict[str, str]:
    """The environment of agents that meet on the loopback interface."""
    own = {"PYTHONPATH": str(ROOT), "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "no"}
    paths = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {**os.environ, **own, "PATH": paths, "GLOO_SOCKET_IFNAME": "lo", "PET_LOCAL_ADDR": "127.0.0.1"}


if __name__ == "__main__":
    run_script(main)


def kill(agent: subprocess.Popen[bytes]) -> None:
    """Kill an agent and its processes, as when a machine loses power."""
    with suppress(psutil.NoSuchProcess):
        family = [psutil.Process(agent.pid), *psutil.Process(agent.pid).children(recursive=True)]
        for each in family:
            with suppress(psutil.NoSuchProcess):
                os.kill(each.pid, signal.SIGKILL)
