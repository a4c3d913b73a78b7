"""Which way of joining two encoders finds held-out images best, in equal time.

    python -m benchmarks.learning --train_file photos_en/captions.jsonl --minutes 4 \\
        --vision_model_name_or_path mobilenet_v2_1.0_224 --text_model_name_or_path all-MiniLM-L6-v2

- `tandem`: scripts/pretrain.py with its defaults; a short run before tells how many steps fit into the time (between two frozen encoders
  it takes as many as the defaults have). Its time includes reading the data, the closed form and checkpoints.
- `cca`: canonical correlations of the frozen encoders' features, a closed form, which draws nothing at random.
- `tuned`: a plain loop with what experience suggests: 1e-3 for projections and 5e-5 for encoders, warm-up and cosine, crops of at least
  80 %, captions padded to the longest, channels-last images, frozen batch norms, clipping.
- `transformers`: the loop of its contrastive-image-text example: captions padded to 128 tokens, the text encoder's pooler, a linear
  schedule, and a learning rate of 5e-4 in place of 5e-5, with which it learns less.

Each contestant is a process, one after the other. Evaluation costs no time. The loops' schedules follow the clock, so nobody has to
guess a number of steps. All keep the weights that were best on validation; the table is of the test split, by an image's own captions,
with 95 % intervals over images.
"""

import argparse
import logging
import math
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import TrainerCallback

from benchmarks.harness import MODEL_FLAGS, Contestant, flags_of, names, print_table, synchronize
from benchmarks.peers import Batch, Bench, add_data_flags, clip_loss, mean_of, transformers_batches, tuned_batches
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media import Image
from mm_utils.evaluation.metrics import mean_interval
from mm_utils.model.build import load_model
from mm_utils.training.closed_form import Features, fit
from scripts import pretrain

PROBE_STEPS = 8
Embed = Callable[[Batch], tuple[Tensor, Tensor]]
"""From a batch of evaluation to embeddings of its images [n, E] and captions [t, E]."""


class Clock:
    """Seconds of work; what happens while it is paused does not count."""

    def __init__(self, device: torch.device):
        self.device = device
        self.begin = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds until now, all work done."""
        synchronize(self.device)
        return time.perf_counter() - self.begin

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do not count what is done within."""
        synchronize(self.device)
        left = time.perf_counter()
        yield
        self.begin += time.perf_counter() - left


class Judge:
    """Held-out recall by one code for all; the clock stands still meanwhile."""

    def __init__(self, bench: Bench):
        if "test" not in bench.splits:
            raise ValueError("The data have no test split. Give some rows of --train_file the split test.")
        self.clock = Clock(bench.device)
        self.points = list[dict[str, Any]]()
        self.loaders = Loaders(bench.loader_args, bench.device, bench.pad_token_id, Image(*bench.geometry))
        self.splits = {
            split: tokenize_captions(bench.splits[split], bench.tokenizer, bench.max_tokens)
            for split in ("validation", "test")
        }

    def __call__(self, embed: Embed) -> None:
        """Embed the held-out splits and keep what they give."""
        seconds = self.clock.seconds
        with self.clock.paused(), torch.no_grad():
            found = {split: self.measure(embed, rows) for split, rows in self.splits.items()}
        self.points.append({"seconds": seconds, **found})

    def measure(self, embed: Embed, rows: Dataset) -> dict[str, tuple[float, float]]:
        """Recalls of one split with half widths; equal captions have equal scores."""
        image_ME, text_TE = (
            torch.cat(side) for side in zip(*map(embed, self.loaders.evaluation(rows, 64)), strict=True)
        )
        captions = [caption for own in rows["captions"] for caption in own]
        first: dict[str, int] = {}
        places = [first.setdefault(caption, place) for place, caption in enumerate(captions)]
        owner_T = torch.tensor([image for image, own in enumerate(rows["captions"]) for _ in own])
        return recalls(image_ME, text_TE[places], owner_T)


def recalls(image_ME: Tensor, text_TE: Tensor, owner_T: Tensor) -> dict[str, tuple[float, float]]:
    """Recalls both ways with half of their 95 % intervals over images; a tie with a wrong candidate counts against the model."""
    score_MT = F.normalize(image_ME.double().cpu(), dim=-1) @ F.normalize(text_TE.double().cpu(), dim=-1).T
    images_M = torch.arange(len(score_MT))
    right_MT = images_M[:, None] == owner_T
    found = {}
    for way, scores, right, image_of in (
        ("text to image", score_MT.T, right_MT.T, owner_T),
        ("image to text", score_MT, right_MT, images_M),
    ):
        best = scores.masked_fill(~right, -math.inf).amax(1, keepdim=True)
        rank_Q = ((scores >= best) & ~right).sum(1)
        for k in (1, 5, 10):
            found[f"{way} R@{k}"] = mean_interval((rank_Q < k).double(), image_of)
    return found


