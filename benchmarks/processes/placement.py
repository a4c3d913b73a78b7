"""Measure a step with encoders together and apart.

    torchrun --nproc_per_node 2 -m benchmarks.processes.placement --vocab_size 20000 --image_size 64 --output_file placement.json

On one machine, a slow network can be had in a namespace of its own, here 200 Mbit/s for all processes together; begin a shell with

    unshare -rn
    ip link set lo up mtu 1500 && tc qdisc add dev lo root tbf rate 200mbit burst 64kb latency 1s

Steps of the real `TrainStep`, on random pixels and captions of about 13 tokens that are in memory, so no loader takes part.
Both placements take turns; a step is as long as on the slowest process, and of all steps of a placement the median counts.
"""

import json
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from benchmarks.gpu import random_batch
from benchmarks.harness import machine, synchronize
from mm_utils import distributed
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.order import EQUAL_SHARES, Division
from mm_utils.extras.placement.preparation import Apart
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import JointObjective, ObjectiveArguments, build_objective
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.text import markdown_table
from mm_utils.training.arguments import TrainingArguments
from mm_utils.training.optim import OptimizerArguments, build_optimizer
from mm_utils.training.prepared import prepare
from mm_utils.training.step import TrainStep

COLUMNS = {
    "processes": "processes", "link": "link", "pairs": "pairs",
    "split": "images on", "together_measured": "together (s)",
    "apart_measured": "apart (s)",
}  # fmt: skip


@dataclass
class PlacementBenchmarkArguments:
    """What to measure."""

    pairs: str = arg("32,256", "Pairs per step, of all processes.")
    micro_batch_size: int | None = arg(None, "Pairs held at a time, as in pretrain.")
    warm_up: int = arg(2, "Steps of each placement before those that count.")
    rounds: int = arg(3, "Turns of each placement.")
    steps: int = arg(4, "Steps of a turn.")
    link: str = arg("", "What connects the processes, for the table.")
    output_file: str | None = arg(None, "Write all figures to this JSON file, and the table beside it (.md).")


class Rows:
    """Random pairs, of which each process reads those that its loaders' division assigns to it."""

    order = features = None

    def __init__(self, pairs: int, model_args: ModelArguments, device: torch.device):
        vocabulary, size = model_args.vocab_size, model_args.image_size or 224
        self.everything, self.pairs = random_batch(pairs, vocabulary, size, device), pairs
        self.loaders = SimpleNamespace(division=EQUAL_SHARES, pad_token_id=0)

    def batch(self) -> dict[str, Any]:
        """This process's rows, longest caption first, as the collator pads them."""
        division: Division = self.loaders.division
        rows = [*range(self.pairs)][division.of_rank(self.pairs, distributed.rank(), distributed.world_size())]
        found: dict[str, Any] = {
            name: value[rows] if isinstance(value, Tensor) else [value[row] for row in rows] if value else value
            for name, value in self.everything.items()
        }
        longest = max(found["lengths"], default=1)
        return found | {name: found[name][:, :longest] for name in ("input_ids", "attention_mask")}


def make_objective(model_args: ModelArguments) -> JointObjective:
    """The contrastive objective of a model from scratch, the same one in every process."""
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    torch.manual_seed(0)
    model = build_model(model_args, processor.tokenizer)
    model.text_model.resize_token_embeddings(model_args.vocab_size)
    return build_objective(model, ObjectiveArguments("contrastive"), 0, processor.tokenizer)


def measure(
    accelerator: Accelerator, pairs: int, args: PlacementBenchmarkArguments, model_args: ModelArguments
) -> dict[str, Any]:
    """Measure both placements of one batch size."""
    part = None if args.micro_batch_size is None else str(args.micro_batch_size)
    given: dict[str, Any] = {
        "output_dir": "unused",
        "max_steps": 10**6,
        "global_batch_size": pairs,
        "micro_batch_size": part,
    }
    world = distributed.world_size()
    images = world // 2
    result: dict[str, Any] = {"processes": world, "link": args.link, "pairs": pairs, "split": f"{images} of {world}"}

    steps, batches, times = {}, {}, {"together": list[float](), "apart": list[float]()}
    for name, placed in (("together", []), ("apart", [Apart(f"apart:{images}")])):
        objective, data = make_objective(model_args), Rows(pairs, model_args, accelerator.device)
        optimizer = build_optimizer(objective.model, OptimizerArguments(), pretrained=False, device=accelerator.device)
        training = TrainingArguments(**given)
        found: Any = data
        ready = prepare(training, accelerator, objective, optimizer, found, placed)
        ready.unwrapped.seed, batches[name] = 0, data.batch()
        steps[name] = TrainStep(
            training, OptimizerArguments(), accelerator, ready.objective, ready.optimizer, 10**6, 40
        )
    for turn in range(-1, args.rounds):
        for name, step in steps.items():
            for number in range(args.steps if turn >= 0 else args.warm_up):
                accelerator.wait_for_everyone()
                begin = time.perf_counter()
                step.run(batches[name], number)
                synchronize(accelerator.device)
                [slowest] = distributed.max_over_ranks(
                    [round(1e9 * (time.perf_counter() - begin))], accelerator.device
                )
                times[name] += [slowest / 1e9] if turn >= 0 else []
    return result | {f"{name}_measured": statistics.median(found) for name, found in times.items()} | {"times": times}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its results; `argv` lets tests and notebooks call it."""
    given = parse_args(PlacementBenchmarkArguments, ModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[PlacementBenchmarkArguments], given[ModelArguments]
    accelerator = make_accelerator()
    if distributed.world_size() < 2:
        raise ValueError("there is one process, which has both encoders. Start two or more with torchrun.")
    results = []
    for pairs in map(int, args.pairs.split(",")):
        results.append(measure(accelerator, pairs, args, model_args))
        accelerator.free_memory()
    if accelerator.is_main_process:
        table = markdown_table(list(COLUMNS.values()), [[result[name] for name in COLUMNS] for result in results])
        sys.stdout.write(f"{table}\n")
        if args.output_file:
            about = {"about": machine(), "results": results}
            Path(args.output_file).write_text(json.dumps(about, indent=2) + "\n", encoding="utf-8")
            Path(args.output_file).with_suffix(".md").write_text(table + "\n", encoding="utf-8")
    return results


if __name__ == "__main__":
    run_script(main)
