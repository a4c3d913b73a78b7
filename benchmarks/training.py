"""Pairs per second and memory of this project's training loop and its peers', on the same pairs.

    python -m benchmarks.training
    python -m benchmarks.training --train_file pairs.jsonl --vision_model_name_or_path mobilenet_v2_1.0_224 \\
        --text_model_name_or_path all-MiniLM-L6-v2
    python -m benchmarks.training --synthetic 32 --batch_size 1024   # one random batch on the device, captions of 32 tokens

- `tandem`: this project's loader, order, objective and optimizer, with the contrastive loss alone; `tandem_grouped` reads captions in
  groups of about one length, not end to end, `tandem_ungrouped` pads them to the longest of the batch, `tandem_in_2_parts` and
  `tandem_in_8_parts` cut the batch into micro-batches (gradient caching).
- `transformers`: what `examples/pytorch/contrastive-image-text/run_clip.py` of transformers does: torchvision inside `with_transform`,
  no workers, texts padded to 128 tokens, the model's own loss, fused AdamW, gradients clipped to 1.
- `open_clip`: what open_clip's loop does with a CSV file: Pillow in workers, texts padded to 77 tokens, `ClipLoss`;
  `open_clip_bucketed`, with `--synthetic` alone, pads nothing, as batches of captions of one length do.

What is equal for all is described in `benchmarks/peers.py`; the learning rate is 1e-6, so that no loop diverges. Each loop is a process.
All run in turn, `--rounds` times, and stand still between their turns. Figures are medians over the rounds; the ratio is to the first.
"""

import argparse
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from statistics import median
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.harness import (
    compete,
    device_name,
    flags_of,
    give_memory_back,
    names,
    print_table,
    synchronize,
)
from benchmarks.peers import (
    ENDLESS,
    OPEN_CLIP_TOKENS,
    SEED,
    TRANSFORMERS_TOKENS,
    Batch,
    Bench,
    add_data_flags,
    clip_loss,
    open_clip_batches,
    synthetic_batches,
    transformers_batches,
)
from mm_utils.data.batches.loaders import DeviceLoader, Loaders
from mm_utils.data.batches.order import GlobalOrder
from mm_utils.data.batches.sizes import BatchSizes
from mm_utils.data.media import Image
from mm_utils.model import packing
from mm_utils.model.arguments import ObjectiveArguments
from mm_utils.objectives.build import build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.training.arguments import OptimizerArguments
from mm_utils.training.memory import peak_bytes
from mm_utils.training.optim import build_optimizer

Losses = Iterator[Any]
"""A contestant: the loss of one training step for each `next`."""

LEARNING_RATE = 1e-6


