"""What recall to expect of how many pairs, between two frozen pretrained encoders.

    python -m benchmarks.pairs --train_file flickr8k/captions.jsonl --sizes 300,600,1261,3000,6000 --output_file pairs.jsonl \\
        --vision_model_name_or_path mobilenet_v2_1.0_224 --text_model_name_or_path all-MiniLM-L6-v2

Each seed draws other training rows, then each contestant learns from them by `scripts/pretrain.py`, with its flags of
`CONTESTANTS`; the figure is the best of its evaluations of the validation split, which is always whole. The encoders run once, over all
rows. Results are added to the file as they come; started again, it goes on with what is missing. The file gets a table (.md) and a
picture (.png).
"""

import json
import logging
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
from datasets import DatasetDict
from matplotlib.ticker import NullLocator

from benchmarks.ablations.report import with_interval
from benchmarks.harness import machine
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.rows.source import DataArguments
from mm_utils.data.training_data import TrainingData
from mm_utils.extras.frozen import feature_cache
from mm_utils.files import append_rows
from mm_utils.model.build import ModelArguments
from mm_utils.reports.plots import COLORS, INK, MUTED, new_figure, save_figure, set_title, small_legend, style_axes
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table
from mm_utils.training.arguments import METRICS_FILE
from scripts import pretrain

logger = logging.getLogger(__name__)

START = "closed form"  # the evaluation before the first step of the first contestant
CONTESTANTS = {
    "12 epochs of 64": "--global_batch_size 64 --num_train_epochs 12 --backbone_learning_rate 1e-4",
    "default": "",
    "mlp": "--projection mlp",
}
SHOWN = ("mean_recall", "text_to_image_recall@1", "image_to_text_recall@1")
_QUIET = "--freeze_vision --freeze_text --save_steps 0 --logging_steps 1000 --set dataloader_num_workers=0"


@dataclass
class PairsArguments:
    """How many pairs, who learns from them."""

    sizes: str = arg("300,600,1261,3000,6000", "Training images of a run, e.g. 300,3000.")
    seeds: str = arg("0,1,2", "Seeds of the rows that are drawn, of their order and of dropout.")
    contestants: str = arg(",".join(CONTESTANTS), "Who takes part, besides the closed form.")
    output_file: str = arg("pairs.jsonl", "Results, one a line; table and picture are put beside it.")

    def __post_init__(self) -> None:
        self.names = self.contestants.split(",")
        if unknown := set(self.names) - set(CONTESTANTS):
            raise ValueError(f"--contestants has {', '.join(sorted(unknown))}; choose from {', '.join(CONTESTANTS)}.")
        if not all(word.isdecimal() for word in f"{self.sizes},{self.seeds}".split(",")):
            raise ValueError(f"--sizes is {self.sizes!r}, --seeds {self.seeds!r}; write numbers, e.g. 300,3000.")


class Rows:
    """The data of all runs, opened once, of which a run is given some rows with the stored output of the encoders."""

    def __init__(self) -> None:
        self.all: TrainingData | None = None
        self.size, self.seed = 0, 0
        self._open, self._cache = pretrain.open_data, feature_cache.cache_features

    def open(self, accelerator: Any, data_args: Any, loader_args: Any, schedule: Any, *others: Any) -> TrainingData:
        """Return the data in place of `open_data`."""
        self.all = self.all or self._open(accelerator, data_args, loader_args, schedule, *others)
        draw = torch.randperm(len(self.all.splits["train"]), generator=torch.Generator().manual_seed(self.seed))
        self.rows = draw[: self.size].sort().values.tolist()
        train = self.all.splits["train"].select(self.rows)
        schedule.fit_batch(len(train))
        splits = DatasetDict(train=train, validation=self.all.splits["validation"])
        return replace(
            self.all, splits=splits, order=GlobalOrder(len(train), schedule.batch_sizes, self.seed), features={}
        )

    def cache(self, data: TrainingData, objective: Any, accelerator: Any, splits: Sequence[str]) -> None:
        """Put features beside the rows in place of `cache_features`."""
        assert self.all is not None
        if not self.all.features:
            self._cache(self.all, objective, accelerator, splits)
        data.features = {**self.all.features, "train": self.all.features["train"].select(self.rows)}


def learn(rows: Rows, name: str, size: int, seed: int, flags: Sequence[str], folder: str) -> list[dict[str, Any]]:
    """Train once; return the evaluations."""
    rows.size, rows.seed = size, seed
    words = [*flags, *_QUIET.split(), *CONTESTANTS[name].split(), "--seed", str(seed), "--output_dir", folder]
    pretrain.main([*words, "--overwrite_output_dir"])
    lines = map(json.loads, (Path(folder) / METRICS_FILE).read_text(encoding="utf-8").splitlines())
    return [
        {"step": line["step"], **{metric: line[f"eval_{metric}"] for metric in SHOWN}}
        for line in lines
        if "eval_mean_recall" in line
    ]


