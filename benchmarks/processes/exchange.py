"""What 1,024 ranks would exchange and compute in a step of the loss, rank after rank in one process, beside one process with all pairs.

Each made-up rank runs `info_nce` of the package twice: up to its one exchange, whose rows are kept, and again with what all ranks
sent. So every share is computed as it would be there; only the network is left out.

    python -m benchmarks.processes.exchange
    python -m benchmarks.processes.exchange --ranks 64 --pairs 8192 --width 256
"""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils import distributed
from mm_utils.arguments import arg, parse_args
from mm_utils.objectives.losses import GlobalBatch, info_nce
from mm_utils.run.script import run_script


@dataclass
class ExchangeArguments:
    """The size of the step."""

    ranks: int = arg(1024, "Made-up ranks; the first has a pair more and the last one less than the others.")
    pairs: int = arg(16384, "Pairs of the global batch.")
    width: int = arg(64, "Numbers of an embedding.")
    seed: int = arg(0, "Of the embeddings.")


class _Sent(Exception):
    """Ends a rank's first run at its exchange."""


def share_of(
    rank: int, batch: GlobalBatch, scale: Tensor, gather: Callable[[Tensor, list[int]], Tensor]
) -> list[Tensor]:
    """Return the loss and the gradients of a rank's images, texts and temperature, as it has them before they are averaged."""
    own = replace(batch, offset=sum(batch.sizes[:rank]))
    mine = slice(own.offset, own.offset + batch.sizes[rank])
    image_nE, text_nE, scale = (
        values.clone().requires_grad_() for values in (batch.image_NE[mine], batch.text_NE[mine], scale)
    )
    with (
        patch.object(distributed, "gather", gather),
        patch.object(distributed, "world_size", lambda: len(batch.sizes)),
        patch.object(distributed, "rank", lambda: rank),
    ):
        loss = info_nce(image_nE, text_nE, scale, own)
        return [loss.detach(), *torch.autograd.grad(loss, (image_nE, text_nE, scale))]


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Print and return the largest differences from one process, and what a rank sends."""
    args = parse_args(ExchangeArguments, argv=argv, doc=__doc__)[ExchangeArguments]
    draw = torch.Generator().manual_seed(args.seed)
    image_NE, text_NE = (normalize(torch.randn(args.pairs, args.width, generator=draw), dim=-1) for _ in range(2))
    ids_N2 = torch.arange(args.pairs)[:, None].repeat(1, 2)
    ids_N2[1::97, 0] = ids_N2[0::97, 0][: len(ids_N2[1::97])]  # some pairs share an image
    sizes = [len(part) for part in torch.arange(args.pairs).tensor_split(args.ranks)]
    sizes[0], sizes[-1] = sizes[0] + 1, sizes[-1] - 1
    batch, scale = GlobalBatch(image_NE, text_NE, ids_N2, sizes, 0, True), torch.tensor(20.0)

    sent: list[Tensor] = []

    def send(rows: Tensor, sizes: list[int]) -> Tensor:
        sent.append(rows)
        raise _Sent

    begin = time.process_time()
    for rank in range(args.ranks):
        with suppress(_Sent):
            share_of(rank, batch, scale, send)
    everything = torch.cat(sent)
    shares = [share_of(rank, batch, scale, lambda rows, sizes: everything) for rank in range(args.ranks)]
    seconds = time.process_time() - begin
    whole = share_of(0, replace(batch, sizes=[args.pairs]), scale, lambda rows, sizes: rows)
    losses, images, texts, scales = zip(*shares, strict=True)
    found = {
        "loss": float((torch.stack(losses) - whole[0]).abs().max()),
        "images": float((torch.cat(images) / args.ranks - whole[1]).abs().max() / whole[1].abs().max()),
        "texts": float((torch.cat(texts) / args.ranks - whole[2]).abs().max() / whole[2].abs().max()),
        "scale": float((torch.stack(scales).mean() - whole[3]).abs() / whole[3].abs()),
        "bytes": 4.0 * (2 * args.width + 3) * max(sizes),
    }
    sys.stdout.write(
        f"{args.ranks:,} ranks of {min(sizes)} to {max(sizes)} pairs, {args.pairs:,} in all, width {args.width}, {seconds:.0f} CPU s\n"
        f"largest difference from one process: loss {found['loss']:.1e}; of the largest gradient: images {found['images']:.1e}, "
        f"texts {found['texts']:.1e}, temperature {found['scale']:.1e}\n"
        f"a rank sends {found['bytes'] / 1e3:.1f} kB of embeddings and sums\n"
    )
    return found


if __name__ == "__main__":
    run_script(main)
