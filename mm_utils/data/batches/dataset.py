"""Turn rows into examples and batches: decode, augment, choose a caption, stack and pad.

`Pairs` shows rows through `Dataset.with_transform`. The transform is a pure function of the columns of rows, of which one is the epoch:
in training it decides caption and crop.
"""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from itertools import groupby
from operator import itemgetter, xor
from typing import Any

import datasets
import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, default_collate
from torchvision.transforms.v2 import functional

from mm_utils.data.batches.column_cache import FEATURES, SKIPPED, feature_tensors
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.mirroring import has_sides
from mm_utils.data.batches.order import Draw, choose_captions, replacement_rows
from mm_utils.data.batches.tokens import Reach, pad_captions
from mm_utils.data.media.medium import Medium
from mm_utils.model.reading import UnreadableError

Batch = dict[str, Any]
MOST_CAPTIONS = 5  # captions of a training image that are targets of captioning
Columns = Mapping[str, Sequence[Any]]
Example = dict[str, Any]
_COLUMNS = {"id", "image", "image_key", "input_ids", "caption_keys", SKIPPED}


@dataclass(frozen=True)
class EvaluationTransform:
    """Show an image's central square, or a clip's or sound's middle, with all its captions, or frozen towers' features."""

    medium: Medium
    readers: Sequence[ColumnReader] = ()

    @property
    def columns(self) -> set[str]:
        """The columns to read, as far as a data set has them."""
        return _COLUMNS.union(*(reader.columns for reader in self.readers))

    def examples(self, batch: Columns) -> list[Example]:
        """Return one example per row.

        If an image cannot be decoded, its example has only `skipped`, the reason, `skipped_id` and `image_key`.
        """
        rows = (dict(zip(batch, values, strict=True)) for values in zip(*batch.values(), strict=True))
        return [self._example(row) for row in rows]

    def of_epoch(self, epoch: int, batch: Columns) -> dict[str, list[Example]]:
        """Return the examples of rows in an epoch, as the one column that a transform of `datasets` returns."""
        return {"example": self.examples({**batch, "epoch": [epoch] * len(batch["id"])})}

    def _example(self, row: dict[str, Any]) -> Example:
        reason = row.get(SKIPPED)
        try:
            if reason is None:
                return {"image_id": row["id"], "image_key": row["image_key"], **self._show(row)}
        except UnreadableError as error:
            reason = f"image {row['id']}: {error}"
        return {"skipped": reason, "skipped_id": row["id"], "image_key": row["image_key"]}

    def _show(self, row: dict[str, Any]) -> Example:
        """Return the model's inputs; raise UnreadableError if the image cannot be decoded."""
        shown = None
        example = {name: row[name] for name in ("input_ids", "caption_keys")}
        example["captions"] = range(len(row["input_ids"]))
        if SKIPPED not in row:
            example["pixel_values"], shown = self.medium.read(row["image"])
        for reader in self.readers:
            example |= reader.example(row, shown, None)
        return example


