"""A model that looks up its answers, and the definition of ranks by sorting, for tests of evaluation."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mm_utils.data import media
from mm_utils.data.batches import order
from mm_utils.data.batches.dataset import Collator
from mm_utils.evaluation.embeddings import Embeddings

CPU = torch.device("cpu")
ACCELERATOR = SimpleNamespace(device=CPU, is_main_process=False, autocast=nullcontext)


def split_of(image: Tensor, text: Tensor, owner: list[int]) -> Embeddings:
    """A split whose text t belongs to image `owner[t]`."""
    keys = 1000 + 7 * torch.arange(len(image))
    texts = torch.zeros(len(text), 2, 1, dtype=torch.long)
    return Embeddings(image, text, keys, keys[torch.tensor(owner)], torch.arange(len(image)), texts)


def lists_by_sorting(
    cosine: Tensor, right: Tensor, head: Tensor | None = None, first: int = 0, scale: float = 0.0
) -> list[list[bool]]:
    """The definition: sort by cosine, wrong items before right ones; then sort the first ones again by the head's score.

    NaN is the best score of a wrong item and the worst of a right one.

    Of each query, whether the items of its list are right, the best one first.
    """
    lists = []
    head = torch.zeros_like(cosine) if head is None else head
    for row, of_head, hits in zip(cosine.tolist(), head.tolist(), right.tolist(), strict=True):
        row = [
            (-math.inf if hit else math.inf) if math.isnan(score) else score
            for score, hit in zip(row, hits, strict=True)
        ]
        order = sorted(range(len(row)), key=lambda item: (-row[item], hits[item]))
        again = sorted(order[:first], key=lambda item: (-(of_head[item] + scale * row[item]), hits[item]))
        lists.append([hits[item] for item in [*again, *order[first:]]])
    return lists


def figures_of_lists(lists: list[list[bool]]) -> dict[str, float]:
    """The figures of ranked lists, item by item: recall and ranks."""
    ranks = sorted(hits.index(True) + 1 for hits in lists)
    middle = len(ranks) // 2
    found = {f"recall@{k}": sum(any(hits[:k]) for hits in lists) / len(lists) for k in (1, 5, 10)}
    return {**found, "mean_rank": sum(ranks) / len(ranks), "median_rank": (ranks[middle] + ranks[~middle]) / 2}


class TruthfulModel:
    """Looks up embeddings by the number that an image shows and a caption holds; its head knows which belong together.

    The number of image i fills its pixels; caption t is the tokens [1, t, image of t].

    Attributes:
        logits: `[M, T]`; if set, the head returns these.
        seen, scored: numbers of images encoded and of pairs scored.
    """

    voices = ("match",)
    logit_scale = torch.tensor(2.0)
    fusion: Any = True

    def __init__(self, images: int = 23):
        generator = torch.Generator().manual_seed(9)
        counts = torch.randint(1, 4, (images,), generator=generator)
        self.owner = torch.repeat_interleave(torch.arange(images), counts).tolist()
        self.image, self.text = (
            normalize(torch.randn(count, 6, generator=generator), dim=1) for count in (images, len(self.owner))
        )
        self.scored = 0
        self.seen = 0
        self.config = SimpleNamespace(projection_dim=6, rerank_weights=None, text_padding={"length": 3})
        self.logits: Tensor | None = None

    @classmethod
    def with_noise(cls, seed: int, images: int = 23) -> Any:
        """A model whose match logits are noise, about as large as its scaled cosines."""
        model = cls(images)
        model.logits = 4 * torch.randn(images, len(model.owner), generator=torch.Generator().manual_seed(seed))
        return model

    def vision_features(self, pixel_values: Tensor, with_taps: bool = True) -> tuple[Tensor, tuple[Tensor, ...]]:
        number = pixel_values[:, 0, 0, 0].round().long()
        self.seen += len(number)
        return number, (number,) if with_taps else ()

    def project_image(self, number: Tensor, taps: Sequence[Tensor]) -> tuple[Tensor, Any]:
        return self.image[number], (
            number.float()[None, :, None, None, None].expand(2, -1, 1, 1, 1),
        ) if taps else None

    def encode_text(
        self, input_ids: Tensor, attention_mask: Tensor, with_states: bool = True
    ) -> tuple[Tensor, Tensor]:
        assert (attention_mask[:, :3] == 1).all()
        return self.text[input_ids[:, 1]], input_ids[:, :, None].float()

    def match_pairs(self, keys_values: tuple[Tensor, ...], text_states: Tensor, attention_mask: Tensor) -> Tensor:
        assert len(text_states) == len(attention_mask) == keys_values[0].shape[1]
        self.scored += len(text_states)
        image = keys_values[0][0, :, 0, 0, 0]
        if self.logits is not None:
            return self.logits[image.long(), text_states[:, 1, 0].long()]
        return torch.where(image == text_states[:, 2, 0], 1000.0, -1000.0)

    def voice_scores(
        self, voices: Sequence[str], keys_values: Any, states: Tensor, attention_mask: Tensor, input_ids: Tensor
    ) -> Tensor:
        given = {"match": lambda: self.match_pairs(keys_values, states, attention_mask)}
        if "caption" in voices:
            given["caption"] = lambda: self.caption_scores(keys_values, input_ids, attention_mask)  # type: ignore[attr-defined]
        return torch.stack([given[name]() for name in voices], 1)

    def batches(self, batch_size: int, unreadable: tuple[int, ...] = ()) -> list[dict[str, Any]]:
        """This rank's batches, as `Loaders.evaluation` yields them."""
        captions = [[] for _ in self.image]
        for text, image in enumerate(self.owner):
            captions[image].append(text)
        examples = [
            {"input_ids": [[1, text, number, *[5] * (text % 9)] for text in texts], "caption_keys": texts}
            for number, texts in enumerate(captions)
        ]
        return evaluation_batches(examples, batch_size, unreadable, first_key=10**12)

    def split(self) -> Embeddings:
        return split_of(self.image, self.text, self.owner)


def evaluation_batches(
    examples: list[dict[str, Any]], batch_size: int, unreadable: tuple[int, ...], first_key: int = 0
) -> list[dict[str, Any]]:
    """This rank's batches of examples whose number fills their pixels, as `Loaders.evaluation` yields them."""
    rows = [
        {"skipped": f"image {number}: broken"}
        if number in unreadable
        else {
            "row": number,
            "image_id": str(number),
            "image_key": first_key + number,
            "pixel_values": torch.full((3, 2, 2), number, dtype=torch.uint8),
            **example,
        }
        for number, example in enumerate(examples)
    ]
    collate = Collator(0, media.Image(2))
    return [collate([rows[row] for row, _ in draws]) for draws in order.evaluation_batches(len(rows), batch_size)]
