"""Find at the start what would end a run hours later: devices, ranks, limits.

A problem on any machine is logged once, and an error is raised on every rank, so that none waits for another.
"""

import ctypes
import functools
import logging
import os
import platform
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from accelerate import Accelerator
from accelerate.utils import gather_object

from mm_utils import distributed
from mm_utils.run.restarts import code_digest, device_name, versions

logger = logging.getLogger(__name__)

_LAUNCHERS = {"accelerate", "accelerate-launch", "torchrun"}
_LAUNCHER_MODULES = {"accelerate.commands.launch", "accelerate.commands.accelerate_cli", "torch.distributed.run"}
_SHARED_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def check_equal_start(common: Mapping[str, Any]) -> None:
    """Check that all ranks have the same arguments, by name, code and package versions.

    Raises:
        ValueError: on every rank, naming the differences and the ranks.
    """
    given = {f"--{name}": value for name, value in common.items()}
    values = {**given, **versions(), "the code of mm_utils": code_digest()}
    distributed.check_equal_on_all_ranks(values, distributed.SAME_COMMAND)


def check_precision() -> None:
    """Check that this device can compute in the precision that the launcher was given.

    Raises:
        ValueError: if it cannot.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes", "y", "on", "t")
    has_cuda = torch.cuda.is_available() and not on_cpu
    no_other = not (torch.backends.mps.is_available() or (hasattr(torch, "xpu") and torch.xpu.is_available()))
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not has_cuda and not on_cpu and re.match(r"\d|GPU-|MIG-", named):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {named}; PyTorch {torch.__version__} sees no GPU. Look at nvidia-smi and at the "
            "container's --gpus, or set ACCELERATE_USE_CPU=true to train on the CPU."
        )
    if precision in ("fp16", "fp8") and not has_cuda and (on_cpu or no_other):
        raise ValueError(
            f"--mixed_precision is {precision}; {precision} needs a GPU. Use bf16, or no for full precision."
        )
    if precision == "bf16" and has_cuda and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise ValueError(
            f"--mixed_precision is bf16; {torch.cuda.get_device_name()} computes none. Use fp16, or no for full precision."
        )
    if precision == "fp8" and has_cuda and torch.cuda.get_device_capability() < (8, 9):
        raise ValueError(f"--mixed_precision is fp8; {torch.cuda.get_device_name()} computes none. Use bf16.")


def check_devices(accelerator: Accelerator) -> None:
    """Warn if there are GPUs of several kinds; called on all ranks."""
    kinds = sorted(set(gather_object([device_name(accelerator.device)])))
    if len(kinds) > 1 and distributed.rank() == 0:
        logger.warning(
            "Devices are %s; every step takes as long as on the slowest. Train on devices of one kind.",
            ", ".join(kinds),
        )


# -- launchers --------------------------------------------------------------------------------------------------------


def check_launcher() -> None:
    """Refuse a launcher whose processes would each train alone.

    Raises:
        RunError: if Horovod started this process.
    """
    if not {"HOROVOD_RANK", "HOROVOD_SIZE"}.isdisjoint(os.environ):
        raise distributed.RunError(
            "The launcher is horovodrun, whose last release (0.28.1 of 2023) builds against no PyTorch of today; its "
            "processes would each train alone. Use accelerate launch or torchrun, or Ray: docs/launchers.md."
        )


def report_launch(device: torch.device) -> None:
    """Log what the launcher leaves unused, and what ends the run when a machine joins."""
    seen = torch.cuda.device_count() if device.type == "cuda" else 0
    used = int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("WORLD_SIZE", "1"))
    if seen > used:
        logger.info(
            "%d of the %d GPUs of this machine train, one per process; accelerate_configs/multi_gpu.yaml starts a process "
            "for each.",
            used,
            seen,
        )
    nodes = _launched_nodes()
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and len({*nodes.split(":")}) > 1:
        logger.warning(
            "--nnodes is %s and %s is not set; a machine that joins ends all others (torch 2.15 and before). Set it to 1 for "
            "torchrun on every machine.",
            nodes,
            _SHARED_STORE,
        )


def _launched_nodes() -> str:
    """Return torchrun's --nnodes, `N` or `MIN:MAX`, if its command line or environment say."""
    words = _command(os.getppid())
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, _, value = word.partition("=")
        if name == "--nnodes":
            return value or following
    return os.environ.get("PET_NNODES", "")


# -- parent and child processes -----------------------------------------------------------------------------------------


@functools.cache
def fork_without_tokenizer_threads() -> None:
    """Let forked processes tokenise with one thread: they would wait forever for others.

    `tokenizers` sees to it by itself, but not where TOKENIZERS_PARALLELISM is true.
    """
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=lambda: os.environ.update(TOKENIZERS_PARALLELISM="false"))


def use_cpu_well() -> None:
    """Use all cores, or OMP_NUM_THREADS of the launch; let the allocator keep its memory.

    `accelerate launch` sets OMP_NUM_THREADS=1 if nobody else did, so its own environment says what the user wants. glibc
    returns the memory of every large tensor to the kernel, which clears it again for the next one: with MobileNetV2 at 224 px
    that was two thirds of the time. The numbers are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    """
    wanted = _environment_of_user().get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) else max(1, distributed.cores_per_process()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
            libc.mallopt(option, value)


def _environment_of_user() -> dict[str, str]:
    """Return the environment that the launcher, else this process, was started with."""
    parent = os.getppid()
    try:
        return psutil.Process(parent).environ() if _is_launcher(parent) else dict(os.environ)
    except psutil.Error:
        return {}


def _is_launcher(process: int) -> bool:
    words = _command(process)[:4]
    return any(word in _LAUNCHER_MODULES or Path(word).name in _LAUNCHERS for word in words)


def _command(process: int) -> list[str]:
    try:
        return Path(f"/proc/{process}/cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
    except OSError:
        return [""]
