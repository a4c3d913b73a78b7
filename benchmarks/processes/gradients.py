"""What each known way of training on several processes does to the contrastive gradient.

    python -m benchmarks.processes.gradients --processes 1,2,3,4

It starts the processes itself (gloo, CPU, fp64, no data). The gradients g of two small encoders, averaged as DDP does
over processes with equal shares of a batch, are compared with the gradients r of one process with the whole batch:

    weights      <g, r> / <r, r>, the factor of the encoders' gradient: 1 is right
    cosine       between g and r: below 1, no learning rate mends it
    residual     |g - weights r| / |g|, the share of g that points elsewhere: rounding leaves about 1e-15
    temperature  g / r of the logarithm of the inverse temperature: 1 is right
    loss         the value that is logged, averaged over the processes, by that of the whole batch
"""

import json
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from accelerate.utils import patch_environment
from torch import Tensor, multiprocessing, nn
from torch.nn.functional import cross_entropy, normalize, softplus

from mm_utils import distributed
from mm_utils.arguments import arg, parse_args
from mm_utils.extras.sigmoid.term import sigmoid_loss
from mm_utils.objectives.losses import gather_batch, info_nce

Loss = Callable[[Tensor, Tensor], Tensor]  # of a process's own [image, text] embeddings and the inverse temperature
PARTS = 2  # in which a batch is accumulated
RIGHT = {"weights": 1, "cosine": 1, "residual": 0, "temperature": 1, "loss": 1}
BIAS = torch.tensor(-10.0)  # of the sigmoid loss


@dataclass
class AblationArguments:
    """How many processes, on what."""

    processes: str = arg("1,2,3,4", "Numbers of processes to compare.")
    pairs: int = arg(24, "Pairs in the batch of all processes together.")
    embedding_dim: int = arg(16, "Width of the embeddings.")
    seed: int = arg(0, "Of the encoders and the pairs.")
    output_file: str | None = arg(None, "Also write the figures to this JSON file.")

    def __post_init__(self) -> None:
        self.worlds = [int(word) if word.strip().isdecimal() else 0 for word in self.processes.split(",")]
        if not all(self.worlds):
            raise ValueError(f"--processes is {self.processes!r}; write numbers above 0, e.g. 1,2,4.")
        for part in (PARTS * world for world in self.worlds):
            if self.pairs % part or self.pairs < 2 * part:
                raise ValueError(f"--pairs is {self.pairs}; give a multiple of {part}, {2 * part} or more.")
        if self.embedding_dim < 2:
            raise ValueError(f"--embedding_dim is {self.embedding_dim}; give 2 or more.")


def dense_info_nce(mine_n2E: Tensor, scale: Tensor, columns_N2E: Tensor | None = None, first: int = 0) -> Tensor:
    """InfoNCE of own rows; column `first` + i is the positive of row i."""
    columns_N2E = mine_n2E if columns_N2E is None else columns_N2E
    target_n = torch.arange(first, first + len(mine_n2E))
    image_to_text = cross_entropy(scale * mine_n2E[:, 0] @ columns_N2E[:, 1].T, target_n)
    return (image_to_text + cross_entropy(scale * mine_n2E[:, 1] @ columns_N2E[:, 0].T, target_n)) / 2


def gather(mine_n2E: Tensor) -> Tensor:
    """The rows of all processes; the own ones are put back, as they alone have a gradient."""
    shares = list(
        distributed.gather(mine_n2E, [len(mine_n2E)] * distributed.world_size()).chunk(distributed.world_size())
    )
    shares[distributed.rank()] = mine_n2E
    return torch.cat(shares)


def local_loss(mine_n2E: Tensor, scale: Tensor, grad: bool = True) -> Tensor:
    """The loss of own rows; with `grad`, gradients of the columns go to their owners."""
    columns_N2E = gather(mine_n2E)
    if grad:
        columns_N2E.register_hook(distributed.sum_over_ranks)
    elif distributed.world_size() > 1:
        columns_N2E = columns_N2E.detach()
    return dense_info_nce(mine_n2E, scale, columns_N2E, distributed.rank() * len(mine_n2E))


def accumulation(mine_n2E: Tensor, scale: Tensor) -> Tensor:
    """The mean of the parts' exact losses: a pair meets the negatives of its part."""
    return torch.stack([local_loss(part_n2E, scale) for part_n2E in mine_n2E.chunk(PARTS)]).mean()


def cached_accumulation(mine_n2E: Tensor, scale: Tensor) -> Tensor:
    """The exact loss once a part: embeddings have a gradient in their part's turn alone."""
    parts = mine_n2E.chunk(PARTS)
    turns = [torch.cat([part if part is live else part.detach() for part in parts]) for live in parts]
    losses = torch.stack([local_loss(turn_n2E, scale) for turn_n2E in turns])
    return losses.sum() - losses.detach()[1:].sum()  # every turn adds its gradient and logs the same value


def ours(mine_n2E: Tensor, *parameters: Tensor, loss: Callable[..., Tensor] = info_nce) -> Tensor:
    """A loss of this package; all pairs are distinct."""
    image_nE, text_nE = mine_n2E.unbind(1)
    ids_n2 = (torch.arange(len(mine_n2E)) + distributed.rank() * len(mine_n2E))[:, None].expand(-1, 2)
    return loss(image_nE, text_nE, *parameters, gather_batch(image_nE, text_nE, ids_n2))


