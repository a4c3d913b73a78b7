"""Copies to a device that the host does not wait for."""

from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor


def to_device(values: np.ndarray, device: torch.device) -> Tensor:
    """Return an array's values on the device, on their way from pinned memory."""
    tensor = torch.from_numpy(values)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


class DeviceCopies:
    """Copies to a device: to a GPU on a stream of their own, beside the step before.

    Args:
        device: where tensors go; from pinned memory, the host does not wait.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def of(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Return a batch whose tensors are on the device; what is computed next waits there."""
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):  # None would set up CUDA
            moved = {
                name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
                for name, value in batch.items()
            }
        if self._stream is not None:
            computing = torch.cuda.current_stream(self.device)
            computing.wait_stream(self._stream)
            for value in moved.values():
                if isinstance(value, Tensor):
                    value.record_stream(computing)  # or its memory would be taken for the next batch too early
        return moved