@dataclass(frozen=True)
class TrainingTransform(EvaluationTransform):
    """Show a random square of an image with one of its captions.

    An example is a pure function of (seed, epoch, image id): caption, crop and, of half of the images, mirroring, except where
    `has_sides` is true. Where features of a frozen tower stand for images, none is decoded.
    """

    seed: int = 0
    horizontal_flip: bool = False
    reach: Reach | None = None  # with it, captions that are read alike count as equal

    @property
    def columns(self) -> set[str]:
        """The columns to read, as far as a data set has them."""
        return super().columns | ({"captions", "regions"} if self.horizontal_flip else set())

    def examples(self, batch: Columns) -> list[Example]:
        """Return one example per row, see `EvaluationTransform.examples`."""
        epochs = np.array(batch["epoch"])
        counts = np.array([len(captions) for captions in batch["input_ids"]])
        keys = np.array(batch["image_key"])
        drawn: dict[str, list] = {
            "epoch": epochs.tolist(),
            "caption": choose_captions(self.seed, epochs, keys, counts).tolist(),
        }
        if self.reach is not None:
            both = zip(batch["caption_keys"], batch["input_ids"], strict=True)
            drawn["caption_keys"] = [list(map(self.reach.key, *row)) for row in both]
        return super().examples({**batch, **drawn})

    def _show(self, row: dict[str, Any]) -> Example:
        example: Example = {name: [row[name][row["caption"]]] for name in ("input_ids", "caption_keys")}
        example["captions"] = [row["caption"]]
        if self.medium.lasts:
            # Rows with the same captions, templates of a class for instance, are not negatives of each other.
            example["image_key"] = reduce(xor, set(row["caption_keys"]), 0)
        count = len(row["input_ids"])
        # the shown one first: cut short, it is among them
        example["all_input_ids"] = [
            row["input_ids"][(row["caption"] + more) % count] for more in range(min(count, MOST_CAPTIONS))
        ]
        shown = None
        if SKIPPED not in row:
            # Random hashes a string by SHA-512, which is the same on every machine
            rng = random.Random(f"{self.seed} {row['epoch']} {row['id']}")
            example["pixel_values"], shown = self.medium.read(row["image"], rng)
            if self.horizontal_flip and rng.random() < 0.5 and not has_sides(row):
                example["pixel_values"] = functional.horizontal_flip(example["pixel_values"])
        for reader in self.readers:
            example |= reader.example(row, shown, self.seed)
        return example


class Pairs(Dataset):
    """Examples of drawn tokenised rows, read a batch at a time; the rows of an epoch are a view `with_transform`."""

    def __init__(self, rows: datasets.Dataset, transform: EvaluationTransform):
        read = [name for name in rows.column_names if name in transform.columns]
        features = [name for name in rows.column_names if name.startswith(FEATURES)]
        self.rows = rows.select_columns(read)
        # Read beside the view, whose Python numbers cost 83 us for 512 of them and 9 ms for 384 x 7 x 7; views of the
        # memory-mapped file cost 8 us and 0.03 ms.
        self.features = rows.select_columns(features).with_format("arrow") if features else None
        self.transform = transform
        self.views: dict[int, datasets.Dataset] = {}

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, draw: Draw) -> Example:
        return self.__getitems__([draw])[0]

    def __getitems__(self, draws: Sequence[Draw]) -> list[Example]:
        examples = []
        # a step has draws of one epoch, or of two where it reaches over the end of the first
        for epoch, drawn in groupby(draws, key=itemgetter(1)):
            rows = [row for row, _ in drawn]
            for row, example, stored in zip(rows, self._view(epoch)[rows]["example"], self._stored(rows), strict=True):
                if "skipped" not in example:
                    example |= {"row": row, **feature_tensors(stored, example["captions"])}
                examples.append(example)
        return examples

    def _view(self, epoch: int) -> datasets.Dataset:
        if epoch not in self.views:  # it takes 0.7 ms, as `datasets` hashes the transform
            self.views = {epoch: self.rows.with_transform(partial(self.transform.of_epoch, epoch))}
        return self.views[epoch]

    def _stored(self, rows: list[int]) -> list[dict[str, Any]]:
        """Return the features of each row as Arrow scalars."""
        if self.features is None:
            return [{} for _ in rows]
        table = self.features[rows]
        return [dict(zip(table.column_names, values, strict=True)) for values in zip(*table.columns, strict=True)]


class TrainingPairs(Pairs):
    """Training examples of drawn rows; unreadable rows are replaced, so batches keep their size.

    The example of the other row also has `skipped` and `skipped_id` of the row that it replaces. It has nothing
    else if none of `replacement_rows` can be decoded.
    """

    transform: TrainingTransform

    def __getitems__(self, draws: Sequence[Draw]) -> list[Example]:
        examples = super().__getitems__(draws)
        return [
            self._replace(example, epoch) if "skipped" in example else example
            for example, (_, epoch) in zip(examples, draws, strict=True)
        ]

    def _replace(self, failed: Example, epoch: int) -> Example:
        for row in replacement_rows(self.transform.seed, epoch, failed["image_key"], len(self)):
            [example] = super().__getitems__([(row, epoch)])
            if "skipped" not in example:
                return {**failed, **example}
        return failed


