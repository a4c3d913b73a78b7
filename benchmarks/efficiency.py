"""Time and pairs until a run reaches a given held-out recall, with and without helps.

The embedded scenes: gradient caching, and batch sizes that grow:
    python -m benchmarks.efficiency --target 0.6 --output_file efficiency.jsonl
Closed-form start and cached features, between two pretrained encoders:
    python -m benchmarks.efficiency --grid benchmarks/ablations/efficiency_pretrained.yaml --target 0.45 \\
        --flags "train_file=pairs.jsonl vision_model_name_or_path=mobilenet_v2 text_model_name_or_path=all-MiniLM-L6-v2"

Every variant of the grid is trained with every seed, as by `benchmarks/ablate.py`; finished runs are not repeated. The time is read
off the run's log: its pairs by its pairs per second, which leave evaluations out, and the closed form, if there was one. A store
of cached features is made once for all runs, and its time, of one pass over the images, is not counted. Between two evaluations
the recall is taken to grow evenly.
"""

import json
import logging
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.ablations.report import with_interval
from benchmarks.ablations.runs import Run, execute_all, plan, read_grid
from benchmarks.harness import ROOT, machine
from mm_utils.arguments import arg, parse_args, required
from mm_utils.data.batches.order import BatchSizes
from mm_utils.distributed import RunError
from mm_utils.run.start import run_script, set_up_logging
from mm_utils.text import markdown_table
from mm_utils.training.arguments import METRICS_FILE

logger = logging.getLogger(__name__)

DEFAULT_BATCH = 64
CLOSED_FORM = re.compile(r"Projections start from the closed form of .*, (\d+) s\)")


@dataclass
class EfficiencyArguments:
    """What to reach, and by whom."""

    target: float = required("The mean recall to be reached on the validation split.")
    grid: str = arg(
        str(ROOT / "benchmarks/ablations/efficiency.yaml"), "Flags of the variants, as for benchmarks.ablate."
    )
    flags: str = arg("", "Flags of every run, e.g. 'train_file=pairs.jsonl image_size=96'.")
    seeds: int = arg(3, "Runs of each variant; with one there is no interval.")
    output_dir: str = arg("outputs/efficiency", "A folder for each run.")
    output_file: str = arg("efficiency.jsonl", "A line a run; the table is put beside it (.md).")
    launcher: str = arg("python", "What starts a run: python, or accelerate launch with its own flags.")
    dry_run: bool = arg(False, "Only list the commands.")

    def __post_init__(self) -> None:
        if self.target is None or not 0 < self.target < 1:
            raise ValueError(f"--target is {self.target}; give a mean recall between 0 and 1, e.g. 0.6.")
        if self.seeds < 1:
            raise ValueError(f"--seeds is {self.seeds}; give at least 1, and 3 for an interval that says something.")
        words = shlex.split(self.flags)
        if not all("=" in word for word in words):
            raise ValueError(f"--flags is {self.flags!r}; write name=value, separated by spaces.")
        self.common = dict(word.split("=", 1) for word in words)


def time_to(
    target: float, rows: Sequence[dict[str, Any]], sizes: BatchSizes, before: float
) -> dict[str, float] | None:
    """Seconds, pairs and steps until `eval_mean_recall` is `target`; None if it never is.

    Args:
        rows: the log, in its order; a training row covers the steps since the one before.
        before: seconds before the first step.

    Raises:
        ValueError: if an evaluation is not right after a training row, so that steps are in none.
    """
    seconds, logged, last = before, 0, (0.0, before, 0)  # recall, seconds and pairs of the evaluation before
    for row in rows:
        if "pairs_per_second" in row:
            seconds += (sizes.before(row["step"]) - sizes.before(logged)) / row["pairs_per_second"]
            logged = row["step"]
        if "eval_mean_recall" not in row:
            continue
        if row["step"] != logged:
            raise ValueError(
                f"step {row['step']} is evaluated and not logged. Make eval_steps a multiple of logging_steps."
            )
        now = (row["eval_mean_recall"], seconds, sizes.before(logged))
        if now[0] >= target:
            share = (target - last[0]) / (now[0] - last[0]) if logged else 1.0
            return {
                "seconds": last[1] + share * (now[1] - last[1]),
                "pairs": last[2] + share * (now[2] - last[2]),
            }
        last = now
    return None


def read_run(run: Run, target: float) -> dict[str, Any]:
    """What a finished run took to reach the target, and the best that it reached."""
    rows = [json.loads(line) for line in (run.folder / METRICS_FILE).read_text(encoding="utf-8").splitlines()]
    schedule = run.flags.get("batch_size_schedule") or f"0:{run.flags.get('global_batch_size', DEFAULT_BATCH)}"
    start = CLOSED_FORM.search((run.folder / "log.txt").read_text(encoding="utf-8", errors="replace"))
    before = float(start[1]) if start else 0.0
    found = time_to(target, rows, BatchSizes.parse(schedule), before)
    best = max(row["eval_mean_recall"] for row in rows if "eval_mean_recall" in row)
    return {"variant": run.variant, "seed": run.seed, "target": target, "best": best, "start_seconds": before} | (
        found or {}
    )


def report(found: Sequence[dict[str, Any]], variants: Sequence[str]) -> str:
    """The table: means over seeds and 95 % intervals; ratios to the first variant, seed by seed."""
    runs = {(each["variant"], each["seed"]): each for each in found}
    table = []
    for variant in variants:
        own = {seed: each for (name, seed), each in runs.items() if name == variant}
        there = [each for each in own.values() if "seconds" in each]
        first = [runs.get((variants[0], each["seed"]), {}).get("seconds") for each in there]
        ratios = [each["seconds"] / other for each, other in zip(there, first, strict=True) if other]
        cells = [_cell([each[name] for each in there], digits) for name, digits in (("seconds", 1), ("pairs", 0))]
        best = _cell([each["best"] for each in own.values()], 3)
        if own:
            table.append([variant, f"{len(there)} of {len(own)}", *cells, _cell(ratios, 2), best])
    titles = ["variant", "reached it", "seconds", "pairs", "ratio of time", "best mean recall"]
    target = found[0]["target"]
    return f"{markdown_table(titles, table)}\n\nUntil a mean recall of {target:g}; mean and 95 % interval (Student) over seeds."


def _cell(values: list[float], digits: int) -> str | None:
    return with_interval(values, digits) if values else None


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return what each run took; `argv` lets tests and notebooks call it."""
    # 1. Arguments and plan.
    args = parse_args(EfficiencyArguments, argv=argv, doc=__doc__)[EfficiencyArguments]
    set_up_logging()
    common, variants = read_grid(args.grid)
    runs = plan(common | args.common, variants, args.seeds, args.output_dir)
    if args.dry_run:
        sys.stdout.writelines(shlex.join(run.command(args.launcher)) + "\n" for run in runs)
        return []

    # 2. Run what is not finished, and read what all took.
    _, failed = execute_all(runs, args.launcher)
    found = [read_run(run, args.target) for run in runs if run.record() is not None]
    if not found:
        raise RunError(f"All {len(runs)} runs failed. Look at log.txt in their folders.")
    path = Path(args.output_file)
    path.write_text("".join(json.dumps(each) + "\n" for each in found), encoding="utf-8")
    text = report(found, list(variants))
    sys.stdout.write(text + "\n")
    path.with_suffix(".md").write_text(f"{text}\n\n{'; '.join(machine().values())}\n", encoding="utf-8")

    # 3. What failed decides the exit status.
    if failed:
        raise RunError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; start again to repeat them.")
    return found


if __name__ == "__main__":
    run_script(main)
