"""Captions become token ids once, and rows get the keys that say which images and captions are the same."""

import hashlib
from pathlib import Path

import datasets
import numpy as np
import pyarrow.compute as pc
from datasets.fingerprint import Hasher
from transformers import PreTrainedTokenizerBase

from mm_utils.data.order import BatchSizes, CaptionLengths, GlobalOrder, choose_captions

_CHARACTERS_PER_TOKEN = 32  # text beyond this many characters per allowed token is cut before it is tokenised


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