def dense_sigmoid(all_N2E: Tensor, scale: Tensor) -> Tensor:
    """The sigmoid loss (arXiv 2303.15343) on one process."""
    logits_NN = scale * all_N2E[:, 0] @ all_N2E[:, 1].T + BIAS
    return softplus(logits_NN - 2 * logits_NN.diag().diag()).sum() / len(all_N2E)


RECIPES: dict[str, Loss] = {
    "local negatives (transformers' example)": dense_info_nce,
    "own slice put back (open_clip's default)": lambda mine, scale: dense_info_nce(gather(mine), scale),
    "local loss (--local-loss)": lambda mine, scale: local_loss(mine, scale, grad=False),
    "local loss (--local-loss --gather-with-grad)": local_loss,
    f"accumulation, {PARTS} parts": accumulation,
    f"cached accumulation (--accum-freq {PARTS})": cached_accumulation,
    "ours, info_nce": ours,
    "ours, sigmoid_loss": lambda mine, scale: ours(mine, scale, BIAS, loss=sigmoid_loss),
}
REFERENCES: dict[str, Loss] = {"ours, sigmoid_loss": dense_sigmoid}  # of the others: dense_info_nce


def measure(rank: int, world: int, folder: str, args: AblationArguments) -> None:
    """As one of `world` processes, compare every recipe with one that has the whole batch."""
    torch.set_num_threads(1)
    torch.set_default_dtype(torch.double)
    torch.manual_seed(args.seed)
    with patch_environment(rank=rank, local_rank=rank, world_size=world, local_world_size=world, omp_num_threads=1):
        state = PartialState(cpu=True, backend="gloo", init_method=Path(folder, "meeting_point").as_uri())
    towers = [nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, args.embedding_dim)) for _ in range(2)]
    parameters = [*nn.ModuleList(towers).parameters(), torch.tensor(1 / 0.07).log().requires_grad_()]
    batch_2NF = torch.randn(2, args.pairs, 32)

    def backward(loss_of: Loss, inputs_2nF: Tensor) -> Tensor:
        embeddings = [tower(inputs_nF) for tower, inputs_nF in zip(towers, inputs_2nF, strict=True)]
        loss = loss_of(normalize(torch.stack(embeddings, 1), dim=2), parameters[-1].exp())
        return torch.cat([value.flatten() for value in (*torch.autograd.grad(loss, parameters), loss.detach())])

    figures = {}
    for name, recipe in RECIPES.items():
        found = distributed.sum_over_ranks(backward(recipe, batch_2NF.chunk(world, 1)[rank])) / world
        wanted = backward(REFERENCES.get(name, dense_info_nce), batch_2NF)
        g, r = found[:-2], wanted[:-2]  # the last two are the temperature's gradient and the loss
        factor, cosine = g @ r / (r @ r), g @ r / g.norm() / r.norm()
        columns = torch.stack([factor, cosine, (g - factor * r).norm() / g.norm(), *(found / wanted)[-2:]])
        figures[name] = dict(zip(RIGHT, columns.tolist(), strict=True))
    Path(folder, f"{rank}.json").write_text(json.dumps(figures), encoding="utf-8")
    state.destroy_process_group()


def main(argv: list[str] | None = None) -> dict[str, dict[int, dict[str, float]]]:
    """Run the script and return the table by recipe, number of processes and column."""
    args = parse_args(AblationArguments, argv=argv, doc=__doc__)[AblationArguments]

    # 1. Measure. All processes are forked from one that has imported everything.
    multiprocessing.get_context("forkserver").set_forkserver_preload(["accelerate", "mm_utils.objectives.losses"])
    table: dict[str, dict[int, dict[str, float]]] = {name: {} for name in RECIPES}
    for world in args.worlds:
        with tempfile.TemporaryDirectory() as folder:
            multiprocessing.start_processes(measure, (world, folder, args), nprocs=world, start_method="forkserver")
            for name, row in json.loads(Path(folder, "0.json").read_text(encoding="utf-8")).items():
                table[name][world] = row

    # 2. Report.
    lines = [f"| {'recipe':44} | processes | {' | '.join(f'{column:>11}' for column in RIGHT)} |"]
    lines.append(f"|{'-' * 46}|----------:|{'------------:|' * len(RIGHT)}")
    verdicts = [""]
    for name, rows in table.items():
        for world, row in rows.items():
            lines.append(f"| {name:44} | {world:9} | {' | '.join(f'{value:11.3g}' for value in row.values())} |")
        wrong = [column for column in RIGHT if any(abs(row[column] - RIGHT[column]) > 1e-10 for row in rows.values())]
        verdicts.append(f"{name:46}{'wrong ' + ', '.join(wrong) if wrong else 'exact'}")
    sys.stdout.write("\n".join([*lines, *verdicts, ""]))
    if args.output_file:
        Path(args.output_file).write_text(json.dumps(table, indent=2) + "\n", encoding="utf-8")
    return table


if __name__ == "__main__":
    main()
