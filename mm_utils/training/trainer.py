"""The one training loop: steps, evaluation, checkpoints, callbacks.

Names follow `transformers.Trainer` wherever the meaning is the same, and its callbacks run here unchanged. One thing differs:
the unit of a step is the global batch, whose rows depend on (data, seed, step) alone, so a run that is resumed with another
number of processes continues with the same batches. A run may be several stages (`mm_utils.training.stages`), one trainer each:
callbacks then see training begin and end as often.

Callbacks get the stock events, with further keyword arguments:
    on_step_begin: batch, data_wait (seconds). on_step_end: report, batch, data_wait.
    on_prediction_step: before every evaluation batch. on_log: logs, to which a callback may add values.
    on_evaluate: metrics, to which a callback may add values: they are logged, too.
    on_save: checkpoint, the folder, once it is complete; training is steps ahead of it then.
And two events of ours, called on callbacks that have them: on_evaluate_begin, on_save_begin. A callback that is a context
manager is entered around training, and one that is `ExportableState` is stored in checkpoints and restored.
"""

import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from torch import Tensor
from transformers import EarlyStoppingCallback, TrainerCallback, TrainerState

from mm_utils import distributed
from mm_utils.checkpointing.files import remove_unfinished, set_aside, step_of
from mm_utils.checkpointing.state import TrainingState, comparable
from mm_utils.checkpointing.writer import MOST_FAILURES, CheckpointWriter, check_room, remove_old_checkpoints
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.retrieval import Evaluate, in_turn, keep_weights
from mm_utils.files import append_rows, truncate_rows
from mm_utils.objectives.objective import Objective
from mm_utils.reliability.signals import Interruption
from mm_utils.training.arguments import METRICS_FILE, NONFINITE_FILE, OptimizerArguments, TrainingArguments
from mm_utils.training.callbacks import CallbackRunner
from mm_utils.training.objective_cache import prepare, unsharded
from mm_utils.training.stages import ENCODERS, HEAD, Stage, evaluations, stages_of
from mm_utils.training.step import TrainStep

logger = logging.getLogger(__name__)

_MANY = 128  # pairs of a process, whose activations may take gigabytes


@dataclass(frozen=True)
class Training:
    """What the stages of a run share.

    Attributes:
        evaluators: called in turn with (model, loader, accelerator), they return metrics; none for no evaluation.
        callbacks: any `transformers.TrainerCallback`.
        flags: those that decide what is learnt, by name; a run that is resumed must have them as they were.
    """

    args: TrainingArguments
    optimizer_args: OptimizerArguments
    accelerator: Accelerator
    data: TrainingData
    evaluators: Sequence[Evaluate] = ()
    callbacks: Sequence[TrainerCallback] = ()
    flags: Mapping[str, Any] = field(default_factory=dict)


