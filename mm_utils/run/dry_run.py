"""Take six steps of each stage of the real script with its largest batch; say what the whole run takes in time, memory and disk.

The script's `main` is called with other arguments and one more callback, so the dry run takes the path of the real run: data are
opened, frozen towers run once over some rows, and a model is trained, evaluated and saved, in a hidden folder beside the output
folder, which is removed.
"""

import logging
import os
import shutil
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.arguments import Parsed
from mm_utils.checkpointing.files import checkpoint_folders, find_checkpoint, size_of
from mm_utils.distributed import RunError
from mm_utils.run import finish
from mm_utils.run.output_folder import misplaced, occupied
from mm_utils.text import duration
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.starts import ALPHAS, has_baseline, stacks_blocks

logger = logging.getLogger(__name__)

STEPS = 6  # of a stage that are taken
EVALUATED = 64  # images of validation
_ROWS = {"train": "max_train_samples", "validation": "max_eval_samples"}
SLOW_STEP = 20.0  # seconds, after which no other is taken
LOADER_SECONDS = 4.0  # of reading data alone


def dry_run(main: Callable[..., Any], name: str, argv: Sequence[str] | None, given: Parsed) -> dict[str, float]:
    """Run a script's `main`, called with (argv, callbacks), on a few pairs; log and return the forecast, as `dry_run_*`.

    `given` are the arguments of the real run.

    Raises:
        RunError: if the output folder cannot be used.
        ValueError: as the real run would raise it.
    """
    args = given[TrainingArguments]
    settings = given.settings
    folder = Path(args.output_dir or f"outputs/{name}")
    if problem := misplaced(folder, settings) or occupied(folder, args.resume_from_checkpoint):
        raise RunError(problem)
    find_checkpoint(args.resume_from_checkpoint, folder)
    # the output folder, and some above it, may not be there yet
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    scratch = existing / f".dry-run-{folder.name}"
    largest = args.batch_sizes.sizes[-1]
    has_stages = bool(settings.get("fusion_layers") and settings.get("head_share"))
    probe = _Probe(STEPS * (1 + has_stages))
    most = {"max_train_samples": max(256, 2 * largest), "max_eval_samples": EVALUATED}
    overrides = {
        "dry_run": False,
        "output_dir": scratch / "run",
        "max_steps": probe.steps,
        "logging_steps": 1,
        "save_steps": STEPS,
        "eval_steps": 0,
        "early_stopping_patience": 0,
        "report_to": "none",
        "load_best_model_at_end": False,
        "push_to_hub": False,
    }
    overrides |= {name: min(rows, settings.get(name) or sys.maxsize) for name, rows in most.items()}
    if args.batch_size_schedule:
        overrides["batch_size_schedule"] = f"0:{largest}"
    if has_stages:  # where there is no head, a given flag of it would change the defaults
        overrides["head_share"] = 0.5
    if args.resume_from_checkpoint:
        overrides["resume_from_checkpoint"] = "latest"  # of an empty folder: a first start
    flags = [word for flag, value in overrides.items() for word in (f"--{flag}", str(value))]

    def remove() -> None:
        # The process group, which knows the rank too, begins after this and ends before it.
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(scratch, ignore_errors=True)

    remove()
    finish.logger.disabled = True  # no summary of the trial
    began = time.perf_counter()
    try:
        main([*(sys.argv[1:] if argv is None else argv), *flags], (probe,))
        if not probe.is_main_process:
            return {}
        elapsed = time.perf_counter() - began
        total = probe.data.total_rows
        rows = {
            name: min(total[name], settings.get(flag) or sys.maxsize) for name, flag in _ROWS.items() if name in total
        }
        args = replace(args, global_batch_size=min(args.global_batch_size, rows["train"]))
        figures = _forecast(args, given, probe, rows, elapsed, scratch / "run")
        largest = args.batch_sizes.sizes[-1]
    finally:
        finish.logger.disabled = False
        remove()
    features = f"features {duration(figures['features_hours'])}, " if figures["features_hours"] else ""
    logger.info(
        "The whole run, by this dry run:\n"
        f"  steps       {figures['steps']:,} of {largest} pairs, from {rows['train']:,} {probe.data.medium}s\n"
        f"  speed       {figures['pairs_per_second']:.4g} pairs/s; the loader alone reaches {probe.loaded:.4g}\n"
        f"  time        {duration(figures['hours'])}: {features}training {duration(figures['training_hours'])}, at most "
        f"{figures['evaluations']} evaluations, {figures['checkpoints']} checkpoints, the start and the end\n"
        f"  memory      {figures['peak_memory_gib']:.2f} GiB a process\n"
        f"  disk        {figures['disk_gb']:.3g} GB of checkpoints and model; {figures['free_disk_gb']:.4g} GB free\n"
        "The same command without --dry_run starts it."
    )
    if 3600 * figures["hours"] < 2 * elapsed:
        logger.info("This dry run took %s: of so few rows, the run takes little longer", duration(elapsed / 3600))
    if figures["disk_gb"] > figures["free_disk_gb"]:
        logger.warning("The disk of %s has no room for that. Make room.", existing)
    return {f"dry_run_{name}": float(value) for name, value in figures.items()}


