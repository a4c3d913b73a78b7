"""Regions of an image, a box with a phrase each: tokenised once, and followed into the square that is shown.

What `tokenize_regions` lays beside a row of r regions, and `Collator` makes of b images that have K regions at most:

==========================  ===========================  ===========================================================
name                        of a row                     of a batch
==========================  ===========================  ===========================================================
``region_boxes``            4r numbers: x, y, width,     `[b, K, 4]` float32: left, top, right, bottom in the square,
                            height of each, in pixels    each in [0, 1]
``region_input_ids``        a list of ids per phrase     `[b, K, L]` int64
``region_attention_mask``                                `[b, K, L]` int64; 0 all along where there is no region
``region_keys``             a key per phrase             `[b, K]` int64, the same for equal phrases
==========================  ===========================  ===========================================================

A row of a batch is an image, as everywhere in a batch, so whoever cuts a batch cuts its regions too. K is at least 1.
Regions of which less than half is in the square are left out: the phrase would not describe what is to be seen.
"""

import random
from functools import partial
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from datasets import Value
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.augment import Window
from mm_utils.data.cells import Cells
from mm_utils.data.derived import Columns, add_columns
from mm_utils.data.ring import by_value
from mm_utils.data.tokens import caption_key, encode_captions, pad_captions, tokenize_splits, tokenizer_content

MOST_REGIONS = 8
"""So many regions of an image take part in a training step; of more, a random choice."""

LEAST_SHARE = 0.5
"""Regions of which less is in the square are left out."""

_FEATURES = datasets.Features(
    {
        "region_boxes": [Value("float64")],
        "region_input_ids": [[Value("int32")]],
        "region_keys": [Value("int64")],
    }
)


def tokenize_pairs(
    pairs: datasets.DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    num_proc: int | None = None,
    regions: bool = False,
) -> datasets.DatasetDict:
    """`mm_utils.data.tokens.tokenize_splits`, and with `regions` `tokenize_regions`."""
    found = tokenize_splits(pairs, tokenizer, max_seq_length, num_proc)
    return tokenize_regions(found, tokenizer, max_seq_length, num_proc) if regions else found