@dataclass
class Collator:
    """Stack images and pad captions to the longest.

    In training, rows are sorted by the length of their caption, longest first: the loss does not depend on the order, and
    the text tower computes little padding of them (`mm_utils.model.encoding`).

    Batch of b images and t captions (t = b in training):
        pixel_values: uint8 `[b, 3, S, S]`, or `[b, *medium.shape]`; input_ids, attention_mask: int64 `[t, L]`
        vision_pooled, vision_taps_0, ... in place of pixel_values, and text_pooled, text_states, as `cached` names them
        ids: int64 `[t, 2]`, image key and caption key of every caption; training clips and sounds with the same captions
            have one image key; caption_image: `[t]`, its image's place in b
        rows: `[b]`, row numbers in the data set; image_ids: list of b; lengths: list of t, in tokens
        skipped: list of reasons, one per row without a readable image, whether or not another row replaced it; skipped_ids
        all_input_ids, all_attention_mask: in training, int64 `[b, k, L]`, up to `MOST_CAPTIONS` captions of each image;
            all_lengths: a list of b lists, the tokens of each caption
        what `readers` collate
    `cached` are the features of no example, see `mm_utils.data.batches.column_cache.empty_features`.
    """

    pad_token_id: int
    medium: Medium
    longest_first: bool = False
    cached: dict[str, Tensor] = field(default_factory=dict)
    readers: Sequence[ColumnReader] = ()

    def __call__(self, examples: list[Example]) -> Batch:
        """Collate the examples of `Pairs`."""
        kept = [example for example in examples if "row" in example]
        skipped = [example for example in examples if "skipped" in example]
        if self.longest_first:
            kept.sort(key=lambda example: -len(example["input_ids"][0]))
        captions = [ids for example in kept for ids in example["input_ids"]]
        input_ids, attention_mask = pad_captions(captions, self.pad_token_id)
        counts = torch.tensor([len(example["input_ids"]) for example in kept], dtype=torch.long)
        keys = [(example["image_key"], key) for example in kept for key in example["caption_keys"]]
        batch: Batch = {}
        for name, none in self.cached.items():
            batch[name] = _stack([value for example in kept for value in example[name]], none)
        if self.longest_first:  # captions are padded to the longest, and images with fewer captions by empty ones
            all_ids = [example["all_input_ids"] for example in kept]
            most = max(map(len, all_ids), default=1)
            # of 2 captions where another image has 3: a, b, []
            filled = [ids for row in all_ids for ids in [*row, *[[]] * (most - len(row))]]
            ids, mask = pad_captions(filled, self.pad_token_id)
            batch["all_input_ids"] = ids.view(-1, most, ids.shape[1])
            batch["all_attention_mask"] = mask.view(-1, most, ids.shape[1])
            batch["all_lengths"] = [list(map(len, row)) for row in all_ids]
        if "vision_pooled" not in batch:
            batch["pixel_values"] = _stack([example["pixel_values"] for example in kept], self.medium.blank(0))
        for reader in self.readers:
            batch |= reader.collate(kept, self.pad_token_id)
        return {
            **batch,
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "ids": torch.tensor(keys, dtype=torch.long).view(-1, 2),
            "caption_image": torch.repeat_interleave(torch.arange(len(kept)), counts),
            "rows": torch.tensor([example["row"] for example in kept], dtype=torch.long),
            "image_ids": [example["image_id"] for example in kept],
            "lengths": list(map(len, captions)),
            "skipped": [example["skipped"] for example in skipped],
            "skipped_ids": [example.get("skipped_id", "") for example in skipped],
        }


def _stack(values: list[Tensor], empty: Tensor) -> Tensor:
    """Stack to `[b, ...]`; values that differ in their first dimension are padded with zeros."""
    if len({len(value) for value in values}) > 1:
        return pad_sequence(values, batch_first=True)
    # In a worker it stacks into shared memory; the result of torch.stack is copied there, at 30 to 60 us an image.
    return default_collate(values) if values else empty
