"""What a run is started with and on: versions, code, machines, devices."""

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import accelerate
import datasets
import torch
import transformers
from accelerate import Accelerator
from accelerate.utils import gather_object

from mm_utils.hub import redact

ROOT = Path(__file__).resolve().parents[1]
_GIT_SECONDS = 10


def versions() -> dict[str, str]:
    """Of the packages that decide what a run computes."""
    packages = (torch, transformers, accelerate, datasets)
    return {package.__name__: package.__version__ for package in packages}


@functools.cache
def code_digest() -> str:
    """A hash of all source files of this package."""
    digest = hashlib.sha256()
    package = Path(__file__).parent
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def describe_start(accelerator: Accelerator) -> dict[str, Any]:
    """Versions, platform, machines, devices, commit, command without secrets, and time; called on all ranks."""
    every_rank = gather_object([(platform.node(), _device_name(accelerator.device))])
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": redact(shlex.join(sys.argv)),
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "hosts": list(dict.fromkeys(host for host, _ in every_rank)),
        "devices": [device for _, device in every_rank],
        "python": platform.python_version(),
        "platform": platform.platform(),
        **versions(),
        "cuda": torch.version.cuda,
        "driver": _driver(),
        "commit": _commit(),
        "code": code_digest(),
    }


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _driver() -> str | None:
    with suppress(OSError):
        return Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    return None


def _commit() -> str | None:
    """The commit of the code, with `-dirty` where it was changed since; None where it is no git checkout."""
    if not (ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    variables = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_GIT_SECONDS, env=variables
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() or None