def mean_recall(found: dict[str, tuple[float, float]]) -> float:
    """The mean of all recalls of a split."""
    return sum(value for value, _ in found.values()) / len(found)


def stock_embed(bench: Bench, model: Any, pools_by_mean: bool = True, projects: bool = True) -> Embed:
    """The stock class, pooled by the mean or its own way, with or without projections."""

    def embed(batch: Batch) -> tuple[Tensor, Tensor]:
        input_ids = batch["input_ids"].to(bench.device)
        attention_mask = (input_ids != bench.pad_token_id).long()
        seen = model.vision_model(pixel_values=batch["pixel_values"].to(bench.device, non_blocking=True))[1]
        states, pooled, *_ = model.text_model(input_ids=input_ids, attention_mask=attention_mask).to_tuple()
        read = mean_of(states, attention_mask) if pools_by_mean else pooled
        return (model.visual_projection(seen), model.text_projection(read)) if projects else (seen, read)

    return embed


# -- the closed form -----------------------------------------------------------------------------------------------------


def frozen_features(bench: Bench, judge: Judge) -> tuple[Embed, Features]:
    """The encoders without projections, and their unit features of the training split, fp64."""
    embed = stock_embed(bench, bench.stock_model().eval(), projects=False)
    images = list[Tensor]()
    texts = list[Tensor]()
    owners = list[Tensor]()
    number = 0
    with torch.no_grad():
        for batch in judge.loaders.evaluation(bench.rows, 64):
            image_nA, text_tB = embed(batch)
            images.append(image_nA)
            texts.append(text_tB)
            owners.append(batch["caption_image"] + number)
            number += len(image_nA)
    return embed, Features(torch.cat(images), torch.cat(texts), torch.cat(owners)).unit()


def cca(bench: Bench, judge: Judge, args: argparse.Namespace) -> None:
    """Canonical correlations."""
    embed, features = frozen_features(bench, judge)
    start = fit(features, bench.model.config.projection_dim)

    def mapped(batch: Batch) -> tuple[Tensor, Tensor]:
        image_nA, text_tB = (side.cpu().double() for side in embed(batch))
        return image_nA @ start.image_AE, text_tB @ start.text_BE

    judge(mapped)


# -- loops ------------------------------------------------------------------------------------------------------------


def loop(bench: Bench, judge: Judge, args: argparse.Namespace, tuned: bool) -> None:
    """Train until the time is over, and be judged at equal fractions of it."""
    model = bench.stock_model()
    loss_of = clip_loss()
    budget = 60 * args.minutes
    if tuned:
        model.to(memory_format=torch.channels_last)
    embed = stock_embed(bench, model, pools_by_mean=tuned)
    heads = [*model.visual_projection.parameters(), *model.text_projection.parameters(), model.logit_scale]
    rest = [weight for part in (model.vision_model, model.text_model) for weight in part.parameters()]
    rates = (5e-5, 1e-3) if tuned else (5e-4, 5e-4)
    groups = [{"params": part, "peak": peak} for part, peak in zip((rest, heads), rates, strict=True)]
    settings = {"weight_decay": 0.05, "betas": (0.9, 0.98)} if tuned else {"weight_decay": 0.1}
    optimizer = bench.accelerator.prepare(torch.optim.AdamW(groups, **settings))  # type: ignore[arg-type]
    for batch in tuned_batches(bench) if tuned else transformers_batches(bench):
        model.train()
        if tuned:
            for module in model.modules():
                module.train(not isinstance(module, nn.BatchNorm2d) and module.training)
        share = min(1.0, judge.clock.seconds / budget)
        factor = (1 + math.cos(math.pi * share)) / 2 * min(1.0, (share + 1e-3) / 0.1) if tuned else 1 - share
        for group in optimizer.param_groups:
            group["lr"] = group["peak"] * factor
        with bench.accelerator.autocast():
            image_NE, text_NE = (F.normalize(side.float(), dim=-1) for side in embed(batch))
            loss = loss_of(image_NE, text_NE, model.logit_scale.exp())
        bench.accelerator.backward(loss)
        bench.accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if judge.clock.seconds >= budget * (len(judge.points) + 1) / args.points:
            model.eval()
            judge(embed)
        if judge.clock.seconds >= budget:
            return


