"""From rows to batches on the device: tokenised once, decoded and augmented in workers, normalised on the device."""

import hashlib
import logging
import random
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset
from transformers import PreTrainedTokenizerBase

from mm_utils.arguments import arg
from mm_utils.data.features import CachedFeatures
from mm_utils.data.images import UnreadableImageError, center_square, open_image, random_square
from mm_utils.data.order import (
    BatchSizes,
    CaptionLengths,
    Draw,
    EvaluationBatches,
    GlobalOrder,
    RankBatches,
    choose_captions,
)
from mm_utils.ranks import cores_per_process

logger = logging.getLogger(__name__)

Batch = dict[str, Any]
_CHARACTERS_PER_TOKEN = 32  # text beyond this many characters per allowed token is cut before it is tokenised


@dataclass
class LoaderArguments:
    """How pairs become batches."""

    max_seq_length: int = arg(64, "Captions are cut to this many tokens.")
    length_bucket_window: int = arg(
        1,
        "Fill batches with captions of about one length, inside windows of this many steps; 1 = as they come. It saves "
        "little beyond what is saved anyway, and changes what is learnt: negatives are then alike in length.",
    )
    min_crop_area: float = arg(0.8, "Training crops cover at least this share of the image; 1 turns cropping off.")
    dataloader_num_workers: int = arg(
        -1, "Processes that decode images, per rank; -1 = one per spare core, at most 16."
    )

    def __post_init__(self) -> None:
        if self.max_seq_length < 3:
            raise ValueError(f"--max_seq_length is {self.max_seq_length}; give at least 3, two are special tokens.")
        if self.length_bucket_window < 1:
            raise ValueError(
                f"--length_bucket_window is {self.length_bucket_window}; give steps, or 1 for no buckets."
            )
        if not 0 < self.min_crop_area <= 1:
            raise ValueError(f"--min_crop_area is {self.min_crop_area}; give a share of the image in (0, 1].")

    @property
    def num_workers(self) -> int:
        """Workers of this rank; a core is left to each rank's training process."""
        if self.dataloader_num_workers >= 0:
            return self.dataloader_num_workers
        return max(0, min(16, cores_per_process() - 1))