class Trainer:
    """Train an objective on global batches. It is built from parts, in the open.

    Args:
        objective: the loss; called with (batch, step), it returns the value to optimise and the values to log.
        optimizer: an optimizer whose groups have a `peak_lr`.
        stage: the steps that are taken, what they train and what judges them; by default a whole run of all at once.
    """

    def __init__(
        self,
        training: Training,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        stage: Stage | None = None,
    ):
        args = training.args
        data = training.data
        accelerator = training.accelerator
        self.steps = args.total_steps(data.num_rows)  # of all stages
        self.stage = stage = stage or stages_of(objective, args, 0.0, data.num_rows)[0]
        # of 25 steps, every third is logged
        every = args.logging_steps if args.logging_steps >= 0 else min(10, -(-self.steps // 10))
        # Early stopping reads the metric from the arguments.
        args = replace(args, metric_for_best_model=stage.metric, logging_steps=every)
        self.args = args
        self.accelerator = accelerator
        self.data = data
        self.output_dir = Path(args.output_dir or ".")
        self.sizes = args.batch_sizes
        self.objective, self.optimizer = prepare(
            args, accelerator, objective, optimizer, training.optimizer_args.max_grad_norm
        )
        self.model = objective.model
        self.evaluators = training.evaluators
        self.state = TrainerState(
            global_step=stage.begin,
            max_steps=stage.end,
            is_world_process_zero=accelerator.is_main_process,
            is_local_process_zero=accelerator.is_local_main_process,
        )
        # rounded up; callbacks read it
        self.state.num_train_epochs = -(-self.sizes.before(self.state.max_steps) // data.num_rows)
        self.step = TrainStep(args, training.optimizer_args, accelerator, self.objective, self.optimizer, stage)
        early = [EarlyStoppingCallback(args.early_stopping_patience)] if args.early_stopping_patience else []
        self.callbacks = CallbackRunner([*training.callbacks, *early], self._context, accelerator.device)
        self.signals = Interruption()
        self.identity = {"seed": args.seed, "batch sizes": str(self.sizes), **data.identity}
        self.flags = comparable(training.flags)
        self.captured = TrainingState(accelerator, self.output_dir, data.processor, objective, self.optimizer)
        self.writer = CheckpointWriter(self.output_dir, args.save_total_limit)
        self._evaluated_step = -1
        self._saved_step = stage.begin
        self._resumed_from: Path | None = None
        self.choice = ""  # where it stopped early, which weights are saved, and what chose them; known after `train`

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(
        self, resume_from: Path | None = None, evaluate_start: bool = False, known: Mapping[str, float] | None = None
    ) -> dict[str, float]:
        """Train to the end of the stage or a callback's stop; load the best weights; return their metrics.

        The model is saved if the run ends with this.

        Args:
            resume_from: a checkpoint of this stage.
            evaluate_start: evaluate the first weights of the run too; they are kept if no later ones are better.
            known: what the stage before has measured of the weights that this one begins with.

        Raises:
            SystemExit: if a signal stopped the run (`mm_utils.reliability.signals`); the checkpoint is written then.
            distributed.RunError: if checkpoints cannot be written any more.
        """
        with ExitStack() as stack:
            self.signals = stack.enter_context(Interruption())
            stack.push(self._add_note)
            stack.callback(self.writer.wait)  # a checkpoint that is being written when the run fails is completed
            for callback in self.callbacks.callbacks:
                if isinstance(callback, AbstractContextManager):
                    stack.enter_context(callback)
            try:
                self._begin(resume_from, known or {})
                if self.stage.begin or not self.stage.is_last:
                    what = "fusion head and the projections" if self.stage.name == "head" else self.stage.name
                    logger.info("Steps %d to %d train the %s", self.stage.begin + 1, self.stage.end, what)
                metrics = self._evaluate_if_due(evaluate_start)
                if not self.callbacks.control.should_training_stop:
                    metrics = self._take_steps() or metrics
                if self._evaluated_step != self.state.global_step and (self.ends_run or self.args.eval_steps > 0):
                    metrics = self.evaluate() if self.evaluators else metrics
                if self.args.save_steps > 0 and self._saved_step != self.state.global_step:
                    self.save_checkpoint()
                complete = self._finish_writing()
                self._stop_if_asked()
                metrics = self._choose(metrics)
                self._stop_if_asked()
            except _StopRequested as stop:
                self._save_and_exit(stop.args[0])
        self.callbacks.call("on_train_end")
        if self.ends_run:
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
            self.callbacks.call("on_step_end", report=report, batch=batch, data_wait=loader.wait)
            signal = self._sync_ranks()
            metrics = self._run_due_actions(report) or metrics
            if signal:
                raise _StopRequested(signal)
            if self.callbacks.control.should_training_stop:
                return metrics
        if self.state.global_step < self.state.max_steps:
            raise distributed.RunError(  # on this process, maybe alone: the others would wait for it in their next step
                f"the training data of process {distributed.rank()} ended after step {self.state.global_step} of "
                f"{self.steps}. Give all processes the same data, and as much as at the start."
            )
        if 0 < self.state.global_step <= self.step.nonfinite.count:
            raise distributed.RunError(
                f"None of {self.state.global_step} steps had a finite loss and gradient, so nothing was learnt; "
                f"{self.step.nonfinite.path} names the terms. Look at them and at the images, or lower --learning_rate."
            )
        return metrics

    @property
    def ends_run(self) -> bool:
        """True if no stage follows this one: it is the last, or a callback other than early stopping has ended it."""
        return self.stage.is_last or (self.callbacks.control.should_training_stop and not self.callbacks.exhausted())

    def _begin(self, resume_from: Path | None, known: Mapping[str, float]) -> None:
        """Check all that can be checked before the first step; load the checkpoint."""
        remedy = "All processes must read the same data with the same arguments."
        distributed.check_equal_on_all_ranks({"what decides the batches": self.identity}, remedy)
        distributed.on_first(partial(remove_unfinished, self.output_dir))
        if resume_from is not None:
            self._resume(resume_from)
        for name in (METRICS_FILE, NONFINITE_FILE):
            distributed.on_first(partial(truncate_rows, self.output_dir / name, self.state.global_step))
        if resume_from is None:
            self.step.nonfinite.count = distributed.on_first(self.step.nonfinite.written)  # by the stages before
        if self.args.save_steps > 0:
            check_room(self.output_dir, self.captured.nbytes)
        pairs = self.sizes.sizes[-1] // self.accelerator.num_processes
        trains_encoders = any(name.startswith(ENCODERS) for name in self.stage.trains)
        if (
            self.accelerator.device.type == "cpu"
            and not self.args.micro_batch_size
            and trains_encoders
            and pairs >= _MANY
        ):
            logger.warning(
                "A step takes %d pairs at once on this CPU, and a system that lacks the memory kills the run without a word. If it "
                "does, give --micro_batch_size %d, which learns the same in a third more time",
                pairs,
                _MANY // 4,  # 32 pairs
            )
        self.callbacks.call("on_train_begin")
        if known and self.args.keeps_best and resume_from is None:
            self.state.log_history.append({"step": self.stage.begin, **known})
            if self.stage.judges_start:
                self.state.best_metric = known.get(f"eval_{self.stage.metric}")
                self.state.best_global_step = self.stage.begin
            self.save_checkpoint()

    def _schedule_actions(self) -> None:
        """Set the actions that are due after this step; callbacks may change them."""
        args = self.args
        control = self.callbacks.control
        step = self.state.global_step
        last = step >= self.state.max_steps
        control.should_log = last or _due(step, args.logging_steps)
        evaluates = _due(step, args.eval_steps) or (last and (self.stage.is_last or args.eval_steps > 0))
        control.should_evaluate = bool(self.evaluators) and evaluates
        control.should_save = _due(step, args.save_steps)

    def _sync_ranks(self) -> int:
        """Let all ranks do what is due on any: signals, clocks and disks differ.

        Returns the number of the signal that asks the run to stop, or 0. Such a step is logged; its other actions are left
        to `_save_and_exit` and to the resumed run.
        """
        signal, saved, failures = self.callbacks.sync(self.signals.number, self.writer.saved(), self.writer.failures)
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
            values = {name: value.item() for name, value in report.items()}
            values["learning_rate"] = self.optimizer.param_groups[0]["lr"]
            values |= self.step.unwrapped.workload.over_ranks(self.accelerator.device)
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
        """Evaluate now, log, and call the callbacks; return the metrics."""
        self.callbacks.call("on_evaluate_begin")
        found = self.measure()
        metrics = {f"eval_{name}": value for name, value in found.items()}
        self._evaluated_step = self.state.global_step
        if self._is_evaluated():  # before a kill: evaluators need their findings again, the log and callbacks do not
            return metrics
        # Callbacks may add metrics, which are logged; they compare with the best so far, so it changes after them.
        self.callbacks.call("on_evaluate", metrics=metrics)
        self.log(metrics)
        step = self.state.global_step
        history = self.state.log_history
        value = metrics.get(f"eval_{self.stage.metric}")
        if value is None and self.stage.asked is None:
            self._check_metric(metrics)
        if self.stage.ranked(history)[:1] == [step]:
            self.state.best_metric = value
            self.state.best_global_step = step
        self.callbacks.control.should_save |= step in self._kept()
        return metrics

    def _kept(self) -> list[int]:
        """Return the steps whose checkpoints are kept: that of the best, and that which the stage began with."""
        return [*self.stage.ranked(self.state.log_history)[:1], self.stage.begin] if self.args.keeps_best else []

    def measure(self) -> dict[str, float]:
        """Evaluate the current weights, without logging; keep the weights of re-ranking that are fitted to them."""
        assert self.data.eval_loader is not None
        self.objective.eval()
        # Graphs for the shapes of an evaluation would take longer to compile than they save.
        with unsharded(self.objective), torch.compiler.set_stance("force_eager"):
            loader = self.data.eval_loader.with_check(self._check_stop_signal)
            metrics = in_turn(*self.evaluators)(self.model, loader, self.accelerator)
        keep_weights(self.model, self.evaluators)
        return metrics

    def _evaluate_if_due(self, at_start: bool) -> dict[str, float]:
        """Do the evaluation due before the first step, or when a resumed run was stopped."""
        step = self.state.global_step
        due = (step > self.stage.begin or (at_start and step == 0)) and _due(step, self.args.eval_steps)
        if not (due and self.evaluators) or self._is_evaluated():
            if step == 0 and self.evaluators:
                self._check_metric()
            return {}
        metrics = self.evaluate()
        if self.callbacks.control.should_save:
            self.save_checkpoint()
        return metrics

    def _check_metric(self, metrics: dict[str, float] | None = None) -> None:
        """Refuse a metric that is not measured; without `metrics`, measure for it if it is not the usual one."""
        name = self.stage.asked or self.stage.metric
        if metrics is None:
            if name == type(self.args).metric_for_best_model:
                return
            self.callbacks.call("on_evaluate_begin")
            metrics = {f"eval_{each}": value for each, value in self.measure().items()}
            if f"eval_{name}" not in metrics:  # a callback may add it
                self.callbacks.call("on_evaluate", metrics=metrics)
        if f"eval_{name}" not in metrics:
            known = ", ".join(each.removeprefix("eval_") for each in metrics)
            raise ValueError(
                f"--metric_for_best_model is {name}; this evaluation does not measure it. Choose of {known}."
            )

    def _is_evaluated(self) -> bool:
        """Return whether the log has the evaluation of the present weights."""
        return self.state.global_step in evaluations(self.state.log_history)

    # -- checkpoints ------------------------------------------------------------------------------------------------

    def save_checkpoint(self) -> None:
        """Start writing all that a resumed run needs, in a folder for `from_pretrained`."""
        self.callbacks.call("on_save_begin")
        self.state.stateful_callbacks = self.callbacks.exported()  # type: ignore[assignment]
        self.writer.wait()  # the host holds one copy at a time
        run = {"identity": self.identity, "flags": self.flags, "nonfinite_steps": self.step.nonfinite.count}
        run["stage"] = {"name": self.stage.name, "begin": self.stage.begin}
        snapshot = self.captured.capture(self.state, run)
        if self.accelerator.is_main_process:
            self.writer.start(self.state.global_step, snapshot, self._kept())
        self._saved_step = self.state.global_step

    def _resume(self, path: Path) -> None:
        """Load a checkpoint's weights, optimizer and counters on all ranks.

        Raises:
            ValueError: if the checkpoint is of another model, of other data or of other flags.
        """
        if (step := step_of(path)) > self.steps:
            raise ValueError(
                f"--resume_from_checkpoint is {path}, of step {step}; the run has {self.steps} steps. Raise --max_steps or "
                "--num_train_epochs."
            )
        state, run = self.captured.restore(path, self.identity, self.flags)
        self.step.nonfinite.count = run["nonfinite_steps"]
        self._resumed_from = path.resolve()
        state.max_steps = self.state.max_steps
        state.num_train_epochs = self.state.num_train_epochs
        state.is_world_process_zero = self.state.is_world_process_zero
        state.is_local_process_zero = self.state.is_local_process_zero
        self.state = state
        self._saved_step = state.global_step
        self.callbacks.restore(state.stateful_callbacks or {})  # type: ignore[arg-type]
        if self.accelerator.is_main_process:
            set_aside(self.output_dir, state.global_step)
            logger.info("Resumed from %s at step %d of %d", path, state.global_step, self.steps)

    def _finish_writing(self) -> bool:
        """Wait for the last checkpoint and call the callbacks; return whether it could be written."""
        self.callbacks.call("on_save_begin")
        self.writer.wait()
        saved = 1
        while saved:
            flags = [self.writer.saved(), self.writer.failures]
            saved, failures = distributed.max_over_ranks(flags, self.accelerator.device)
            if saved:
                self.callbacks.call("on_save", checkpoint=self.writer.path(saved))
        if self.accelerator.is_main_process:
            remove_old_checkpoints(self.output_dir, self.writer.limit, self._kept())
        return not failures

    def _choose(self, metrics: dict[str, float]) -> dict[str, float]:
        """Load the best weights, where they are kept, and note what chose them; return their metrics."""
        history = self.state.log_history
        last = self.state.global_step
        if waited := self.callbacks.exhausted():
            what = "Training" if self.stage.is_last else "The encoders' stage"
            best = f"{self.state.best_metric:.4g} of step {self.state.best_global_step}"
            self.choice = (
                f"{what} stopped early after step {last} of {self.stage.end}: in {waited} evaluations "
                f"(--early_stopping_patience), eval_{self.stage.metric} was not better than {best}."
            )
            logger.info(self.choice)
        if self.args.keeps_best and (ranked := self.stage.ranked(history)):
            written = [(step, path) for step in ranked if (path := self._folder_of(step))]
            if not written or written[0][0] != ranked[0]:
                kept = f"those of step {written[0][0]}, the best that is left," if written else "the last weights"
                logger.warning("%s, the best, is not there; %s are taken", self.writer.path(ranked[0]), kept)
            if written:
                metrics = self._load_best(*written[0])
        return metrics

    def _load_best(self, best: int, path: Path) -> dict[str, float]:
        history = self.state.log_history
        last = self.state.global_step
        self.captured.load_weights(path)
        metrics = {name: value for name, value in evaluations(history)[best].items() if name.startswith("eval_")}
        if not self.ends_run:
            logger.info("The fusion head is trained on the encoders of step %d, the best of theirs", best)
            return metrics
        figure, saved = self.stage.choice(history, best)
        self.choice = f"{self.choice} {saved}".strip()
        row = {"step": last, "saved_step": best, "saved_part": self.stage.name, "saved_by": figure}
        reranks = any((self.model.config.rerank_weights or {}).values())
        if self.stage.lost_recall(history, best, reranks) and (start := self._folder_of(self.stage.begin)):
            self._put_back_projections(start)
            metrics = {f"eval_{name}": value for name, value in self.measure().items()}
            self.choice += " Its projections are those that it began with: later ones cost more recall than it adds."
            row["saved_projections_step"] = self.stage.begin
        elif best != self._evaluated_step:
            self.measure()  # the pictures are of what is saved
        if self.accelerator.is_main_process:
            append_rows(self.output_dir / METRICS_FILE, [row])
        return metrics

    def _put_back_projections(self, path: Path) -> None:
        """Load all weights of a checkpoint but the head's."""
        weights = self.model.named_parameters()
        heads = [(weight, weight.detach().clone()) for name, weight in weights if f"model.{name}".startswith(HEAD)]
        self.captured.load_weights(path)
        with torch.no_grad():
            for weight, kept in heads:
                weight.copy_(kept)

    def _folder_of(self, step: int) -> Path | None:
        """Return the checkpoint of a step, maybe in the folder that the run was resumed from; None if it is lost."""
        places = [self.writer.path(step)]
        if self._resumed_from:
            places += [self._resumed_from.parent / places[0].name, self._resumed_from]
        return next((path for path in places if path.is_dir() and step_of(path) == step), None)

    def _save_and_exit(self, signal: int) -> NoReturn:
        step = self.state.global_step
        if self._saved_step != step:
            self.save_checkpoint()
        if not self._finish_writing():
            self._fail_after_save_errors()
        self.callbacks.call("on_train_end")
        if self.accelerator.is_main_process:
            logger.warning("Stopped by a signal after step %d. Resume: %s", step, self.args.resume_command)
        raise SystemExit(128 + signal)  # as in shells

    def _add_note(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        """Let a traceback end with how to go on."""
        if isinstance(error, Exception) and sys.version_info >= (3, 11) and self._saved_step > self.stage.begin:
            error.add_note(f"Resume: {self.args.resume_command}")

    def _fail_after_save_errors(self) -> NoReturn:
        problem, diverged = distributed.on_first(lambda: (self.writer.problem, self.writer.diverged))
        if diverged:
            raise distributed.RunError(problem)
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
        self._stop_if_asked()

    def _stop_if_asked(self) -> None:
        [signal] = distributed.max_over_ranks([self.signals.number], self.accelerator.device)
        if signal:
            raise _StopRequested(signal)

    def _context(self) -> tuple[TrainingArguments, TrainerState, dict[str, Any]]:
        shared = {"model": self.model, "optimizer": self.optimizer, "data": self.data}
        shared |= {"processing_class": self.data.processor, "eval_dataloader": self.data.eval_loader}
        return self.args, self.state, shared


class _StopRequested(Exception):
    """A signal, whose number is the argument, asked the run to stop; raised on all ranks at once."""


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
