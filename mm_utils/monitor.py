"""How well the hardware is used: pairs and FLOPs per second, memory, and advice to a run that waits for its data."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import ranks
from mm_utils.flops import FlopCounts
from mm_utils.grad_cache import cuts
from mm_utils.memory import peak_bytes
from mm_utils.modeling_fusion_dual_encoder import is_trained
from mm_utils.padding import length_groups, padded_tokens

logger = logging.getLogger(__name__)

LOADER_BOUND = 0.2  # share of the time spent waiting for data above which a run is slower than it needs to be


class Throughput:
    """What was done per second since the last line of the log, by this rank unless it says otherwise.

    Args:
        device: of this rank.
        flops: of the model; without, FLOPs are not counted.
        pairs_scored: by the fusion head, per pair of the batch.
        peak_tflops: of the device; without, its utilisation is not known.
    """

    def __init__(
        self,
        device: torch.device,
        flops: FlopCounts | None = None,
        pairs_scored: int = 0,
        peak_tflops: float | None = None,
    ):
        self.device, self.flops, self.pairs_scored, self.peak_tflops = device, flops, pairs_scored, peak_tflops
        self.restart()

    def restart(self) -> None:
        """Begin to count anew."""
        self.start, self.wait = time.perf_counter(), 0.0
        self.pairs = self.real_tokens = self.tokens = self.operations = 0

    def add(self, lengths: list[int], micro_batch_size: int | None, wait: float) -> None:
        """Count a step.

        Args:
            lengths: tokens of every caption, in the order in which they are cut into parts.
            micro_batch_size: the parts' size, None for one part.
            wait: seconds until the batch was there.
        """
        pairs, real = len(lengths), sum(lengths)
        self.pairs += pairs
        self.real_tokens += real
        for cut in cuts(pairs, micro_batch_size):
            part = lengths[cut.start : cut.stop]
            self.tokens += padded_tokens(part, length_groups(part, self.device.type))
        self.wait += wait
        if self.flops is not None and pairs:
            self.operations += self.flops.training_step(pairs, lengths, self.pairs_scored * pairs, round(real / pairs))

    def rates(self) -> dict[str, float]:
        """Figures for the log.

        pairs_per_second: of all ranks. data_wait: share of the time. padding: share of the tokens. tflops: model FLOPs
        (`mm_utils.flops`) per second, of real tokens, in 10^12. utilisation: their share of the device's peak.
        """
        seconds = max(1e-9, time.perf_counter() - self.start)
        rates = {
            "pairs_per_second": self.pairs * ranks.world_size() / seconds,
            "data_wait": self.wait / seconds,
            "padding": 1 - self.real_tokens / self.tokens if self.tokens else 0.0,
            "peak_memory_gib": peak_bytes(self.device) / 2**30,
        }
        if self.flops is not None:
            rates["tflops"] = self.operations / seconds / 1e12
            if self.peak_tflops:
                rates["utilisation"] = rates["tflops"] / self.peak_tflops
        busy = gpu_utilisation(self.device)
        if busy is not None:
            rates["gpu_utilisation"] = busy
        self.restart()
        return rates


def gpu_utilisation(device: torch.device) -> float | None:
    """Share of the last sample period in which the GPU ran a kernel; None without a GPU or where NVML cannot be read."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # without nvidia-ml-py, without a driver, on a MIG slice: each raises its own, and none matters
        return None


class LoaderAdvice(TrainerCallback):
    """Say once a run, when two lines of the log in succession show it waiting for data, what would help.

    Args:
        num_workers: gives the number of this rank's loader.
    """

    def __init__(self, num_workers: Callable[[], int]):
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
            frozen = not is_trained(kwargs["model"].vision_model)
            logger.warning("%s", _advice(sum(latest) / 2, self.num_workers(), ranks.cores_per_process() - 1, frozen))


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
