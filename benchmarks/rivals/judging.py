"""Held-out recall and clock of the contestants of `benchmarks/learning.py`."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import synchronize
from benchmarks.rivals.loop_bench import Batch, Bench
from mm_utils.data.batches.loaders import Loaders
from mm_utils.data.batches.tokens import tokenize_captions
from mm_utils.data.media import Image
from mm_utils.evaluation.metrics import mean_interval

RECALL_AT = (1, 5, 10)
Towers = Callable[[Batch], tuple[Tensor, Tensor]]
"""From a batch of evaluation to embeddings of its images [n, E] and captions [t, E]."""


class Clock:
    """Seconds of work; what happens while it is paused does not count."""

    def __init__(self, device: torch.device):
        self.device, self.begin = device, time.perf_counter()

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

    def __init__(self, bench: Bench, clock: Clock):
        self.clock, self.found = clock, list[dict[str, Any]]()
        self.loaders = Loaders(bench.loader_args, bench.device, bench.pad_token_id, Image(*bench.geometry))
        if "test" not in bench.splits:
            raise ValueError("The data has no test split. Give --test_file.")
        self.rows = {
            split: tokenize_captions(bench.splits[split], bench.tokenizer, bench.max_tokens)
            for split in ("validation", "test")
        }

    def __call__(self, towers: Towers) -> None:
        """Embed the held-out splits and keep what they give."""
        seconds = self.clock.seconds
        with self.clock.paused(), torch.no_grad():
            measured = {split: self.measure(towers, rows) for split, rows in self.rows.items()}
        self.found.append({"seconds": seconds, **measured})

    def measure(self, towers: Towers, rows: Dataset) -> dict[str, Any]:
        """Recalls of one split and the `half_widths` of their intervals; equal captions have equal scores."""
        batches = self.loaders.evaluation(rows, 64)
        image_ME, text_TE = (torch.cat(side) for side in zip(*map(towers, batches), strict=True))
        captions = [caption for own in rows["captions"] for caption in own]
        first: dict[str, int] = {}
        places = [first.setdefault(caption, place) for place, caption in enumerate(captions)]
        relevant_MT = caption_relevance(list(rows["captions"]))[0]
        hits = hits_of(cosines(image_ME, text_TE[places]), relevant_MT)
        return with_mean(means(hits)) | {"half_widths": half_widths(hits, relevant_MT)}

    def result(self) -> dict[str, Any]:
        """What was best on validation, and recall over time."""
        best = max(self.found, key=lambda each: each["validation"]["mean_recall"])
        return best | {"points": [[each["seconds"], each["validation"]["mean_recall"]] for each in self.found]}


def recalls(image_ME: Tensor, text_TE: Tensor, relevant_MT: Tensor) -> dict[str, float]:
    """Recalls of cosines in both directions, and their mean."""
    return with_mean(retrieval_metrics(cosines(image_ME, text_TE), relevant_MT))


def cosines(image_ME: Tensor, text_TE: Tensor) -> Tensor:
    """Scores `[images, captions]`, fp64."""
    return F.normalize(image_ME.double().cpu(), dim=-1) @ F.normalize(text_TE.double().cpu(), dim=-1).T


def with_mean(found: dict[str, float]) -> dict[str, float]:
    """Add the mean recall."""
    return found | {"mean_recall": sum(found.values()) / len(found)}


def stock_towers(bench: Bench, model: Any, pools_by_mean: bool, projects: bool = True) -> Towers:
    """The stock class, pooled its own way or by the mean, with or without projections."""

    def embed(batch: Batch) -> tuple[Tensor, Tensor]:
        input_ids = batch["input_ids"].to(bench.device)
        attention_mask = (input_ids != bench.pad_token_id).long()
        seen = model.vision_model(pixel_values=bench.layout(batch["pixel_values"]))[1]
        states, pooled, *_ = model.text_model(input_ids=input_ids, attention_mask=attention_mask).to_tuple()
        read = mean_of(states, attention_mask) if pools_by_mean else pooled
        return (model.visual_projection(seen), model.text_projection(read)) if projects else (seen, read)

    return embed


def mean_of(state_NLC: Tensor, attention_mask_NL: Tensor) -> Tensor:
    """Return the mean of the tokens that are not padding."""
    weight_NL1 = attention_mask_NL[..., None].to(state_NLC)
    return (state_NLC * weight_NL1).sum(1) / weight_NL1.sum(1)


def judge_now(model: nn.Module, towers: Towers, judge: Judge) -> None:
    """Judge a model that goes on being trained."""
    model.eval()
    judge(towers)
    model.train()


def ranks(scores: torch.Tensor, relevant: torch.Tensor) -> torch.Tensor:
    """For each row (a query), how many wrong candidates score at least as its best right one.

    `scores` and `relevant` (bool) are queries x candidates. Ties with a wrong candidate count against the model.
    """
    if not torch.isfinite(scores).all():
        raise ValueError("The scores are not all finite.")
    if not relevant.any(dim=1).all():
        raise ValueError("A query has no right candidate.")
    best_right = scores.masked_fill(~relevant, float("-inf")).max(dim=1, keepdim=True).values
    return ((scores >= best_right) & ~relevant).sum(dim=1)


def retrieval_metrics(scores: torch.Tensor, relevant: torch.Tensor) -> dict[str, float]:
    """R@k both ways from images x captions scores; `relevant` says which are right.

    Image to text: any right caption in the first k is a hit. Text to image: likewise, and each caption is a query.
    """
    return means(hits_of(scores, relevant))


def means(hits: dict[str, torch.Tensor]) -> dict[str, float]:
    """Recalls, of the hits of queries."""
    return {name: hit_Q.mean().item() for name, hit_Q in hits.items()}


def half_widths(hits: dict[str, torch.Tensor], own_MT: torch.Tensor) -> dict[str, float]:
    """Half the width of each recall's 95 % interval over images; `own_MT` says whose captions are whose."""
    image_of = {"text_to_image": own_MT.int().argmax(0), "image_to_text": torch.arange(len(own_MT))}
    return {name: mean_interval(hit_Q, image_of[name.partition("_R@")[0]])[1] for name, hit_Q in hits.items()}


def hits_of(scores: torch.Tensor, relevant: torch.Tensor) -> dict[str, torch.Tensor]:
    """By recall, 1 for each query that finds, else 0."""
    by_direction = {"text_to_image": ranks(scores.T, relevant.T), "image_to_text": ranks(scores, relevant)}
    return {f"{way}_R@{k}": (rank < k).double() for way, rank in by_direction.items() for k in RECALL_AT}


def caption_relevance(captions_by_image: list[list[str]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two images x captions tables: own captions, and also equal ones of other images."""
    captions = [caption for own in captions_by_image for caption in own]
    owner = torch.tensor([index for index, own in enumerate(captions_by_image) for _ in own])
    by_owner = torch.arange(len(captions_by_image))[:, None] == owner[None, :]
    by_text = torch.tensor([[caption in own for caption in captions] for own in map(set, captions_by_image)])
    return by_owner, by_text
