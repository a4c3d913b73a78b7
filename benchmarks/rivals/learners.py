"""The contestants of `benchmarks/learning.py`: ways to join two towers, in equal time.

- `tandem`: scripts/pretrain.py with its defaults, but for the number of steps, which a short run before tells; between two frozen
  towers as many as the defaults have. `tandem_towers` trains no fusion head. Their time includes reading the data, the closed form
  and checkpoints, which that of the others does not.
- `cca`: canonical correlations of the frozen towers' features (`mm_utils.extras.starts.closed_form`, without class names).
- `ridge`: ridge regression of image features to text features and back; the score is the sum of both cosines.
- `transformers`: the loop of its contrastive-image-text example (`contestants.py`): captions padded to 128 tokens, the text
  tower's pooler, one learning rate, here 5e-4 in place of 5e-5, with which it learns less, and a linear schedule.
- `open_clip`: open_clip's transforms, loss and AdamW, mean of tokens, a learning rate of 1e-4, warm-up and cosine.
- `tuned`: a plain loop with what experience suggests: 1e-3 for projections and 5e-5 for towers, warm-up and cosine, crops of
  at least 80 %, captions padded to the longest, channels-last images, batch norms as they were trained, clipping.
- `sentence_transformers`: its trainer and its symmetric MultipleNegativesRankingLoss (`sentence_pairs.py`).

Schedules of the loops follow the clock, so nobody has to guess a number of steps. All keep the weights that were best on
validation. The loops begin from random projections of one width, and train what no flag freezes; batch norms too, unless stated otherwise.
"""

import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.transforms import Compose, InterpolationMode, Normalize, RandomResizedCrop, ToTensor
from transformers import TrainerCallback

from benchmarks.harness import serve
from benchmarks.rivals.closed_forms import cca, ridge
from benchmarks.rivals.contestants import clip_loss
from benchmarks.rivals.judging import Clock, Judge, judge_now, stock_towers
from benchmarks.rivals.loop_bench import (
    Batch,
    Bench,
    PillowPairs,
    Task,
    endless,
    open_clip_batches,
    to_rgb,
    transformers_batches,
)
from mm_utils.data.batches.loaders import LoaderArguments
from mm_utils.data.rows.source import DataArguments
from mm_utils.model.build import ModelArguments, load_model
from scripts import pretrain

PROBE_STEPS = 8


# -- loops ------------------------------------------------------------------------------------------------------------


def tuned_batches(bench: Bench) -> Iterator[Batch]:
    """Crops of at least 80 %, and captions cut to the longest of a batch."""
    size, mean, std = bench.geometry
    crop = RandomResizedCrop(size, scale=(0.8, 1.0), interpolation=InterpolationMode.BICUBIC)
    transform = Compose([to_rgb, crop, ToTensor(), Normalize(mean, std)])
    rows = PillowPairs(*bench.pairs(), transform, bench.pad_token_id)
    for batch in endless(bench, rows, bench.loader_args.num_workers):
        longest = int((batch["input_ids"] != bench.pad_token_id).sum(1).max())
        yield {**batch, "input_ids": batch["input_ids"][:, :longest]}


@dataclass(frozen=True)
class Recipe:
    """What a loop does its own way. Rates are peaks; `warmup` is a share of the time."""

    batches: Callable[[Bench], Iterator[Batch]]
    tower_rate: float
    projection_rate: float
    cosine: bool = True
    warmup: float = 0.1
    weight_decay: float = 0.2
    betas: tuple[float, float] = (0.9, 0.98)
    max_norm: float = 1.0
    pools_by_mean: bool = True
    freezes_norms: bool = False

    def rate(self, share: float) -> float:
        """Learning rate as a share of its peak, after this share of the time."""
        falling = (1 + math.cos(math.pi * min(1.0, share))) / 2 if self.cosine else max(0.0, 1 - share)
        return falling * min(1.0, (share + 1e-3) / self.warmup) if self.warmup else falling


RECIPES = {
    "transformers": Recipe(
        partial(transformers_batches, workers=0),
        *(5e-4, 5e-4),
        cosine=False,
        warmup=0.0,
        weight_decay=0.1,
        betas=(0.9, 0.999),
        pools_by_mean=False,
    ),
    "open_clip": Recipe(open_clip_batches, 1e-4, 1e-4, max_norm=math.inf),
    "tuned": Recipe(tuned_batches, 5e-5, 1e-3, weight_decay=0.05, freezes_norms=True),
}


