"""Measure time and memory of the contrastive loss alone: in tiles, and as N x N matrix.

    python -m benchmarks.loss
    python -m benchmarks.loss --pairs 1024,65536 --embedding_dim 768 --output_file loss.json
    python -m benchmarks.loss --pairs 8192,131072 --own_pairs 512

`tiled` is `mm_utils.objectives.losses.info_nce`, on one process. `naive` is the usual two cross-entropies of one matrix of logits.
Each measurement is a process of its own, in fp32 on random unit vectors. Seconds are the fastest of `--repeats`, memory is
what the process needs at its peak beyond the embeddings. With `--own_pairs`, the process computes what one of many would: these
rows against all pairs, with a made-up answer in place of the others' log-sum-exps; `strips` are then tiles of all columns. Where the naive loss would need more than half of the memory that
is free, its figures are extrapolated with the square of the batch from the largest one measured, and marked so.
"""

import json
import logging
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.harness import TurnTaker, device_name, machine, serve, synchronize
from mm_utils.arguments import arg, parse_args
from mm_utils.distributed import RunError
from mm_utils.objectives.losses import TILE_ELEMENTS, GlobalBatch, Tile, full_precision, gather_batch, info_nce
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.text import markdown_table
from mm_utils.training.memory import free_bytes, peak_bytes, reset_peak

NAIVE_MATRICES = 4  # logits, two log-softmaxes and a gradient, all N x N


@dataclass
class LossBenchmarkArguments:
    """What to measure."""

    pairs: str = arg("2048,8192,32768", "Batch sizes.")
    embedding_dim: int = arg(512, "Width of the embeddings.")
    own_pairs: int | None = arg(None, "Pairs of this process, as if others held the rest; default: all.")
    repeats: int = arg(3, "Forward and backward passes; the fastest counts.")
    output_file: str | None = arg(None, "Also write the figures to this JSON file.")

    def __post_init__(self) -> None:
        if not all(size.isdecimal() and int(size) > 1 for size in self.pairs.split(",")):
            raise ValueError(f"--pairs is {self.pairs!r}; write numbers above 1, e.g. 2048,8192.")
        if min(self.embedding_dim, self.repeats) < 1:
            raise ValueError("--embedding_dim and --repeats count from 1.")
        if not 0 < (self.own_pairs or 1) <= min(map(int, self.pairs.split(","))):
            raise ValueError(f"--own_pairs is {self.own_pairs}; give at least 1, and at most the least of --pairs.")


