"""Compare the ranks of a start, and set up a CPU."""

import ctypes
import os
import platform
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
    distributed.check_equal_on_all_ranks(values, "Start all machines with one command, in equal environments.")


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
