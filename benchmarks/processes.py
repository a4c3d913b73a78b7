"""What several processes do to the gradient of a step, and what they send to each other: DDP over gloo, on one machine.

    python -m benchmarks.processes
    python -m benchmarks.processes --processes 2 --vision_model_name_or_path mobilenet_v2_1.0_224

Each step is a batch of pairs at the weights as they are drawn; nothing is updated. `distance` is |g - g64| / |g64| and `cosine` that of the
angle, over all parameters, to the gradient g64 of one process with the whole batch in fp64; figures are medians over the
steps, with their range. Captions count as different from each other, so that all have the same negatives:

- `contrastive`: this project's loss;
- `LocalNegatives`: the pairs of the own process alone, as transformers' contrastive-image-text example has under DDP;
- `OwnSlice`: all pairs, with gradient at the own ones alone, as open_clip does without `--gather-with-grad`.

What a process sends is counted from what it hands to each collective, for rings: `all_reduce` of b bytes on W processes sends 2 b (W - 1) / W, and
`all_gather` b (W - 1). `share` is the part of the step in which a collective is under way, waiting for others included.
"""

import argparse
import copy
import json
import logging
import os
import socket
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing import start_processes

from benchmarks.harness import flags_of, numbers, print_table
from benchmarks.peers import SEED, Bench, add_data_flags, clip_loss
from benchmarks.training import tandem_batches
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.losses import GlobalBatch
from mm_utils.objectives.terms import EmbeddingTerm, Encoded

WARM = 1  # step after which DDP has its buckets
CASES = (("contrastive", "fp32"), ("contrastive", "bf16"), ("LocalNegatives", "fp32"), ("OwnSlice", "fp32"))
RIGHT = ("contrastive", "fp64")
BYTES = {"float": 4, "double": 8, "long int": 8, "int": 4, "c10::BFloat16": 2, "unsigned char": 1}
SENT: dict[str, Callable[[int], float]] = {  # what a process sends for each byte that it hands over
    "all_reduce": lambda world: 2 * (world - 1) / world,
    "reduce_scatter": lambda world: (world - 1) / world,
    "all_gather": lambda world: world - 1,
}


class LocalNegatives(EmbeddingTerm):
    """The loss of the own pairs."""

    name = "local_negatives"

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Compare the own pairs alone."""
        return clip_loss()(own.embeds["image"], own.embeds["text"], own.scale)


class OwnSlice(EmbeddingTerm):
    """The loss of all pairs, of which other processes' are constants."""

    name = "own_slice"

    def loss(self, own: Encoded, batch: GlobalBatch) -> Tensor:
        """Put the own rows in place of those that were gathered."""
        mine = slice(batch.offset, batch.offset + len(own))
        image_NE = batch.image_NE.clone()
        text_NE = batch.text_NE.clone()
        image_NE[mine] = own.embeds["image"]
        text_NE[mine] = own.embeds["text"]
        return clip_loss()(image_NE, text_NE, own.scale)


def measure(rank: int, world: int, port: int, args: argparse.Namespace, folder: str) -> None:
    """Take all steps in one process; the first writes gradients, bytes and seconds of each case into the folder."""
    if world > 1:
        logging.disable(logging.WARNING)
        place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_PORT": port}
        os.environ |= {name: str(value) for name, value in place.items()}
        os.environ |= {"MASTER_ADDR": "localhost", "ACCELERATE_USE_CPU": "true"}
    bench = Bench(args)
    batches = list(islice(tandem_batches(bench), WARM + args.steps))
    for batch in batches:
        batch["ids"] = batch["rows"][:, None].expand(-1, 2).contiguous()
    found: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for case in (*CASES, *([RIGHT] if world == 1 else [])):
        found[case] = steps_of(bench, case, batches)
    if rank == 0:
        torch.save(found, Path(folder, f"{world}.pt"))


