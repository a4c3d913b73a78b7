"""Measure pairs a second and memory of training: this project, variants, peers, in turn.

The embedded data set and a tiny model, in a few minutes:
    python -m benchmarks.training
Your own pairs and backbones, at two batch sizes, all figures to a file:
    python -m benchmarks.training --train_file pairs.jsonl --batch_sizes 64,128 --output_file speed.json \\
        --vision_model_name_or_path facebook/dinov2-small --text_model_name_or_path sentence-transformers/all-MiniLM-L6-v2
The model's own ceiling on a GPU, without a loader:
    accelerate launch --config_file accelerate_configs/single_gpu.yaml -m benchmarks.training --synthetic \\
        --vision_config base --text_config base --vocab_size 30522 --caption_lengths 32 --batch_sizes 1024 --peak_tflops 989

What the contestants do, and what is equal for all, is described in `benchmarks/rivals/contestants.py`. Each is a process of its
own, with its own peak memory (of tensors on a GPU, else of the process without its loader workers). They run in turn,
`--rounds` times, each time from another one on, so what slows the machine down hits all alike. Between its turns a
contestant is stopped with its loader workers, so nobody decodes images in another's time, and its allocator's free memory
is given back. A turn begins with steps that are not counted: they fetch that memory again and bring the queue of
prefetched batches to where it stays. What free work is left is one queue over all rounds together (4 batches per worker
here, 2 in the peers' loaders); take more steps than that.

Figures are medians over the rounds, ratios are ratios of medians, tokens are those embedded by those that are not padding.
Utilisation counts the model FLOPs of images and real tokens (`mm_utils.extras.flops.counts`), not padding or what is computed twice.
"""

import json
import logging
import os
import sys
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.harness import ROOT, TurnTaker, machine
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.distributed import RunError
from mm_utils.model.build import ModelArguments
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

logger = logging.getLogger(__name__)

CONTESTANTS = (
    "tandem,tandem_ungrouped,tandem_padded_77,tandem_cached_2,tandem_cached_4,tandem_cached_8,"
    "two_pass_2,two_pass_8,transformers,transformers_workers,open_clip"
)
TIME_TARGETS = {"tandem_cached_2": 1.10, "tandem_cached_8": 1.30}  # of the single pass, by gradient caching in parts
COLUMNS = {
    "contestant": "contestant", "batch_size": "pairs per step", "caption_tokens": "captions", "pairs_per_second": "pairs/s",
    "slowest": "slowest", "fastest": "fastest", "ratio": "ratio", "peak_gib": "peak GiB", "start_gib": "before step 1",
    "tokens": "tokens / real", "utilisation": "utilisation",
}  # fmt: skip


@dataclass
class BenchmarkArguments:
    """What to measure, how often."""

    contestants: str = arg(CONTESTANTS, "Who takes part; ratios are to the first.")
    batch_sizes: str = arg("64", "Pairs per step, e.g. 64,128.")
    caption_lengths: str = arg("real", "Tokens that captions are cut to, e.g. real,16,32; real = --max_seq_length.")
    rounds: int = arg(3, "How often each contestant has its turn.")
    steps_per_round: int = arg(16, "Counted steps of a turn.")
    uncounted_steps: int = arg(2, "Steps at the beginning of a turn that are not counted.")
    synthetic: bool = arg(False, "Random images and captions that stay on the device, and no loader.")
    peers_keep_memory: bool = arg(True, "On CPUs, give the peers this project's allocator settings.")
    peers_channels_last: bool = arg(False, "Give the peers this project's memory layout of images.")
    peak_tflops: float | None = arg(None, "What the device can do at this precision; prints the utilisation.")
    output_file: str | None = arg(None, "Write all figures to this JSON file, and the table beside it (.md).")
    dry_run: bool = arg(False, "Only say what would be measured.")

    def __post_init__(self) -> None:
        self.names = self.contestants.split(",")
        if unknown := set(self.names) - set(CONTESTANTS.split(",")):
            raise ValueError(f"--contestants has {', '.join(sorted(unknown))}; choose from {CONTESTANTS}.")
        if not all(size.isdecimal() and int(size) > 1 for size in self.batch_sizes.split(",")):
            raise ValueError(f"--batch_sizes is {self.batch_sizes!r}; write numbers above 1, e.g. 64,128.")
        if not all(length == "real" or length.isdecimal() for length in self.caption_lengths.split(",")):
            raise ValueError(f"--caption_lengths is {self.caption_lengths!r}; write real or numbers, e.g. real,32.")
        if min(self.rounds, self.steps_per_round, self.uncounted_steps + 1) < 1:
            raise ValueError("--rounds and --steps_per_round count from 1, --uncounted_steps from 0.")


