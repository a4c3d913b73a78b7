"""The peak of a process's memory begins anew."""

import mmap
import sys

import pytest
import torch

from mm_utils.training.memory import peak_bytes, reset_peak

CPU = torch.device("cpu")


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the peak is never reset")
def test_peak_memory_begins_anew() -> None:
    """Measured on fresh pages, because an allocator may have some left from before."""
    reset_peak(CPU)
    before = peak_bytes(CPU)
    with mmap.mmap(-1, 2**27) as kept:
        for place in range(0, 2**27, mmap.PAGESIZE):
            kept[place] = 1
        assert peak_bytes(CPU) - before == pytest.approx(2**27, rel=0.2)
    reset_peak(CPU)
    assert peak_bytes(CPU) - before < 2**26