class Watch(TrainerCallback):
    """Follows a run of scripts/pretrain.py by a clock without evaluations; ends it in time."""

    def __init__(self, clock: Clock, budget: float = math.inf):
        self.clock = clock
        self.budget = budget
        self.ready = self.left = 0.0
        self.ends: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Training is ready to begin."""
        self.ready = self.clock.seconds

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Read the clock, and end training once the time is over."""
        self.ends.append(self.clock.seconds)
        control.should_training_stop |= self.ends[-1] >= self.budget

    def on_evaluate_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Stop the clock."""
        self.left = time.perf_counter()

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Start it again."""
        self.clock.begin += time.perf_counter() - self.left


def tandem(bench: Bench, judge: Judge, args: argparse.Namespace) -> None:
    """Train by scripts/pretrain.py for as many steps as fit into the time."""
    chosen = ("train_file", "dataloader_num_workers", "max_seq_length", *MODEL_FLAGS)
    flags = [f"--{name}={getattr(args, name)}" for name in chosen if getattr(args, name) is not None]
    flags += [f"--{name}" for name in ("freeze_vision", "freeze_text") if getattr(args, name)]
    if args.freeze_vision and args.freeze_text:
        flags.append("--config=recipes/two_encoders.yaml")
    flags.append(f"--seed={args.seed}")
    budget = 60 * args.minutes
    with tempfile.TemporaryDirectory() as folder:
        if not (args.freeze_vision and args.freeze_text):
            flags.append(f"--global_batch_size={bench.batch_size}")
            probe = Watch(Clock(bench.device))
            short = ["--save_steps=0", f"--max_steps={PROBE_STEPS}", f"--output_dir={folder}/probe"]
            pretrain.main([*flags, *short], [probe])
            a_step = (probe.ends[-1] - probe.ends[0]) / (PROBE_STEPS - 1)  # the first waits for the loader
            flags.append(f"--max_steps={max(1, int((budget - probe.ready) / a_step))}")
        judge.clock = Clock(bench.device)
        pretrain.main([*flags, f"--output_dir={folder}/run"], [Watch(judge.clock, budget)])
        model = load_model(f"{folder}/run", fusion_layers=0).to(bench.device).eval()

        def embed(batch: Batch) -> tuple[Tensor, Tensor]:
            image_nE, _ = model.encode_image(batch["pixel_values"], with_keys_values=False)
            return image_nE, model.encode_text(batch["input_ids"], batch["attention_mask"], with_states=False)[0]

        judge(embed)


CONTESTANTS: dict[str, Callable[[Bench, Judge, argparse.Namespace], None]] = {
    "tandem": tandem,
    "cca": cca,
    "tuned": partial(loop, tuned=True),
    "transformers": partial(loop, tuned=False),
}


class Learner:
    """One contestant in its process, which learns once."""

    def __init__(self, args: argparse.Namespace):
        logging.disable(logging.INFO)
        warnings.filterwarnings("ignore", category=FutureWarning)
        self.args = args

    def __call__(self, _: Any) -> dict[str, Any]:
        """Return both splits' recalls at the weights that were best on validation."""
        bench = Bench(self.args, self.args.seed)
        judge = Judge(bench)
        CONTESTANTS[self.args.contestant](bench, judge, self.args)
        return max(judge.points, key=lambda point: mean_recall(point["validation"]))


def main(argv: list[str] | None = None) -> list[dict[str, Any]]:
    """Print the table and return its rows."""
    parser = flags_of(__doc__)
    parser.add_argument("--minutes", type=float, default=4.0, help="time of each contestant, without evaluation")
    parser.add_argument("--seeds", default="0,1,2", help="seeds of those that draw at random, with commas between")
    parser.add_argument(
        "--contestants", type=names([*CONTESTANTS]), default=",".join(CONTESTANTS), help="who takes part"
    )
    parser.add_argument("--points", type=int, default=5, help="how often a loop is judged")
    add_data_flags(parser)
    args = parser.parse_args(argv)
    seeds = [int(seed) for seed in args.seeds.split(",")]
    rows: list[dict[str, Any]] = []
    for name in args.contestants:
        for seed in seeds[:1] if name == "cca" else seeds:
            process = Contestant(Learner, argparse.Namespace(**{**vars(args), "contestant": name, "seed": seed}))
            best = process.ask()
            process.end()
            row: dict[str, Any] = {"contestant": name, "seed": seed}
            if process.error:
                row["error"] = process.error
            else:
                shown = {way: figure for way, figure in best["test"].items() if not way.endswith("R@5")}
                row |= {way: f"{value:.3f} ± {half:.3f}" for way, (value, half) in shown.items()}
                row |= {"validation, mean recall": mean_recall(best["validation"]), "best after, s": best["seconds"]}
            rows.append(row)
            print_table(rows)
    return rows


if __name__ == "__main__":
    main()