def compete(args: BenchmarkArguments, tasks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """One result per task, measured in turn; ratios are to the first."""
    results: list[dict[str, Any]] = [{name: task[name] for name in COLUMNS if name in task} for task in tasks]
    field: list[TurnTaker] = []
    try:
        for task, result in zip(tasks, results, strict=True):
            field.append(TurnTaker(ROOT / "benchmarks/rivals/contestants.py"))
            result |= {"about": field[-1].ask(task), "turns": []}
            field[-1].ask({"uncounted": args.uncounted_steps, "counted": 1})  # the first steps ever
            logger.info("%s of %d pairs: %s", task["contestant"], task["batch_size"], field[-1].error or "ready")
        for turn in range(args.rounds):
            for place in [*range(turn % len(field), len(field)), *range(turn % len(field))]:
                steps = {"uncounted": args.uncounted_steps, "counted": args.steps_per_round}
                results[place]["turns"].append(field[place].ask(steps))
            logger.info("round %d of %d", turn + 1, args.rounds)
    finally:
        for contestant in field:
            contestant.end()
    for result, out in zip(results, [contestant.error for contestant in field], strict=True):
        result |= {"error": out} if out else summarise(result["about"], result["turns"], args.peak_tflops)
    for result in results:
        both = "error" not in result and "error" not in results[0]
        result["ratio"] = result["pairs_per_second"] / results[0]["pairs_per_second"] if both else None
    return results


def summarise(about: dict[str, Any], turns: list[dict[str, Any]], peak_tflops: float | None) -> dict[str, Any]:
    """The figures of a contestant from its turns."""
    rates = [turn["pairs"] / turn["seconds"] for turn in turns]
    computed, real = (sum(turn[name] for turn in turns) for name in ("tokens_computed", "tokens_real"))
    return {
        "pairs_per_second": median(rates),
        "slowest": min(rates),
        "fastest": max(rates),
        "peak_gib": max(turn["peak_bytes"] for turn in turns) / 2**30,
        "start_gib": turns[0]["start_bytes"] / 2**30,
        "tokens": computed / real,
        "utilisation": median(rates) * about["gflop_per_pair"] / 1000 / peak_tflops if peak_tflops else None,
    }


def report(results: list[dict[str, Any]]) -> str:
    """The table, gradient caching beside its targets, who did not finish, and the machine."""
    shown = [name for name in COLUMNS if any(result.get(name) is not None for result in results)]
    cells = [[result.get(name) for name in shown] for result in results]
    lines = [markdown_table([COLUMNS[name] for name in shown], cells), ""]
    for result in results:
        who, target = f"- {result['contestant']}, {result['batch_size']} pairs", TIME_TARGETS.get(result["contestant"])
        if "error" in result:
            lines.append(f"{who}: did not finish: {result['error']}")
        elif target and result["ratio"]:
            lines.append(f"{who}: {1 / result['ratio']:.2f} x the time of {results[0]['contestant']}; target {target}")
    said = machine() | next((result["about"] for result in results if result["about"]), {})
    return "\n".join([*lines, "- " + "; ".join(f"{name}: {value}" for name, value in said.items())])


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    # 1. Arguments: dataclass defaults < --config file < command line.
    groups = (BenchmarkArguments, DataArguments, LoaderArguments, ModelArguments)
    given = parse_args(*groups, argv=argv, doc=__doc__)
    args = given[BenchmarkArguments]
    others: list[Any] = [given[each] for each in groups[1:]]
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise RunError("This measures one process at a time. Launch it with --num_processes 1.")
    logging.basicConfig(format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S", level=logging.WARNING)
    logger.setLevel(logging.INFO)

    # 2. The plan: at each setting, all contestants compete.
    shared: dict[str, Any] = dict(zip(("data", "loader", "model"), map(asdict, others), strict=True))
    shared |= {name: getattr(args, name) for name in ("synthetic", "peers_keep_memory", "peers_channels_last")}
    settings = product(args.batch_sizes.split(","), args.caption_lengths.split(","))
    plan = [
        [{"contestant": name, "batch_size": int(size), "caption_tokens": captions, **shared} for name in args.names]
        for size, captions in settings
    ]
    if args.dry_run:
        line = "{contestant}: {batch_size} pairs, {caption_tokens} tokens\n"
        sys.stdout.writelines(line.format(**task) for tasks in plan for task in tasks)
        return []

    # 3. Measure and report.
    results = [result for tasks in plan for result in compete(args, tasks)]
    text = report(results)
    sys.stdout.write(text + "\n")
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
        Path(args.output_file).with_suffix(".md").write_text(text + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    run_script(main)