def tiled(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """This project's loss of pairs that are all different."""
    ids_N2 = torch.arange(len(image_NE), device=image_NE.device)[:, None].expand(-1, 2)
    return info_nce(image_NE, text_NE, scale, gather_batch(image_NE, text_NE, ids_N2))


def naive(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """The loss of `VisionTextDualEncoderModel`."""
    logits_NN = scale * image_NE @ text_NE.T
    target_N = torch.arange(len(image_NE), device=image_NE.device)
    return (cross_entropy(logits_NN, target_N) + cross_entropy(logits_NN.T, target_N)) / 2


def of_rank(image_NE: Tensor, text_NE: Tensor, scale: Tensor, own: int, tile: Tile | None = None) -> Tensor:
    """This project's loss on one of many processes, which holds the first `own` pairs."""
    total = len(image_NE)
    ids_N2 = torch.arange(total, device=image_NE.device)[:, None].expand(-1, 2)
    batch = GlobalBatch(image_NE.detach(), text_NE.detach(), ids_N2, [own, total - own], 0, False)

    def gather(rows: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([rows.detach(), rows.new_full((sizes[1], rows.shape[1]), 10.0)])

    with mock.patch("mm_utils.distributed.gather", gather):
        image_nE, text_nE = (side[:own].detach().requires_grad_() for side in (image_NE, text_NE))
        return info_nce(image_nE, text_nE, scale, batch, tile)


def in_strips(image_NE: Tensor, text_NE: Tensor, scale: Tensor, own: int) -> Tensor:
    """The same with all columns in every tile."""
    total = len(image_NE)
    return of_rank(image_NE, text_NE, scale, own, Tile(max(1, TILE_ELEMENTS[image_NE.device.type] // total), total))


LOSSES: dict[str, Callable[..., Tensor]] = {"tiled": tiled, "naive": naive}
LOSSES_OF_RANK: dict[str, Callable[..., Tensor]] = {"tiled": of_rank, "strips": in_strips}


def measure(question: dict[str, Any]) -> dict[str, Any]:
    """Seconds and MiB of one loss at one size, in this process; nothing if it would not fit."""
    device = make_accelerator().device
    pairs, own = question["pairs"], question.get("own_pairs")
    loss_of = partial(LOSSES_OF_RANK[question["loss"]], own=own) if own else LOSSES[question["loss"]]
    if loss_of is naive and NAIVE_MATRICES * 4 * pairs**2 > free_bytes(device) / 2:
        return {}
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(pairs, question["embedding_dim"], generator=generator) for _ in range(2)]
    image_NE, text_NE = (normalize(vector).to(device).requires_grad_() for vector in vectors)
    scale = torch.tensor(1 / 0.07, device=device, requires_grad=True)
    reset_peak(device)
    before, seconds = peak_bytes(device), []
    for _ in range(question["repeats"]):
        image_NE.grad = text_NE.grad = scale.grad = None
        synchronize(device)
        start = time.perf_counter()
        with full_precision(device):  # both: TF32 would halve the time of the naive one
            loss_of(image_NE, text_NE, scale).backward()
        synchronize(device)
        seconds.append(time.perf_counter() - start)
    figures = {"seconds": min(seconds), "mebibytes": (peak_bytes(device) - before) / 2**20}
    return figures | {"note": "", "device": device_name(device)}


def extrapolate(measured: dict[str, Any] | None, pairs: int) -> dict[str, Any]:
    """The naive loss where it does not fit: both figures grow with the square of the batch."""
    if measured is None:
        return {"seconds": None, "mebibytes": NAIVE_MATRICES * 4 * pairs**2 / 2**20, "note": "does not fit; computed"}
    growth = (pairs / measured["pairs"]) ** 2
    note = f"does not fit; extrapolated from {measured['pairs']}"
    return {"seconds": measured["seconds"] * growth, "mebibytes": measured["mebibytes"] * growth, "note": note}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its figures, one row a measurement."""
    args = parse_args(LossBenchmarkArguments, argv=argv, doc=__doc__)[LossBenchmarkArguments]

    # 1. Measure.
    rows: list[dict[str, Any]] = []
    sizes = {"embedding_dim": args.embedding_dim, "repeats": args.repeats, "own_pairs": args.own_pairs}
    for loss in LOSSES_OF_RANK if args.own_pairs else LOSSES:
        largest = None
        for pairs in sorted(map(int, args.pairs.split(","))):
            question = {"loss": loss, "pairs": pairs}
            process = TurnTaker(Path(__file__), "--serve")
            answer = process.ask({**question, **sizes})
            process.end()
            if process.error:
                raise RunError(f"{loss} of {pairs} pairs failed: {process.error}")
            rows.append({**question, **(answer or extrapolate(largest, pairs))})
            largest = rows[-1] if answer else largest

    # 2. Report.
    cells = [[row[name] for name in ("pairs", "loss", "seconds", "mebibytes", "note")] for row in rows]
    text = markdown_table(["pairs", "loss", "seconds", "MiB beyond the embeddings", ""], cells)
    devices = {row["device"]: None for row in rows if "device" in row}
    said = "; ".join(f"{name}: {value}" for name, value in (machine() | {"device": ", ".join(devices)}).items())
    sys.stdout.write(f"{text}\n\n{said}\n")
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")
    return rows


if __name__ == "__main__":
    if sys.argv[1:] == ["--serve"]:
        logging.disable(logging.INFO)
        serve(measure)
    else:
        run_script(main)
