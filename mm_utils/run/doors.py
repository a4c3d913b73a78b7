"""What attaches to a run: callbacks that every run has, those of the extras and of `--callbacks`, and those of `main`.

A script asks for the flags of the extras before it parses (`arguments`), and for their callbacks after that (`open`). Then
`start` calls `on_start`, when data, model, objective and optimizer exist, and `finish` calls `on_finish`, when the model is
saved, and when its card is written `on_publish`. Starts go by the names of the extras, finishes the other way round.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from transformers import EarlyStoppingCallback, TrainerCallback

from mm_utils import distributed
from mm_utils.arguments import Parsed
from mm_utils.data.training_data import TrainingData
from mm_utils.doors import entries, load, load_own
from mm_utils.evaluation.retrieval import Evaluate, RetrievalEvaluator, in_turn
from mm_utils.hub import HubPusher
from mm_utils.objectives import Objective
from mm_utils.reliability.skipped import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection, StragglerDetection
from mm_utils.run.output_folder import save_config
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import Run
from mm_utils.training.callbacks import ProgressBar, RunCallback, TemperatureClamp
from mm_utils.training.throughput import Throughput
from mm_utils.training.trackers import Tracking
from mm_utils.training.warnings import CollapseWarning


@dataclass
class RunContext:
    """A run between its start and its finish; callbacks may change what it has.

    Attributes:
        run: processes, output folder, training arguments.
        given: all flags.
        data, model, objective, optimizer: what is trained, on what, how.
        evaluators: called in turn with (model, loader, accelerator); their metrics become those of an evaluation.
        resume_from: the checkpoint that training goes on from.
        has_baseline: whether the weights before the first step are a model already.
        evaluates_start: whether they are evaluated, and kept if no later ones are better.
        retrieval: in pre-training, the evaluator of the validation split, which is among `evaluators`.
        metrics: after training, those of the saved model.
        published: lines of the summary: where callbacks have published the output folder.
        passes: passes over training rows at the start: name, seconds, rows, and the most rows that a whole run takes.
        final_evaluations: how often callbacks evaluate after training.
    """

    run: Run
    given: Parsed
    data: TrainingData
    model: Any
    objective: Objective
    optimizer: torch.optim.Optimizer
    evaluators: list[Evaluate]
    resume_from: Path | None = None
    has_baseline: bool = False
    evaluates_start: bool = False
    retrieval: RetrievalEvaluator | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    published: list[str] = field(default_factory=list)
    passes: list[tuple[str, float, int, int]] = field(default_factory=list)
    final_evaluations: int = 0

    def evaluate(self, model: Any, loader: Iterable, accelerator: Accelerator) -> dict[str, float]:
        """Return the metrics of all evaluators."""
        return in_turn(*self.evaluators)(model, loader, accelerator)

    def timed_pass(self, name: str, rows: int, most: int, work: Callable[[], Any]) -> Any:
        """Do `work`, which goes over `rows` training rows, and note how long that took."""
        begin = time.monotonic()
        found = work()
        self.passes.append((name, time.monotonic() - begin, rows, most))
        return found


class Doors:
    """The callbacks of one run of a script.

    Args:
        script: the script's name.
        callbacks: those that `main` was given.

    Attributes:
        arguments: the dataclasses of the extras' flags.
        callbacks: all callbacks that are attached, after `open`.
    """

    def __init__(self, script: str, callbacks: Sequence[TrainerCallback] = ()):
        kinds = [*(load(path) for path in entries("CALLBACKS").values()), CollapseWarning, HubPusher, Tracking]
        self._kinds = [kind for kind in kinds if script in kind.scripts]
        self.script, self._of_main = script, callbacks
        self.arguments = [kind.arguments for kind in self._kinds if kind.arguments is not None]
        self.callbacks: list[TrainerCallback] = []

    def open(self, given: Parsed) -> None:
        """Attach the callbacks that the flags ask for, after they have checked theirs.

        Raises:
            ValueError: if flags contradict each other, or `--callbacks` names no callback.
        """
        names = [name.strip() for name in (given["callbacks"] or "").split(",") if name.strip()]
        own = [load_own(name, "--callbacks", TrainerCallback)() for name in names]
        wanted = [kind for kind in self._kinds if kind.flag is None or given.differs(kind.flag)]
        for kind in self._kinds:
            if kind not in wanted and not given.is_trial:  # which turns flags off behind the user's
                given.refuse(kind.reads, f"there is no --{kind.flag}")
        attached = [found for kind in wanted if (found := kind.attach(given)) is not None]
        self.callbacks = [*attached, *own, *self._of_main]

    def first(self, event: str, *given: Any) -> Any:
        """Return what the first callback does in place of the script, by a method of `RunCallback`; None if none does."""
        methods = [getattr(each, event, None) for each in self.callbacks]
        return next((found for method in methods if method and (found := method(*given)) is not None), None)

    def has_baseline(self, given: Parsed, data: TrainingData) -> bool:
        """Return whether the weights before the first step are a model: a whole one, or one that a callback makes."""
        ours = (each for each in self.callbacks if isinstance(each, RunCallback))
        whole = given["model_name_or_path"] is not None and given["text_model_name_or_path"] is None
        return whole or any(each.has_baseline(data) for each in ours)

    def start(self, context: RunContext) -> None:
        """Call `on_start` of the callbacks."""
        context.evaluates_start = context.has_baseline
        _call("on_start", self.callbacks, context)

    def finish(self, context: RunContext) -> dict[str, float]:
        """Call `on_finish` of the callbacks, the last first; return the metrics."""
        _call("on_finish", self.callbacks[::-1], context)
        return context.metrics

    def publish(self, context: RunContext) -> None:
        """Call `on_publish` of the callbacks, the last first, on all ranks."""
        _call("on_publish", self.callbacks[::-1], context)


def _call(event: str, callbacks: Sequence[TrainerCallback], context: RunContext) -> None:
    for callback in callbacks:
        if (method := getattr(callback, event, None)) is not None:
            method(context)


def all_callbacks(
    run: Run,
    objective: Objective,
    data: TrainingData,
    others: Iterable[TrainerCallback],
    highest_scale: float | None = None,
) -> list[TrainerCallback]:
    """Return the callbacks that every run has, and others; those that add values to the log come before the bar.

    Args:
        run: the started run.
        objective: the objective that is trained.
        data: the data that it is trained on.
        others: those that are attached.
        highest_scale: the bound of the inverse temperature; None for an objective without one.
    """
    args = run.args
    callbacks: list[TrainerCallback] = [
        HangDetection(args.ddp_timeout),
        Throughput(run.accelerator.device),
        *([StragglerDetection()] if distributed.world_size() > 1 else []),
        SkippedSamples(),
        RestartRecord(partial(save_config, run.name, run.output_dir, run.settings)),
    ]
    if highest_scale is not None:
        callbacks.append(TemperatureClamp(highest_scale))
    if args.early_stopping_patience:
        callbacks.append(EarlyStoppingCallback(args.early_stopping_patience))
    return [*callbacks, *others, ProgressBar()]
