"""Regions of an image, a box with a phrase each: tokenised once, followed into the square.

A moment of a clip or a sound, a span with a phrase, is a region on the time axis: x is time, in seconds of the stored medium, y
is one wide, and the square is the window of time that an example shows. So what regions have, moments have too.

`RegionReader` adds columns for the r regions of a row, and makes a batch of b images with at most K regions:

==========================  ===========================  ===========================================================
name                        in a row                     in a batch
==========================  ===========================  ===========================================================
``region_boxes``            4r numbers: x, y, width,     `[b, K, 4]` float32: left, top, right, bottom in the square,
                            height of each, in pixels;   each in [0, 1]
                            or start, 0, seconds, 1
``region_input_ids``        a list of ids per phrase     `[b, K, L]` int64
``region_attention_mask``                                `[b, K, L]` int64; all zeros where there is no region
``region_keys``             a key per phrase             `[b, K]` int64, the same for equal phrases
==========================  ===========================  ===========================================================

The first dimension is the image, as in all tensors of a batch, so slicing a batch slices its regions. K is at least 1.
A region is left out if less than half of it is in the square: its phrase would not describe what the square shows.
"""

import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets import Value
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.batches.column_cache import Columns
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.tokens import add_tokens, encode_lists, pad_captions
from mm_utils.data.media import kind_of
from mm_utils.data.media.medium import Shown, Window
from mm_utils.text import caption_key

MAX_REGIONS = 8  # per image in a training step; where there are more, eight are drawn at random
MIN_VISIBLE_SHARE = 0.5  # of a region's area, that must be in the square

_FEATURES = datasets.Features(
    {"region_boxes": [Value("float64")], "region_input_ids": [[Value("int32")]], "region_keys": [Value("int64")]}
)


