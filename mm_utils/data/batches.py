"""Rows become examples, and examples become batches: which caption, which crop, stacked and padded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mm_utils.data.augment import center_square, random_square
from mm_utils.data.features import CachedFeatures
from mm_utils.data.images import UnreadableImageError, open_image
from mm_utils.data.order import Draw, choose_captions

Batch = dict[str, Any]


class Pairs(Dataset):
    """Rows of the one schema as training or evaluation examples.

    An example is a pure function of (seed, epoch, image id): which caption, which crop. An image that cannot be decoded
    gives `{"skipped": reason}` in its place; the collator leaves it out and says so. Rows with features of a frozen tower
    (`mm_utils.data.features`) give those, in training; where they stand for images, none is decoded.
    """

    def __init__(
        self, rows: datasets.Dataset, image_size: int, *, train: bool, min_crop_area: float = 1.0, seed: int = 0
    ):
        self.cached = CachedFeatures(rows)
        self.rows = rows.remove_columns(self.cached.names).with_transform(self._decode)
        self.image_size, self.train, self.min_crop_area, self.seed = image_size, train, min_crop_area, seed

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> dict[str, Any]:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[dict[str, Any]]:
        places = [row for row, _ in draws]
        columns = {**self.rows[places], **self.cached[places]}
        examples = (dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True))
        return [self._example(example, *draw) for example, draw in zip(examples, draws, strict=True)]

    def _decode(self, columns: dict[str, list]) -> dict[str, list]:
        if "image" not in columns:
            return columns
        side = self.image_size
        if self.train and self.min_crop_area < 1:
            side = int(side * self.min_crop_area**-0.5) + 1  # so that even the smallest crop is not enlarged
        images: list[Any] = []
        for image_id, value in zip(columns["id"], columns["image"], strict=True):
            try:
                images.append(open_image(value, side))
            except UnreadableImageError as error:
                images.append(f"image {image_id}: {error}")
        return {**columns, "image": images}

    def _example(self, row: dict[str, Any], index: int, epoch: int) -> dict[str, Any]:
        if isinstance(row["image"], str):
            return {"skipped": row["image"]}
        example = {"row": index, "image_id": row["id"], "image_key": row["image_key"]}
        if not self.train:
            pixels = center_square(row["image"], self.image_size)
            return {
                **example,
                "pixel_values": pixels,
                "input_ids": row["input_ids"],
                "caption_keys": row["caption_keys"],
            }
        key, count = (np.array([value]) for value in (row["image_key"], len(row["input_ids"])))
        caption = int(choose_captions(self.seed, np.array([epoch]), key, count)[0])
        if not self.cached.has_vision:
            rng = random.Random(f"{self.seed} {epoch} {row['id']}")
            example["pixel_values"] = random_square(row["image"], self.image_size, self.min_crop_area, rng)
        return {
            **example,
            **self.cached.example(row, caption),
            "input_ids": [row["input_ids"][caption]],
            "caption_keys": [row["caption_keys"][caption]],
        }


@dataclass
class Collator:
    """Stack images and pad captions to the longest.

    In training, rows are sorted by the length of their caption, longest first: the loss does not depend on the order, and
    the text tower takes them in groups of about one length (`mm_utils.padding`).

    Batch of b images and t captions (t = b in training):
        pixel_values: uint8 `[b, 3, S, S]`; input_ids, attention_mask: int64 `[t, L]`
        vision_pooled, vision_taps_0, ... in place of pixel_values, and text_pooled, text_states, as `cached` names them
        ids: int64 `[t, 2]`, image key and caption key of every caption; caption_image: `[t]`, its image's place in b
        rows: `[b]`, place in the data set; image_ids: list of b; lengths: list of t, tokens
        skipped: list of reasons

    Attributes:
        cached: the features that examples hold, of no example, see `mm_utils.data.features.CachedFeatures.blank`.
    """

    pad_token_id: int
    image_size: int
    longest_first: bool = False
    cached: dict[str, Tensor] = field(default_factory=dict)

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Collate what `Pairs` gives."""
        kept = [example for example in examples if "skipped" not in example]
        if self.longest_first:
            kept.sort(key=lambda example: -len(example["input_ids"][0]))
        captions = [ids for example in kept for ids in example["input_ids"]]
        input_ids, attention_mask = pad_captions(captions, self.pad_token_id)
        counts = torch.tensor([len(example["input_ids"]) for example in kept], dtype=torch.long)
        keys = [(example["image_key"], key) for example in kept for key in example["caption_keys"]]
        blank = dict(self.cached)
        if "vision_pooled" not in blank:
            blank["pixel_values"] = torch.empty(0, 3, self.image_size, self.image_size, dtype=torch.uint8)
        return {
            **{name: _stack([example[name] for example in kept], none) for name, none in blank.items()},
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "ids": torch.tensor(keys, dtype=torch.long).view(-1, 2),
            "caption_image": torch.repeat_interleave(torch.arange(len(kept)), counts),
            "rows": torch.tensor([example["row"] for example in kept], dtype=torch.long),
            "image_ids": [example["image_id"] for example in kept],
            "lengths": list(map(len, captions)),
            "skipped": [example["skipped"] for example in examples if "skipped" in example],
        }


def pad_captions(captions: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of t captions, int64 `[t, L]`, padded to the longest; L is 1 if there is none."""
    input_ids = torch.full((len(captions), max(map(len, captions), default=1)), pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for place, ids in enumerate(captions):
        input_ids[place, : len(ids)] = torch.tensor(ids)
        attention_mask[place, : len(ids)] = 1
    return input_ids, attention_mask


def _stack(rows: list[Tensor], none: Tensor) -> Tensor:
    """`[b, ...]`; rows that differ in their first dimension are padded with zeros."""
    if len({len(row) for row in rows}) > 1:
        return pad_sequence(rows, batch_first=True)
    return torch.stack(rows) if rows else none
