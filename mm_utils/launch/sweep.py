"""Sweep over a script's flags by Ray Tune: every combination is a run with a folder."""

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from mm_utils.distributed import RunError
from mm_utils.files import write_atomic
from mm_utils.launch.arguments import Command, LaunchArguments, parse_grid, trial_name
from mm_utils.text import no_formula
from mm_utils.training.arguments import CONFIG_FILE, greater_is_better

logger = logging.getLogger(__name__)


def sweep(args: LaunchArguments, command: Command, resources: Mapping[str, float], name: str) -> dict[str, float]:
    """Run all trials, as many at a time as fit; write their table, best first; return the metrics of the best.

    Raises:
        RunError: if no trial succeeded.
    """
    import ray
    from ray import tune

    from mm_utils.launch.cluster import fit

    grid = parse_grid(args.tune)
    top = Path(command.folder, command.value_of("output_dir") or "")

    def run_trial(values: dict[str, str]) -> dict[str, Any]:
        folder = top / trial_name(values)
        flags = {**values, "output_dir": str(folder)}
        # the last of equal flags counts
        argv = (*command.argv, *(word for flag, value in flags.items() for word in (f"--{flag}", value)))
        return {"metrics": fit(args, replace(command, argv=argv), resources, f"{name}-{folder.name}")}

    total = ray.cluster_resources()
    workers = args.workers[1]
    # with 8 GPUs and trials of 2 workers, 4 trials at a time
    together = max(1, min(int(total.get(kind, 0.0) // (workers * each)) for kind, each in resources.items()))
    results = tune.Tuner(
        # Ray wants something; the cores are for its workers.
        tune.with_resources(run_trial, {"CPU": 0, "memory": 1 << 20}),
        param_space={flag: tune.grid_search(values) for flag, values in grid.items()},
        tune_config=tune.TuneConfig(max_concurrent_trials=together),
        run_config=tune.RunConfig(name=name, storage_path=command.records, verbose=0),
    ).fit()
    rows = []
    for result in results:
        metrics = {} if result.error else result.metrics["metrics"]
        problem = str(result.error or "").strip().rpartition("\n")[2]  # of a traceback the last line
        rows.append({**result.config, **metrics, "folder": top / trial_name(result.config), "problem": problem})
    table, metric = ranked(pd.DataFrame(rows))
    top.mkdir(parents=True, exist_ok=True)
    write_atomic(top / "sweep.csv", table.to_csv(index=False))
    logger.info("%s", table[["folder", metric, "problem"]].to_string(index=False))
    if table["problem"].all():
        raise RunError(f"all {len(rows)} trials failed; the first: {rows[0]['problem']}")
    return table.drop(columns=[*grid, "folder", "problem"]).iloc[0].to_dict()


def ranked(trials: pd.DataFrame) -> tuple[pd.DataFrame, str]:
    """Return the trials, best first and those without a figure last, and the metric that decides.

    It is `--metric_for_best_model` of the runs, as their config.yaml says, after re-ranking where all trials measured that.

    Args:
        trials: flags, metrics (none if the run failed), `folder` and `problem` of each combination of values.
    """
    done = trials[trials["problem"] == ""]
    config = next((path for folder in done["folder"] if (path := folder / CONFIG_FILE).is_file()), None)
    name = yaml.safe_load(config.read_text(encoding="utf-8"))["metric_for_best_model"] if config else "mean_recall"
    reranked = f"eval_rerank_{name}"  # of encoders and head together
    metric = reranked if reranked in done and done[reranked].notna().all() else f"eval_{name}"
    trials = trials if metric in trials else trials.assign(**{metric: float("nan")})
    trials = trials.sort_values(metric, ascending=not greater_is_better(name), kind="stable")
    return trials.map(no_formula), metric  # a spreadsheet may open it