def tokenize_captions(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.Dataset:
    """Add `input_ids` (one list per caption) and the int64 `image_key` and `caption_keys`, once, in the datasets cache.

    Special tokens written inside a caption (`[SEP]`, `<|endoftext|>`) are text, not tokens. Keys are hashes; equal keys
    mean the same image or, up to case and spacing, the same caption.
    """
    settings = {"tokenizer": tokenizer, "max_seq_length": max_seq_length}
    # Tables read from text files live in memory, and `map` would keep its result there too.
    cache = Path(datasets.config.HF_DATASETS_CACHE, "tandem_tokens")
    cache.mkdir(parents=True, exist_ok=True)
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a call leaves its settings in the tokenizer, and they would change the name
    backend.no_padding()
    name = Hasher.hash((rows._fingerprint, tokenizer.name_or_path, backend.to_str(), max_seq_length))
    return rows.map(
        _tokenize,
        batched=True,
        num_proc=num_proc,
        fn_kwargs=settings,
        cache_file_name=str(cache / f"{name}.arrow"),
        new_fingerprint=name,
        desc="Tokenising captions",
    )


def fingerprint(rows: datasets.Dataset) -> str:
    """16 hexadecimal digits that depend on which images and captions, in which order, tokenised `rows` hold."""
    digest = hashlib.blake2b(digest_size=8)
    for batch in rows.select_columns(["image_key", "caption_keys"]).with_format("arrow").iter(10_000):
        digest.update(repr(batch.to_pydict()).encode())
    return digest.hexdigest()


def tokenize_splits(
    pairs: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.DatasetDict:
    """`tokenize_captions` of every split."""
    return datasets.DatasetDict(
        {name: tokenize_captions(rows, tokenizer, max_seq_length, num_proc) for name, rows in pairs.items()}
    )


def _tokenize(rows: dict[str, list], tokenizer: PreTrainedTokenizerBase, max_seq_length: int) -> dict[str, list]:
    flat = [caption[: _CHARACTERS_PER_TOKEN * max_seq_length] for captions in rows["captions"] for caption in captions]
    tokens = iter(tokenizer(flat, truncation=True, max_length=max_seq_length, split_special_tokens=True)["input_ids"])
    return {
        "input_ids": [[next(tokens) for _ in captions] for captions in rows["captions"]],
        "image_key": [_key(image_id) for image_id in rows["id"]],
        "caption_keys": [
            [_key(" ".join(caption.lower().split())) for caption in captions] for captions in rows["captions"]
        ],
    }


def global_order(rows: datasets.Dataset, sizes: BatchSizes, seed: int, length_bucket_window: int = 1) -> GlobalOrder:
    """The order of the tokenised `rows`; buckets read all captions' lengths from the table, not the tokens."""
    lengths = _caption_lengths(rows, seed) if length_bucket_window > 1 else None
    return GlobalOrder(len(rows), sizes, seed, lengths, length_bucket_window)


def _caption_lengths(rows: datasets.Dataset, seed: int) -> CaptionLengths:
    keys, counts, lengths = [], [], []
    for batch in rows.select_columns(["image_key", "input_ids"]).with_format("arrow").iter(10_000):
        keys.append(batch["image_key"].to_numpy())
        counts.append(pc.list_value_length(batch["input_ids"]).to_numpy())
        lengths.append(pc.list_value_length(pc.list_flatten(batch["input_ids"])).to_numpy().astype(np.uint16))
    key_R, count_R, length_C = (np.concatenate(parts) for parts in (keys, counts, lengths))
    first_R = np.cumsum(count_R) - count_R

    def of(rows: np.ndarray, epochs: np.ndarray) -> np.ndarray:
        return length_C[first_R[rows] + choose_captions(seed, epochs, key_R[rows], count_R[rows])]

    return of


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


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


class DeviceLoader:
    """Iterate over a `DataLoader` with batches moved to `device` and images normalised there.

    Attributes:
        wait: seconds that the last batch made the caller wait.
    """

    def __init__(self, loader: DataLoader, device: torch.device, mean: Sequence[float], std: Sequence[float]):
        self.loader, self.device, self.wait = loader, device, 0.0
        self.mean, self.std = (torch.tensor(v, device=device).view(3, 1, 1) * 255 for v in (mean, std))

    def __len__(self) -> int:
        return len(self.loader)

    def __iter__(self) -> Iterator[Batch]:
        batches = iter(self.loader)
        while True:
            start = time.perf_counter()
            batch = next(batches, None)
            self.wait = time.perf_counter() - start
            if batch is None:
                return
            yield self._to_device(batch)

    def _to_device(self, batch: Batch) -> Batch:
        moved = {
            name: value.to(self.device, non_blocking=True) if isinstance(value, Tensor) else value
            for name, value in batch.items()
        }
        if "pixel_values" in moved:
            moved["pixel_values"] = (moved["pixel_values"] - self.mean) / self.std
        return moved


@dataclass
class Loaders:
    """Builds the loaders of one run: everything that training and evaluation share.

    Attributes:
        pad_token_id: from the tokenizer.
        image_size, mean, std: from the image processor.
    """

    arguments: LoaderArguments
    device: torch.device
    pad_token_id: int
    image_size: int
    mean: Sequence[float]
    std: Sequence[float]

    def train(self, rows: datasets.Dataset, order: GlobalOrder, start: int, stop: int) -> DeviceLoader:
        """This rank's share of the global batches of steps `start` to `stop`."""
        pairs = Pairs(rows, self.image_size, train=True, min_crop_area=self.arguments.min_crop_area, seed=order.seed)
        return self._loader(pairs, RankBatches(order, start, stop))

    def evaluation(self, rows: datasets.Dataset, batch_size: int) -> DeviceLoader:
        """This rank's share of all rows, each with all its captions, in order."""
        return self._loader(Pairs(rows, self.image_size, train=False), EvaluationBatches(len(rows), batch_size))

    def _loader(self, pairs: Pairs, batches: RankBatches | EvaluationBatches) -> DeviceLoader:
        workers = min(self.arguments.num_workers, len(batches))
        loader = DataLoader(
            pairs,
            batch_sampler=batches,
            collate_fn=Collator(self.pad_token_id, self.image_size, pairs.train, pairs.cached.blank()),
            num_workers=workers,
            persistent_workers=bool(workers),
            pin_memory=self.device.type == "cuda",
            prefetch_factor=4 if workers else None,
            worker_init_fn=_one_thread,
        )
        return DeviceLoader(loader, self.device, self.mean, self.std)


def _one_thread(_: int) -> None:
    torch.set_num_threads(1)
