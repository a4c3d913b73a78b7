"""Measure how well a run uses its hardware, and advise one that waits for its data."""

import logging
import math
import time
from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import DistributedType
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils import distributed
from mm_utils.communication import meter, reduced_bytes
from mm_utils.model.modeling_fusion_dual_encoder import is_trained
from mm_utils.objectives.encoding import computed_tokens
from mm_utils.objectives.grad_cache import cuts
from mm_utils.training.memory import peak_bytes

logger = logging.getLogger(__name__)

MAX_DATA_WAIT = 0.2  # share of the time spent waiting for data above which a run is slower than it needs to be


class Throughput(TrainerCallback):
    """Add to each training row the rates since the row before, of this rank by default.

    pairs_per_second: pairs of all ranks. data_wait: share of the time. padding: share of the tokens. peak_memory_gib.
    gpu_utilisation: share of the time in which the GPU ran a kernel.

    Args:
        device: this rank's device.
    """

    def __init__(self, device: torch.device):
        self.device = device
        self.start: float | None = None
        self._restart(None)

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock with the wait for the first batch."""
        if self.start is None:
            self.start = time.perf_counter() - kwargs["data_wait"]

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Count a step."""
        lengths = kwargs["batch"]["lengths"]
        self.pairs += args.batch_sizes.at(state.global_step - 1)
        self.real_tokens += sum(lengths)
        for cut in cuts(len(lengths), kwargs["micro_batch_size"]):
            self.tokens += computed_tokens(lengths[cut.start : cut.stop], self.device.type)
        self.wait += kwargs["data_wait"]

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rates to a training row."""
        logs = kwargs["logs"]
        if "loss" not in logs or self.start is None:
            return
        seconds = max(1e-9, time.perf_counter() - self.start)
        logs["pairs_per_second"] = self.pairs / seconds
        logs["data_wait"] = self.wait / seconds
        logs["padding"] = 1 - self.real_tokens / self.tokens if self.tokens else 0.0
        logs["peak_memory_gib"] = peak_bytes(self.device) / 2**30
        busy = gpu_utilisation(self.device)
        if busy is not None:
            logs["gpu_utilisation"] = busy
        self._restart(time.perf_counter())

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._restart(None)

    def _restart(self, start: float | None) -> None:
        self.start, self.wait = start, 0.0
        self.pairs = self.real_tokens = self.tokens = 0


class Communication(TrainerCallback):
    """Add to each training row what this rank exchanges in a step, on average.

    comm_mib: MiB received. comm_seconds: seconds in which it waited for them (`mm_utils.communication`). DDP's averages of gradients
    are in the first by their size, and not in the second, as they travel beside the backward pass. What FSDP2 and DeepSpeed
    exchange by themselves is in neither.

    Args:
        backend: how the objective is distributed.
    """

    def __init__(self, backend: DistributedType):
        self.by_ddp = backend not in (DistributedType.FSDP, DistributedType.DEEPSPEED)
        self._began: tuple[float, float] | None = None
        self._reset()

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Learn the size of the gradients."""
        gradients = sum(weight.nbytes for weight in kwargs["model"].parameters() if weight.requires_grad)
        self.averaged = reduced_bytes(gradients, distributed.world_size()) if self.by_ddp else 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        """Count from here to the next step, evaluation, checkpoint or row of the log."""
        self._pause()
        self._began = meter.received, meter.seconds

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        """Count a step; in parts, it averages gradients by `mm_utils.distributed`, metered there."""
        self.steps += 1
        if kwargs["micro_batch_size"] is None:
            self.received += self.averaged

    def on_evaluate_begin(self, *args: Any, **kwargs: Any) -> None:
        """Leave the evaluation out, and a checkpoint alike."""
        self._pause()

    on_save_begin = on_evaluate_begin

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the figures to a training row."""
        self._pause()
        logs = kwargs["logs"]
        if "loss" not in logs or not self.steps:
            return
        logs["comm_mib"] = self.received / self.steps / 2**20
        logs["comm_seconds"] = self.seconds / self.steps
        self._reset()

    def _pause(self) -> None:
        if self._began is not None:
            received, seconds = self._began
            self.received += meter.received - received
            self.seconds += meter.seconds - seconds
            self._began = None

    def _reset(self) -> None:
        self.steps, self.received, self.seconds = 0, 0.0, 0.0


def gpu_utilisation(device: torch.device) -> float | None:
    """Return the GPU's busy share of the last sample period; None where NVML cannot tell."""
    if device.type != "cuda":
        return None
    try:
        return torch.cuda.utilization(device) / 100
    except Exception:  # without nvidia-ml-py, without a driver, on a MIG slice: each raises its own, and none matters
        return None


class LoaderAdvice(TrainerCallback):
    """Advise once a run, when two rows in succession show that training waits for data.

    Args:
        num_workers: returns the number of this rank's data workers.
    """

    def __init__(self, num_workers: Callable[[], int]):
        self.num_workers = num_workers

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Forget an earlier run."""
        self.waits: list[float] = []
        self.advised = False

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Read the share of time that this rank waited since the row before."""
        wait = kwargs["logs"].get("data_wait")
        if self.advised or not state.is_world_process_zero or wait is None:
            return
        self.waits.append(wait)
        latest = self.waits[1:][-2:]  # the first row includes the start of the workers
        if len(latest) == 2 and min(latest) > MAX_DATA_WAIT:
            self.advised = True
            frozen = not is_trained(kwargs["model"].vision_model)
            spare = distributed.cores_per_process() - 1
            logger.warning("%s", _advice(sum(latest) / 2, self.num_workers(), spare, frozen))


def _advice(wait: float, workers: int, spare_cores: int, vision_is_frozen: bool) -> str:
    found = (
        f"data_wait is {wait:.2f}; that share of the time the model waits for images (loader workers: {workers}, "
        f"spare cores: {max(0, spare_cores)})."
    )
    computing = max(0.01, 1 - wait)
    if workers < spare_cores:
        # Too few workers are busy all the time; without workers, the wait is the decoding itself.
        enough = math.ceil((workers or wait) / computing)
        return f"{found} Raise --dataloader_num_workers to {min(spare_cores, enough)}."
    if vision_is_frozen:
        return f"{found} Pass --cache_features, as the vision tower is frozen, or store the images smaller."
    return (
        f"{found} Store the images smaller; or train a larger model, as up to {1 / computing:.1f} times the compute "
        "per step costs no time."
    )