def report(results: Sequence[dict[str, Any]], names: Sequence[str]) -> str:
    """The table: mean recall by size and contestant, with 95 % intervals over seeds, and of the gain over the closed form."""
    table = []
    for size in sorted({row["size"] for row in results}):
        cells: list[Any] = [f"{size:,}"]
        for name in (START, *names):
            found = {row["seed"]: row for row in results if (row["size"], row["contestant"]) == (size, name)}
            if not found:
                cells.append(None)
                continue
            text = with_interval([row["mean_recall"] for row in found.values()])
            gains = [row["mean_recall"] - row["start"] for row in found.values()]
            cells.append(text if name == START else f"{text} ({with_interval(gains, sign='+')})")
        table.append([*cells, len({row["seed"] for row in results if row["size"] == size})])
    return markdown_table(["images", START, *names, "seeds"], table)


def draw(results: Sequence[dict[str, Any]], names: Sequence[str], out_path: Path) -> None:
    """Draw mean recall over the number of images."""
    figure = new_figure(6, 3.8)
    ax = figure.add_subplot()
    style_axes(ax)
    sizes = sorted({row["size"] for row in results})
    for color, name in zip(COLORS, (START, *names), strict=False):
        by_size = {
            size: [row["mean_recall"] for row in results if (row["size"], row["contestant"]) == (size, name)]
            for size in sizes
        }
        points = [(size, sum(values) / len(values)) for size, values in by_size.items() if values]
        ax.plot(*zip(*points, strict=True), color=color, linewidth=1.6, marker="o", markersize=3, label=name)
    ax.set_xscale("log")
    ax.set_xticks(sizes, [f"{size:,}" for size in sizes])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xlabel("training images", fontsize=8, color=MUTED)
    ax.tick_params(labelcolor=INK)
    set_title(ax, "Validation: mean recall")
    small_legend(ax, loc="upper left")
    save_figure(figure, out_path)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    # 1. Arguments.
    given = parse_args(PairsArguments, DataArguments, ModelArguments, argv=argv, doc=__doc__)
    args, path = given[PairsArguments], Path(given["output_file"])
    shared = given.named & {*asdict(given[DataArguments]), *asdict(given[ModelArguments])}
    flags = [word for name in sorted(shared) for word in (f"--{name}", str(given[name]))]

    # 2. Runs, without those that the file has.
    results = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    done = {(row["contestant"], row["size"], row["seed"]) for row in results}
    rows, seeds, sizes = Rows(), map(int, args.seeds.split(",")), list(map(int, args.sizes.split(",")))
    due = [(name, size, seed) for seed in seeds for size in sizes for name in args.names]
    with ExitStack() as stack:
        folder = stack.enter_context(TemporaryDirectory())
        stack.enter_context(mock.patch.object(pretrain, "open_data", rows.open))
        stack.enter_context(mock.patch.object(feature_cache, "cache_features", rows.cache))
        stack.enter_context(mock.patch.object(pretrain, "finish_run"))
        stack.enter_context(mock.patch.object(pretrain, "train_recall", return_value=[]))  # nobody reads it here
        for name, size, seed in due:
            if (name, size, seed) in done:
                continue
            begin = time.process_time()
            first, *later = learn(rows, name, size, seed, flags, f"{folder}/run")
            best = max(later, key=lambda each: each["mean_recall"])
            about = {"size": size, "seed": seed, "start": first["mean_recall"], "cpu_s": time.process_time() - begin}
            found = [{"contestant": name, **about, **best, **machine()}]
            if not any((row["contestant"], row["size"], row["seed"]) == (START, size, seed) for row in results):
                found.append({"contestant": START, **about, **first, **machine()})
            append_rows(path, found)
            results += found
            logger.info(
                "%s, %d images, seed %d: %.4f, from %.4f", name, size, seed, best["mean_recall"], about["start"]
            )

    # 3. Table and picture.
    shown = [name for name in CONTESTANTS if any(row["contestant"] == name for row in results)]
    text = report(results, shown)
    path.with_suffix(".md").write_text(f"{text}\n", encoding="utf-8")
    draw(results, shown, path.with_suffix(".png"))
    sys.stdout.write(f"{text}\n")
    return results


if __name__ == "__main__":
    run_script(main)
