"""Record every start, so that a restarted launcher finds its folder and checkpoint.

Every start is an entry of `environment.json` in the output folder. A launcher that restarts its processes (`torchrun` and
`accelerate launch` with `--max_restarts`, or a changed number of nodes) is recognised by a log folder that it creates once
and names to all of them, and Ray by the name of the launch; so a start finds the earlier ones, and a folder
`outputs/<script>-N` too.
"""

import functools
import hashlib
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.arguments import in_notebook
from mm_utils.files import read_json, write_json
from mm_utils.reports.model_card import library_versions
from mm_utils.text import redact

STARTS_FILE = "environment.json"
A_NOTEBOOK = "a notebook"  # in the place of a command
LAUNCHER_VARIABLE = "TANDEM_LAUNCHER"  # holds the name of a launcher that sets it in its processes (`mm_utils.launch`)
_ROOT = Path(__file__).resolve().parents[2]


def launcher_names() -> list[str]:
    """Return all ranks' launchers' names, which restarts keep; called on all ranks."""
    return sorted({name for name in gather_object([_launcher_name()]) if name})


def _launcher_name() -> str | None:
    """Return the launcher's name, or `<host>:<folder>` of torchelastic's logs, new each launch."""
    if os.environ.get(LAUNCHER_VARIABLE):
        return os.environ[LAUNCHER_VARIABLE]
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    folders = Path(os.environ.get("TORCHELASTIC_ERROR_FILE", "")).parents  # <folder>/attempt_N/<local rank>/error.json
    # torchrun without --rdzv_id says 'none', which all launches would share
    name = str(folders[2]) if len(folders) > 3 else run_id if run_id != "none" else ""
    return f"{platform.node()}:{name}" if run_id and name else None


def earlier_starts(folder: Path, launch: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Return a folder's starts, oldest first; with `launch`, those of the same launchers."""
    try:
        starts = read_json(folder / STARTS_FILE)
    except (OSError, ValueError):
        return []
    if not isinstance(starts, list):  # a file of somebody else
        return []
    return starts if launch is None else [start for start in starts if set(launch) & set(start.get("launch", ()))]


def folder_of_launch(name: str, launch: Sequence[str]) -> Path | None:
    """Return the `outputs/<name>-N` that an earlier start of this launch created."""
    return next((path for path in Path("outputs").glob(f"{name}-*") if earlier_starts(path, launch)), None)


def record_start(folder: Path, description: dict[str, Any], launch: Sequence[str]) -> None:
    """Append a start to `environment.json`."""
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    start = {**description, "launch": list(launch), "restarts": restarts}
    write_json(folder / STARTS_FILE, [*earlier_starts(folder), start])


class RestartRecord(TrainerCallback):
    """Record the step that this start resumes from.

    Args:
        save_config: writes `config.yaml`, which a resumed run replaces only here, where nothing refuses it any more.
    """

    def __init__(self, save_config: Callable[[], None] = lambda: None):
        self.save_config = save_config
        self._is_recorded = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Record the step of the first stage that this start trains."""
        if not self._is_recorded:
            self._is_recorded = True
            distributed.on_first(lambda: self._record(Path(args.output_dir), state.global_step))

    def _record(self, folder: Path, step: int) -> None:
        if starts := earlier_starts(folder):
            starts[-1]["resumed_from"] = step
            write_json(folder / STARTS_FILE, starts)
        self.save_config()


# -- the environment of a start -----------------------------------------------------------------------------------------


@functools.cache
def code_digest() -> str:
    """Return a hash of all source files of this package."""
    digest = hashlib.sha256()
    package = Path(__file__).parents[1]
    for path in sorted(package.rglob("*.py")):
        # \0 tells where a name ends and the content begins
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def describe_start(accelerator: Accelerator) -> dict[str, Any]:
    """Return versions, machines, devices, commit, redacted command, time; on all ranks."""
    every_rank = gather_object([(platform.node(), device_name(accelerator.device))])
    return {
        "time": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "command": A_NOTEBOOK if in_notebook() else redact(shlex.join(sys.argv)),
        "num_processes": accelerator.num_processes,
        "distributed_type": accelerator.distributed_type.value,
        "mixed_precision": accelerator.mixed_precision,
        "hosts": list(dict.fromkeys(host for host, _ in every_rank)),
        "devices": [device for _, device in every_rank],
        "platform": platform.platform(),
        **library_versions(),
        "cuda": torch.version.cuda,
        "commit": _commit(),
        "code": code_digest(),
    }


def device_name(device: torch.device) -> str:
    """Return the GPU's name, or the kind of another device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _commit() -> str | None:
    """Return the code's commit, `-dirty` if changed since; None outside a git checkout."""
    # --exclude=*: always the hash, never a tag
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    environment = {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}  # git would refresh its index, and lock it
    with suppress(OSError, subprocess.SubprocessError):
        return subprocess.check_output(
            command, text=True, timeout=10, stderr=subprocess.DEVNULL, env=environment
        ).strip()
    return None
