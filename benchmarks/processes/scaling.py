"""Where time goes on many GPUs, reckoned: what breaks first at 10^9 pairs, 1,024 GPUs.

    python -m benchmarks.processes.scaling
    python -m benchmarks.processes.scaling --vision_config small --text_config small --gpus 64,1024 --bandwidth_gb 25

It needs no GPU. FLOPs are counted on the real model (`mm_utils.extras.flops.counts`), bytes by the formulas of docs/communication.md
(`benchmarks.processes.communication`), which are tested, and the draw of a global batch is timed here. What a GPU, a link, a core and a
disk reach are flags: assumptions. So this shows what grows beyond what, and does not replace a measurement.

Gradients travel beside the backward pass, two thirds of the towers' time, and a batch is drawn beside the step before; what
does not fit into that is the unhidden rest.
"""

import logging
import sys
import time
from dataclasses import dataclass
from typing import Any

from benchmarks.processes.communication import StepSize, predict
from mm_utils.arguments import arg, parse_args
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.extras.flops.counts import FlopCounts, measure_flops
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.reliability.failures import POLL_SECONDS
from mm_utils.run.start import run_script
from mm_utils.text import markdown_table

CHECKPOINT_BYTES = 16  # a parameter, its two moments and its average, fp32
FIRST = 0.1  # of the towers' time: what takes less is not a bottleneck yet


@dataclass
class ScalingArguments:
    """The run, and what the hardware is taken to reach."""

    gpus: str = arg("8,64,256,1024", "Numbers of GPUs.")
    global_batch: str = arg("32768,131072,1048576", "Pairs of a step.")
    pairs: int = arg(10**9, "Pairs of the training set.")
    seen_pairs: float = arg(12.8e9, "Pairs of the whole run.")
    tokens: int = arg(32, "Tokens of a caption.")
    tflops: float = arg(300.0, "What a GPU reaches in the towers.")
    fp32_tflops: float = arg(40.0, "What it reaches in a product of fp32 matrices, as in the loss.")
    memory_gb: float = arg(3000.0, "GB per second that it reads or writes.")
    bandwidth_gb: float = arg(50.0, "GB per second that a GPU receives.")
    images_per_core: float = arg(
        1500.0, "Images per second that a core reads from shards; docs/benchmarks.md#loading."
    )
    kb_per_pair: float = arg(45.0, "kB that are read for a pair.")
    disk_gb: float = arg(2.0, "GB per second at which process 0 writes and hashes a checkpoint.")


@dataclass
class ScaledModelArguments(ModelArguments):
    """The two towers, without a head."""

    vision_config: str = arg("base", "As in pretrain.")
    text_config: str = arg("base", "As in pretrain.")
    vocab_size: int = arg(30522, "Size of the vocabulary.")
    projection_dim: int | None = arg(512, "Width of the shared embedding space.")
    fusion_layers: int = arg(0, "As in pretrain.")


def loss_seconds(rows: int, batch: int, width: int, args: ScalingArguments) -> float:
    """The loss of one GPU: six products of rows x batch x width, 16 passes over the logits."""
    products, passes = 6 * 2 * rows * batch * width, 16 * 4 * rows * batch
    return products / (args.fp32_tflops * 1e12) + passes / (args.memory_gb * 1e9)


def order_seconds(pairs: int, batch: int, gpus: int) -> float:
    """The CPU time in which one of `gpus` processes draws its rows of a batch, measured on this core."""
    order = GlobalOrder(pairs, BatchSizes((0,), (batch,)), 0)
    order.batch(1, slice(0, None, gpus))
    begin = time.process_time()
    order.batch(2, slice(0, None, gpus))
    return time.process_time() - begin


