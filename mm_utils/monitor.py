"""How well the hardware is used: GPU utilisation, peak memory, and advice to a run that waits for its data."""

import logging
import math
import sys
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import ranks

logger = logging.getLogger(__name__)

LOADER_BOUND = 0.2  # share of the time spent waiting for data above which a run is slower than it needs to be


def gpu_utilisation(device: torch.device) -> float | None:
    """Share of the last sample period in which the GPU ran a kernel; None without a GPU or where NVML cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # without nvidia-ml-py, without a driver, on a MIG slice: each raises its own, and none matters
        return None


def peak_memory_gib(device: torch.device) -> float:
    """The most memory so far in GiB: of tensors on a GPU, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    import resource  # not on Windows

    unit = 1 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


class LoaderAdvice(TrainerCallback):
    """Say once a run, when two lines of the log in succession show it waiting for data, what would help.

    Args:
        num_workers: of this rank's loader.
    """

    def __init__(self, num_workers: int):
        self.num_workers = num_workers

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget an earlier run."""
        self.waits: list[float] = []
        self.advised = False

    def on_log(
        self,
        args: Any,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float] | None = None,
        **kwargs: Any,
    ) -> None:
        """Look at the share of time that this rank waited since the line before."""
        wait = (logs or {}).get("data_wait")
        if self.advised or not state.is_world_process_zero or wait is None:
            return
        self.waits.append(wait)
        latest = self.waits[1:][-2:]  # the first line holds the start of the workers
        if len(latest) == 2 and min(latest) > LOADER_BOUND:
            self.advised = True
            vision = kwargs["model"].vision_model
            frozen = not any(parameter.requires_grad for parameter in vision.parameters())
            logger.warning("%s", _advice(sum(latest) / 2, self.num_workers, ranks.cores_per_process() - 1, frozen))


def _advice(wait: float, workers: int, spare_cores: int, vision_is_frozen: bool) -> str:
    found = (
        f"data_wait is {wait:.2f}; that share of the time the model waits for images (loader workers: {workers}, "
        f"spare cores: {max(0, spare_cores)})."
    )
    computing = max(0.01, 1 - wait)
    if workers < spare_cores:
        # Workers are busy all the time when they are too few; without any, the waiting is the decoding.
        enough = math.ceil((workers or wait) / computing)
        return f"{found} Raise --dataloader_num_workers to {min(spare_cores, enough)}."
    if vision_is_frozen:
        return f"{found} Pass --cache_features, as the vision tower is frozen, or store the images smaller."
    return (
        f"{found} Store the images smaller; or train a larger model, as up to {1 / computing:.1f} times the compute "
        "per step costs no time."
    )
