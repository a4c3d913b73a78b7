"""Sweep over a script's flags by Ray Tune: every combination is a run with a folder."""

import csv
import io
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from mm_utils.distributed import RunError
from mm_utils.files import write_atomic
from mm_utils.launch.arguments import Command, LaunchArguments, parse_grid, trial_name
from mm_utils.text import no_formula
from mm_utils.training.arguments import CONFIG_FILE, greater_is_better

logger = logging.getLogger(__name__)

TABLE_FILE = "sweep.csv"


@dataclass
class Trial:
    """One combination of values, and the result of its run.

    Attributes:
        values: by flag.
        folder: the output folder.
        metrics: what the script returned; empty if it failed.
        problem: why it failed.
    """

    values: dict[str, str]
    folder: Path
    metrics: dict[str, float]
    problem: str = ""


def sweep(args: LaunchArguments, command: Command, resources: Mapping[str, float], name: str) -> list[Trial]:
    """Run all trials, as many at a time as fit; return them, best first; write their table.

    Raises:
        RunError: if no trial succeeded.
    """
    import ray
    from ray import tune

    from mm_utils.launch.cluster import fit, records

    grid, top = parse_grid(args.tune), Path(command.folder, command.folder_of("output_dir") or "")

    def run_trial(values: dict[str, str]) -> dict[str, Any]:
        trial = command.with_values(values, str(top / trial_name(values)))
        return {"metrics": fit(args, trial, resources, f"{name}-{trial_name(values)}")}

    total, workers = ray.cluster_resources(), args.workers[1]
    together = max(1, min(int(total.get(kind, 0.0) // (workers * each)) for kind, each in resources.items()))
    results = tune.Tuner(
        tune.with_resources(
            run_trial, {"CPU": 0, "memory": 1 << 20}
        ),  # Ray wants something; the cores are for its workers
        param_space={flag: tune.grid_search(values) for flag, values in grid.items()},
        tune_config=tune.TuneConfig(max_concurrent_trials=together),
        run_config=tune.RunConfig(name=name, storage_path=records(args, command), verbose=0),
    ).fit()
    trials = []
    for result in results:
        metrics = {} if result.error else result.metrics["metrics"]
        problem = str(result.error or "").strip().rpartition("\n")[2]
        trials.append(Trial(result.config, top / trial_name(result.config), metrics, problem))
    trials, metric = ranked(trials)
    for trial in trials:
        values = ", ".join(f"{name} {value}" for name, value in trial.values.items())
        logger.info(
            "%s: %s", values, trial.problem or f"{metric} {trial.metrics.get(metric, math.nan):.4f}, {trial.folder}"
        )
    top.mkdir(parents=True, exist_ok=True)
    write_atomic(top / TABLE_FILE, as_csv(trials))
    if not any(trial.metrics for trial in trials):
        raise RunError(f"all {len(trials)} trials failed; the first: {trials[0].problem}")
    return trials


def ranked(trials: Sequence[Trial]) -> tuple[list[Trial], str]:
    """Return the trials, best first and failed ones last, and the metric that decides.

    It is `--metric_for_best_model` of the runs, as their config.yaml says, after re-ranking where all trials measured that.
    """
    metric, sign = "mean_recall", 1
    for trial in trials:
        if trial.metrics and (trial.folder / CONFIG_FILE).is_file():
            settings = yaml.safe_load((trial.folder / CONFIG_FILE).read_text(encoding="utf-8"))
            metric, sign = settings["metric_for_best_model"], 1
            sign = 1 if greater_is_better(metric) else -1
            break
    measured = [trial.metrics for trial in trials if trial.metrics]
    reranked = f"eval_rerank_{metric}"  # of encoders and head together, where all trials have one
    metric = reranked if measured and all(reranked in metrics for metrics in measured) else f"eval_{metric}"

    def place(trial: Trial) -> tuple[bool, bool, float]:
        value = trial.metrics.get(metric, math.nan)
        return not trial.metrics, math.isnan(value), -sign * value  # NaN would leave the others unsorted

    return sorted(trials, key=place), metric


def as_csv(trials: Sequence[Trial]) -> str:
    """Return a CSV file: swept flags, metrics, folder, problem; best trial first."""
    names = list(dict.fromkeys(name for trial in trials for name in trial.metrics))
    file = io.StringIO()
    writer = csv.DictWriter(file, [*trials[0].values, *names, "folder", "problem"], restval="", lineterminator="\n")
    writer.writeheader()
    for trial in trials:
        row = {**trial.values, **trial.metrics, "folder": trial.folder, "problem": trial.problem}
        writer.writerow({name: no_formula(cell) for name, cell in row.items()})
    return file.getvalue()