def reckon(
    gpus: int, batch: int, flops: FlopCounts, parameters: int, width: int, drawn: float, args: ScalingArguments
) -> dict[str, Any]:
    """The seconds of a step by what takes them, and what the run asks of all around the GPUs."""
    rows = -(-batch // gpus)
    received = predict(["contrastive"], StepSize(gpus, rows, width, args.tokens, parameters))
    gradients = received.pop("gradients") / (args.bandwidth_gb * 1e9)
    towers = flops.training_step(rows, [args.tokens] * rows) / (args.tflops * 1e12)
    beside = {
        "gather": sum(received.values()) / (args.bandwidth_gb * 1e9),
        "loss": loss_seconds(rows, batch, width, args),
        "gradients": max(0.0, gradients - 2 / 3 * towers),
    }
    step = towers + sum(beside.values())
    waits = {**beside, "order": max(0.0, drawn - towers)}
    largest = max(waits, key=waits.__getitem__)
    share = waits[largest] / towers
    rate = batch / step
    return {
        "gpus": gpus, "batch": batch, "rows": rows, "towers": towers, **beside, "all gradients": gradients, "order": drawn,
        "step": step, "first": f"{largest}, {share:.0%} of the towers" if share > FIRST else "nothing",
        "pairs_per_second": rate, "days": args.seen_pairs / rate / 86400, "cores": rate / args.images_per_core,
        "cores_of_gpu": rate / args.images_per_core / gpus, "read": rate * args.kb_per_pair / 1e6,
        "requests": gpus / POLL_SECONDS,
    }  # fmt: skip


def report(results: list[dict[str, Any]], parameters: int, gflops: float, args: ScalingArguments) -> str:
    """Two tables, and what does not depend on GPUs and batch."""
    steps = [
        [
            f"{row['gpus']:,}", f"{row['batch']:,}", f"{row['rows']:,}",
            *(f"{1e3 * row[name]:,.1f}" for name in ("towers", "gather", "loss")),
            f"{1e3 * row['gradients']:,.1f} of {1e3 * row['all gradients']:,.1f}",
            f"{1e3 * row['step']:,.1f}", f"{row['towers'] / row['step']:.0%}", row["first"],
        ]
        for row in results
    ]  # fmt: skip
    titles = [
        "GPUs",
        "batch",
        "pairs a GPU",
        "towers, ms",
        "gather",
        "loss",
        "gradients, unhidden",
        "step",
        "in the towers",
    ]
    around = [
        [
            f"{row['gpus']:,}", f"{row['batch']:,}", f"{row['pairs_per_second']:,.0f}", f"{row['days']:.1f}",
            f"{row['cores']:,.0f}", f"{row['cores_of_gpu']:.1f}", f"{row['read']:,.1f}", f"{1e3 * row['order']:,.0f}",
            f"{row['requests']:,.0f}",
        ]
        for row in results
    ]  # fmt: skip
    asks = ["GPUs", "batch", "pairs/s", "days", "loader cores", "of a GPU", "GB/s read", "order, ms", "requests/s"]
    checkpoint = CHECKPOINT_BYTES * parameters / 1e9
    return (
        f"{parameters / 1e6:,.0f} million parameters, {gflops:,.0f} GFLOP a pair, {args.pairs:,} pairs.\n\n"
        f"{markdown_table([*titles, 'first to break'], steps)}\n\n{markdown_table(asks, around)}\n\n"
        f"A checkpoint: {checkpoint:.1f} GB, {checkpoint / args.disk_gb:.1f} s of process 0 beside training. A listed order "
        f"would hold {8 * args.pairs / 1e9:.1f} GB on every process; this one holds a batch.\n"
    )


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its figures, a row for each number of GPUs and batch."""
    given = parse_args(ScalingArguments, ScaledModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[ScalingArguments], given[ScaledModelArguments]
    logging.basicConfig(level=logging.WARNING)
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    model = build_model(model_args, processor.tokenizer)
    if not model_args.pretrained:
        model.text_model.resize_token_embeddings(model_args.vocab_size, mean_resizing=False)
    parameters = sum(weight.numel() for weight in model.parameters() if weight.requires_grad)
    flops = measure_flops(model, processor.image_processor.crop_size["height"], args.tokens)
    width = model.config.projection_dim
    del model

    results: list[dict[str, Any]] = []
    for batch in map(int, args.global_batch.split(",")):
        for gpus in map(int, args.gpus.split(",")):
            if gpus <= batch:
                drawn = order_seconds(args.pairs, batch, gpus)
                results.append(reckon(gpus, batch, flops, parameters, width, drawn, args))
    sys.stdout.write(report(results, parameters, flops.training_step(1, [args.tokens]) / 1e9, args))
    return results


if __name__ == "__main__":
    run_script(main)
