"""What a step exchanges between processes: bytes predicted, beside those counted.

    ACCELERATE_USE_CPU=true accelerate launch --config_file accelerate_configs/two_processes.yaml -m benchmarks.processes.communication

Every process takes one step of each of `--objectives_tried`, in one part and in several, on random pixels and captions. Counted
are the collectives of `mm_utils.distributed` by their meter, and DDP's own by a hook on its buckets. The formulas are those of
docs/communication.md; `benchmarks.processes.scaling` reckons with them too.
"""

import logging
import sys
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.distributed import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.futures import Future

from benchmarks.gpu import random_batch
from mm_utils import distributed
from mm_utils.arguments import arg, parse_args
from mm_utils.communication import gathered_bytes, meter, reduced_bytes
from mm_utils.model.build import ModelArguments, build_model
from mm_utils.model.processor import load_processor
from mm_utils.objectives import JointObjective, ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.run.start import make_accelerator, run_script
from mm_utils.text import markdown_table

FLOAT, INTEGER = 4, 8  # bytes of numbers, and of ids, counts and flags
TRIED = (
    "contrastive", "sigmoid", "contrastive,matching", "contrastive,captioning",
    "sigmoid,matching,masked_lm,captioning",
)  # fmt: skip


@dataclass
class CommunicationArguments:
    """What to try."""

    pairs: int = arg(18, "Pairs of a step, of all processes.")
    objectives_tried: str = arg("/".join(TRIED), "Values of --objectives, with a slash between.")
    matryoshka_dims: str | None = arg(None, "As in pretrain.")
    negatives: int = arg(9, "Tokens of the longest negative that the data has for its images; 0 = it has none.")
    micro_batch_size: int = arg(4, "Pairs held at a time, in the steps of several parts.")


@dataclass(frozen=True)
class StepSize:
    """What the bytes of a step depend on.

    Attributes:
        ranks: number of processes, W.
        rows: pairs of the process that has most of them, n; N / W where shares are equal.
        width: width of the embeddings, E.
        tokens, negative_tokens: longest caption of the global batch, L, and longest negative; 0 if the data has none.
        parameters: number of trained parameters, P.
        has_parts: True with a micro-batch size.
        losses: number of widths of the contrastive loss; 1 without `--matryoshka_dims`.
    """

    ranks: int
    rows: int
    width: int
    tokens: int
    parameters: int
    negative_tokens: int = 0
    has_parts: bool = False
    losses: int = 1


def predict(terms: list[str], size: StepSize) -> dict[str, float]:
    """Return the bytes that a process receives in a step of these terms, by what travels."""

    def gathered(*bytes_of_rank: int) -> float:
        return sum(gathered_bytes(each, size.ranks) for each in bytes_of_rank)

    rows, embeddings = size.rows, 2 * size.width * FLOAT
    tokens = [size.tokens, size.negative_tokens] if size.negative_tokens else [size.tokens]
    of_term = {
        "contrastive": size.losses * gathered(rows * 3 * FLOAT),
        "sigmoid": size.losses * reduced_bytes(FLOAT, size.ranks),
        "matching": gathered(rows * 4 * INTEGER, 2 * len(tokens) * rows * max(tokens) * INTEGER),
        "masked_lm": reduced_bytes(INTEGER, size.ranks),
        "captioning": reduced_bytes(INTEGER, size.ranks),
    }
    reported = 2 * FLOAT * len({"matching", "masked_lm", "captioning"} & set(terms))
    return {
        "embeddings and ids": gathered((1 + rows) * 2 * INTEGER, rows * embeddings),
        **{name: of_term[name] for name in terms},
        "losses of rows": reduced_bytes(reported, size.ranks),
        "memory of parts": 2 * reduced_bytes(INTEGER, size.ranks) * size.has_parts,
        "gradients": reduced_bytes(size.parameters * FLOAT, size.ranks),
    }


