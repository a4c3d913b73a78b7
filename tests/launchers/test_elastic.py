"""Machines that come and go under torchrun, as two agents on the loopback interface."""

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.kit.processes import free_port
from tests.kit.tiny_run import TinyRun, alone, train
from tests.launchers.agents import ARGUMENTS, HELD, PATIENCE, SAVE_STEPS, STEPS, environment, history, kill, wait_until

AGENT = (
    *("torchrun", "--nnodes", "1:2", "--nproc-per-node", "1", "--max-restarts", "3"),
    *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf", "last_call_timeout=3"),
)


@pytest.fixture
def agents() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Agents that end with the test, and their processes."""
    started: list[subprocess.Popen[bytes]] = []
    yield started
    for agent in started:
        kill(agent)


def start(folder: Path, port: int, name: str) -> subprocess.Popen[bytes]:
    command = [*AGENT, "--rdzv-endpoint", f"127.0.0.1:{port}", "-m", "tests.launchers.agents", str(folder)]
    variables = environment() | {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    with open(folder / f"{name}.log", "w") as log:
        return subprocess.Popen(command, env=variables, cwd=folder, stdout=log, stderr=subprocess.STDOUT)


@pytest.mark.slow
def test_a_machine_joins_and_is_killed(tmp_path: Path, agents: list[subprocess.Popen[bytes]]) -> None:
    port = free_port()
    (tmp_path / "hold").touch()
    for number, name in enumerate(("first", "second"), 1):
        agents.append(start(tmp_path, port, name))
        assert wait_until(lambda: len(history(tmp_path)) == number * HELD), (tmp_path / "first.log").read_text()  # noqa: B023
    kill(agents[1])
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
    assert found.keys() == right.keys()
    for name, value in right.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=1e-5, msg=name)
