"""Which way of joining two encoders finds held-out images best, in equal time.

    python -m benchmarks.learning --train_file photos_en/captions.jsonl --minutes 4 --output_file learning.jsonl \\
        --vision_model_name_or_path mobilenet_v2_1.0_224 --text_model_name_or_path all-MiniLM-L6-v2

What the contestants do is described in `benchmarks/rivals/learners.py`. Each is a process of its own, one after the other, with every
seed (closed forms, which draw nothing at random, once). Results are added to the file as they come; started again, it goes on
with what is missing. Only evaluation, reading the encoders and, but for this project, reading the data cost no time.

Whatever is chosen is chosen on the validation split: which weights, and how strong a penalty by folds of the training split.
The table is of the test split. The file gets a table (.md) and a picture of validation recall over time (.png).
"""

import json
import logging
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from tqdm.auto import tqdm

from benchmarks.ablations.report import with_interval
from benchmarks.harness import ROOT, TurnTaker, machine
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.distributed import RunError
from mm_utils.files import append_rows
from mm_utils.model.build import ModelArguments
from mm_utils.reports.plots import COLORS, INK, MUTED, new_figure, save_figure, set_title, small_legend, style_axes
from mm_utils.run.start import run_script, set_up_logging
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)

CLOSED_FORMS = "cca,ridge"
CONTESTANTS = "tandem,tandem_towers,cca,ridge,transformers,open_clip,tuned,sentence_transformers"
SHOWN = ("text_to_image_R@1", "text_to_image_R@10", "image_to_text_R@1", "image_to_text_R@10")


@dataclass
class LearningArguments:
    """Who takes part, for how long."""

    minutes: float = arg(4.0, "Time of each contestant, without evaluation.")
    seeds: str = arg("0,1,2", "Seeds of the contestants that draw at random, e.g. 0,1,2.")
    contestants: str = arg(CONTESTANTS, "Who takes part.")
    global_batch_size: int = arg(64, "Pairs per step.")
    points: int = arg(5, "How often a loop is judged, at equal fractions of the time.")
    output_file: str = arg("learning.jsonl", "Results, one a line; table and picture are put beside it.")
    dry_run: bool = arg(False, "Only list what would be run.")

    def __post_init__(self) -> None:
        self.names = self.contestants.split(",")
        if unknown := set(self.names) - set(CONTESTANTS.split(",")):
            raise ValueError(f"--contestants has {', '.join(sorted(unknown))}; choose from {CONTESTANTS}.")
        if not all(seed.isdecimal() for seed in self.seeds.split(",")):
            raise ValueError(f"--seeds is {self.seeds!r}; write numbers, e.g. 0,1,2.")
        if self.minutes <= 0 or self.points < 1:
            raise ValueError(f"--minutes is {self.minutes:g}, --points {self.points}; give more than 0.")
        if Path(self.output_file).suffix in (".md", ".png"):
            raise ValueError(f"--output_file is {self.output_file}; its table and picture end so. Give a .jsonl file.")


def plan(args: LearningArguments) -> list[tuple[str, int]]:
    """Contestants and seeds, the seeds outermost: a run that is stopped has some of everyone."""
    seeds = [int(seed) for seed in args.seeds.split(",")]
    return [
        (name, seed)
        for seed in seeds
        for name in args.names
        if seed == seeds[0] or name not in CLOSED_FORMS.split(",")
    ]


