"""The contestants of `benchmarks/training.py`: loops of one model, each a process.

Every contestant is a generator that takes one optimizer step per `next`. The process reads which one it is (`Task`), and
answers with what it found; then each question `{"uncounted": u, "counted": n}` makes it take u + n steps and answer with
the time of the last n. After an answer it is stopped, with its loader workers (`benchmarks.harness.TurnTaker`).

- `tandem`: this project's loader, order, objective, gradient caching and optimizer, with the contrastive loss alone; the
  variants take away one thing each, or cut the batch into parts.
- `two_pass_K`: gradient caching as published (arXiv 2101.06983), on this project's loader: K parts are embedded without
  gradient, the loss is taken at the embeddings, and all K are embedded again.
- `transformers`: what `examples/pytorch/contrastive-image-text/run_clip.py` of transformers does, without the callbacks
  and logs of its Trainer: torchvision reads and transforms images in fp32 inside `with_transform`, texts are padded to
  128 tokens, the model returns its own loss, AdamW is fused, gradients are clipped to 1. No loader workers, which is the
  default, or (`transformers_workers`) as many as this project takes.
- `open_clip`: what open_clip's training loop does with a CSV file: Pillow decodes in workers, crops 90 to 100 % of the
  area and normalises in fp32, texts are padded to 77 tokens, `ClipLoss`. Where open_clip is installed, its own
  `image_transform` and `ClipLoss` are used, else equivalent lines; the process says which.

What is equal for all is described in `loop_bench.py`.
"""

import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from benchmarks.harness import give_memory_back, serve, synchronize
from benchmarks.rivals.loop_bench import (
    ENDLESS,
    LEARNING_RATE,
    OPEN_CLIP_TOKENS,
    SEED,
    TRANSFORMERS_TOKENS,
    Batch,
    Bench,
    Task,
    open_clip_batches,
    open_clip_version,
    synthetic_peer,
    transformers_batches,
)
from mm_utils import distributed
from mm_utils.data.batches.loaders import DeviceLoader, Loaders
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.data.media import Image
from mm_utils.objectives import JointObjective, ObjectiveArguments, build_objective
from mm_utils.objectives.grad_cache import backward
from mm_utils.training.memory import peak_bytes
from mm_utils.training.optim import OptimizerArguments, build_optimizer

Steps = Iterator[None]


# -- this project -----------------------------------------------------------------------------------------------------