class RegionReader(ColumnReader):
    """Reads the regions of images, or the moments of clips and sounds; phrases are tokenised like captions."""

    columns = frozenset(_FEATURES)

    def source(self, rows: datasets.Dataset) -> str:
        """Return `regions` of images, `moments` of clips and sounds."""
        return "regions" if kind_of(rows.features) == "image" else "moments"

    def prepare(
        self, rows: datasets.Dataset, split: str, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
    ) -> datasets.Dataset:
        """Add the columns above, once, in the datasets cache; raise ValueError without regions."""
        column = self.source(rows)
        if column not in rows.column_names:
            raise ValueError(
                f"the {split} split has no column {column}; it has {', '.join(rows.column_names)}. Take {column} out of "
                "--objectives, or give every row a list of them (docs/data.md)."
            )
        read = (column,) if column == "regions" else (column, "seconds")
        found = add_tokens(rows, column, read, _tokenize, tokenizer, max_seq_length, _FEATURES)
        if split == "train" and not any(map(len, found.select_columns(["region_keys"])["region_keys"])):
            raise ValueError(f"no row of the train split has {column}. Take {column} out of --objectives.")
        return found

    def example(self, row: dict[str, Any], shown: Shown | None, seed: int | None) -> dict[str, Any]:
        """Return the regions that are shown; in training at most `MAX_REGIONS`, drawn apart from the crop."""
        assert shown is not None  # cached features are refused by the terms
        rng = None if seed is None else random.Random(f"{seed} {row['epoch']} {row['id']} regions")
        return visible_regions(row, *shown, rng)

    def collate(self, examples: Sequence[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
        """Lay the regions of each example beside each other."""
        counts = np.array([len(example["region_keys"]) for example in examples], np.int64)
        is_region_bK = np.arange(counts.max(initial=1)) < counts[:, None]
        input_ids, attention_mask = pad_captions(
            [ids for row in examples for ids in row["region_input_ids"]], pad_token_id
        )

        def spread(values: np.ndarray, blank: int) -> Tensor:
            spread_bK = np.full((*is_region_bK.shape, *values.shape[1:]), blank, values.dtype)
            spread_bK[is_region_bK] = values
            return torch.from_numpy(spread_bK)

        # the empty one stands for a batch without examples, which np.concatenate refuses
        boxes = [np.empty((0, 4), np.float32), *(example["region_boxes"] for example in examples)]
        return {
            "region_boxes": spread(np.concatenate(boxes), 0),
            "region_input_ids": spread(input_ids.numpy(), pad_token_id),
            "region_attention_mask": spread(attention_mask.numpy(), 0),
            "region_keys": spread(np.array([key for row in examples for key in row["region_keys"]], np.int64), 0),
        }


def _tokenize(
    rows: Columns, wanted: np.ndarray | None, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> Columns:
    column = "moments" if "moments" in rows else "regions"
    seconds = rows.get("seconds", [0.0] * len(rows[column]))
    boxes: list[list[float]] = []  # of each row, one number after the other
    phrases: list[list[str]] = []
    for place, (listed, length) in enumerate(zip(rows[column], seconds, strict=True)):
        boxes.append([])
        phrases.append([])
        for value in listed or () if wanted is None or wanted[place] else ():
            box = value.get("box")
            if column == "moments":  # codecs cut the ends of sounds, and so of what lies there
                start, end = value["span"]
                box = [start, 0.0, min(end, length) - start, 1.0]
            boxes[-1] += map(float, box)
            phrases[-1].append(value["phrase"])
    return {
        "region_boxes": boxes,
        "region_input_ids": encode_lists(tokenizer, phrases, max_seq_length),
        "region_keys": [list(map(caption_key, texts)) for texts in phrases],
    }


def visible_regions(
    row: dict[str, Any], size: tuple[float, float], window: Window, rng: random.Random | None = None
) -> dict[str, Any]:
    """Return the regions that a row's square or window shows, as fields of an example; of `Shown` are `size` and `window`.

    `rng` draws `MAX_REGIONS` if there are more; None keeps all.
    """
    # `size` twice, for x and y and for width and height
    boxes = np.asarray(row["region_boxes"], np.float64).reshape(-1, 4) / (size * 2)
    corner = np.array(window[:2])
    far = np.array(window[2:])
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    edges = (edges - np.tile(corner, 2)) / np.tile(far - corner, 2)
    boxes = edges.clip(0, 1).astype(np.float32)
    whole = edges[:, 2:] - edges[:, :2]
    left = boxes[:, 2:] - boxes[:, :2]
    # a moment behind the cut end of a sound has no length: 0 >= 0.5 * 0 alone would keep it
    is_visible = (left.prod(1) >= MIN_VISIBLE_SHARE * whole.prod(1)) & (left > 0).all(1)
    places = is_visible.nonzero()[0].tolist()
    if rng is not None and len(places) > MAX_REGIONS:
        places = sorted(rng.sample(places, MAX_REGIONS))
    return {
        "region_boxes": boxes[places],
        "region_input_ids": [row["region_input_ids"][place] for place in places],
        "region_keys": [row["region_keys"][place] for place in places],
    }


class Regions(NamedTuple):
    """The R regions of a batch, one after the other."""

    image: Tensor  # `[R]`, index of the region's image in the batch
    boxes: Tensor  # `[R, 4]`, left, top, right, bottom in shares of the square
    input_ids: Tensor  # `[R, L]`, the phrases
    attention_mask: Tensor
    keys: Tensor  # `[R]`, the same for equal phrases


def regions_of(batch: dict[str, Any]) -> tuple[Regions, int]:
    """Return the regions of a batch, and their number.

    If there are none, return one that covers the first image, and 0: models do not take empty batches.
    """
    mask = batch["region_attention_mask"]
    image, place = mask.any(-1).nonzero().unbind(1)
    found = Regions(image, *(batch[f"region_{name}"][image, place] for name in Regions._fields[1:]))
    if len(image):
        return found, len(image)
    whole = found.boxes.new_tensor([[0, 0, 1, 1]])
    one = mask.new_ones(1, 1)
    return Regions(mask.new_zeros(1), whole, one, one, mask.new_zeros(1)), 0
