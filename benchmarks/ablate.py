"""Compare variants of a training run: equal budget, several seeds, a table with intervals.

    python -m benchmarks.ablate --grid benchmarks/ablations/fusion.yaml --seeds 3 --output_dir outputs/ablation

Every variant is trained by scripts/pretrain.py with every seed, one run after the other, each in a process and a folder of
its own. A run that fails says why and stops no other; started again, it goes on with what is not finished. More seeds
later add to those that exist. What is measured is the validation split, never the test split.

On several GPUs, each run by all of them:
    python -m benchmarks.ablate --grid benchmarks/ablations/fusion.yaml \\
        --launcher "accelerate launch --config_file accelerate_configs/multi_gpu.yaml"

It leaves `ablation.md`, `ablation.json` and `ablation.png`.
"""

import json
import logging
import os
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

from benchmarks.ablations.report import draw, report, summarise
from benchmarks.ablations.runs import BUDGET, execute_all, plan, read_grid
from benchmarks.harness import machine
from mm_utils.arguments import arg, parse_args, required
from mm_utils.distributed import RunError
from mm_utils.run.start import run_script, set_up_logging

logger = logging.getLogger(__name__)

METRICS = (
    "text_to_image_recall@1,image_to_text_recall@1,rerank_text_to_image_recall@1,rerank_image_to_text_recall@1,"
    "order_accuracy,rerank_order_accuracy,matching_lift"
)


@dataclass
class AblationArguments:
    """What to compare, how often, by what."""

    grid: str = required(
        "A YAML file of flags: common ones, and those of each variant, e.g. benchmarks/ablations/fusion.yaml."
    )
    seeds: int = arg(3, "Runs of each variant; with one there is no interval.")
    output_dir: str = arg("outputs/ablation", "A folder for each run, and the tables.")
    max_steps: int | None = arg(None, "Steps of every run, in place of the grid's budget.")
    num_train_epochs: float | None = arg(None, "Passes of every run over its images, in place of the grid's budget.")
    metrics: str = arg(METRICS, "What is compared: names in metrics.jsonl, without eval_.")
    launcher: str = arg("python", "What starts a run: python, or accelerate launch with its own flags.")
    dry_run: bool = arg(False, "Only list the commands.")

    def __post_init__(self) -> None:
        if self.grid is None:
            raise ValueError("--grid is missing; give a file such as benchmarks/ablations/fusion.yaml.")
        if self.seeds < 1:
            raise ValueError(f"--seeds is {self.seeds}; give at least 1, and 3 for an interval that says something.")
        given = {name: getattr(self, name) for name in BUDGET}
        self.budget = {name: value for name, value in given.items() if value is not None}
        if len(self.budget) > 1 or min(self.budget.values(), default=1) <= 0:
            raise ValueError(f"the budget is {self.budget}; give one of them, above 0, or leave it to the grid.")
        self.names = [name.strip() for name in self.metrics.split(",")]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Run the script; return the means as variant/metric. Tests and notebooks give `argv`."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    args = parse_args(AblationArguments, argv=argv, doc=__doc__)[AblationArguments]
    set_up_logging()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError("This starts processes itself. Start it with python, and say how it does that with --launcher.")

    # 2. The plan.
    common, variants = read_grid(args.grid)
    runs = plan(common, variants, args.seeds, args.output_dir, args.budget)
    if args.dry_run:
        sys.stdout.writelines(shlex.join(run.command(args.launcher)) + "\n" for run in runs)
        return {}

    # 3. Run what is not finished.
    records, failed = execute_all(runs, args.launcher)
    if not records:
        raise RunError(f"All {len(runs)} runs failed; there is nothing to compare. Look at log.txt in their folders.")
    measured = {name for record in records for name in record["figures"]}
    metrics = [name for name in args.names if name in measured]
    if len(metrics) < len(args.names):
        absent = ", ".join(name for name in args.names if name not in measured)
        logger.warning("No run has %s; measured were %s", absent, ", ".join(sorted(measured)))
    if not metrics:
        raise RunError(f"--metrics is {args.metrics}; no run has any of them. Choose others; finished runs are kept.")

    # 4. Compare.
    summary = summarise(records, list(variants), metrics)
    text = report(summary, metrics)
    sys.stdout.write(text + "\n")
    folder, about = Path(args.output_dir), machine()
    (folder / "ablation.md").write_text(f"{text}\n\n{'; '.join(about.values())}\n", encoding="utf-8")
    content = {
        "grid": args.grid,
        "common": common | args.budget,
        "variants": summary,
        "failed": failed,
        "machine": about,
    }
    (folder / "ablation.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(summary, metrics, folder / "ablation.png")

    # 5. Finish: what failed decides the exit status.
    if failed:
        raise RunError(f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}; start again to repeat them.")
    return {f"{name}/{metric}": of["mean"] for name, o in summary.items() for metric, of in o["metrics"].items()}


if __name__ == "__main__":
    run_script(main)
