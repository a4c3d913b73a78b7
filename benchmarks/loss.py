"""Time and memory of the contrastive loss alone: in tiles, and as an N x N matrix.

    python -m benchmarks.loss
    python -m benchmarks.loss --pairs 1024,65536 --embedding_dim 768

`tiled` is `mm_utils.objectives.losses.info_nce` on one process. `naive` is the usual pair of cross-entropies of one matrix of logits.
On a CPU each measurement is a process of its own. All are in fp32 without TF32, on random unit vectors; the table is printed again after every row. Seconds are the fastest of `--repeats`;
memory is what the process needs at its peak beyond the embeddings. Where the naive loss would need more than half of the free
memory, its figures are extrapolated from the largest batch that was measured, with the square of the batch.
"""

import argparse
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, normalize

from benchmarks.harness import Contestant, flags_of, numbers, print_table, synchronize
from mm_utils.objectives.losses import full_precision, gather_batch, info_nce
from mm_utils.training.memory import peak_bytes, reset_peak

NAIVE_MATRICES = 4  # logits, two log-softmaxes and a gradient, all N x N


def free_bytes(device: torch.device) -> int:
    """Return the free memory in bytes."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available


def tiled(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """This project's loss of pairs that are all different."""
    ids_N2 = torch.arange(len(image_NE), device=image_NE.device)[:, None].expand(-1, 2)
    return info_nce(image_NE, text_NE, scale, gather_batch(image_NE, text_NE, ids_N2))


def naive(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """The loss of `VisionTextDualEncoderModel`."""
    logits_NN = scale * image_NE @ text_NE.T
    target_N = torch.arange(len(image_NE), device=image_NE.device)
    return (cross_entropy(logits_NN, target_N) + cross_entropy(logits_NN.T, target_N)) / 2


LOSSES: dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]] = {"tiled": tiled, "naive": naive}


def measure(task: dict[str, Any]) -> Callable[[Any], dict[str, Any]]:
    """What one process answers: seconds, MiB and the value of one loss; nothing if it would not fit."""

    def answer(_: Any) -> dict[str, Any]:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        loss_of = LOSSES[task["loss"]]
        pairs = task["pairs"]
        if loss_of is naive and NAIVE_MATRICES * 4 * pairs**2 > free_bytes(device) / 2:
            return {}
        generator = torch.Generator().manual_seed(0)
        vectors = [torch.randn(pairs, task["embedding_dim"], generator=generator) for _ in range(2)]
        image_NE, text_NE = (normalize(vector).to(device).requires_grad_() for vector in vectors)
        scale = torch.tensor(1 / 0.07, device=device, requires_grad=True)
        reset_peak(device)
        before = peak_bytes(device)
        seconds = []
        value = 0.0
        for _ in range(task["repeats"]):
            image_NE.grad = text_NE.grad = scale.grad = None
            synchronize(device)
            start = time.perf_counter()
            with full_precision(device):
                loss = loss_of(image_NE, text_NE, scale)
                loss.backward()
            synchronize(device)
            seconds.append(time.perf_counter() - start)
            value = loss.item()
        return {"seconds": min(seconds), "MiB": (peak_bytes(device) - before) / 2**20, "value": value}

    return answer


def extrapolate(measured: dict[str, Any] | None, pairs: int) -> dict[str, Any]:
    """The naive loss where it does not fit: both figures grow with the square of the batch."""
    if measured is None:
        return {"MiB": NAIVE_MATRICES * 4 * pairs**2 / 2**20, "note": "does not fit; computed"}
    growth = (pairs / measured["pairs"]) ** 2
    note = f"does not fit; extrapolated from {measured['pairs']}"
    return {"seconds": measured["seconds"] * growth, "MiB": measured["MiB"] * growth, "note": note}


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--pairs", type=numbers, default=[2048, 8192, 32768], help="batch sizes")
    parser.add_argument("--embedding_dim", type=int, default=512, help="width of the embeddings")
    parser.add_argument("--repeats", type=int, default=3, help="forward and backward passes; the fastest counts")
    args: argparse.Namespace = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    for loss in LOSSES:
        largest = None
        for pairs in sorted(args.pairs):
            task = {"loss": loss, "pairs": pairs}
            settings = task | {"embedding_dim": args.embedding_dim, "repeats": args.repeats}
            if torch.cuda.is_available():  # its peak of memory can be reset, and a process takes seconds to start
                answer = measure(settings)(None)
            else:
                process = Contestant(measure, settings)
                answer = process.ask()
                process.end()
                answer = {"note": process.error} if process.error else answer
            rows.append(task | (answer or extrapolate(largest, pairs)))
            largest = rows[-1] if "value" in answer else largest
            print_table(rows)
    return rows


if __name__ == "__main__":
    main()
