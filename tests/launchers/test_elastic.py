"""Machines that come and go under torchrun, as two agents on the loopback interface.

As a script, it is a tiny run that writes down who takes which step: torchrun ... -m tests.launchers.test_elastic FOLDER
"""

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.checkpointing.files import find_checkpoint
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import RunArguments, run_script, start_run
from mm_utils.training.arguments import TrainingArguments
from tests.kit.processes import PATIENCE, free_port, kill_family, on_loopback, wait_until
from tests.kit.tiny_run import TinyRun, alone, build, train

STEPS, SAVE_STEPS = 12, 4
ARGUMENTS = {"max_steps": STEPS, "save_steps": SAVE_STEPS, "eval_steps": STEPS}
HELD = 3  # the step of every process that lasts until a signal comes or FOLDER/hold is gone


class Note(NamedTuple):
    """A step that was taken, by how many processes, and the pid of the first of them."""

    step: int
    world: int
    pid: int


def history(folder: Path) -> list[Note]:
    path = folder / "history"
    lines = path.read_text().splitlines() if path.exists() else []
    return [Note(*map(int, line.split())) for line in lines]


def main() -> None:
    folder = Path(sys.argv[1])
    torch.set_num_threads(1)
    args = TrainingArguments(output_dir=str(folder / "run"))
    start_run("tiny", Parsed([args, RunArguments()]))
    taken = 0

    def strike(place: str, step: int) -> None:
        nonlocal taken
        if place != "end":
            return
        taken += 1
        if distributed.rank() == 0:
            with open(folder / "history", "a") as file:
                file.write(f"{step} {distributed.world_size()} {os.getpid()}\n")
        while taken == HELD and (folder / "hold").exists() and not trainer.signals.number:
            time.sleep(0.05)

    trainer = build(TinyRun(folder / "run", strike=strike, dropout=0.0, exact=True, arguments=ARGUMENTS), [])
    trainer.callbacks.callbacks.append(RestartRecord())
    trainer.train(find_checkpoint("latest", folder / "run"))


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents that end with the test, and their processes."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        kill_family(agent.pid)


def start(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    command = ["torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3", "--rdzv-backend", "c10d"]
    command += ["--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=3", "--rdzv-endpoint", f"127.0.0.1:{port}"]
    variables = on_loopback() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / f"{name}.log", "w") as log:
        words = [*command, "-m", "tests.launchers.test_elastic", str(folder)]
        return subprocess.Popen(words, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_a_machine_joins_and_is_killed(tmp_path: Path, agents: list[subprocess.Popen[bytes]]) -> None:
    port = free_port()
    (tmp_path / "hold").touch()
    for number, name in enumerate(("first", "second"), 1):
        agents.append(start(tmp_path, port, name))
        assert wait_until(lambda: len(history(tmp_path)) == number * HELD), (tmp_path / "first.log").read_text()  # noqa: B023
    kill_family(agents[1].pid)
    (tmp_path / "hold").unlink()
    assert agents[0].wait(PATIENCE) == 0, (tmp_path / "first.log").read_text()

    notes = history(tmp_path)
    alone_before, together, alone_after = (
        [(note.step, note.world) for note in notes if note.pid == pid]
        for pid in dict.fromkeys(note.pid for note in notes)
    )
    assert alone_before == [(1, 1), (2, 1), (3, 1)]
    assert together == [(4, 2), (5, 2), (6, 2)], "no step is lost where a machine joins"
    assert alone_after == [(step, 1) for step in range(SAVE_STEPS + 1, STEPS + 1)], (
        "the last checkpoint, where one dies"
    )
    assert "is not set; a machine that joins" not in (tmp_path / "first.log").read_text()

    status, (_, last, _) = alone(train, TinyRun(tmp_path / "straight", dropout=0.0, exact=True, arguments=ARGUMENTS))
    assert (status, last) == (0, STEPS)
    found, right = (load_file(tmp_path / name / "model.safetensors") for name in ("run", "straight"))
    torch.testing.assert_close(found, right, rtol=0, atol=1e-5)


if __name__ == "__main__":
    run_script(main)