class _Probe(TrainerCallback):
    """Measure the steps, the evaluation, the checkpoint and the loader of a dry run."""

    def __init__(self, steps: int) -> None:
        self.steps = steps  # of all stages
        self.is_main_process = False
        self.seconds = {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}
        self.measured = 0.0  # seconds, of all that is measured
        self.stages: list[list[float]] = []  # of each stage, the seconds of its steps

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Begin a stage."""
        if not self.stages:
            logger.info(
                "This dry run now takes a few steps; their figures are not those of the run, and nothing is kept"
            )
        self.data = kwargs["data"]
        self.has_stages = bool(self.stages) or state.max_steps < self.steps
        self.stages.append([])

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock: a step does not count the time that it waited for data."""
        self.last = time.perf_counter()
        self.measured += kwargs.get("data_wait", 0.0)

    on_evaluate_begin = on_step_begin

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time of a step; stop if others would take too long."""
        self._lap("step")
        self.stages[-1].append(self.seconds["step"])
        control.should_training_stop = self.seconds["step"] > SLOW_STEP

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the figures of a step."""
        if "loss" in kwargs["logs"]:
            self.logs = kwargs["logs"]

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time of the evaluation."""
        self._lap("evaluation")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time from the end of the evaluation to the complete checkpoint."""
        self._lap("checkpoint")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Time the loader alone, after the last stage."""
        self.is_main_process = state.is_world_process_zero
        if state.global_step < self.steps and not control.should_training_stop:
            return
        images = 0
        began = time.perf_counter()
        seconds = 0.0
        for batch in self.data.train_batches(state.global_step, state.global_step + 100_000):
            images += len(batch["image_ids"])
            seconds = time.perf_counter() - began
            if seconds > LOADER_SECONDS:
                break
        self.measured += seconds
        self.loaded = sum(gather_object([images / seconds]))

    def step_seconds(self, stage: int) -> float:
        """Return the mean time of a step of a stage, or of the one before if no step of it was taken; the first one sets up."""
        taken = [steps for steps in self.stages[: stage + 1] if steps][-1]
        # without the first, which compiles kernels and fills caches, unless it is the only one
        return sum(taken[1:] or taken) / len(taken[1:] or taken)

    def _lap(self, name: str) -> None:
        before = self.last
        self.last = time.perf_counter()
        self.seconds[name] = self.last - before
        self.measured += self.seconds[name]


def _forecast(
    args: TrainingArguments,
    given: Parsed,
    probe: _Probe,
    rows: Mapping[str, int],
    elapsed: float,
    folder: Path,
) -> dict[str, float]:
    """Return what the whole run takes, with `rows` by split; the trial took `elapsed` seconds, and its run lies in `folder`."""
    data = probe.data
    sizes = args.batch_sizes
    is_model = has_baseline(given, data)
    steps = args.total_steps(rows["train"])
    largest = sizes.sizes[-1]
    ends = [round((1 - given["head_share"]) * steps), steps] if probe.has_stages else [steps]
    training = 0.0
    begin = 0
    for stage, end in enumerate(ends):
        trained = probe.step_seconds(stage)
        loaded = largest / probe.loaded
        # workers read while the step computes; without workers, one waits for the other
        seconds = max(trained, loaded) if data.loaders.arguments.num_workers else trained + loaded
        training += (sizes.before(end) - sizes.before(begin)) / largest * seconds
        begin = end
    args = args.settled(sizes, rows["train"], is_model)
    saved = max(2, steps // args.save_steps) if args.save_steps > 0 else 0  # the ends of two stages at least
    evaluations = (max(1, steps // args.eval_steps) if args.eval_steps > 0 else 1) + (is_model and not args.wise_ft)
    if args.keeps_best:  # each may be the best so far, and is measured once more if it is not the last
        saved = max(saved, evaluations)
        evaluations += evaluations > 1
    evaluations += stacks_blocks(given)  # which measures the model as it is
    evaluations += len(ALPHAS) * args.wise_ft
    # An old one goes after a new one is complete, and the best of a stage stays.
    kept = min(saved, args.save_total_limit + 1 + 2 * args.keeps_best)
    written = [size_of(path) for path in checkpoint_folders(folder)]
    # the trial evaluated a few images, the run all
    growth = rows["validation"] / len(data.splits["validation"])
    others = evaluations * growth * probe.seconds["evaluation"] + saved * probe.seconds["checkpoint"]
    features = sum(seconds * min(rows["train"], most) / passed for seconds, passed, most in data.passes)
    once = max(0.0, elapsed - probe.measured - sum(seconds for seconds, *_ in data.passes))  # opening, pictures, card
    return {
        "steps": steps,
        "evaluations": evaluations,
        "checkpoints": saved,
        "pairs_per_second": sizes.before(steps) / training,
        "features_hours": features / 3600,
        "hours": (once + features + training + others) / 3600,
        "training_hours": training / 3600,
        "peak_memory_gib": probe.logs["peak_memory_gib"],
        "disk_gb": (kept * max(written, default=0) + size_of(folder) - sum(written)) / 1e9,
        "free_disk_gb": shutil.disk_usage(folder).free / 1e9,
    }