def count(
    accelerator: Accelerator, objective: JointObjective, batch: dict[str, Any], micro_batch_sizes: list[int | None]
) -> list[float]:
    """Take a step with each micro-batch size; return the bytes that this process received in it."""
    of_buckets: list[float] = []

    def hook(state: None, bucket: GradBucket) -> Future[Tensor]:
        of_buckets.append(reduced_bytes(bucket.buffer().nbytes, distributed.world_size()))
        return allreduce_hook(None, bucket)  # type: ignore[arg-type]

    prepared: Any = accelerator.prepare(objective)
    if prepared is not objective:
        prepared.register_comm_hook(None, hook)
    found = []
    for size in [None, *micro_batch_sizes]:  # in the first step, ids travel twice
        before = meter.received
        backward(accelerator, prepared, batch, 0, size)
        found.append(meter.received - before + sum(of_buckets))
        prepared.zero_grad()
        of_buckets.clear()
    return found[1:]


def size_of_step(
    objective: JointObjective, batch: dict[str, Any], has_parts: bool, losses: int, device: torch.device
) -> StepSize:
    """Return what the formulas need to know of a step of which `batch` is this process's share."""
    widths = [batch[name].shape[1] for name in ("input_ids", "negative_input_ids") if name in batch]
    rows, *longest = distributed.max_over_ranks([len(batch["lengths"]), *widths], device)
    parameters = sum(weight.numel() for weight in objective.parameters() if weight.requires_grad)
    width = objective.model.config.projection_dim
    return StepSize(distributed.world_size(), rows, width, longest[0], parameters, sum(longest[1:]), has_parts, losses)


def batch_of_this_rank(pairs: int, negative_tokens: int, vocabulary: int, device: torch.device) -> dict[str, Any]:
    """This process's share of random pairs, with negatives of each if they have tokens."""
    own = len(distributed.share(pairs, distributed.rank(), distributed.world_size()))
    batch = random_batch(own, vocabulary, 32, device)
    if negative_tokens:
        ones = torch.ones(own, negative_tokens, dtype=torch.long, device=device)
        batch |= {"negative_input_ids": 5 * ones, "negative_attention_mask": ones}
    return batch


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Run the script and return its figures, a row for each step."""
    given = parse_args(CommunicationArguments, ModelArguments, argv=argv, doc=__doc__)
    args, model_args = given[CommunicationArguments], given[ModelArguments]
    logging.basicConfig(level=logging.WARNING)
    accelerator = make_accelerator()
    results: list[dict[str, Any]] = []
    processor = load_processor(model_args, ["a red square left of a blue circle", "two green stars"] * 20)
    sizes = [None, args.micro_batch_size]
    for objectives in args.objectives_tried.split("/"):
        torch.manual_seed(0)
        model = build_model(model_args, processor.tokenizer)
        objective_args = ObjectiveArguments(objectives, matryoshka_dims=args.matryoshka_dims)
        objective = build_objective(model, objective_args, 0, processor.tokenizer)
        negatives = args.negatives if "matching" in objectives else 0
        batch = batch_of_this_rank(args.pairs, negatives, len(processor.tokenizer), accelerator.device)
        losses = 1 + len(objective_args.widths)
        for size, counted in zip(sizes, count(accelerator, objective, batch, sizes), strict=True):
            step = size_of_step(objective, batch, size is not None, losses, accelerator.device)
            predicted = predict(list(objective_args.weights), step)
            results.append({"objectives": objectives, "size": size, "predicted": predicted, "counted": counted})
        accelerator.free_memory()

    if accelerator.is_main_process:
        cells = []
        for row in results:
            together, gradients = sum(row["predicted"].values()), row["predicted"]["gradients"]
            figures = [f"{each:,.0f}" for each in (gradients, together - gradients, together, row["counted"])]
            cells.append([row["objectives"], "several" if row["size"] else "one", *figures])
        titles = ["objectives", "parts", "gradients", "all else", "both", "counted"]
        sys.stdout.write(markdown_table(titles, cells) + "\n")
    return results


if __name__ == "__main__":
    run_script(main)
