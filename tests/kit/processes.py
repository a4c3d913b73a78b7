"""Child processes of a test, runs of scripts in processes of their own, and what these leave."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import torch

from mm_utils.model.modeling_fusion_dual_encoder import FusionDualEncoderModel

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
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


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
