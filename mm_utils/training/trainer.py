"""The one training loop: steps, evaluation, checkpoints, callbacks.

Names follow `transformers.Trainer` wherever the meaning is the same, and its callbacks run here unchanged. One thing differs:
the unit of a step is the global batch, whose rows depend on (data, seed, step) alone, so a run that is resumed with another
number of processes continues with the same batches.

Callbacks get the stock events, with further keyword arguments:
    on_step_begin: batch, data_wait (seconds). on_step_end: report, batch, data_wait, micro_batch_size.
    on_prediction_step: before every evaluation batch. on_log: logs, to which a callback may add values.
    on_evaluate: metrics, to which a callback may add values: they are logged, too.
    on_save: checkpoint, the folder, once it is complete; training is steps ahead of it then.
And two events of ours, called on callbacks that have them: on_evaluate_begin, on_save_begin. A callback that is a context
manager is entered around training, and one that is `ExportableState` is stored in checkpoints and restored.
"""

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import TrainerCallback, TrainerState

from mm_utils import distributed
from mm_utils.checkpointing.files import step_of
from mm_utils.checkpointing.state import TrainingState, learnt_flags
from mm_utils.checkpointing.writer import MOST_FAILURES, CheckpointWriter, check_room
from mm_utils.data.batches.workers import CheckedLoader
from mm_utils.data.training_data import TrainingData
from mm_utils.files import append_rows, truncate_rows
from mm_utils.objectives import Objective
from mm_utils.reliability.signals import Interrupted, Interruption
from mm_utils.training.arguments import METRICS_FILE, NONFINITE_FILE, TrainingArguments
from mm_utils.training.callbacks import CallbackRunner
from mm_utils.training.fsdp_deepspeed import prepare, unsharded
from mm_utils.training.optim import OptimizerArguments
from mm_utils.training.step import TrainStep

logger = logging.getLogger(__name__)


