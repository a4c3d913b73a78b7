"""Find at the start what would end a run hours later: ranks that differ, a device that cannot compute in the precision."""

import ctypes
import os
import platform
import re
from collections.abc import Mapping
from typing import Any

import torch

from mm_utils import distributed
from mm_utils.reports.model_card import library_versions
from mm_utils.run.restarts import code_digest


def check_equal_start(common: Mapping[str, Any]) -> None:
    """Check that all ranks have the same arguments, by name, code and package versions.

    Raises:
        ValueError: on every rank, naming the differences and the ranks.
    """
    given = {f"--{name}": value for name, value in common.items()}
    values = {**given, **library_versions(), "the code of mm_utils": code_digest()}
    distributed.check_equal_on_all_ranks(values, distributed.SAME_COMMAND)


def check_precision() -> None:
    """Check that this device can compute in the precision that the launcher was given.

    Raises:
        ValueError: if it cannot.
    """
    precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    on_cpu = os.environ.get("ACCELERATE_USE_CPU", "false").lower() in ("true", "1", "yes", "y", "on", "t")
    has_cuda = torch.cuda.is_available() and not on_cpu
    named = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    if not has_cuda and not on_cpu and re.match(r"\d|GPU-|MIG-", named):
        raise ValueError(
            f"CUDA_VISIBLE_DEVICES is {named}; PyTorch {torch.__version__} sees no GPU. Look at nvidia-smi and at the "
            "container's --gpus, or set ACCELERATE_USE_CPU=true to train on the CPU."
        )
    reason = ""
    if not has_cuda:  # a device of Apple or Intel is accelerate's to judge
        other = not on_cpu and (torch.backends.mps.is_available() or torch.xpu.is_available())
        reason = "it needs a GPU. Use bf16" if precision in ("fp16", "fp8") and not other else ""
    elif precision == "bf16" and not torch.cuda.is_bf16_supported(including_emulation=False):
        reason = f"{torch.cuda.get_device_name()} computes none. Use fp16"
    elif precision == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        reason = f"{torch.cuda.get_device_name()} computes none. Use bf16"
    if reason:
        raise ValueError(f"--mixed_precision is {precision}; {reason}, or no for full precision.")


def use_cpu_well() -> None:
    """Use all cores, or OMP_NUM_THREADS of the launch; let the allocator keep its memory.

    glibc returns the memory of every large tensor to the kernel, which clears it again for the next one: with MobileNetV2 at
    224 px that was two thirds of the time. The numbers are M_MMAP_MAX, M_TRIM_THRESHOLD and M_TOP_PAD of malloc.h.
    """
    wanted = os.environ.get("OMP_NUM_THREADS", "")
    if wanted == "1" and not {"ACCELERATE_DYNAMO_BACKEND", "TORCHELASTIC_RUN_ID"}.isdisjoint(os.environ):
        wanted = ""  # these launchers set 1 where nobody has set any
    torch.set_num_threads(int(wanted) if wanted.isdigit() and int(wanted) else max(1, distributed.cores_per_process()))
    if platform.libc_ver()[0] == "glibc":
        libc = ctypes.CDLL(None)
        for option, value in ((-4, 0), (-1, -1), (-2, 2**28)):
            libc.mallopt(option, value)
