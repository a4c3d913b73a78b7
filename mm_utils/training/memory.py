"""The peak of memory of a process, and how busy its GPU is."""

import resource
import sys
from contextlib import suppress
from pathlib import Path

import torch


def peak_bytes(device: torch.device) -> int:
    """Return the peak of memory in bytes: of tensors on a GPU, else of this process alone.

    On Linux, `ru_maxrss` starts at the parent's value; `VmHWM` starts at 0.
    """
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    with suppress(OSError, StopIteration), open("/proc/self/status", encoding="ascii") as status:
        # 'VmHWM:\t  812345 kB'
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) * 1024
    # Linux counts kibibytes, macOS bytes
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def gpu_use(device: torch.device) -> float | None:
    """Return the share of the last second or less in which the GPU ran a kernel; None on a CPU, or where nothing can tell.

    That takes the package nvidia-ml-py, and a GPU that is not cut into parts (MIG).
    """
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # what NVML raises is of a package that may be missing
        return None


def reset_peak(device: torch.device) -> None:
    """Reset `peak_bytes` to the present memory, where the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    else:
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # 5 resets VmHWM (man 5 proc)