def tandem(bench: Bench, parts: int = 1, padded_to: int | None = None, grouped: bool = True) -> Steps:
    """This project's step, as `mm_utils.training.trainer` takes it."""
    objective = build_objective(bench.model, ObjectiveArguments("contrastive:1"), SEED)
    objective.groups_texts = grouped
    rates = OptimizerArguments(learning_rate=LEARNING_RATE)
    optimizer = build_optimizer(bench.model, rates, pretrained=bench.model_args.pretrained, device=bench.device)
    objective, optimizer = bench.accelerator.prepare(objective, optimizer)
    bench.count_tokens_of(bench.model.text_model)
    micro_batch_size = -(-bench.task.batch_size // parts) if parts > 1 else None
    for step, batch in enumerate(tandem_batches(bench, padded_to)):
        objective.train()
        backward(bench.accelerator, objective, batch, step, micro_batch_size)
        bench.accelerator.clip_grad_norm_(objective.parameters(), rates.max_grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        yield


def tandem_batches(bench: Bench, padded_to: int | None = None) -> Iterator[Batch]:
    """This project's batches on the device; `padded_to` pads them further."""
    if bench.task.synthetic:
        pixels = torch.randint(
            256, (bench.task.batch_size, 3, bench.geometry[0], bench.geometry[0]), dtype=torch.uint8
        )
        width = padded_to or bench.max_tokens
        pairs = torch.arange(bench.task.batch_size, device=bench.device)[:, None].expand(-1, 2).contiguous()
        lengths = [min(width, bench.max_tokens)] * bench.task.batch_size
        batch = {
            "pixel_values": pixels.to(bench.device),
            **bench.random_tokens(width),
            "ids": pairs,
            "lengths": lengths,
        }
        return iter(DeviceLoader(itertools.repeat(batch), bench.device, Image(*bench.geometry)))  # type: ignore[arg-type]
    order = GlobalOrder(len(bench.rows), BatchSizes((0,), (bench.task.batch_size,)), SEED)
    loaders = Loaders(
        bench.loader_args, bench.device, bench.pad_token_id, Image(*bench.geometry, bench.loader_args.min_crop_area)
    )
    batches = iter(loaders.train(bench.rows, order, 0, ENDLESS))
    return batches if padded_to is None else (pad(batch, padded_to, bench.pad_token_id) for batch in batches)


def pad(batch: Batch, width: int, pad_token_id: int) -> Batch:
    """The batch with its captions padded, or cut, to `width` tokens."""
    missing = width - batch["input_ids"].shape[1]
    return {
        **batch,
        "input_ids": F.pad(batch["input_ids"], (0, missing), value=pad_token_id),
        "attention_mask": F.pad(batch["attention_mask"], (0, missing)),
    }


def two_pass(bench: Bench, parts: int) -> Steps:
    """Gradient caching as published; equal seeds make the dropout of both passes the same."""
    model = bench.model
    objective, optimizer = JointObjective(model, {}), bench.optimizer_of(model)
    bench.count_tokens_of(model.text_model)
    cuts = [distributed.share(bench.task.batch_size, part, parts) for part in range(parts)]

    def embed(batch: Batch, cut: range) -> tuple[Tensor, Tensor]:
        torch.manual_seed(cut.start)
        names = ("pixel_values", "input_ids", "attention_mask", "ids", "lengths")
        taken = {name: batch[name][cut.start : cut.stop] for name in names}
        with bench.accelerator.autocast():
            embeds = objective.encode(taken).embeds
            return embeds["image"], embeds["text"]

    for batch in tandem_batches(bench):
        with torch.no_grad():
            embedded = [embed(batch, cut) for cut in cuts]
        image_NE, text_NE = (torch.cat(side).float().requires_grad_() for side in zip(*embedded, strict=True))
        bench.accelerator.backward(clip_loss(image_NE, text_NE, model.logit_scale.exp()))
        assert image_NE.grad is not None
        assert text_NE.grad is not None
        for cut in cuts:
            rows = slice(cut.start, cut.stop)
            image_nE, text_nE = embed(batch, cut)
            pulled = (image_nE * image_NE.grad[rows]).sum() + (text_nE * text_NE.grad[rows]).sum()
            pulled.backward()  # the cached gradients carry the loss scale already
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


# -- transformers' example --------------------------------------------------------------------------------------------


def transformers_example(bench: Bench, workers: int) -> Steps:
    """The stock class with its own loss, behind torchvision."""
    model = bench.stock_model()
    optimizer = bench.optimizer_of(model, fused=True)
    synthetic = bench.task.synthetic
    batches = synthetic_peer(bench, TRANSFORMERS_TOKENS) if synthetic else transformers_batches(bench, workers)
    for batch in batches:
        batch = {name: value.to(bench.device) if isinstance(value, Tensor) else value for name, value in batch.items()}
        batch["pixel_values"] = bench.layout(batch["pixel_values"])
        with bench.accelerator.autocast():
            loss = model(**{**batch, "return_loss": True}).loss
        bench.accelerator.backward(loss)
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        yield


# -- open_clip --------------------------------------------------------------------------------------------------------


def open_clip(bench: Bench) -> Steps:
    """Towers and loss under autocast, no clipping, the temperature clamped after each step."""
    model = bench.stock_model()
    optimizer = bench.optimizer_of(model, betas=(0.9, 0.98), eps=1e-6)
    loss_of: Callable[..., Tensor] = clip_loss
    if open_clip_version():
        from open_clip.loss import ClipLoss

        loss_of = ClipLoss()
    batches = synthetic_peer(bench, OPEN_CLIP_TOKENS) if bench.task.synthetic else open_clip_batches(bench)
    for batch in batches:
        pixel_values, input_ids = (
            bench.layout(batch["pixel_values"]),
            batch["input_ids"].to(bench.device, non_blocking=True),
        )
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
        yield


def clip_loss(image_NE: Tensor, text_NE: Tensor, scale: Tensor) -> Tensor:
    """open_clip's `ClipLoss` on one process: each direction's logits by its own product."""
    target = torch.arange(len(image_NE), device=image_NE.device)
    by_image, by_text = scale * image_NE @ text_NE.T, scale * text_NE @ image_NE.T
    return (F.cross_entropy(by_image, target) + F.cross_entropy(by_text, target)) / 2


# -- one process ------------------------------------------------------------------------------------------------------

CONTESTANTS: dict[str, Callable[[Bench], Steps]] = {
    "tandem": tandem,
    "tandem_ungrouped": partial(tandem, grouped=False),
    "tandem_padded_77": partial(tandem, padded_to=OPEN_CLIP_TOKENS, grouped=False),
    "tandem_cached_2": partial(tandem, parts=2),
    "tandem_cached_4": partial(tandem, parts=4),
    "tandem_cached_8": partial(tandem, parts=8),
    "two_pass_2": partial(two_pass, parts=2),
    "two_pass_8": partial(two_pass, parts=8),
    "transformers": partial(transformers_example, workers=0),
    "transformers_workers": lambda bench: transformers_example(bench, bench.loader_args.num_workers),
    "open_clip": open_clip,
}


def answers() -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What this process says to a `Task`, and then to each turn."""
    entered: list[tuple[Bench, Steps]] = []

    def answer(question: dict[str, Any]) -> dict[str, Any]:
        if entered:
            return take_turn(*entered[0], **question)
        bench = Bench(Task(**question))
        entered.append((bench, CONTESTANTS[bench.task.contestant](bench)))
        return bench.about()

    return answer


def take_turn(bench: Bench, steps: Steps, uncounted: int, counted: int) -> dict[str, Any]:
    """Seconds and tokens of the counted steps; peak bytes before the first step, and so far."""
    for _ in range(uncounted):
        next(steps)
    synchronize(bench.device)
    computed, real = bench.tokens_computed, int(bench.tokens_real)
    start = time.perf_counter()
    for _ in range(counted):
        next(steps)
    synchronize(bench.device)
    seconds = time.perf_counter() - start
    give_memory_back(bench.device)
    return {
        "seconds": seconds,
        "pairs": counted * bench.task.batch_size,
        "tokens_computed": bench.tokens_computed - computed,
        "tokens_real": int(bench.tokens_real) - real,
        "start_bytes": bench.start_bytes,
        "peak_bytes": peak_bytes(bench.device),
    }


if __name__ == "__main__":
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
    serve(answers())