def tokenize_regions(
    pairs: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.DatasetDict:
    """Add the columns above to all splits, once, in the datasets cache. Phrases become tokens as captions do.

    Raises:
        ValueError: if a split has no column `regions`, the training split has no region, or one is not a box and a phrase.
    """
    for name, rows in pairs.items():
        if "regions" not in rows.column_names:
            raise ValueError(
                f"the {name} split has no column regions; it has {', '.join(rows.column_names)}. Take regions out of "
                "--objectives, or give every image a list of box (x, y, width, height in pixels) and phrase."
            )
    found = {name: _tokenize_split(rows, tokenizer, max_seq_length, num_proc) for name, rows in pairs.items()}
    if "train" in found and not has_regions(found["train"]):
        raise ValueError("no image of the train split has a region. Take regions out of --objectives.")
    return datasets.DatasetDict(found)


def has_regions(rows: datasets.Dataset) -> bool:
    """Whether `rows` were given to `tokenize_regions`, and hold a region."""
    if "region_keys" not in rows.column_names:
        return False
    return any(map(len, rows.select_columns(["region_keys"])["region_keys"]))


def _tokenize_split(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None
) -> datasets.Dataset:
    name = Hasher.hash(("regions", rows._fingerprint, tokenizer_content(tokenizer), max_seq_length))
    derive = partial(_tokenize, tokenizer=tokenizer, max_seq_length=max_seq_length)
    title = "Tokenising regions"
    return add_columns(rows, ("id", "regions"), derive, name, title=title, num_proc=num_proc, features=_FEATURES)


def _tokenize(
    rows: Columns, wanted: np.ndarray | None, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> Columns:
    is_wanted = [True] * len(rows["id"]) if wanted is None else wanted
    both = zip(rows["id"], rows["regions"], is_wanted, strict=True)
    regions = [_checked(image_id, listed or []) if reads else [] for image_id, listed, reads in both]
    phrases = [phrase for row in regions for _, phrase in row]
    tokens = iter(encode_captions(tokenizer, phrases, None, max_seq_length))
    return {
        "region_boxes": [[number for box, _ in row for number in box] for row in regions],
        "region_input_ids": [[next(tokens) for _ in row] for row in regions],
        "region_keys": [[caption_key(phrase) for _, phrase in row] for row in regions],
    }


def _checked(image_id: str, regions: Any) -> list[tuple[list[float], str]]:
    """Box and phrase of each; sources that prepare_data has not seen may hold anything."""
    found = []
    for region in regions if isinstance(regions, list) else [regions]:
        try:
            x, y, width, height = map(float, region["box"])
            phrase = region["phrase"]
            sound = width > 0 and height > 0 and all(map(np.isfinite, (x, y, width, height))) and phrase.strip()
        except (TypeError, ValueError, KeyError, AttributeError):
            sound = False
        if not sound:
            raise ValueError(
                f"image {image_id} has the region {region}; a region is a box (x, y, width, height in pixels) and a "
                "phrase. Correct it, or let scripts/prepare_data.py set such rows aside."
            )
        found.append(([x, y, width, height], phrase))
    return found


def regions_shown(
    rows: Cells, row: int, size: tuple[int, int], window: Window, rng: random.Random | None = None
) -> dict[str, Any]:
    """The regions of a tokenised row that its square shows, as fields of an example for `collate_regions`.

    Args:
        size: width and height of the stored image, in whose pixels its boxes are.
        window: what of it the square shows.
        rng: draws `MOST_REGIONS` of more; None gives all.
    """
    boxes = np.asarray(rows.cell("region_boxes", row).values, np.float64).reshape(-1, 4)
    boxes, shown = boxes_in(window, boxes / (size * 2))
    places = shown.nonzero()[0].tolist()
    if rng is not None and len(places) > MOST_REGIONS:
        places = sorted(rng.sample(places, MOST_REGIONS))
    input_ids, keys = (rows.cell(name, row).values for name in ("region_input_ids", "region_keys"))
    return {
        "region_boxes": boxes[places],
        "region_input_ids": [input_ids[place].as_py() for place in places],
        "region_keys": [keys[place].as_py() for place in places],
    }


def boxes_in(window: Window, boxes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Boxes `[r, 4]` of x, y, width, height in shares of the image, as a square of `window` shows them.

    Returns:
        left, top, right, bottom of each in shares of the square, float32 `[r, 4]`, cut to it; and which of them have
        at least half of their area in it, bool `[r]`.
    """
    corner, far = np.array(window[:2]), np.array(window[2:])
    edges = np.concatenate([boxes[:, :2], boxes[:, :2] + boxes[:, 2:]], 1)
    edges = (edges - np.tile(corner, 2)) / np.tile(far - corner, 2)
    inside = edges.clip(0, 1).astype(np.float32)
    whole, left = (each[:, 2:] - each[:, :2] for each in (edges, inside))
    return inside, (left.prod(1) >= LEAST_SHARE * whole.prod(1)) & (left > 0).all(1)


def collate_regions(examples: list[dict[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """The regions of a batch from the fields that `regions_shown` gives."""
    counts = np.array([len(example["region_keys"]) for example in examples], np.int64)
    is_region_bK = np.arange(counts.max(initial=1)) < counts[:, None]
    input_ids, attention_mask = pad_captions(
        [ids for row in examples for ids in row["region_input_ids"]], pad_token_id
    )

    def spread(values: np.ndarray, blank: int) -> Tensor:
        spread_bK = np.full((*is_region_bK.shape, *values.shape[1:]), blank, values.dtype)
        spread_bK[is_region_bK] = values
        return by_value(torch.from_numpy(spread_bK))

    boxes = [np.empty((0, 4), np.float32), *(example["region_boxes"] for example in examples)]
    return {
        "region_boxes": spread(np.concatenate(boxes), 0),
        "region_input_ids": spread(input_ids.numpy(), pad_token_id),
        "region_attention_mask": spread(attention_mask.numpy(), 0),
        "region_keys": spread(np.array([key for row in examples for key in row["region_keys"]], np.int64), 0),
    }


class Regions(NamedTuple):
    """All R regions of a batch, one after the other.

    Attributes:
        image: `[R]`, the place of each one's image in the batch.
        boxes: `[R, 4]`.
        input_ids, attention_mask: `[R, L]`.
        keys: `[R]`, of the phrases.
    """

    image: Tensor
    boxes: Tensor
    input_ids: Tensor
    attention_mask: Tensor
    keys: Tensor


def regions_of(batch: dict[str, Any]) -> tuple[Regions, int]:
    """The regions of a batch, and how many there are.

    Where there are none, there is one all the same, all of the first image: models do not take empty batches.
    """
    mask = batch["region_attention_mask"]
    image, place = mask.any(-1).nonzero().unbind(1)
    found = Regions(image, *(batch[f"region_{name}"][image, place] for name in Regions._fields[1:]))
    if len(image):
        return found, len(image)
    whole = found.boxes.new_tensor([[0, 0, 1, 1]])
    one = mask.new_ones(1, 1)
    return Regions(mask.new_zeros(1), whole, one, one, mask.new_zeros(1)), 0