def steps_of(bench: Bench, case: tuple[str, str], batches: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the gradient, bytes by collective and seconds of each step of a case."""
    (term, precision) = case
    found = []
    model = copy.deepcopy(bench.model)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    name = (
        term if term == "contrastive" else f"{__name__ if __name__ != '__main__' else 'benchmarks.processes'}.{term}"
    )
    objective = build_objective(model.to(dtype), ObjectiveArguments(f"{name}:1"), SEED)
    wrapped = bench.accelerator.prepare(objective)
    for number, batch in enumerate(batches):
        batch = batch | {"pixel_values": batch["pixel_values"].to(dtype)}
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
            start = time.perf_counter()
            with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
                loss = wrapped(batch, number)["loss"]
            bench.accelerator.backward(loss)
            seconds = time.perf_counter() - start
        gradients = [weight.grad.double().flatten() for weight in objective.parameters() if weight.grad is not None]
        objective.zero_grad()
        if number >= WARM:
            sent, busy = collectives(profile)
            found.append({"gradient": torch.cat(gradients), "bytes": sent, "share": busy / seconds})
    return found


def collectives(profile: torch.profiler.profile) -> tuple[Counter[str], float]:
    """Return the bytes that a step hands to each collective, and the seconds in which any is under way."""
    with tempfile.TemporaryDirectory() as folder:
        profile.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(folder, "trace.json").read_text())["traceEvents"]
    given = Counter[str]()
    busy = 0.0
    until = 0.0
    calls = [event for event in events if event.get("name", "").startswith("gloo:") and "dur" in event]
    for event in sorted(calls, key=lambda event: event["ts"]):
        for kind, shape in zip(event["args"]["Input type"], event["args"]["Input Dims"], strict=True):
            given[event["name"].removeprefix("gloo:")] += BYTES[kind] * torch.Size(shape).numel()
        end = event["ts"] + event["dur"]
        busy += max(0.0, end - max(until, event["ts"]))
        until = max(until, end)
    return given, busy / 1e6


def row_of(world: int, case: tuple[str, str], steps: list[dict[str, Any]], right: list[Tensor]) -> dict[str, Any]:
    """Return a row of the table."""
    pairs = [(step["gradient"], other) for step, other in zip(steps, right, strict=True)]
    distances = [float((one - other).norm() / other.norm()) for one, other in pairs]
    cosines = [float(torch.cosine_similarity(one, other, dim=0)) for one, other in pairs]
    row: dict[str, Any] = {"processes": world, "loss": case[0], "precision": case[1]}
    row |= {"distance": median(distances), "least": min(distances), "most": max(distances), "cosine": median(cosines)}
    for name, factor in SENT.items():
        handed = median(step["bytes"][name] for step in steps)
        if handed:
            row[f"{name} MB"] = handed * factor(world) / 1e6
    shares = [step["share"] for step in steps]
    return row | (
        {"share": median(shares), "share, range": f"{min(shares):.2f} to {max(shares):.2f}"} if world > 1 else {}
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--processes", type=numbers, default="1,2,3", help="numbers of processes")
    parser.add_argument("--steps", type=int, default=5, help="batches of each case")
    add_data_flags(parser)
    parser.set_defaults(dataloader_num_workers="0", synthetic=0)
    args = parser.parse_args(argv)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for world in dict.fromkeys([1, *args.processes]):  # the first has the right gradient
            with socket.socket() as free:
                free.bind(("localhost", 0))
                port = free.getsockname()[1]
            given = (world, port, args, folder)
            measure(0, *given) if world == 1 else start_processes(measure, given, nprocs=world, start_method="spawn")
            found[world] = torch.load(Path(folder, f"{world}.pt"), weights_only=False)
    right = [step["gradient"] for step in found[1][RIGHT]]
    rows = [row_of(world, case, found[world][case], right) for world in args.processes for case in CASES]
    print_table(rows, [f"{args.steps} batches of {args.batch_size} pairs; {len(right[0]):,} parameters"])
    return rows


if __name__ == "__main__":
    main()
