"""Readings of the hardware, and when advice is given."""

import pytest
import torch

from mm_utils.training.throughput import gpu_utilisation

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_utilisation_is_a_share(monkeypatch):
    monkeypatch.setattr("torch.cuda.utilization", lambda device: 37)
    assert gpu_utilisation(CUDA) == pytest.approx(0.37)
    assert gpu_utilisation(CPU) is None


@pytest.mark.parametrize("error", [ModuleNotFoundError("nvidia-ml-py"), RuntimeError("driver"), OSError()])
def test_utilisation_never_raises(error, monkeypatch):
    def fail(device):
        raise error

    monkeypatch.setattr("torch.cuda.utilization", fail)
    assert gpu_utilisation(CUDA) is None
