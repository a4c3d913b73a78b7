"""Measure how well a run uses its hardware."""

import time
from typing import Any

import torch
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.training.memory import peak_bytes


class Throughput(TrainerCallback):
    """Add to each training row the rates since the row before, of this rank by default.

    pairs_per_second: pairs of all ranks. data_wait: share of the time. peak_memory_gib.
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
        self.pairs += args.batch_sizes.at(state.global_step - 1)
        self.wait += kwargs["data_wait"]

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Add the rates to a training row."""
        logs = kwargs["logs"]
        if "loss" not in logs or self.start is None:
            return
        seconds = max(1e-9, time.perf_counter() - self.start)
        logs["pairs_per_second"] = self.pairs / seconds
        logs["data_wait"] = self.wait / seconds
        logs["peak_memory_gib"] = peak_bytes(self.device) / 2**30
        self._restart(time.perf_counter())

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._restart(None)

    def _restart(self, start: float | None) -> None:
        self.start, self.wait, self.pairs = start, 0.0, 0
