"""Run the real script on a few pairs; extrapolate time and disk, measure memory.

The script's `main` is called with other arguments and one more callback, so the dry run takes the same path as the real run:
data are opened, a few steps are trained, evaluated and saved. Everything is written to a hidden folder beside the output
folder, which is removed. Four steps are taken, two with a quarter of the largest batch and two with all of it; if the large
ones would take longer than a minute they are left out, and the peak of memory stays unknown.
"""

import logging
import math
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object
from transformers import TrainerCallback, TrainerControl, TrainerState

from mm_utils.checkpointing.files import find_checkpoint, size_of
from mm_utils.data.training_data import TrainingData
from mm_utils.distributed import RunError
from mm_utils.reliability import failures
from mm_utils.run import finish
from mm_utils.run.callbacks import RunContext
from mm_utils.run.output_folder import holds_run, misplaced
from mm_utils.text import duration
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.memory import available_bytes
from mm_utils.training.stages import stages_of

logger = logging.getLogger(__name__)

CHECKED, EVALUATED = 256, 32  # images of train that are read, and of validation that are evaluated
STEP_SECONDS, LOADER_SECONDS = 60.0, 4.0


def dry_run(
    main: Callable[..., Any],
    name: str,
    argv: Sequence[str] | None,
    args: TrainingArguments,
    settings: Mapping[str, Any],
) -> dict[str, float]:
    """Run a script's `main` on a few pairs; log and return the forecast, as `dry_run_*`.

    Args:
        main: called with (argv, callbacks).
        name: the script's name.
        argv: the command line, None for that of the process.
        args: the training arguments of the real run.
        settings: all its arguments, by name.

    Raises:
        RunError: if the output folder cannot be used.
        ValueError, FloatingPointError: as the real run would raise them.
    """
    folder = Path(args.output_dir or f"outputs/{name}")
    problem = misplaced(folder, settings) or holds_run(folder, args.resume_from_checkpoint is not None)
    if problem:
        raise RunError(problem)
    find_checkpoint(args.resume_from_checkpoint, folder)
    existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
    scratch = existing / f".dry-run-{folder.name}"
    sizes = args.batch_sizes.sizes
    plan = {0: max(2, min(sizes[0], sizes[-1] // 4)), 2: sizes[-1]}  # two steps of a size
    probe = _Probe(plan)
    with _scratch_folder(scratch):
        main([*(sys.argv[1:] if argv is None else argv), *_overrides(args, settings, plan, scratch)], (probe,))
        if not probe.is_main_process:
            return {}
        figures = _forecast(args, settings.get("head_share") or 0.0, probe, scratch)
    logger.info("%s", "\n".join(_describe(figures, args, probe)))
    _warn(figures, probe, existing)
    return {f"dry_run_{name}": float(value) for name, value in figures.items()}


@contextmanager
def _scratch_folder(scratch: Path) -> Iterator[None]:
    """Remove the folder before and after, even after failures; no summary of the trial."""

    def remove() -> None:
        # The process group, which knows the rank too, begins after this and ends before it.
        if os.environ.get("RANK", "0") == "0":
            shutil.rmtree(scratch, ignore_errors=True)

    summary = finish.logger
    remove()
    failures.at_stop(remove)
    summary.disabled = True
    try:
        yield
    finally:
        summary.disabled = False
        remove()


def _overrides(args: TrainingArguments, settings: Mapping[str, Any], plan: dict[int, int], scratch: Path) -> list[str]:
    """Return the flags of the dry run, which follow those of the real run."""
    steps = 2 * max(plan)
    samples = {"max_train_samples": max(CHECKED, 2 * max(plan.values())), "max_eval_samples": EVALUATED}
    values = {
        "dry_run": False,
        "output_dir": scratch,
        **{name: min(most, settings.get(name) or sys.maxsize) for name, most in samples.items()},
        "max_steps": steps,
        "head_share": 0.0,  # towers and head at once: no step of the run takes more
        "batch_size_schedule": ",".join(f"{start}:{size}" for start, size in plan.items()),
        "logging_steps": 1,
        "save_steps": steps,
        "report_to": "none",
        **dict.fromkeys(("eval_steps", "early_stopping_patience"), 0),
        **dict.fromkeys(("load_best_model_at_end", "push_to_hub"), False),
        **({"resume_from_checkpoint": "latest"} if args.resume_from_checkpoint else {}),
    }
    return [word for flag, value in values.items() for word in (f"--{flag}", str(value))]


class _Probe(TrainerCallback):
    """Measure the steps, the evaluation, the checkpoint and the loader of a dry run.

    Args:
        plan: the global batch size from each step on.
    """

    def __init__(self, plan: dict[int, int]):
        self.plan, self.is_main_process = plan, False
        self.seconds = {"evaluation": 0.0, "checkpoint": 0.0}

    def on_start(self, context: RunContext) -> None:
        """Keep what decides evaluations, and the passes before the first step."""
        self.context = context

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock."""
        self.data: TrainingData = kwargs["data"]
        self.is_main_process = state.is_world_process_zero
        self.began = time.perf_counter()

    def on_step_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock: a step does not count the time that it waited for data."""
        self.last = time.perf_counter()

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time of a step; stop before the large batch if that would take too long."""
        self._lap("step")
        self.pairs = args.batch_sizes.at(state.global_step - 1)
        if state.global_step in self.plan:
            expected = state.global_step * self.seconds["step"] * self.plan[state.global_step] / self.pairs
            control.should_training_stop = time.perf_counter() - self.began + expected > STEP_SECONDS

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the figures of a step."""
        logs = kwargs["logs"]
        if "loss" not in logs:
            return
        for name in ("loss",) if "nonfinite_steps" not in logs else ("loss", "grad_norm"):
            if not math.isfinite(logs[name]):
                raise FloatingPointError(
                    f"{name} is {logs[name]} in step {state.global_step} of the dry run. Lower --learning_rate, train in "
                    "bf16 or fp32, or look at the images."
                )
        self.logs = logs

    def on_evaluate_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Start the clock."""
        self._lap("log")

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time of the evaluation."""
        self._lap("evaluation")

    def on_save(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Note the time from the end of the evaluation to the complete checkpoint."""
        self._lap("checkpoint")

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Time the loader alone; note what it cannot read."""
        self.free_memory = available_bytes(next(kwargs["model"].parameters()).device) / 2**30
        start, images, seen, unreadable = state.global_step, 0, set[str](), dict[str, str]()
        began = time.perf_counter()
        for batch in self.data.train_batches(start, start + 100_000):
            images += len(batch["image_ids"]) + len(batch["skipped"])
            seen.update(batch["image_ids"])
            unreadable |= dict(zip(batch["skipped_ids"], batch["skipped"], strict=True))
            seconds = time.perf_counter() - began
            if seconds > LOADER_SECONDS or (seconds > LOADER_SECONDS / 4 and images > CHECKED):
                break
        found = gather_object([(images / (time.perf_counter() - began), seen, unreadable)])
        self.images_per_second = sum(rate for rate, _, _ in found)
        self.unreadable = {name: reason for *_, reasons in found for name, reason in reasons.items()}
        self.seen = len(set().union(*(ids for _, ids, _ in found)) | set(self.unreadable))

    def _lap(self, name: str) -> None:
        before, self.last = self.last, time.perf_counter()
        self.seconds[name] = self.last - before


def _forecast(args: TrainingArguments, share: float, probe: _Probe, folder: Path) -> dict[str, float]:
    """Return what the whole run will take; memory is NaN if the largest batch was not tried."""
    total, data, context = probe.data.total_rows, probe.data, probe.context
    steps = args.total_steps(total["train"])
    model, loader = probe.pairs / probe.seconds["step"], probe.images_per_second
    rate = min(model, loader) if data.loaders.arguments.num_workers else 1 / (1 / model + 1 / loader)
    args = args.settled(args.batch_sizes, total["train"], context.has_baseline)
    first = 0 if context.evaluates_start else args.eval_steps
    evaluated_steps = {steps, *(range(first, steps, args.eval_steps) if args.eval_steps > 0 else ())}
    ends = {stage.end for stage in stages_of(context.objective, args, share, total["train"])}
    if args.eval_steps > 0:
        evaluated_steps |= ends
    saved_steps = {*ends, *range(args.save_steps, steps, args.save_steps)} if args.save_steps > 0 else set()
    if args.keeps_best:  # each may be the best so far
        saved_steps |= evaluated_steps
    again = args.keeps_best and len(evaluated_steps) > 1  # if the best are not the last, they are measured once more
    evaluations, kept = len(evaluated_steps) + again + context.final_evaluations, len(saved_steps)
    if args.save_total_limit is not None:  # an old one is removed after a new one is complete, and the best ones stay
        kept = min(kept, args.save_total_limit + 1 + args.keeps_best * len(ends))
    checkpoint = find_checkpoint("latest", folder)
    checkpoint_bytes = size_of(checkpoint) if checkpoint else 0
    growth = total["validation"] / len(data.splits["validation"])
    passes = (seconds * min(total["train"], most) / rows for _, seconds, rows, most in context.passes)
    hours = {
        "start_hours": sum(passes) / 3600,
        "training_hours": args.batch_sizes.before(steps) / rate / 3600,
        "evaluation_hours": evaluations * growth * probe.seconds["evaluation"] / 3600,
        "checkpoint_hours": len(saved_steps) * probe.seconds["checkpoint"] / 3600,
    }
    return {
        "steps": steps,
        "evaluations": evaluations,
        "checkpoints": len(saved_steps),
        "pairs_per_second": rate,
        "hours": sum(hours.values()),
        **hours,
        "peak_memory_gib": probe.logs["peak_memory_gib"] if probe.pairs == args.batch_sizes.sizes[-1] else math.nan,
        "free_memory_gib": probe.free_memory,
        "checkpoints_gb": kept * checkpoint_bytes / 1e9,
        "model_gb": (size_of(folder) - checkpoint_bytes) / 1e9,
        "free_disk_gb": shutil.disk_usage(folder).free / 1e9,
        "loss": probe.logs["loss"],
        "unreadable_share": len(probe.unreadable) / max(1, probe.seen),
    }


def _describe(figures: dict[str, float], args: TrainingArguments, probe: _Probe) -> list[str]:
    """Return the forecast as lines of text."""
    largest, timed, loader = args.batch_sizes.sizes[-1], probe.pairs, probe.images_per_second
    spent = {name: duration(figures[f"{name}_hours"]) for name in ("start", "training", "evaluation", "checkpoint")}
    exact, memory = "measured", f"{figures['peak_memory_gib']:.2f} GiB a process (measured)"
    if timed != largest:
        exact = f"extrapolated from {timed} pairs to {largest}"
        memory = f"unknown: a step of {largest} pairs was too slow to try; set --micro_batch_size auto to be safe"
    rows = {
        "steps": f"{figures['steps']:,} of {largest} pairs, from {probe.data.total_rows['train']:,} {probe.data.medium}s",
        "speed": f"{figures['pairs_per_second']:.4g} pairs/s ({exact}); the loader alone reaches {loader:.4g}",
        "time": f"{duration(figures['hours'])}: before the first step {spent['start']}, training {spent['training']}, at most "
        f"{figures['evaluations']} evaluations {spent['evaluation']}, checkpoints {spent['checkpoint']}",
        "memory": f"{memory}; {figures['free_memory_gib']:.2f} GiB free",
        "disk": f"checkpoints {figures['checkpoints_gb']:.3g} GB, model {figures['model_gb']:.3g} GB; "
        f"{figures['free_disk_gb']:.4g} GB free",
    }
    lines = [f"  {name:<12}{text}" for name, text in rows.items()]
    return ["The whole run, by this dry run:", *lines, "The same command without --dry_run starts it."]


def _warn(figures: dict[str, float], probe: _Probe, place: Path) -> None:
    """Log what would spoil the run."""
    if probe.unreadable:
        total, reasons = probe.data.total_rows["train"], sorted(probe.unreadable.values())
        logger.warning(
            "%d of %d training %ss cannot be decoded, so perhaps %s of %s; others take their place: %s",
            len(reasons), probe.seen, probe.data.medium, f"{figures['unreadable_share'] * total:,.0f}", f"{total:,}", "; ".join(reasons[:3]),
        )  # fmt: skip
    if figures["peak_memory_gib"] > figures["free_memory_gib"]:
        logger.warning(
            "The peak of memory is %.2f GiB, and %.2f GiB are free. Set --micro_batch_size auto.",
            figures["peak_memory_gib"], figures["free_memory_gib"],
        )  # fmt: skip
    gigabytes = figures["checkpoints_gb"] + figures["model_gb"]
    if gigabytes > figures["free_disk_gb"]:
        logger.warning(
            "The disk of %s has %.3g GB left, and the run writes %.3g GB. Make room.",
            place, figures["free_disk_gb"], gigabytes,
        )  # fmt: skip