class Trainer:
    """Train an objective on global batches. It is built from parts, in the open.

    Args:
        args, optimizer_args: the run's arguments.
        accelerator: the accelerator, from `mm_utils.run.start.start_run`.
        objective: the loss; called with (batch, step), it returns the value to optimise and the values to log.
        optimizer: an optimizer whose groups have a `peak_lr`.
        data: the training batches, and the batches to evaluate on.
        evaluators: called in turn with (model, loader, accelerator), they return metrics; none for no evaluation.
        callbacks: any `transformers.TrainerCallback`.
    """

    def __init__(
        self,
        args: TrainingArguments,
        optimizer_args: OptimizerArguments,
        accelerator: Accelerator,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        data: TrainingData,
        evaluators: Sequence[Callable[..., dict[str, float]]] = (),
        callbacks: Sequence[TrainerCallback] = (),
    ):
        self.args, self.accelerator, self.data = args, accelerator, data
        self.output_dir, self.sizes = Path(args.output_dir or "."), args.batch_sizes
        prepared = prepare(args, accelerator, objective, optimizer, data, callbacks)
        objective, self.objective, self.optimizer = prepared.unwrapped, prepared.objective, prepared.optimizer
        self.model = objective.model
        self.evaluators = evaluators
        self.state = TrainerState(
            max_steps=args.total_steps(data.num_rows),
            is_world_process_zero=accelerator.is_main_process,
            is_local_process_zero=accelerator.is_local_main_process,
        )
        self.state.num_train_epochs = -(-self.sizes.before(self.state.max_steps) // data.num_rows)
        self.callbacks, self.signals = (
            CallbackRunner(prepared.callbacks, self._context, accelerator.device),
            Interruption(),
        )
        self.step = TrainStep(
            args,
            optimizer_args,
            accelerator,
            self.objective,
            self.optimizer,
            self.state.max_steps,
            data.max_seq_length,
        )
        self.average = objective.teacher = self.step.average
        objective.seed = args.seed
        self.identity = {"seed": args.seed, "batch sizes": str(self.sizes), **data.identity}
        self.flags = learnt_flags(args.settings)
        self.captured = TrainingState(
            accelerator, self.output_dir, data.processor, objective, self.optimizer, self.average
        )
        self.writer = CheckpointWriter(self.output_dir, args.save_total_limit)
        self._evaluated_step, self._saved_step, self._saved_at = -1, 0, time.monotonic()

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self, resume_from: Path | None = None, evaluate_start: bool = False) -> dict[str, float]:
        """Train to the end or a callback's stop; save; return the metrics of what is saved.

        With `evaluate_start`, the first weights are evaluated too, and kept if no later ones are better.

        Raises:
            Interrupted: if a signal stopped the run (`mm_utils.reliability.signals`); the checkpoint is written then.
            distributed.RunError: if checkpoints cannot be written any more.
        """
        with ExitStack() as stack:
            self.signals = stack.enter_context(Interruption())
            for callback in self.callbacks.callbacks:
                if isinstance(callback, AbstractContextManager):
                    stack.enter_context(callback)
            try:
                self._begin(resume_from)
                metrics = self._evaluate_if_due(evaluate_start)
                if not self.callbacks.control.should_training_stop:
                    metrics = self._take_steps() or metrics
                    self.step.settle()
                if self.evaluators and self._evaluated_step != self.state.global_step:
                    metrics = self.evaluate()
                if self.saves and self._saved_step != self.state.global_step:
                    self.save_checkpoint()
                complete = self._finish_writing()
                if self.args.keeps_best and self.state.best_model_checkpoint:
                    metrics = self._load_best(metrics)
            except _StopRequested as stop:
                self._save_and_exit(stop.signal)
        self.callbacks.call("on_train_end")
        self.captured.save_model()
        if not complete:
            self._fail_after_save_errors()
        return metrics

    def _take_steps(self) -> dict[str, float]:
        """Take all steps, or stop where a callback or a signal says so; return the last metrics."""
        metrics: dict[str, float] = {}
        loader = self.data.train_batches(self.state.global_step, self.state.max_steps)
        for batch in loader:
            self.callbacks.call("on_step_begin", batch=batch, data_wait=loader.wait)
            report = self.step.run(batch, self.state.global_step)
            self.state.global_step += 1
            self.state.epoch = self.sizes.before(self.state.global_step) / self.data.num_rows
            self._schedule_actions()
            size = self.step.micro_batch.size
            self.callbacks.call(
                "on_step_end", report=report, batch=batch, data_wait=loader.wait, micro_batch_size=size
            )
            signal = self._sync_ranks()
            self.step.finish()
            metrics = self._run_due_actions(report) or metrics
            if signal:
                raise _StopRequested(signal)
            if self.callbacks.control.should_training_stop:
                return metrics
        if self.state.global_step < self.state.max_steps:
            raise distributed.RunError(  # on this process, maybe alone: the others would wait for it in their next step
                f"the training data of process {distributed.rank()} ended after step {self.state.global_step} of "
                f"{self.state.max_steps}. Give all processes the same data, and as much as at the start."
            )
        return metrics

    def _begin(self, resume_from: Path | None) -> None:
        """Check all that can be checked before the first step; load the checkpoint."""
        distributed.check_equal_on_all_ranks({"what decides the batches": self.identity})
        if self.accelerator.is_main_process:
            self.writer.clean_up()
        if resume_from is not None:
            self._resume(resume_from)
        if self.accelerator.is_main_process:
            for name in (METRICS_FILE, NONFINITE_FILE):
                truncate_rows(self.output_dir / name, self.state.global_step)
        if self.saves:
            limit = self.args.save_total_limit
            kept = None if limit is None else limit + max(self.args.save_best_limit, self.args.keeps_best)
            check_room(self.output_dir, self.captured.nbytes, kept)
        self.callbacks.call("on_train_begin")

    def _schedule_actions(self) -> None:
        """Set the actions that are due after this step; callbacks may change them."""
        step, last = self.state.global_step, self.state.global_step >= self.state.max_steps
        self.callbacks.control.should_log = last or _due(step, self.args.logging_steps)
        self.callbacks.control.should_evaluate = bool(self.evaluators) and (last or _due(step, self.args.eval_steps))
        waited = time.monotonic() - self._saved_at
        self.callbacks.control.should_save = (
            _due(step, self.args.save_steps) or 0 < 60 * self.args.save_minutes <= waited
        )

    def _sync_ranks(self) -> int:
        """Let all ranks do what is due on any: signals, clocks and disks differ.

        Returns the number of the signal that asks the run to stop, or 0. Such a step is logged; its other actions are left
        to `_save_and_exit` and to the resumed run. On GPUs, ranks agree a step later, unless they wait for this one anyway.
        """
        signal, step = 0, self.state.global_step
        waits = step >= self.state.max_steps or any(
            _due(step, every) for every in (self.args.logging_steps, self.args.eval_steps, self.args.save_steps)
        )
        flags = (self.signals.number, self.writer.saved(), self.writer.failures)
        for asked, saved, failures in self.callbacks.agree(*flags, later=self.step.reads_late and not waits):
            signal = signal or asked
            if saved:
                self.callbacks.call("on_save", checkpoint=self.writer.path(saved))
                self.callbacks.sync()
            if failures >= MOST_FAILURES:
                self._fail_after_save_errors()
        if signal:
            self.callbacks.control.should_evaluate = self.callbacks.control.should_save = False
        return signal

    def _run_due_actions(self, report: dict[str, Tensor]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self.callbacks.control.should_log:
            self.step.settle()
            values = {name: value.item() for name, value in report.items()}
            values["learning_rate"] = self.optimizer.param_groups[0]["lr"]
            if self.step.nonfinite.count:
                values["nonfinite_steps"] = self.step.nonfinite.count
            self.log(values)
            self.callbacks.sync()
        if self.callbacks.control.should_evaluate:
            metrics = self.evaluate()
            self.callbacks.sync()
        if self.callbacks.control.should_save:
            self.save_checkpoint()
        return metrics

    # -- evaluation -------------------------------------------------------------------------------------------------

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, log, and call the callbacks; return the metrics.

        With a weight average, which is what will be saved, `eval_*` are its metrics, and `eval_raw_*` those of the current
        weights.
        """
        self.step.settle()
        self.callbacks.call("on_evaluate_begin")
        # The saved weights come last: evaluators keep their last findings, for the pictures.
        raw = self.measure() if self.average is not None else {}
        found = self._measure_saved()
        metrics = {f"eval_{name}": value for name, value in found.items()}
        metrics |= {f"eval_raw_{name}": value for name, value in raw.items()}
        self._evaluated_step = self.state.global_step
        if self._is_evaluated():  # before a kill: evaluators need their findings again, the log and callbacks do not
            return metrics
        # Callbacks may add metrics, which are logged; they compare with the best so far, so it changes after them.
        self.callbacks.call("on_evaluate", metrics=metrics)
        self.log(metrics)
        value, best = metrics.get(f"eval_{self.args.metric_for_best_model}"), self.state.best_metric
        if value is None:
            raise ValueError(
                f"--metric_for_best_model is {self.args.metric_for_best_model}; measured were {', '.join(found)}."
            )
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        self.callbacks.control.should_save |= self.state.global_step in self._best_steps()
        return metrics

    def measure(self) -> dict[str, float]:
        """Evaluate the current weights, without logging."""
        if not self.evaluators or self.data.eval_loader is None:
            raise ValueError(
                "this Trainer was given nothing to evaluate; pass data with an eval_loader, and evaluators"
            )
        self.objective.eval()
        with unsharded(self.objective):
            loader = CheckedLoader(self.data.eval_loader, self._check_stop_signal)
            found = [evaluate(self.model, loader, self.accelerator) for evaluate in self.evaluators]
        return {name: value for metrics in found for name, value in metrics.items()}

    def _measure_saved(self) -> dict[str, float]:
        """Evaluate the weights that would be saved, without logging."""
        with self.average.applied() if self.average is not None else nullcontext():
            return self.measure()

    def _evaluate_if_due(self, at_start: bool) -> dict[str, float]:
        """Do the evaluation due before the first step, or when a resumed run was stopped."""
        step = self.state.global_step
        due = bool(self.evaluators) and _due(step, self.args.eval_steps) and (at_start or step > 0)
        if not due or self._is_evaluated():
            return {}
        metrics = self.evaluate()
        if self.callbacks.control.should_save:
            self.save_checkpoint()
        return metrics

    def _is_evaluated(self) -> bool:
        """Return whether the log has the evaluation of the present weights."""
        step = self.state.global_step
        return any(row["step"] == step and "loss" not in row for row in self.state.log_history)

    def _best_steps(self) -> list[int]:
        """Return the steps whose checkpoints are kept because their evaluations are the best."""
        return self._best_of(max(self.args.save_best_limit, int(self.args.keeps_best)))

    def _best_of(self, limit: int) -> list[int]:
        name, sign = f"eval_{self.args.metric_for_best_model}", 1 if self.args.greater_is_better else -1
        evaluated = {int(row["step"]): sign * row[name] for row in self.state.log_history if name in row}
        return sorted(evaluated, key=lambda step: (-evaluated[step], step))[:limit]

    # -- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """True if checkpoints are written during training."""
        return bool(self.args.save_steps or self.args.save_minutes)

    def save_checkpoint(self) -> None:
        """Start writing all that a resumed run needs, in a folder for `from_pretrained`."""
        self.step.settle()
        self.callbacks.call("on_save_begin")
        self.state.stateful_callbacks = self.callbacks.exported()  # type: ignore[assignment]
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(self.writer.path(self.state.global_step))
        self.writer.wait()  # the next capture reuses the memory that it reads
        run = {"identity": self.identity, "flags": self.flags, "nonfinite_steps": self.step.nonfinite.count}
        snapshot = self.captured.capture(self.state, run)
        if self.accelerator.is_main_process:
            self.writer.start(self.state.global_step, snapshot, self._best_steps())
        self._saved_step, self._saved_at = self.state.global_step, time.monotonic()

    def load_checkpoint(self, path: Path) -> TrainerState:
        """Load a checkpoint's weights, optimizer and counters on all ranks; return its state.

        Raises:
            ValueError: if the checkpoint is of another model, of other data or of other flags.
        """
        state, run = self.captured.restore(path, self.identity, self.flags, self.args.allow_changed_run)
        self.step.nonfinite.count = run["nonfinite_steps"]
        return state

    def _resume(self, path: Path) -> None:
        if (step := step_of(path.resolve())) > self.state.max_steps:
            raise ValueError(
                f"--resume_from_checkpoint is {path}, of step {step}; the run has {self.state.max_steps} steps. Raise --max_steps "
                "or --num_train_epochs."
            )
        state = self.load_checkpoint(path)
        state.max_steps, state.num_train_epochs = self.state.max_steps, self.state.num_train_epochs
        state.is_world_process_zero = self.state.is_world_process_zero
        state.is_local_process_zero = self.state.is_local_process_zero
        self.state, self._saved_step = state, state.global_step
        self._forget_other_metric(path)
        self.callbacks.restore(state.stateful_callbacks or {})  # type: ignore[arg-type]
        if self.accelerator.is_main_process:
            self.writer.set_newer_aside(state.global_step)
            logger.info("Resumed from %s at step %d of %d", path, state.global_step, state.max_steps)

    def _forget_other_metric(self, path: Path) -> None:
        """Let the best be sought from the resumed step on if another metric has chosen it so far."""
        state, metric = self.state, f"eval_{self.args.metric_for_best_model}"
        best: dict[float | None, float | None] = {
            row["step"]: row.get(metric) for row in state.log_history if "loss" not in row
        }
        chosen = self._best_of(1)
        if state.best_global_step in (None, *chosen) and best.get(state.best_global_step) == state.best_metric:
            return
        state.log_history = [row for row in state.log_history if "loss" in row or row["step"] == state.global_step]
        state.best_metric = best.get(state.global_step)
        known = state.best_metric is not None
        state.best_global_step = state.global_step if known else None
        state.best_model_checkpoint = str(path) if known else None

    def _finish_writing(self) -> bool:
        """Wait for the last checkpoint and call the callbacks; return whether it could be written."""
        self.callbacks.call("on_save_begin")
        self.writer.wait()
        while True:
            flags = [self.writer.saved(), self.writer.failures]
            saved, failures = distributed.max_over_ranks(flags, self.accelerator.device)
            if not saved:
                break
            self.callbacks.call("on_save", checkpoint=self.writer.path(saved))
        if self.accelerator.is_main_process:
            self.writer.remove_old(self._best_steps())
        return not failures

    def _load_best(self, metrics: dict[str, float]) -> dict[str, float]:
        """Load the best checkpoint's weights; return the metrics of its evaluation."""
        best = self.writer.path(int(self.state.best_global_step or 0))
        if not best.is_dir():  # a run that goes on in another folder than it began
            best = Path(self.state.best_model_checkpoint or best)
        if not best.is_dir():
            logger.warning("%s could not be written, so the last weights are kept in place of the best", best)
            return metrics
        self.captured.load_weights(best)
        if self.state.best_global_step != self._evaluated_step:
            self._measure_saved()  # the pictures are of what is saved
        evaluated = [
            {name: value for name, value in row.items() if name.startswith("eval_")}
            for row in self.state.log_history
            if row["step"] == self.state.best_global_step
        ]
        return next((row for row in evaluated if row), metrics)

    def _save_and_exit(self, signal: int) -> NoReturn:
        """Save and stop, as a signal asked."""
        step = self.state.global_step
        if self._saved_step != step:
            self.save_checkpoint()
        if not self._finish_writing():
            self._fail_after_save_errors()
        self.callbacks.call("on_train_end")
        if self.accelerator.is_main_process:
            logger.warning("Stopped by a signal after step %d. Resume: %s", step, self.args.resume_command)
        raise Interrupted(signal)

    def _fail_after_save_errors(self) -> NoReturn:
        [problem] = broadcast_object_list([self.writer.problem])
        raise distributed.RunError(f"{problem}. Then resume: {self.args.resume_command}")

    # -- small parts ------------------------------------------------------------------------------------------------

    def log(self, values: dict[str, float]) -> None:
        """Add a row to the log: callbacks may add values, then it is written to `metrics.jsonl`."""
        row = {"step": self.state.global_step, "epoch": round(self.state.epoch or 0.0, 4), **values}
        self.state.log_history.append(row)
        self.callbacks.call("on_log", logs=row)
        if self.accelerator.is_main_process:
            append_rows(self.output_dir / METRICS_FILE, [row])

    def _check_stop_signal(self) -> None:
        """Stop, on all ranks at once, if a signal asked any of them to."""
        self.callbacks.call("on_prediction_step")
        [signal] = distributed.max_over_ranks([self.signals.number], self.accelerator.device)
        if signal:
            raise _StopRequested(signal)

    def _context(self) -> tuple[TrainingArguments, TrainerState, dict[str, Any]]:
        """Return the arguments of every event."""
        shared = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        shared |= {"processing_class": self.data.processor, "eval_dataloader": self.data.eval_loader}
        return self.args, self.state, shared


class _StopRequested(Exception):
    """A signal asked the run to stop; raised on all ranks at once."""

    def __init__(self, signal: int):
        super().__init__(signal)
        self.signal = signal


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
