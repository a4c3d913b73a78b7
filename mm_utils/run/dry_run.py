"""Take four steps of the real script with its largest batch; say what the whole run takes in time, memory and disk.

The script's `main` is called with other arguments and one more callback, so the dry run takes the path of the real run: data are
opened, and a model is trained, evaluated and saved, in a hidden folder beside the output folder, which is removed.
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

from mm_utils.checkpointing.files import find_checkpoint, size_of
from mm_utils.distributed import RunError
from mm_utils.run import finish
from mm_utils.run.callbacks import RunContext
from mm_utils.run.output_folder import misplaced, occupied
from mm_utils.text import duration
from mm_utils.training.arguments import TrainingArguments

logger = logging.getLogger(__name__)

STEPS, EVALUATED = 4, 32  # steps that are taken, and images of validation that are evaluated
SLOW_STEP, LOADER_SECONDS = 20.0, 4.0  # seconds of a step after which no other is taken, and of reading data alone


def dry_run(
    main: Callable[..., Any],
    name: str,
    argv: Sequence[str] | None,
    args: TrainingArguments,
    settings: Mapping[str, Any],
) -> dict[str, float]:
    """Run a script's `main`, called with (argv, callbacks), on a few pairs; log and return the forecast, as `dry_run_*`.

    `args` and `settings`, all arguments by name, are those of the real run.

    Raises:
        RunError: if the output folder cannot be used.
        ValueError: as the real run would raise it.
    """
    folder = Path(args.output_dir or f"outputs/{name}")
    if problem := misplaced(folder, settings) or occupied(folder, args.resume_from_checkpoint):
        raise RunError(problem)
    find_checkpoint(args.resume_from_checkpoint, folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    scratch, probe, largest = existing / f".dry-run-{folder.name}", _Probe(), args.batch_sizes.sizes[-1]
    most = {"max_train_samples": max(256, 2 * largest), "max_eval_samples": EVALUATED}
    overrides = {
        **{"dry_run": False, "output_dir": scratch, "max_steps": STEPS},
        **({"batch_size_schedule": f"0:{largest}"} if args.batch_size_schedule else {}),
        **{name: min(rows, settings.get(name) or sys.maxsize) for name, rows in most.items()},
        # Towers and head at once: no step takes more. Where there is no head, a given flag of it would change the defaults.
        **({"head_share": 0.0} if settings.get("fusion_layers") else {}),
        **{"logging_steps": 1, "save_steps": STEPS, "eval_steps": 0, "early_stopping_patience": 0},
        **{"report_to": "none", "load_best_model_at_end": False, "push_to_hub": False},
        **({"resume_from_checkpoint": "latest"} if args.resume_from_checkpoint else {}),
    }
    flags = [word for flag, value in overrides.items() for word in (f"--{flag}", str(value))]

    def remove() -> None:
        # The process group, which knows the rank too, begins after this and ends before it.
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(scratch, ignore_errors=True)

    remove()
    finish.logger.disabled = True  # no summary of the trial
    try:
        main([*(sys.argv[1:] if argv is None else argv), *flags], (probe,))
        if not probe.is_main_process:
            return {}
        args = replace(args, global_batch_size=min(args.global_batch_size, probe.data.total_rows["train"]))
        figures, largest = _forecast(args, probe, scratch), args.batch_sizes.sizes[-1]
    finally:
        finish.logger.disabled = False
        remove()
    logger.info(
        "The whole run, by this dry run:\n"
        f"  steps       {figures['steps']:,} of {largest} pairs, from {probe.data.total_rows['train']:,} {probe.data.medium}s\n"
        f"  speed       {figures['pairs_per_second']:.4g} pairs/s; the loader alone reaches {probe.loaded:.4g}\n"
        f"  time        {duration(figures['hours'])}: training {duration(figures['training_hours'])}, at most "
        f"{figures['evaluations']} evaluations, {figures['checkpoints']} checkpoints, and what comes before the first step\n"
        f"  memory      {figures['peak_memory_gib']:.2f} GiB a process\n"
        f"  disk        {figures['disk_gb']:.3g} GB of checkpoints and model; {figures['free_disk_gb']:.4g} GB free\n"
        "The same command without --dry_run starts it."
    )
    if figures["disk_gb"] > figures["free_disk_gb"]:
        logger.warning("The disk of %s has no room for that. Make room.", existing)
    return {f"dry_run_{name}": float(value) for name, value in figures.items()}


class _Probe(TrainerCallback):
    """Measure the steps, the evaluation, the checkpoint and the loader of a dry run."""

    def __init__(self) -> None:
        self.is_main_process, self.seconds = False, {"step": 0.0, "evaluation": 0.0, "checkpoint": 0.0}

    def on_start(self, context: RunContext) -> None:
        """Keep what decides evaluations, and the passes before the first step."""
        self.context, self.data = context, context.data

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock: a step does not count the time that it waited for data."""
        self.last = time.perf_counter()

    on_evaluate_begin = on_step_begin

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time of a step; stop if others would take too long."""
        self._lap("step")
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
        """Time the loader alone."""
        self.is_main_process = state.is_world_process_zero
        images, began, seconds = 0, time.perf_counter(), 0.0
        for batch in self.data.train_batches(state.global_step, state.global_step + 100_000):
            images, seconds = images + len(batch["image_ids"]), time.perf_counter() - began
            if seconds > LOADER_SECONDS:
                break
        self.loaded = sum(gather_object([images / seconds]))

    def _lap(self, name: str) -> None:
        before, self.last = self.last, time.perf_counter()
        self.seconds[name] = self.last - before


def _forecast(args: TrainingArguments, probe: _Probe, folder: Path) -> dict[str, float]:
    """Return what the whole run will take."""
    data, context, rows = probe.data, probe.context, probe.data.total_rows["train"]
    steps = args.total_steps(rows)
    trained, loaded = args.batch_sizes.sizes[-1] / probe.seconds["step"], probe.loaded
    rate = min(trained, loaded) if data.loaders.arguments.num_workers else 1 / (1 / trained + 1 / loaded)
    args = args.settled(args.batch_sizes, rows, context.has_baseline)
    saved = max(2, steps // args.save_steps) if args.save_steps > 0 else 0  # the ends of two stages at least
    evaluations = (max(1, steps // args.eval_steps) if args.eval_steps > 0 else 1) + context.evaluates_start
    if args.keeps_best:  # each may be the best so far, and is measured once more if it is not the last
        saved, evaluations = max(saved, evaluations), evaluations + (evaluations > 1)
    # An old one goes after a new one is complete, and the best of a stage stays.
    kept = min(saved, args.save_total_limit + 1 + 2 * args.keeps_best)
    checkpoint = find_checkpoint("latest", folder)
    growth = data.total_rows["validation"] / len(data.splits["validation"])
    training = args.batch_sizes.before(steps) / rate
    others = evaluations * growth * probe.seconds["evaluation"] + saved * probe.seconds["checkpoint"]
    before = sum(seconds * min(rows, most) / passed for seconds, passed, most in context.passes)
    return {
        **{"steps": steps, "evaluations": evaluations, "checkpoints": saved, "pairs_per_second": rate},
        **{"hours": (before + training + others) / 3600, "training_hours": training / 3600},
        "peak_memory_gib": probe.logs["peak_memory_gib"],
        "disk_gb": ((kept - 1) * (size_of(checkpoint) if checkpoint else 0) + size_of(folder)) / 1e9,
        "free_disk_gb": shutil.disk_usage(folder).free / 1e9,
    }
