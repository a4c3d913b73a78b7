"""The one training loop: steps, clipping, schedule, evaluation, checkpoints, callbacks.

Names follow `transformers.Trainer` wherever the meaning is the same, and its callbacks run here unchanged. What differs:
the unit of a step is the global batch, whose rows depend on (data, seed, step) alone, so a run resumed with another number
of processes goes on with the same batches.
"""

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from torch import Tensor
from transformers import EarlyStoppingCallback, ProcessorMixin, TrainerCallback, TrainerControl, TrainerState
from transformers.trainer_callback import ExportableState

from mm_utils import backends, ranks
from mm_utils.averaging import WeightAverage
from mm_utils.checkpoints import checkpoint_path, remove_unfinished, set_aside
from mm_utils.data.loaders import DeviceLoader
from mm_utils.flops import FlopCounts
from mm_utils.interruption import Interrupted, Interruption
from mm_utils.jsonl import append_rows, truncate_rows
from mm_utils.metrics import Evaluate
from mm_utils.modeling_fusion_dual_encoder import FusionDualEncoderModel
from mm_utils.monitor import Throughput
from mm_utils.objectives import Objective
from mm_utils.optim import OptimizerArguments
from mm_utils.persistence import Checkpoints
from mm_utils.preflight import agree_on, check_disk
from mm_utils.run import RunError
from mm_utils.saving import MOST_FAILURES
from mm_utils.skipped import SKIPPED_FILE, SkippedImages
from mm_utils.snapshot import STATE_FILE, changes
from mm_utils.starting import note_start
from mm_utils.stepping import NONFINITE_FILE, Stepper
from mm_utils.stragglers import Stragglers
from mm_utils.tracking import Tracking
from mm_utils.training_arguments import TrainingArguments
from mm_utils.watchdog import Watchdog

logger = logging.getLogger(__name__)