def read_results(path: Path, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the results that the file already has.

    Raises:
        ValueError: if they were found with other settings.
    """
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    for row in rows:
        if other := sorted(name for name in settings if row["settings"].get(name) != settings[name]):
            raise ValueError(f"{path} has results with other {', '.join(other)}. Give another --output_file.")
    return rows


def compete(name: str, seed: int, settings: dict[str, Any]) -> dict[str, Any]:
    """Let one contestant learn in a process of its own; a result, or `error`."""
    task = {
        **{part: settings[part] for part in ("data", "loader", "model")},
        **{"contestant": name, "seed": seed, "batch_size": settings["global_batch_size"], "caption_tokens": "real"},
        **{"synthetic": False, "peers_keep_memory": True, "peers_channels_last": name == "tuned"},
    }
    process = TurnTaker(ROOT / "benchmarks/rivals/learners.py")
    try:
        found = process.ask({"task": task, "minutes": settings["minutes"], "points": settings["points"]})
        return found if process.error is None else {"error": process.error}
    finally:
        process.end()


def report(rows: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The table of the test split: means over seeds, 95 % intervals, best mean recall first."""
    table = []
    for name in names:
        own = [row for row in rows if row["contestant"] == name]
        if own:
            cells = [_recall([row["test"] for row in own], metric) for metric in SHOWN]
            seconds, steps = (fmean(row.get(key) or 0 for row in own) for key in ("seconds", "steps"))
            order = fmean(row["test"]["mean_recall"] for row in own)
            table.append((order, [name, *cells, f"{seconds:.0f}", f"{steps:.0f}" if steps else None, len(own)]))
    table.sort(key=lambda each: -each[0])
    titles = [metric.replace("_", " ") for metric in SHOWN]
    text = markdown_table(["contestant", *titles, "seconds", "steps", "runs"], [cells for _, cells in table])
    return (
        f"{text}\n\nMean and 95 % interval: over seeds (Student), of a single run over images. Seconds until the weights that were "
        "best on validation."
    )


def _recall(runs: Sequence[dict[str, Any]], metric: str) -> str:
    """One figure of one or several runs with its interval."""
    if len(runs) > 1:
        return with_interval([run[metric] for run in runs])
    return f"{runs[0][metric]:.3f} ± {runs[0]['half_widths'][metric]:.3f}"


def draw(rows: Sequence[dict[str, Any]], names: Sequence[str], out_path: Path) -> None:
    """Validation recall over time: each contestant's mean; a star for what needs no training."""
    figure = new_figure(7.5, 4.2)
    ax = figure.add_subplot()
    style_axes(ax)
    for place, name in enumerate(names):
        runs = [row["points"] for row in rows if row["contestant"] == name]
        if not runs:
            continue
        # A run that was ended by the clock has a point less or more.
        points = [[fmean(axis) for axis in zip(*points, strict=True)] for points in zip(*runs, strict=False)]
        seconds, recalls = zip(*points, strict=True)
        style: dict[str, Any] = (
            {"marker": "*", "markersize": 11} if len(points) == 1 else {"marker": "o", "markersize": 3}
        )
        line = "--" if place >= len(COLORS) else "-"
        ax.plot(seconds, recalls, line, color=COLORS[place % len(COLORS)], linewidth=1.6, label=name, **style)
    set_title(ax, "Validation: mean recall")
    ax.set_xlabel("seconds", fontsize=8, color=MUTED)
    ax.tick_params(labelcolor=INK)
    small_legend(ax, loc="center left", bbox_to_anchor=(1.0, 0.5))
    save_figure(figure, out_path)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    groups = (LearningArguments, DataArguments, LoaderArguments, ModelArguments)
    given = parse_args(*groups, argv=argv, doc=__doc__)
    args = given[LearningArguments]
    others: list[Any] = [given[each] for each in groups[1:]]
    set_up_logging()
    parts: dict[str, Any] = dict(zip(("data", "loader", "model"), map(asdict, others), strict=True))
    settings = {name: getattr(args, name) for name in ("minutes", "points", "global_batch_size")} | parts

    # 2. The plan, without what is finished.
    path = Path(args.output_file)
    rows = read_results(path, settings)
    done = {(row["contestant"], row["seed"]) for row in rows}
    runs = plan(args)
    due = [run for run in runs if run not in done]
    if args.dry_run:
        sys.stdout.writelines(f"{name}, seed {seed}\n" for name, seed in due)
        return rows

    # 3. One after the other.
    failed = []
    with tqdm(total=len(runs), initial=len(runs) - len(due), desc="Learning", unit="run", dynamic_ncols=True) as bar:
        for name, seed in due:
            bar.set_postfix_str(f"{name}, seed {seed}")
            found = compete(name, seed, settings)
            if "error" in found:
                failed.append(f"{name}, seed {seed}: {found['error']}")
                logger.warning("%s did not finish: %s", name, found["error"])
            else:
                rows.append({"contestant": name, "seed": seed, **found, "settings": settings, "machine": machine()})
                append_rows(path, [rows[-1]])
            bar.update()

    # 4. Compare.
    if rows:
        text = report(rows, args.names)
        sys.stdout.write(text + "\n")
        path.with_suffix(".md").write_text(f"{text}\n\n{'; '.join(machine().values())}\n", encoding="utf-8")
        draw(rows, args.names, path.with_suffix(".png"))
    if failed:
        raise RunError(f"{len(failed)} of {len(due)} did not finish; start again to repeat them. {'; '.join(failed)}")
    return rows


if __name__ == "__main__":
    run_script(main)
