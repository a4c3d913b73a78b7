"""Sweep over a script's flags by Ray Tune: every combination is a run with a folder."""

import logging
import math
from collections.abc import Mapping, Sequence
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

TABLE_FILE = "sweep.csv"
Trial = dict[str, Any]
"""Flags, metrics (none if the run failed), `folder` and `problem` of one combination of values."""


def sweep(args: LaunchArguments, command: Command, resources: Mapping[str, float], name: str) -> dict[str, float]:
    """Run all trials, as many at a time as fit; write their table, best first; return the metrics of the best.

    Raises:
        RunError: if no trial succeeded.
    """
    import ray
    from ray import tune

    from mm_utils.launch.cluster import fit, records

    grid, top = parse_grid(args.tune), Path(command.folder, command.value_of("output_dir") or "")

    def run_trial(values: dict[str, str]) -> dict[str, Any]:
        words = [word for flag, value in values.items() for word in (f"--{flag}", value)]
        words += ["--output_dir", str(top / trial_name(values))]
        trial = replace(command, argv=(*command.argv, *words))
        return {"metrics": fit(args, trial, resources, f"{name}-{trial_name(values)}")}

    total, workers = ray.cluster_resources(), args.workers[1]
    together = max(1, min(int(total.get(kind, 0.0) // (workers * each)) for kind, each in resources.items()))
    results = tune.Tuner(
        # Ray wants something; the cores are for its workers.
        tune.with_resources(run_trial, {"CPU": 0, "memory": 1 << 20}),
        param_space={flag: tune.grid_search(values) for flag, values in grid.items()},
        tune_config=tune.TuneConfig(max_concurrent_trials=together),
        run_config=tune.RunConfig(name=name, storage_path=records(args, command), verbose=0),
    ).fit()
    trials = []
    for result in results:
        metrics = {} if result.error else result.metrics["metrics"]
        problem = str(result.error or "").strip().rpartition("\n")[2]
        trials.append({**result.config, **metrics, "folder": top / trial_name(result.config), "problem": problem})
    trials, metric = ranked(trials)
    top.mkdir(parents=True, exist_ok=True)
    write_atomic(top / TABLE_FILE, as_csv(trials))
    for trial in trials:
        logger.info("%s: %s", trial["folder"], trial["problem"] or f"{metric} {trial.get(metric, math.nan):.4f}")
    if trials[0]["problem"]:
        raise RunError(f"all {len(trials)} trials failed; the first: {trials[0]['problem']}")
    return {name: value for name, value in trials[0].items() if name not in (*grid, "folder", "problem")}


def ranked(trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Return the trials, best first and failed ones last, and the metric that decides.

    It is `--metric_for_best_model` of the runs, as their config.yaml says, after re-ranking where all trials measured that.
    """
    done = [trial for trial in trials if not trial["problem"]]
    config = next((path for trial in done if (path := trial["folder"] / CONFIG_FILE).is_file()), None)
    metric = yaml.safe_load(config.read_text(encoding="utf-8"))["metric_for_best_model"] if config else "mean_recall"
    sign = 1 if greater_is_better(metric) else -1
    reranked = f"eval_rerank_{metric}"  # of encoders and head together, where all trials have one
    metric = reranked if done and all(reranked in trial for trial in done) else f"eval_{metric}"

    def place(trial: Trial) -> tuple[bool, bool, float]:
        value = trial.get(metric, math.nan)
        return bool(trial["problem"]), math.isnan(value), -sign * value  # NaN would leave the others unsorted

    return sorted(trials, key=place), metric


def as_csv(trials: Sequence[Trial]) -> str:
    """Return a CSV file of the trials in their order."""
    return pd.DataFrame(list(trials)).map(no_formula).to_csv(index=False)
