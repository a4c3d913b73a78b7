"""What `--balance` gains where one process is slower, beside what could be gained.

    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/two_processes.yaml -m benchmarks.processes.balance

The devices are made up: after each forward pass of the vision tower a process sleeps `--milliseconds` for each pair, the last
process as many times longer as `--slower` says. Everything else is real: the measurement at the start, the division of the
batch, collectives, gradients of a tiny model on random pixels and captions. The time of a step is the median of
`--steps`. The ideal is that of rows assigned in proportion to speed, without a whole number of rows: N / (sum of the speeds).
"""

import logging
import sys
import time
from dataclasses import dataclass
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from transformers import TrainerControl, TrainerState

from benchmarks.gpu import random_batch
from mm_utils import distributed
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.order import EQUAL_SHARES
from mm_utils.extras.placement.balance import Balance
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import ObjectiveArguments, build_objective
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.text import markdown_table
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.step import TrainStep

IMAGE_SIZE, VOCABULARY = 32, 300


@dataclass
class BalanceBenchmarkArguments:
    """What to try."""

    slower: str = arg("1,1.5,2,4", "How many times as long the last process needs for a pair.")
    milliseconds: float = arg(20.0, "What the others need for one.")
    pairs: int = arg(64, "Pairs of a step, of all processes.")
    steps: int = arg(7, "Steps of a setting.")


def timed_run(
    accelerator: Accelerator, args: BalanceBenchmarkArguments, model_args: ModelArguments, slower: float, balance: bool
) -> tuple[float, list[int]]:
    """Seconds of a step, and the rows of each process."""
    here, ranks = distributed.rank(), distributed.world_size()
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    torch.manual_seed(0)
    model = build_model(model_args, processor.tokenizer)
    model.text_model.resize_token_embeddings(VOCABULARY, mean_resizing=False)
    joint = build_objective(model, ObjectiveArguments("contrastive"), 0, processor.tokenizer)
    seconds = args.milliseconds / 1000 * (slower if here == ranks - 1 else 1)
    model.vision_model.register_forward_hook(lambda _, given, out: time.sleep(seconds * len(out.last_hidden_state)))
    optimizer_args = OptimizerArguments()
    optimizer = build_optimizer(model, optimizer_args, pretrained=False, device=accelerator.device)
    objective, optimizer = accelerator.prepare(joint, optimizer)
    training = TrainingArguments(max_steps=args.steps, global_batch_size=args.pairs)

    data: Any = SimpleNamespace(loaders=SimpleNamespace(division=EQUAL_SHARES))
    data.train_batches = lambda start, stop: [
        random_batch(args.pairs // ranks, VOCABULARY, IMAGE_SIZE, accelerator.device)
    ]
    state = TrainerState(max_steps=args.steps)
    if balance:
        measuring = Balance()
        measuring.on_start(
            SimpleNamespace(run=SimpleNamespace(accelerator=accelerator, args=training), objective=joint)
        )
        measuring.on_train_begin(training, state, TrainerControl(), data=data)
    mine = data.loaders.division.of_rank([(row, 0) for row in range(args.pairs)], here, ranks)
    batch = random_batch(len(mine), VOCABULARY, IMAGE_SIZE, accelerator.device)
    step = TrainStep(training, optimizer_args, accelerator, objective, optimizer, args.steps, 40)
    times = []
    for number in range(args.steps):
        distributed.any_rank(False, accelerator.device)
        begin = time.perf_counter()
        step.run(batch, number)
        distributed.any_rank(False, accelerator.device)
        times.append(time.perf_counter() - begin)
    accelerator.free_memory()
    return median(times[1:]), distributed.gather_sizes(len(mine), accelerator.device)


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its figures, a row for each setting."""
    given = parse_args(BalanceBenchmarkArguments, ModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[BalanceBenchmarkArguments], given[ModelArguments]
    logging.basicConfig(level=logging.WARNING)
    accelerator = make_accelerator()
    results: list[dict[str, Any]] = []
    for slower in map(float, args.slower.split(",")):
        equal, _ = timed_run(accelerator, args, model_args, slower, balance=False)
        balanced, rows = timed_run(accelerator, args, model_args, slower, balance=True)
        ideal = args.pairs * args.milliseconds / 1000 / (distributed.world_size() - 1 + 1 / slower)
        results.append({"slower": slower, "rows": rows, "equal": equal, "balanced": balanced, "ideal": ideal})
    if accelerator.is_main_process:
        cells = [
            [
                f"{row['slower']:g} times",
                " + ".join(map(str, row["rows"])),
                *(f"{row[name]:.2f} s" for name in ("equal", "balanced", "ideal")),
                f"{row['equal'] / row['balanced']:.2f}",
            ]
            for row in results
        ]
        titles = ["the last process is slower by", "rows", "a step without", "with --balance", "ideal", "faster by"]
        sys.stdout.write(markdown_table(titles, cells) + "\n")
    return results


if __name__ == "__main__":
    run_script(main)
