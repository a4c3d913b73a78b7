"""The callbacks of a run: those that every run has, those that flags ask for, those of `--callbacks`, and those of `main`."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from mm_utils.arguments import Parsed, load_own
from mm_utils.data.training_data import TrainingData
from mm_utils.evaluation.retrieval import Evaluate, RetrievalEvaluator
from mm_utils.hub import HubPusher
from mm_utils.objectives.joint import Objective
from mm_utils.reliability.skipped import SkippedSamples
from mm_utils.reliability.watchdog import HangDetection
from mm_utils.run.output_folder import save_config
from mm_utils.run.restarts import RestartRecord
from mm_utils.run.start import Run
from mm_utils.text import passes_own_code
from mm_utils.training.callbacks import ProgressBar, Throughput
from mm_utils.training.feature_cache import CacheFeatures
from mm_utils.training.stages import Stage
from mm_utils.training.starts import BlockStart, ClosedFormStart, WiseFT
from mm_utils.training.teacher import CacheTeacher
from mm_utils.training.trackers import Tracking
from mm_utils.training.warnings import CollapseWarning

KINDS = (CacheFeatures, CacheTeacher, ClosedFormStart, BlockStart, WiseFT, CollapseWarning, HubPusher, Tracking)
"""The callbacks that flags ask for, in the order in which they are started."""


@dataclass
class RunContext:
    """A run between its start and its finish; callbacks may change what it has.

    Callbacks go by the order of `KINDS` at the start, and the other way round at the end.

    Attributes:
        evaluators: called in turn with (model, loader, accelerator); their metrics become those of an evaluation.
        has_baseline: whether the weights before the first step are a model already.
        retrieval: in pre-training, the evaluator of the validation split, which is among `evaluators`.
        metrics, choice: after training, those of the saved model; which weights are saved, and what chose them.
        passes: passes over training rows at the start: seconds, rows, and the most rows that a whole run takes.
        stages: all stages of the run, what each trains included.
    """

    run: Run
    given: Parsed
    data: TrainingData
    model: Any
    objective: Objective
    evaluators: list[Evaluate]
    resume_from: Path | None = None
    has_baseline: bool = False
    retrieval: RetrievalEvaluator | None = None
    metrics: dict[str, float] = field(default_factory=dict)
    choice: str = ""
    passes: list[tuple[float, int, int]] = field(default_factory=list)
    stages: Sequence[Stage] = ()
    callbacks: Sequence[TrainerCallback] = ()

    @property
    def evaluates_start(self) -> bool:
        """Whether the weights before the first step are evaluated; interpolation measures them at the end."""
        return self.has_baseline and not self.given["wise_ft"]

    @property
    def feature_root(self) -> Path | None:
        """Where features are stored: in the datasets cache, or by a dry run, which measures them and leaves none, beside its model."""
        return self.run.output_dir.parent if self.given.is_trial else None

    def call(self, event: str) -> None:
        """Call a method of the callbacks, on all ranks: those of `RunCallback`, which any other callback may have, too."""
        for callback in self.callbacks if event == "on_start" else self.callbacks[::-1]:
            if (method := getattr(callback, event, None)) is not None:
                method(self)

    def timed_pass(self, rows: int, most: int, work: Callable[[], Any]) -> None:
        """Do `work`, which goes over `rows` training rows, and note how long that took."""
        begin = time.monotonic()
        work()
        self.passes.append((time.monotonic() - begin, rows, most))


def attach(given: Parsed, others: Sequence[TrainerCallback] = ()) -> list[TrainerCallback]:
    """Return the callbacks that the flags ask for, after they have checked theirs, those of `--callbacks`, and others.

    Raises:
        ValueError: if flags contradict each other, or `--callbacks` names no callback.
    """
    names = [name.strip() for name in (given["callbacks"] or "").split(",") if name.strip()]
    own = [_made(load_own(name, "--callbacks", TrainerCallback), name) for name in names]
    attached = [found for kind in KINDS if (found := kind.attach(given)) is not None]
    return [*attached, *own, *others]


def _made(kind: type[TrainerCallback], name: str) -> TrainerCallback:
    try:
        return kind()
    except TypeError as error:
        if passes_own_code(error):
            raise
        raise ValueError(
            f"--callbacks has {name}; {error}. It is made without arguments: give each a default."
        ) from error


def has_baseline(given: Parsed, data: TrainingData, callbacks: Sequence[TrainerCallback]) -> bool:
    """Return whether the weights before the first step are a model: a whole one, or one in closed form."""
    whole = given["model_name_or_path"] is not None and given["text_model_name_or_path"] is None
    return whole or any(isinstance(each, ClosedFormStart) and each.has_baseline(data) for each in callbacks)


def all_callbacks(run: Run, others: Iterable[TrainerCallback]) -> list[TrainerCallback]:
    """Return the callbacks that every run has, and others; those that add values to the log come before the bar."""
    return [
        HangDetection(run.args.ddp_timeout),
        Throughput(run.accelerator.device),
        SkippedSamples(),
        RestartRecord(partial(save_config, run.output_dir, run.settings)),
        *others,
        ProgressBar(),
    ]
