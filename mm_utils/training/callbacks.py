"""Run a training loop's callbacks; the bar and the rates are among them."""

import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from tqdm.auto import tqdm
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mm_utils import distributed
from mm_utils.training.memory import gpu_use, peak_bytes

logger = logging.getLogger(__name__)

_FLAGS = ("should_log", "should_evaluate", "should_save", "should_training_stop")


class CallbackRunner:
    """Call the events of `TrainerCallback`s, in their order; keep their control flags equal on all ranks.

    `context` returns the positional arguments (args, state) and the keyword arguments of every event.
    """

    def __init__(
        self,
        callbacks: Iterable[TrainerCallback],
        context: Callable[[], tuple[Any, TrainerState, dict[str, Any]]],
        device: torch.device,
    ):
        self.callbacks = list(callbacks)
        self._context = context
        self._device = device
        self.control = TrainerControl()

    def call(self, event: str, **values: Any) -> None:
        """Call an event on every callback that has it."""
        args, state, shared = self._context()
        for callback in self.callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                # most callbacks return nothing
                self.control = method(args, state, self.control, **shared, **values) or self.control

    def sync(self, *numbers: int) -> list[int]:
        """Set on all ranks the flags set on any, as a callback may act on one; return maxima."""
        wanted = [*(getattr(self.control, name) for name in _FLAGS), *numbers]
        found = distributed.max_over_ranks(wanted, self._device)
        for name, flag in zip(_FLAGS, found, strict=False):
            setattr(self.control, name, bool(flag))
        return found[len(_FLAGS) :]

    def exported(self) -> dict[str, Any]:
        """Return the state of the callbacks that are stored in checkpoints, by class name."""
        stored = [callback for callback in self.callbacks if isinstance(callback, ExportableState)]
        return {type(callback).__name__: callback.state() for callback in stored}

    def restore(self, exported: dict[str, Any]) -> None:
        """Set the attributes that `exported` returned; a run that had stopped early stops again."""
        for callback in self.callbacks:
            for name, value in exported.get(type(callback).__name__, {}).get("attributes", {}).items():
                setattr(callback, name, value)
        if patience := self.exhausted():
            self.control.should_training_stop = True
            text = "The run had stopped early; to go on, give --early_stopping_patience above its %d evaluations"
            logger.info(text, patience)

    def exhausted(self) -> int:
        """Return after how many evaluations without a better metric early stopping has ended the stage; 0 if it has not."""
        early = [callback for callback in self.callbacks if isinstance(callback, EarlyStoppingCallback)]
        counts = [(each.early_stopping_patience_counter, each.early_stopping_patience) for each in early]
        return max((count for count, patience in counts if count >= patience), default=0)


class ProgressBar(TrainerCallback):
    """A bar over the steps: loss, pairs a second, share of time spent waiting for data."""

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start at the step where the run starts or resumes."""
        seconds = 0.1 if sys.stderr.isatty() else 30.0  # between lines of a log
        self.bar = tqdm(
            initial=state.global_step,
            total=state.max_steps,
            desc="Training",
            unit="step",
            disable=not state.is_world_process_zero,
            dynamic_ncols=True,
            mininterval=seconds,
        )

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Advance to the step."""
        self.bar.update(state.global_step - self.bar.n)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Show training figures behind the bar, and evaluations as lines above it."""
        logs = kwargs["logs"]
        if "loss" in logs:
            shown = [f"loss {logs['loss']:.3f}"]
            if "pairs_per_second" in logs:
                shown += [f"{logs['pairs_per_second']:.0f} pairs/s", f"{logs['data_wait']:.0%} data wait"]
            if "gpu" in logs:
                shown.append(f"{logs['gpu']:.0%} gpu")
            self.bar.set_postfix_str(", ".join(shown))
        figures = [
            # 'eval_text_to_image_recall@1' is shown as 'text to image recall@1'
            f"{name.removeprefix('eval_').replace('_', ' ')} {value:.3f}"
            for name, value in logs.items()
            if name.endswith(("recall@1", "mean_recall", "eval_accuracy"))
        ]
        if figures and state.is_world_process_zero:
            medium = kwargs["data"].medium  # the names in files are those of images, whatever the medium is
            self.bar.write(f"step {state.global_step}: {', '.join(figures).replace('image', medium)}")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the finished bar on the screen."""
        self.bar.close()


class Throughput(TrainerCallback):
    """Add to each training row the rates since the row before, of this rank by default.

    pairs_per_second: pairs of all ranks. data_wait: share of the time. peak_memory_gib. gpu: see `gpu_use`.
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
        if (use := gpu_use(self.device)) is not None:
            logs["gpu"] = use
        self._restart(time.perf_counter())

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Leave the evaluation out."""
        self._restart(None)

    def _restart(self, start: float | None) -> None:
        self.start = start
        self.wait = 0.0
        self.pairs = 0
