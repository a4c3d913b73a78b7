"""Rows become examples, and examples become batches: which caption, which crop, stacked and padded."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import datasets
import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

from mm_utils.data.augment import (
    MOST_FIXED,
    Window,
    center_square,
    center_window,
    fixed_square,
    jitter_colors,
    random_square,
)
from mm_utils.data.cells import Cells
from mm_utils.data.decoding import read_pixels
from mm_utils.data.features import CachedFeatures
from mm_utils.data.images import UnreadableImageError
from mm_utils.data.order import Draw, choose_captions
from mm_utils.data.regions import collate_regions, regions_shown
from mm_utils.data.ring import PixelRing, by_value
from mm_utils.data.sides import names_a_side
from mm_utils.data.substitutes import substitutes
from mm_utils.data.tokens import pad_captions

Batch = dict[str, Any]


class Pairs(Dataset):
    """Rows of the one schema as training or evaluation examples.

    An example is a pure function of (seed, epoch, image id): which caption, which crop, colours, which way round. Rows with
    features of a frozen tower (`mm_utils.data.features`) give those, in training; where they stand for images, none is
    decoded.

    Where an image cannot be decoded, the example holds `skipped`, the reason, and `skipped_id`, the image's id. In
    evaluation it holds nothing else, and the collator leaves it out. In training it is otherwise the example of another
    row, image and caption both (`mm_utils.data.substitutes`), so that batches keep their size; unless that cannot be
    decoded either, nor any of those that are tried.

    Rows are read past `datasets`, whose transforms see rows as Python objects: 60 us each, and 15 through
    `mm_utils.data.cells.Cells`, which for raw pixels is an eighth of all that is left.

    Args:
        rows: tokenised.
        image_size: side of the square.
        train: one caption and a random square, or all captions and the centre.
        min_crop_area: crops cover at least this share of the largest square; 1 is the centre square.
        fixed_crop: cut squares of that size, not resized, from images that are little larger.
        color_jitter: brightness, contrast and saturation vary by up to this share.
        horizontal_flip: mirror every other image, unless a caption of it names a side or it has boxes.
        regions: examples hold their regions too (`mm_utils.data.regions`).
        seed: of the run.
    """

    def __init__(
        self,
        rows: datasets.Dataset,
        image_size: int,
        *,
        train: bool,
        min_crop_area: float = 1.0,
        fixed_crop: bool = False,
        color_jitter: float = 0.0,
        horizontal_flip: bool = False,
        regions: bool = False,
        seed: int = 0,
    ):
        self.cached = CachedFeatures(rows)
        self.rows = Cells(rows.remove_columns(self.cached.names))
        self.image_size, self.train, self.seed = image_size, train, seed
        self.min_crop_area, self.fixed_crop = min_crop_area, fixed_crop
        self.color_jitter, self.horizontal_flip = color_jitter, horizontal_flip
        self.regions = regions

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> dict[str, Any]:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[dict[str, Any]]:
        examples = self.attempt(draws)
        if not self.train:
            return examples
        return [
            self._substitute(draw, example) if "skipped" in example else example
            for draw, example in zip(draws, examples, strict=True)
        ]

    def attempt(self, draws: Sequence[Draw]) -> list[dict[str, Any]]:
        """The examples of these very rows; of one that cannot be decoded, `skipped` and `skipped_id` alone."""
        if not self.train:
            return [self._example(row) for row, _ in draws]
        features = self.cached[[row for row, _ in draws]]
        each = ({name: column[place] for name, column in features.items()} for place in range(len(draws)))
        turns = zip(draws, self._captions(draws), each, strict=True)
        return [self._example(row, (epoch, caption, cached)) for (row, epoch), caption, cached in turns]

    def _substitute(self, draw: Draw, failed: dict[str, Any]) -> dict[str, Any]:
        row, epoch = draw
        for other in substitutes(self.seed, epoch, self.rows.value("image_key", row), len(self)):
            [example] = self.attempt([(other, epoch)])
            if "skipped" not in example:
                return {**example, **failed}
        return failed

    def _captions(self, draws: Sequence[Draw]) -> list[int]:
        keys = np.array([self.rows.value("image_key", row) for row, _ in draws])
        counts = np.array([len(self.rows.cell("input_ids", row).values) for row, _ in draws])
        return choose_captions(self.seed, np.array([epoch for _, epoch in draws]), keys, counts).tolist()

    def _example(self, row: int, shown: tuple[int, int, dict[str, Any]] | None = None) -> dict[str, Any]:
        """`shown`: epoch, caption and cached features of a training example."""
        image_id = self.rows.value("id", row)
        if shown is not None and shown[-1].get("image") is not None:
            return {"skipped": shown[-1]["image"], "skipped_id": image_id}
        example = {"row": row, "image_id": image_id, "image_key": self.rows.value("image_key", row)}
        try:
            return {**example, **(self._evaluation(row) if shown is None else self._training(row, image_id, *shown))}
        except UnreadableImageError as error:
            return {"skipped": f"image {image_id}: {error}", "skipped_id": image_id}

    def _evaluation(self, row: int) -> dict[str, Any]:
        pixels, size = read_pixels(self.rows.image(row), self.image_size)
        input_ids = self.rows.value("input_ids", row)
        return {
            **(regions_shown(self.rows, row, size, self._center(pixels.shape)) if self.regions else {}),
            "pixel_values": center_square(Image.fromarray(pixels), self.image_size),
            "input_ids": input_ids,
            "caption_keys": self.rows.value("caption_keys", row),
            "languages": self.rows.value("languages", row) or [""] * len(input_ids),
        }

    def _training(self, row: int, image_id: str, epoch: int, caption: int, cached: dict[str, Any]) -> dict[str, Any]:
        example: dict[str, Any] = {
            name: [self.rows.cell(name, row).values[caption].as_py()] for name in ("input_ids", "caption_keys")
        }
        if not self.cached.has_vision:
            rng = random.Random(f"{self.seed} {epoch} {image_id}")
            example["pixel_values"], shown = self._square(row, rng)
        if self.regions:
            size, window = self._center_of(row) if self.cached.has_vision else shown
            draw = random.Random(f"{self.seed} {epoch} {image_id} regions")  # so that the crop is the same without
            example |= regions_shown(self.rows, row, size, window, draw)
        return {**example, **self.cached.example(cached, caption)}

    def _center_of(self, row: int) -> tuple[tuple[int, int], Window]:
        """Size of the stored image, and the square that features are cached of."""
        pixels, size = read_pixels(self.rows.image(row), self.image_size)
        return size, self._center(pixels.shape)

    def _center(self, shape: tuple[int, ...]) -> Window:
        return center_window(shape[1], shape[0], self.image_size)

    def _square(self, row: int, rng: random.Random) -> tuple[Tensor, tuple[tuple[int, int], Window]]:
        """The square; and what it shows: the size of the stored image, and where in it."""
        side = self.image_size
        if self.min_crop_area < 1:
            side = int(side * self.min_crop_area**-0.5) + 1  # so that even the smallest crop is not enlarged
        pixels, size = read_pixels(self.rows.image(row), side)
        if self.fixed_crop and self.image_size <= min(pixels.shape[:2]) <= MOST_FIXED * self.image_size:
            square, window = fixed_square(pixels, self.image_size, rng)
        else:
            square, window = random_square(pixels, self.image_size, self.min_crop_area, rng)
        if self.color_jitter:
            square = jitter_colors(square, self.color_jitter, rng)
        if self.horizontal_flip and rng.random() < 0.5 and self._has_no_sides(row):
            square = square.flip(-1)  # boxes need not follow: an image that has any is not mirrored
        return square, (size, window)

    def _has_no_sides(self, row: int) -> bool:
        """Whether neither boxes nor any of the captions, also those not shown, tell left from right."""
        if self.rows.value("regions", row):
            return False
        captions = self.rows.value("captions", row)
        languages = self.rows.value("languages", row) or [""] * len(captions)
        return not any(map(names_a_side, captions, languages))


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
        languages: list of t, "" where unknown; empty in training
        skipped: list of reasons, one per row that could not be shown, whether or not another took its place
        skipped_ids: list of the images' ids, in the same order
        region_boxes, ..., with `regions`: see `mm_utils.data.regions`

    Attributes:
        cached: the features that examples hold, of no example, see `mm_utils.data.features.CachedFeatures.blank`.
        ring: where workers put pixels, see `mm_utils.data.ring`.
        regions: whether examples hold regions.
    """

    pad_token_id: int
    image_size: int
    longest_first: bool = False
    cached: dict[str, Tensor] = field(default_factory=dict)
    ring: PixelRing | None = None
    regions: bool = False

    def __call__(self, examples: list[dict[str, Any]]) -> Batch:
        """Collate what `Pairs` gives."""
        kept = [example for example in examples if "row" in example]
        skipped = [example for example in examples if "skipped" in example]
        if self.longest_first:
            kept.sort(key=lambda example: -len(example["input_ids"][0]))
        captions = [ids for example in kept for ids in example["input_ids"]]
        input_ids, attention_mask = pad_captions(captions, self.pad_token_id)
        counts = torch.tensor([len(example["input_ids"]) for example in kept], dtype=torch.long)
        keys = [(example["image_key"], key) for example in kept for key in example["caption_keys"]]
        blank = dict(self.cached)
        if "vision_pooled" not in blank:
            blank["pixel_values"] = torch.empty(0, 3, self.image_size, self.image_size, dtype=torch.uint8)
        stacked: dict[str, Any] = {}
        for name, none in blank.items():
            values = [example[name] for example in kept]
            ring = self.ring if name == "pixel_values" and values else None
            stacked[name] = _stack(values, none) if ring is None else ring.stack(values)
        return {
            **stacked,
            "input_ids": by_value(input_ids),
            "attention_mask": by_value(attention_mask),
            "ids": by_value(torch.tensor(keys, dtype=torch.long).view(-1, 2)),
            "caption_image": by_value(torch.repeat_interleave(torch.arange(len(kept)), counts)),
            "rows": by_value(torch.tensor([example["row"] for example in kept], dtype=torch.long)),
            "image_ids": [example["image_id"] for example in kept],
            "lengths": list(map(len, captions)),
            "languages": [code for example in kept for code in example.get("languages", ())],
            "skipped": [example["skipped"] for example in skipped],
            "skipped_ids": [example.get("skipped_id", "") for example in skipped],
            **(collate_regions(kept, self.pad_token_id) if self.regions else {}),
        }


def _stack(rows: list[Tensor], none: Tensor) -> Tensor:
    """`[b, ...]`; rows that differ in their first dimension are padded with zeros."""
    if len({len(row) for row in rows}) > 1:
        return pad_sequence(rows, batch_first=True)
    return torch.stack(rows) if rows else none