def tandem(bench: Bench, parts: int = 1, grouped: bool = True, packed: bool = True) -> Losses:
    """This project's step, as `mm_utils.training.trainer` takes it."""
    if not packed:
        packing.PACKED_ON.clear()
    objective = build_objective(bench.model, ObjectiveArguments("contrastive:1"), SEED)
    objective.groups_texts = grouped
    rates = OptimizerArguments(learning_rate=LEARNING_RATE)
    optimizer = build_optimizer(bench.model, rates, pretrained=bench.model_args.pretrained, device=bench.device)
    objective, optimizer = bench.accelerator.prepare(objective, optimizer)
    bench.count_tokens_of(bench.model.text_model)
    micro_batch_size = -(-bench.batch_size // parts) if parts > 1 else None
    for step, batch in enumerate(tandem_batches(bench)):
        objective.train()
        report = backward(bench.accelerator, objective, batch, step, micro_batch_size)
        bench.accelerator.clip_grad_norm_(objective.parameters(), rates.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield report["loss"]


def tandem_batches(bench: Bench) -> Iterator[Batch]:
    """This project's batches on the device."""
    if length := bench.args.synthetic:
        pixels = torch.randint(256, (bench.batch_size, 3, bench.geometry[0], bench.geometry[0]), dtype=torch.uint8)
        ids = torch.arange(bench.batch_size, device=bench.device)[:, None].expand(-1, 2).contiguous()
        batch = {"pixel_values": pixels.to(bench.device), **bench.random_tokens(length, length)}
        batch |= {"ids": ids, "lengths": [length] * bench.batch_size}
        return iter(DeviceLoader(itertools.repeat(batch), bench.device, Image(*bench.geometry)))
    order = GlobalOrder(len(bench.rows), BatchSizes((0,), (bench.batch_size,)), SEED)
    medium = Image(*bench.geometry, bench.loader_args.min_crop_area)
    loaders = Loaders(bench.loader_args, bench.device, bench.pad_token_id, medium)
    return iter(loaders.train(bench.rows, order, 0, ENDLESS))


def transformers_example(bench: Bench) -> Losses:
    """The stock class with its own loss, behind torchvision."""
    model = bench.stock_model()
    optimizer = bench.optimizer_of(model, lr=LEARNING_RATE, fused=True)
    synthetic = bench.args.synthetic
    for batch in synthetic_batches(bench, TRANSFORMERS_TOKENS) if synthetic else transformers_batches(bench):
        batch = {name: value.to(bench.device) for name, value in batch.items()}
        with bench.accelerator.autocast():
            loss = model(**batch, return_loss=True).loss
        bench.accelerator.backward(loss)
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield loss


def open_clip_bucketed(bench: Bench) -> Losses:
    """The same with captions of one length in a batch, as its buckets of lengths make them."""
    if not bench.args.synthetic:
        raise ValueError("open_clip_bucketed has no loader here. Give --synthetic.")
    return open_clip(bench, bench.args.synthetic)


def open_clip(bench: Bench, width: int = OPEN_CLIP_TOKENS) -> Losses:
    """Encoders and loss under autocast, no clipping, the temperature clamped after each step."""
    model = bench.stock_model()
    loss_of = clip_loss()
    optimizer = bench.optimizer_of(model, lr=LEARNING_RATE, betas=(0.9, 0.98), eps=1e-6)
    for batch in synthetic_batches(bench, width) if bench.args.synthetic else open_clip_batches(bench):
        pixel_values = batch["pixel_values"].to(bench.device, non_blocking=True)
        input_ids = batch["input_ids"].to(bench.device, non_blocking=True)
        optimizer.zero_grad()
        with bench.accelerator.autocast():
            seen = model.vision_model(pixel_values=pixel_values)[1]
            read = model.text_model(input_ids=input_ids, attention_mask=(input_ids != bench.pad_token_id).long())[1]
            image_NE = F.normalize(model.visual_projection(seen), dim=-1)
            text_NE = F.normalize(model.text_projection(read), dim=-1)
            loss = loss_of(image_NE, text_NE, model.logit_scale.exp())
        bench.accelerator.backward(loss)
        optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, 4.6052)
        yield loss


CONTESTANTS: dict[str, Callable[[Bench], Losses]] = {
    "tandem": tandem,
    "tandem_grouped": partial(tandem, packed=False),
    "tandem_ungrouped": partial(tandem, grouped=False),
    "tandem_in_2_parts": partial(tandem, parts=2),
    "tandem_in_8_parts": partial(tandem, parts=8),
    "transformers": transformers_example,
    "open_clip": open_clip,
    "open_clip_bucketed": open_clip_bucketed,
}


class Loop:
    """One contestant in its process: each question is a number of steps to take."""

    def __init__(self, task: tuple[str, argparse.Namespace]):
        name, args = task
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore", category=FutureWarning)
        self.bench = Bench(args)
        self.losses = CONTESTANTS[name](self.bench)

    def __call__(self, steps: int) -> dict[str, Any]:
        """Take one step that is not counted, then these; return seconds, tokens, memory and the last loss."""
        bench = self.bench
        next(self.losses)
        synchronize(bench.device)
        computed = bench.tokens_computed
        real = int(bench.tokens_real)
        start = time.perf_counter()
        loss = None
        for _ in range(steps):
            loss = next(self.losses)
        synchronize(bench.device)
        seconds = time.perf_counter() - start
        give_memory_back(bench.device)
        return {
            "rate": steps * bench.batch_size / seconds,
            "tokens": (bench.tokens_computed - computed) / max(1, int(bench.tokens_real) - real),
            "GiB": peak_bytes(bench.device) / 2**30,
            "GiB before": bench.start_bytes / 2**30,
            "loss": float(loss.detach()) if loss is not None else None,
            "device": f"{device_name(bench.device)}, {bench.accelerator.mixed_precision}",
        }


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument(
        "--contestants", type=names([*CONTESTANTS]), default=",".join([*CONTESTANTS][:-1]), help="who takes part"
    )
    parser.add_argument("--rounds", type=int, default=3, help="how often each has its turn")
    parser.add_argument("--steps", type=int, default=8, help="counted steps of a turn")
    parser.add_argument("--synthetic", type=int, default=0, help="no loader: one random batch, captions of N tokens")
    add_data_flags(parser)
    args = parser.parse_args(argv)
    rows: list[dict[str, Any]] = []
    found = compete(Loop, args.contestants, args, (1,), args.steps, args.rounds)  # the first steps ever do not count
    for name, contestant, turns in found:
        rows.append({"contestant": name})
        if contestant.error:
            rows[-1]["error"] = contestant.error
            continue
        rate = median(turn["rate"] for turn in turns)
        rows[-1]["pairs/s"] = rate
        if "pairs/s" in rows[0]:  # the turns of a round are side by side in time
            ratios = [turn["rate"] / other["rate"] for turn, other in zip(turns, found[0][2], strict=False)]
            rows[-1] |= {"ratio": rate / rows[0]["pairs/s"], "ratio, range": f"{min(ratios):.2f} to {max(ratios):.2f}"}
        rows[-1] |= {"slowest": min(turn["rate"] for turn in turns), "fastest": max(turn["rate"] for turn in turns)}
        rows[-1] |= {"peak GiB": max(turn["GiB"] for turn in turns), "before step 1": turns[0]["GiB before"]}
        rows[-1] |= {"tokens computed / real": turns[-1]["tokens"], "loss": turns[-1]["loss"]}
    print_table(rows, [turns[0]["device"] for _, _, turns in found if turns and turns[0]][:1])
    return rows


if __name__ == "__main__":
    main()
