"""What a whole run will take in time, memory and disk, from what a few of its steps took.

Time and disk are in proportion to what was measured. Memory is a straight line through two sizes, as in `mm_utils.memory`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from mm_utils.training_arguments import TrainingArguments


@dataclass(frozen=True)
class Step:
    """A step that was taken: pairs of its global batch, seconds without waiting for data, the peak of bytes after it."""

    pairs: int
    seconds: float
    peak: float


@dataclass(frozen=True)
class Measured:
    """What was found on a sample.

    Attributes:
        sampled, total: images by split.
        steps: in the order in which they were taken; batches do not shrink.
        processes: that took them together.
        micro_batch_size: pairs that a process holds at a time; None for its whole share.
        images_per_second: of all processes' loaders alone.
        workers: of a process's loader; without any, it decodes between its steps.
        evaluation_seconds, checkpoint_seconds, finish_seconds: once, of the sample.
        checkpoint_bytes, model_bytes: of a checkpoint, and of what is left at the end besides.
        token_bytes, feature_bytes: of the sample's caches.
    """

    sampled: dict[str, int]
    total: dict[str, int]
    steps: Sequence[Step]
    processes: int
    micro_batch_size: int | None
    images_per_second: float
    workers: int
    evaluation_seconds: float
    checkpoint_seconds: float
    finish_seconds: float
    checkpoint_bytes: int
    model_bytes: int
    token_bytes: int
    feature_bytes: int


def forecast_time(args: TrainingArguments, measured: Measured) -> dict[str, float]:
    """Steps, pairs per second of model, loader and both, and hours, in all and by what they are spent on."""
    steps = args.total_steps(measured.total["train"])
    model, loader = measured.steps[-1].pairs / measured.steps[-1].seconds, measured.images_per_second
    rate = min(model, loader) if measured.workers else 1 / (1 / model + 1 / loader)
    evaluations = -(-steps // args.eval_steps) if args.eval_steps else 1
    checkpoints = _checkpoints(args, steps)
    growth = measured.total["validation"] / measured.sampled["validation"]
    hours = {
        "training_hours": args.batch_sizes.before(steps) / rate / 3600,
        "evaluation_hours": evaluations * growth * measured.evaluation_seconds / 3600,
        "checkpoint_hours": (checkpoints * measured.checkpoint_seconds + measured.finish_seconds) / 3600,
    }
    return {
        "steps": steps,
        "evaluations": evaluations,
        "checkpoints": checkpoints,
        "pairs_per_second": rate,
        "model_pairs_per_second": model,
        "loader_images_per_second": loader,
        "hours": sum(hours.values()),
        **hours,
    }


def forecast_memory(args: TrainingArguments, measured: Measured) -> dict[str, float]:
    """Peak of a process, in GiB, as measured and at the most pairs that it will hold at a time."""

    def held(pairs: int) -> int:
        return min(-(-pairs // measured.processes), measured.micro_batch_size or pairs)

    first = next((step for step in measured.steps[1:]), measured.steps[0])  # the first step also sets up libraries
    last, wanted = measured.steps[-1], held(args.batch_sizes.sizes[-1])
    more = wanted - held(last.pairs)
    slope = max(0.0, last.peak - first.peak) / max(1, held(last.pairs) - held(first.pairs))
    return {
        "held_pairs": wanted,
        "measured_held_pairs": held(last.pairs),
        "measured_memory_gib": last.peak / 2**30,
        "peak_memory_gib": (last.peak + max(0, more) * slope) / 2**30,
    }


def forecast_disk(args: TrainingArguments, measured: Measured) -> dict[str, float]:
    """GB (10^9 bytes) at the most: of all checkpoints, of the final model, of the caches.

    A checkpoint is removed only after a newer one stands, and the best one is kept besides.
    """
    count = _checkpoints(args, args.total_steps(measured.total["train"]))
    if args.save_total_limit is not None:
        count = min(count, args.save_total_limit + 1 + max(args.save_best_limit, bool(args.load_best_model_at_end)))
    captions = sum(measured.total.values()) / sum(measured.sampled.values())
    images = measured.total["train"] / measured.sampled["train"]
    return {
        "kept_checkpoints": count,
        "checkpoints_gb": count * measured.checkpoint_bytes / 1e9,
        "model_gb": measured.model_bytes / 1e9,
        "cache_gb": (captions * measured.token_bytes + images * measured.feature_bytes) / 1e9,
    }


def describe_forecast(figures: dict[str, float], args: TrainingArguments, measured: Measured) -> list[str]:
    """A line for each kind of thing. `figures` are those above, and what a dry run adds to them."""
    largest, timed = args.batch_sizes.sizes[-1], measured.steps[-1].pairs
    model, loader = figures["model_pairs_per_second"], figures["loader_images_per_second"]
    bound = "the loader decides the speed" if loader < model else "the model decides the speed"
    exact = "measured" if timed == largest else f"extrapolated from {timed} pairs to {largest}"
    held, tried = figures["held_pairs"], figures["measured_held_pairs"]
    memory = "measured" if tried >= held else f"extrapolated from {tried}"
    spent = {name: _duration(figures[f"{name}_hours"]) for name in ("training", "evaluation", "checkpoint")}
    rows = {
        "steps": f"{figures['steps']:,} of {largest} pairs, from {measured.total['train']:,} images",
        "speed": f"{figures['pairs_per_second']:.4g} pairs/s ({exact}): model {model:.4g}, loader alone {loader:.4g} "
        f"(workers: {measured.workers}); {bound}",
        "time": f"{_duration(figures['hours'])}: training {spent['training']}, evaluation {spent['evaluation']} "
        f"({figures['evaluations']} times), checkpoints and the end {spent['checkpoint']}",
        "memory": f"{figures['peak_memory_gib']:.2f} GiB a process, {held} pairs at a time ({memory}); "
        f"{figures['free_memory_gib']:.2f} GiB are there",
        "parameters": f"{figures['parameters']:,}, {figures['trained_parameters']:,} of them trained",
        "compute": f"{figures['gflops_per_pair']:.3g} GFLOPs a pair, the fusion head "
        f"{figures['head_gflops_per_pair']:.3g} of them",
        "disk": f"checkpoints {figures['checkpoints_gb']:.3g} GB ({figures['kept_checkpoints']} at a time), model "
        f"{figures['model_gb']:.3g} GB, caches {figures['cache_gb']:.3g} GB; {figures['free_disk_gb']:.4g} GB are there",
    }
    return [
        "The whole run, by this dry run:",
        *(f"  {name:<12}{text}" for name, text in rows.items()),
    ]


def _checkpoints(args: TrainingArguments, steps: int) -> int:
    """One every so many steps, and one at the end."""
    return -(-steps // args.save_steps) if args.save_steps > 0 else 0


def _duration(hours: float) -> str:
    for unit, size in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= 2 * size:
            return f"{hours / size:.1f} {unit}"
    return f"{3600 * hours:.1f} s"