class Trainer:
    """Train an objective. It is built from parts, in the open.

    Args:
        args, optimizer_args: the dataclasses.
        accelerator: from `mm_utils.run.start_run`.
        objective: called with (batch, step); returns what to optimise and to log.
        optimizer: whose groups carry a `peak_lr`.
        processor: saved beside the model.
        train_batches: (start, stop) -> loader of this rank's share of the global batches of these steps.
        num_rows: images of the training split.
        eval_loader, evaluate: what is measured, on what.
        callbacks: any `transformers.TrainerCallback`.
        max_seq_length: tokens of the longest caption there may be, for `--micro_batch_size auto`.
        flops: of the model, to log how fast it computes.
        identity: of the training data, with what else decides its order; a resumed run must have the same.
        tracking: is sent what is logged.
    """

    def __init__(
        self,
        args: TrainingArguments,
        optimizer_args: OptimizerArguments,
        accelerator: Accelerator,
        objective: Objective,
        optimizer: torch.optim.Optimizer,
        processor: ProcessorMixin,
        train_batches: Callable[[int, int], DeviceLoader],
        num_rows: int,
        eval_loader: DeviceLoader | None = None,
        evaluate: Evaluate | None = None,
        callbacks: Sequence[TrainerCallback] = (),
        max_seq_length: int = 64,
        flops: FlopCounts | None = None,
        identity: Mapping[str, Any] | None = None,
        tracking: Tracking | None = None,
    ):
        self.args, self.accelerator = args, accelerator
        self.output_dir, self.sizes = Path(args.output_dir or "."), args.batch_sizes
        backends.get_ready(accelerator, objective, self.sizes.at(0))
        self.objective, self.optimizer = accelerator.prepare(objective, optimizer)
        backends.wake(self.objective)
        self.model: FusionDualEncoderModel = objective.model
        self.processor, self.train_batches, self.num_rows = processor, train_batches, num_rows
        self.eval_loader, self.evaluate_model, self.callbacks = eval_loader, evaluate, list(callbacks)
        self.tracking = tracking
        self.state = TrainerState(
            max_steps=args.total_steps(num_rows),
            is_world_process_zero=accelerator.is_main_process,
            is_local_process_zero=accelerator.is_local_main_process,
        )
        self.state.num_train_epochs = -(-self.sizes.before(self.state.max_steps) // num_rows)
        self.control = TrainerControl()
        self.average = WeightAverage(self.model, args.ema_decay) if args.ema_decay else None
        objective.teacher = self.average
        self.stepper = Stepper(
            args,
            optimizer_args,
            accelerator,
            self.objective,
            self.optimizer,
            self.average,
            self.state.max_steps,
            max_seq_length,
        )
        self.skipped = SkippedImages(self.output_dir, args.max_corrupt_share)
        self._evaluated_at = -1
        self.identity = {"seed": args.seed, "batch sizes": str(self.sizes), **(identity or {})}
        self.checkpoints = Checkpoints(
            accelerator, self.output_dir, args.save_total_limit, processor, objective, self.optimizer, self.average
        )
        self.watchdog = Watchdog(args.ddp_timeout, accelerator.device)
        self.stragglers = Stragglers(accelerator.device, (self.model.vision_model, self.model.text_model))
        self.interruption, self._saved_step, self._saved_at = Interruption(), 0, time.monotonic()
        self._throughput = Throughput(accelerator.device, flops, objective.pairs_per_image, args.peak_tflops)

    # -- the loop ---------------------------------------------------------------------------------------------------

    def train(self, resume_from: Path | None = None) -> dict[str, float]:
        """Run to the last step or until a callback stops it, and save the model. Returns the last metrics.

        Raises:
            Interrupted: if a signal asked for it (`mm_utils.interruption`); the checkpoint is written then.
            RunError: if checkpoints cannot be written any more.
        """
        with Interruption() as self.interruption, self.watchdog:
            try:
                metrics = self._train(resume_from)
                complete = self._complete_saving()
                if self.args.load_best_model_at_end and self.state.best_model_checkpoint:
                    metrics = self._take_best(metrics)
            except _Asked as asked:
                self._leave(asked.number)
        self._event("on_train_end")
        self.checkpoints.save_model()
        if not complete:
            self._give_up()
        return metrics

    def _train(self, resume_from: Path | None) -> dict[str, float]:
        self._begin(resume_from)
        metrics = self._evaluate_if_owed()
        if not self.control.should_training_stop:
            metrics = self._take_steps() or metrics
        if self.evaluate_model and self._evaluated_at != self.state.global_step:
            metrics = self.evaluate()
        if self.saves and self._saved_step != self.state.global_step:
            self.save_checkpoint()
        return metrics

    def _begin(self, resume_from: Path | None) -> None:
        """Check what can be known before the first step, and go to where the run goes on."""
        agree_on("what decides the batches", self.identity)
        if self.accelerator.is_main_process:
            remove_unfinished(self.output_dir)
        if resume_from is not None:
            self._resume(resume_from)
        if self.accelerator.is_main_process:
            for name in ("metrics.jsonl", SKIPPED_FILE, NONFINITE_FILE):
                truncate_rows(self.output_dir / name, self.state.global_step)
        note_start(self.output_dir, self.state.global_step)
        if self.saves:
            limit = self.args.save_total_limit
            kept = None if limit is None else limit + self.args.save_best_limit
            check_disk(self.output_dir, self.checkpoints.nbytes, kept)
        self._event("on_train_begin")

    def _take_steps(self) -> dict[str, float]:
        """To the last step, or until a callback or a signal stops the run. Returns the last metrics."""
        metrics: dict[str, float] = {}
        loader = self.train_batches(self.state.global_step, self.state.max_steps)
        self._throughput.restart()
        self.stragglers.restart()
        self.watchdog.at(self.state.global_step, "data")
        for batch in loader:
            self.watchdog.at(self.state.global_step, "step")
            report = self.stepper.take(batch, self.state.global_step)
            self.state.global_step += 1
            self.state.epoch = self.sizes.before(self.state.global_step) / self.num_rows
            self._throughput.add(batch["lengths"], self.stepper.micro_batch_size, loader.wait)
            self.stragglers.own(loader.wait)
            self.skipped.add(self.state.global_step, batch)
            self._plan()
            self._event("on_step_end", report=report)
            self.stepper.follow()
            number = self._agree()
            metrics = self._act(report) or metrics
            if number:
                raise _Asked(number)
            if self.control.should_training_stop:
                return metrics
            self.watchdog.at(self.state.global_step, "data")
        if self.state.global_step < self.state.max_steps:
            raise RunError(  # on this process, maybe alone: the others would wait for it in their next step
                f"the training data of process {ranks.rank()} ended after step {self.state.global_step} of "
                f"{self.state.max_steps}. Give all processes the same data, and as much as at the start."
            )
        return metrics

    def _evaluate_if_owed(self) -> dict[str, float]:
        """Make up for the evaluation that was due when a signal stopped the run that is gone on from."""
        step = self.state.global_step
        due = self.evaluate_model is not None and step > 0 and _due(step, self.args.eval_steps)
        if not due or any(row["step"] == step and "loss" not in row for row in self.state.log_history):
            return {}
        metrics = self.evaluate()
        if self.control.should_save:
            self.save_checkpoint()
        return metrics

    def evaluate(self) -> dict[str, float]:
        """Evaluate now, log, and tell the callbacks.

        With an average of the weights, which is what will be saved, `eval_*` are its figures, and `eval_raw_*` those of the
        weights as they are.
        """
        self.watchdog.at(self.state.global_step, "evaluation")
        # What is saved comes last: evaluators keep their last findings, for the pictures.
        raw = self.measure() if self.average is not None else {}
        with self.average.applied() if self.average is not None else nullcontext():
            found = self.measure()
        metrics = {f"eval_{name}": value for name, value in found.items()}
        metrics |= {f"eval_raw_{name}": value for name, value in raw.items()}
        self._evaluated_at = self.state.global_step
        self._log(metrics)
        # Callbacks compare with the best so far, so that changes after them.
        self._event("on_evaluate", metrics=metrics)
        value, best = metrics.get(f"eval_{self.args.metric_for_best_model}"), self.state.best_metric
        if value is None:
            raise ValueError(
                f"--metric_for_best_model is {self.args.metric_for_best_model}; measured were {', '.join(found)}."
            )
        if best is None or (value > best if self.args.greater_is_better else value < best):
            self.state.best_metric, self.state.best_global_step = value, self.state.global_step
        self.control.should_save |= self.state.global_step in self._best_steps()
        return metrics

    def measure(self) -> dict[str, float]:
        """What `evaluate` finds of the weights as they are, and no more than that."""
        if self.evaluate_model is None or self.eval_loader is None:
            raise ValueError("this Trainer was given nothing to evaluate; pass eval_loader and evaluate")
        self.objective.eval()
        with backends.gathered(self.objective):
            return self.evaluate_model(self.model, _Watched(self.eval_loader, self._look), self.accelerator)

    def _best_steps(self) -> list[int]:
        """Of all evaluations, the steps of those whose checkpoints are kept for being the best."""
        name, sign = f"eval_{self.args.metric_for_best_model}", 1 if self.args.greater_is_better else -1
        evaluated = {int(row["step"]): sign * row[name] for row in self.state.log_history if name in row}
        limit = max(self.args.save_best_limit, int(self.args.load_best_model_at_end))
        return sorted(evaluated, key=lambda step: (-evaluated[step], step))[:limit]

    # -- what is left behind ----------------------------------------------------------------------------------------

    @property
    def saves(self) -> bool:
        """Whether checkpoints are written as time goes by."""
        return bool(self.args.save_steps or self.args.save_minutes)

    def save_checkpoint(self) -> None:
        """Begin to write all that a resumed run needs, as a folder that `from_pretrained` reads."""
        self.watchdog.at(self.state.global_step, "save")
        exported = [callback for callback in self.callbacks if isinstance(callback, ExportableState)]
        self.state.stateful_callbacks = {type(callback).__name__: callback.state() for callback in exported}  # type: ignore
        if self.state.best_global_step == self.state.global_step:
            self.state.best_model_checkpoint = str(checkpoint_path(self.output_dir, self.state.global_step))
        self._settle_skipped()
        counts = {"nonfinite_steps": self.stepper.nonfinite_steps, "skipped": self.skipped.state()}
        self.checkpoints.save(self.state, {"identity": self.identity, **counts}, self._best_steps())
        self._saved_step, self._saved_at = self.state.global_step, time.monotonic()

    def load_checkpoint(self, path: Path) -> TrainerState:
        """Take up a checkpoint's weights, optimizer and counts, on all ranks, and return the trainer's state.

        Raises:
            ValueError: if it is of another model or of other data.
        """
        run = self.checkpoints.read(path)
        changed = changes(run["identity"], self.identity)
        if changed and not self.args.allow_changed_run:
            raise ValueError(
                f"--resume_from_checkpoint is {path}; since it was written, {changed}, so its steps would have other "
                "images. Give what it had, or --allow_changed_run."
            )
        self.checkpoints.load(path, run)
        self.stepper.nonfinite_steps = run["nonfinite_steps"]
        self.skipped.load(run["skipped"])
        return TrainerState.load_from_json(str(path / STATE_FILE))

    def _resume(self, path: Path) -> None:
        state = self.load_checkpoint(path)
        state.max_steps, state.num_train_epochs = self.state.max_steps, self.state.num_train_epochs
        state.is_world_process_zero = self.state.is_world_process_zero
        state.is_local_process_zero = self.state.is_local_process_zero
        self.state, self._saved_step = state, state.global_step
        exported: Any = state.stateful_callbacks or {}
        for callback in self.callbacks:
            for name, value in exported.get(type(callback).__name__, {}).get("attributes", {}).items():
                setattr(callback, name, value)
            if isinstance(callback, EarlyStoppingCallback):
                self._stop_again(callback)
        if self.accelerator.is_main_process:
            set_aside(self.output_dir, state.global_step)
            logger.info("Resumed from %s at step %d of %d", path, state.global_step, state.max_steps)

    def _stop_again(self, callback: EarlyStoppingCallback) -> None:
        """A run that had stopped early takes no further step, unless it is given more patience."""
        waited, patience = callback.early_stopping_patience_counter, callback.early_stopping_patience
        if waited >= patience:
            self.control.should_training_stop = True
            logger.info(
                "The run had stopped early, after %d evaluations without a better metric; to go on, give more than that as "
                "--early_stopping_patience", waited,
            )  # fmt: skip

    def _take_best(self, metrics: dict[str, float]) -> dict[str, float]:
        """Go back to the best checkpoint's weights; its metrics are those logged when it was evaluated."""
        best = checkpoint_path(self.output_dir, int(self.state.best_global_step or 0))
        if not (best / STATE_FILE).is_file():
            logger.warning("%s could not be written, so the last weights are kept in place of the best", best)
            return metrics
        self.checkpoints.load_weights(best)
        evaluated = [
            {name: value for name, value in row.items() if name.startswith("eval_")}
            for row in self.state.log_history
            if row["step"] == self.state.best_global_step
        ]
        return next((row for row in evaluated if row), metrics)

    # -- small parts ------------------------------------------------------------------------------------------------

    def _plan(self) -> None:
        """What is due after this step; callbacks may change it."""
        step, last = self.state.global_step, self.state.global_step >= self.state.max_steps
        self.control.should_log = last or _due(step, self.args.logging_steps)
        self.control.should_evaluate = self.evaluate_model is not None and (last or _due(step, self.args.eval_steps))
        waited = time.monotonic() - self._saved_at
        self.control.should_save = _due(step, self.args.save_steps) or 0 < 60 * self.args.save_minutes <= waited

    def _agree(self) -> int:
        """Let all ranks do after this step what is due on any, as signals, clocks and disks differ between them.

        Returns the number of the signal that asks the run to stop, or 0. Such a step is logged; what else is due is left to
        `_leave` and to the run that goes on.
        """
        writer, device = self.checkpoints.writer, self.accelerator.device
        told = (self.interruption.number, writer.saved(), writer.failures)
        number, saved, failures = _share_wishes(self.control, device, *told)
        if saved:
            self._event("on_save", checkpoint=checkpoint_path(self.output_dir, saved))
            _share_wishes(self.control, device)
        if failures >= MOST_FAILURES:
            self._give_up()
        if number:
            self.control.should_evaluate = self.control.should_save = False
        return number

    def _look(self) -> None:
        """Stop, on all ranks at once, if a signal asked any of them to."""
        self.watchdog.at(self.state.global_step, "evaluation")
        [number] = ranks.max_over_ranks([self.interruption.number], self.accelerator.device)
        if number:
            raise _Asked(number)

    def _leave(self, number: int) -> NoReturn:
        """Save and stop, as a signal asked for."""
        step = self.state.global_step
        if self._saved_step != step:
            self.save_checkpoint()
        if not self._complete_saving():
            self._give_up()
        self._event("on_train_end")
        if self.accelerator.is_main_process:
            logger.warning("Stopped by a signal after step %d; go on with --resume_from_checkpoint latest", step)
        raise Interrupted(number)

    def _complete_saving(self) -> bool:
        """Wait for what is being written, and tell the callbacks. Whether the last checkpoint could be written."""
        self.watchdog.at(self.state.global_step, "save")
        self.checkpoints.writer.wait()
        while True:
            told = [self.checkpoints.writer.saved(), self.checkpoints.writer.failures]
            saved, failures = ranks.max_over_ranks(told, self.accelerator.device)
            if not saved:
                break
            self._event("on_save", checkpoint=checkpoint_path(self.output_dir, saved))
        if self.accelerator.is_main_process:
            self.checkpoints.writer.tidy(self._best_steps())
        return not failures

    def _give_up(self) -> NoReturn:
        [problem] = broadcast_object_list([self.checkpoints.writer.problem])
        raise RunError(f"{problem}. Then go on with --resume_from_checkpoint latest")

    def _settle_skipped(self) -> int:
        """How many images could not be read since the first step, on all ranks; too many of them end the run."""
        return self.skipped.settle(self.sizes.before(self.state.global_step), self.accelerator.device)

    def _act(self, report: dict[str, Tensor]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        if self.control.should_log:
            self.stragglers.check(self.state.global_step)
            rate = self.optimizer.param_groups[0]["lr"]
            values = {name: value.item() for name, value in report.items()}
            skipped = self._settle_skipped()
            self._log(
                {
                    **values,
                    "learning_rate": rate,
                    **self._throughput.rates(),
                    **({"skipped_images": skipped} if skipped else {}),
                    **({"nonfinite_steps": self.stepper.nonfinite_steps} if self.stepper.nonfinite_steps else {}),
                }
            )
            _share_wishes(self.control, self.accelerator.device)
        if self.control.should_evaluate:
            metrics = self.evaluate()
            _share_wishes(self.control, self.accelerator.device)
        if self.control.should_save:
            self.save_checkpoint()
        if self.control.should_evaluate or self.control.should_save:
            self._throughput.restart()
            self.stragglers.restart()
        return metrics

    def _log(self, values: dict[str, float]) -> None:
        row = {"step": self.state.global_step, "epoch": round(self.state.epoch or 0.0, 4), **values}
        self.state.log_history.append(row)
        if self.accelerator.is_main_process:
            append_rows(self.output_dir / "metrics.jsonl", [row])
        if self.tracking is not None:
            self.tracking.log(values, self.state.global_step)
        self._event("on_log", logs=row)

    def _event(self, name: str, **values: Any) -> None:
        for callback in self.callbacks:
            changed = getattr(callback, name)(
                self.args,
                self.state,
                self.control,
                model=self.model,
                processing_class=self.processor,
                optimizer=self.optimizer,
                eval_dataloader=self.eval_loader,
                **values,
            )
            self.control = changed or self.control


class _Asked(Exception):
    """A signal asked the run to stop; raised on all ranks at once."""

    def __init__(self, number: int):
        super().__init__(number)
        self.number = number


class _Watched:
    """A loader, as many batches on every rank, that calls `look` before each."""

    def __init__(self, loader: DeviceLoader, look: Callable[[], None]):
        self.loader, self.look = loader, look

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in self.loader:
            self.look()
            yield batch


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


def _share_wishes(control: TrainerControl, device: torch.device, *numbers: int) -> list[int]:
    """Let all ranks do what is wanted on any, as some callbacks act on one alone; returns the largest of each number."""
    names = ("should_log", "should_evaluate", "should_save", "should_training_stop")
    found = ranks.max_over_ranks([*(getattr(control, name) for name in names), *numbers], device)
    for name, wanted in zip(names, found, strict=False):
        setattr(control, name, bool(wanted))
    return found[len(names) :]