def loop(bench: Bench, judge: Judge, budget: float, points: int) -> dict[str, Any]:
    """Train by a recipe until the time is over, and be judged at equal fractions of it."""
    recipe, model, steps = RECIPES[bench.task.contestant], bench.stock_model(), 0
    towers = stock_towers(bench, model, recipe.pools_by_mean)
    heads = [*model.visual_projection.parameters(), *model.text_projection.parameters(), model.logit_scale]
    rest = [*model.vision_model.parameters(), *model.text_model.parameters()]
    groups = [{"params": rest, "peak": recipe.tower_rate}, {"params": heads, "peak": recipe.projection_rate}]
    adam = torch.optim.AdamW(groups, lr=0.0, betas=recipe.betas, weight_decay=recipe.weight_decay)
    optimizer = bench.accelerator.prepare(adam)
    for batch in recipe.batches(bench):
        model.train()
        for module in model.modules():
            if recipe.freezes_norms and isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.eval()
        for group in adam.param_groups:
            group["lr"] = group["peak"] * recipe.rate(judge.clock.seconds / budget)
        with bench.accelerator.autocast():
            image_NE, text_NE = (F.normalize(side, dim=-1) for side in towers(batch))
            loss = clip_loss(image_NE, text_NE, model.logit_scale.exp())
        bench.accelerator.backward(loss)
        bench.accelerator.clip_grad_norm_(model.parameters(), recipe.max_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        steps += 1
        if judge.clock.seconds >= budget * (len(judge.found) + 1) / points:
            judge_now(model, towers, judge)
        if judge.clock.seconds >= budget:
            break
    return {"steps": steps}


# -- this project -----------------------------------------------------------------------------------------------------


class Watch(TrainerCallback):
    """Follows a run of scripts/pretrain.py by a clock without evaluations; ends it in time."""

    def __init__(self, clock: Clock, budget: float = math.inf):
        self.clock, self.budget = clock, budget
        self.ready = 0.0  # seconds before the first step
        self.ends: list[float] = []
        self.points: list[list[float]] = []
        self.left = 0.0

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is ready to begin."""
        self.ready = self.clock.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock, and end training once the time is over."""
        self.ends.append(self.clock.seconds)
        control.should_training_stop |= self.ends[-1] >= self.budget

    def on_evaluate_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.points.append([self.clock.seconds])
        self.left = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start it again."""
        self.clock.begin += time.perf_counter() - self.left
        self.points[-1].append(kwargs["metrics"]["eval_mean_recall"])


def tandem(bench: Bench, judge: Judge, budget: float, points: int) -> dict[str, Any]:
    """Train by scripts/pretrain.py for as many steps as fit into the time."""
    flags = [f"--seed={bench.task.seed}"]
    frozen = bench.task.model["freeze_vision"] and bench.task.model["freeze_text"]
    groups = {DataArguments: bench.task.data, LoaderArguments: bench.task.loader, ModelArguments: bench.task.model}
    for kind, values in groups.items():
        defaults = {each.name: each.default for each in fields(kind)}
        flags += [f"--set={name}={value}" for name, value in values.items() if value != defaults[name]]
    if bench.task.contestant == "tandem_towers":
        flags += ["--objectives=contrastive:1", "--fusion_layers=0"]
    with tempfile.TemporaryDirectory() as folder:
        if not frozen:
            flags.append(f"--global_batch_size={bench.task.batch_size}")
            probe = Watch(Clock(bench.device))
            pretrain.main(
                [*flags, f"--max_steps={PROBE_STEPS}", "--save_steps=0", f"--output_dir={folder}/probe"], [probe]
            )
            a_step = (probe.ends[-1] - probe.ends[0]) / (PROBE_STEPS - 1)  # the first waits for the loader
            flags.append(f"--max_steps={max(1, int((budget - probe.ready) / a_step))}")
        watch = Watch(Clock(bench.device), budget)
        pretrain.main([*flags, f"--output_dir={folder}/run"], [watch])
        model = load_model(f"{folder}/run", fusion_layers=0).to(bench.device).eval()  # type: ignore[arg-type]

        def embed(batch: Batch) -> tuple[Tensor, Tensor]:
            seen = model.vision_features(batch["pixel_values"], with_taps=False)[0]
            read = model.text_features(batch["input_ids"], batch["attention_mask"], with_taps=False)[0]
            return model.visual_projection(seen), model.text_projection(read)

        judge(embed)
    seconds, _ = max(watch.points, key=lambda point: point[1])
    return {"points": watch.points, "seconds": seconds, "steps": len(watch.ends)}


# -- one process ------------------------------------------------------------------------------------------------------


def sentence_transformers(bench: Bench, judge: Judge, budget: float, points: int) -> dict[str, Any]:
    """Its own trainer."""
    from benchmarks.rivals.sentence_pairs import train

    return train(bench, judge, budget, points, RECIPES["open_clip"].rate)


CONTESTANTS: dict[str, Callable[[Bench, Judge, float, int], dict[str, Any]]] = {
    "tandem": tandem,
    "tandem_towers": tandem,
    "cca": cca,
    "ridge": ridge,
    **dict.fromkeys(RECIPES, loop),
    "sentence_transformers": sentence_transformers,
}


def learn(question: dict[str, Any]) -> dict[str, Any]:
    """Take part once; return both splits' recalls at the best validation, and over time."""
    bench = Bench(Task(**question["task"]))
    judge = Judge(bench, Clock(bench.device))
    more = CONTESTANTS[bench.task.contestant](bench, judge, 60 * question["minutes"], question["points"])
    return judge.result() | more | {"about": bench.about()}


if __name__ == "__main__":
    logging.disable(logging.INFO)
    warnings.filterwarnings("ignore", message=".*torch.jit.script", category=FutureWarning)
    serve(learn)
