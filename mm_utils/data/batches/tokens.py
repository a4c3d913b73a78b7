"""Tokenise captions once, and give equal images and equal captions equal keys."""

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.cores import available_cores
from mm_utils.data.batches.column_cache import Columns, arrow_batches, fingerprint_of, picked
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.distributed import rank
from mm_utils.model.reading import CHARACTERS_PER_TOKEN, token_ids
from mm_utils.stored import open_rows, stored
from mm_utils.text import caption_key, image_key

logger = logging.getLogger(__name__)

_MANY = 100_000  # rows from which on all cores tokenise; fewer take less time than starting processes
_LOOKED_AT = 10_000  # rows whose captions are counted, 2 s of one core
_MANY_UNKNOWN = 0.1  # share of unknown tokens that is worth a warning
_BATCH = 1_000_000  # rows whose keys are read at a time; 50 MB with five captions each


def tokenize_captions(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> datasets.Dataset:
    """Add columns that are computed from ids and captions.

    `input_ids`: token ids, one list per caption. `image_key` and `caption_keys`: int64 hashes; equal keys mean the same
    image or, except for case and spacing, the same caption.
    """
    return add_tokens(rows, "captions", ["id", "captions"], tokenize_rows, tokenizer, max_seq_length)


def add_tokens(
    rows: datasets.Dataset,
    name: str,
    read: Sequence[str],
    compute: Callable[[Columns, np.ndarray | None, PreTrainedTokenizerBase, int], Columns],
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    features: datasets.Features | None = None,
) -> datasets.Dataset:
    """Lay computed columns beside the others, once, in the datasets cache; only the new ones are written.

    Rows that were picked out of a table still point into it, so no image is copied.

    Args:
        name: what is tokenised.
        read: names of the columns that `compute` reads.
        compute: maps the columns of a batch, a bool for each row that is in `rows` (None: all), tokenizer and length to the new
            columns. Its values for other rows are never read.
        features: types of the new columns, if the first rows may not show them.
    """
    table = rows.data
    places = picked(rows)
    if not table.num_rows:
        return rows
    key = Hasher.hash((name, fingerprint_of(rows), tokenizer_digest(tokenizer), max_seq_length))
    whole = datasets.Dataset(table, info=rows.info.copy(), split=rows.split, fingerprint=fingerprint_of(rows))
    is_wanted = None
    if places is not None:
        is_wanted = np.zeros(table.num_rows, bool)
        is_wanted[places.to_numpy()] = True

    def of_batch(batch: Columns, numbers: list[int]) -> Columns:
        return compute(batch, None if is_wanted is None else is_wanted[numbers], tokenizer, max_seq_length)

    def make(folder: Path) -> None:
        whole.select_columns(list(read)).map(
            of_batch,
            batched=True,
            with_indices=True,
            # the other ranks wait for the one that does this
            num_proc=available_cores() if table.num_rows >= _MANY else None,
            remove_columns=list(read),
            cache_file_name=str(folder / "columns.arrow"),
            new_fingerprint=key,
            features=features,
            desc=f"Tokenising {name}",
        )

    both = datasets.concatenate_datasets([whole, open_rows(stored("tokens", key, make))], axis=1)
    # The rows at the same places of the wider table.
    return datasets.Dataset(both.data, info=both.info, split=rows.split, indices_table=rows._indices, fingerprint=key)


def encode_captions(
    tokenizer: PreTrainedTokenizerBase, captions: Sequence[str], max_seq_length: int
) -> list[list[int]]:
    """Return the token ids of each caption, at most `max_seq_length`, special tokens included.

    Special tokens that are written in a caption (`[SEP]`, `<|endoftext|>`) are text; text that the vocabulary has only as
    such a token is left out. At most 32 characters per token are read of a caption, so that none takes long.
    """
    most = CHARACTERS_PER_TOKEN * max_seq_length
    return token_ids(tokenizer, [caption[:most] for caption in captions], max_seq_length) if captions else []


def encode_lists(
    tokenizer: PreTrainedTokenizerBase, lists: Sequence[Sequence[str]], max_seq_length: int
) -> list[list[list[int]]]:
    """Return the token ids of the texts of each list, see `encode_captions`."""
    tokens = iter(encode_captions(tokenizer, [*itertools.chain.from_iterable(lists)], max_seq_length))
    return [[*itertools.islice(tokens, len(texts))] for texts in lists]


def pad_captions(captions: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad t captions to the longest; return ids and mask, int64 `[t, L]`, L being at least 1."""
    length_t = np.fromiter(map(len, captions), np.int64, len(captions))
    mask_tL = np.arange(length_t.max(initial=1)) < length_t[:, None]
    ids_tL = np.full(mask_tL.shape, pad_token_id, np.int64)
    ids_tL[mask_tL] = np.fromiter(itertools.chain.from_iterable(captions), np.int64, int(length_t.sum()))
    return torch.from_numpy(ids_tL), torch.from_numpy(mask_tL.astype(np.int64))


class Reach(NamedTuple):
    """How far texts are read: up to `most` tokens; all words that a tokenizer lacks are `unknown`, which a blank text has `bare` times."""

    most: int
    unknown: int | None
    bare: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase, most: int) -> "Reach":
        """Return the reach of a tokenizer; CLIP's unknown token is also the one that ends every text."""
        [bare] = encode_captions(tokenizer, [""], most)
        return cls(most, tokenizer.unk_token_id, bare.count(tokenizer.unk_token_id))

    def unknown_words(self, ids: Sequence[int]) -> int:
        """Return how many tokens of a text are unknown."""
        return ids.count(self.unknown) - self.bare

    def key(self, key: int, ids: Sequence[int]) -> int:
        """Return a caption's key for a loss: its own, or that of its tokens if these are not all of it."""
        return image_key(str(ids)) if len(ids) >= self.most or self.unknown_words(ids) else key


def unread(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str], most: int, what: str) -> list[str]:
    """Return a sentence each on texts that are cut and on many unknown tokens; `what` is what the texts are, in words."""
    reach = Reach.of(tokenizer, most)
    said = []
    # so large a limit cuts nothing
    ids = token_ids(tokenizer, list(texts), 1 << 30) if texts else []
    lengths = list(map(len, ids))
    if longer := sum(length > most for length in lengths):
        which = "It"
        if len(texts) > 1:
            which = f"Longer are {longer:,} of {len(texts):,}; the longest"
        said.append(
            f"Of {what[0].lower()}{what[1:]}, the model reads {most} tokens. {which} has {max(lengths):,}, and the rest is cut. Training sets the number by "
            "--max_seq_length."
        )
    unknown = sum(map(reach.unknown_words, ids))
    # without special tokens
    words = sum(lengths) - len(ids) * len(encode_captions(tokenizer, [""], most)[0])
    if unknown > _MANY_UNKNOWN * words:
        said.append(
            f"{what}: {unknown / words:.0%} of the tokens are unknown to the tokenizer, which reads them all alike. Name a multilingual "
            "text encoder by --text_model_name_or_path, or a multilingual model by --model_name_or_path (docs/job_language.md)."
        )
    return said


def unread_captions(rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, most: int, what: str) -> list[str]:
    """Return what `unread` says of the captions of rows; of many, of some that are evenly spread."""
    seen = evenly_spread(rows.select_columns(["captions"]))
    return unread(tokenizer, list(itertools.chain.from_iterable(seen["captions"])), most, what)


def evenly_spread(rows: datasets.Dataset) -> datasets.Dataset:
    """Return at most `_LOOKED_AT` rows, at equal distances; all of fewer."""
    return rows.select(range(0, len(rows), 1 + len(rows) // _LOOKED_AT))  # of 25,000 rows every third


def fingerprint(rows: datasets.Dataset) -> str:
    """Return 16 hexadecimal digits that identify tokenised images and captions in their order.

    The way the rows are stored (chunks, slices, picked rows of a table) changes nothing.
    """
    keys = hashlib.blake2b(digest_size=8)
    counts = keys.copy()
    captions = keys.copy()
    for batch in arrow_batches(rows, ["image_key", "caption_keys"], _BATCH):
        for chunk in batch["image_key"].chunks:
            keys.update(chunk.to_numpy())
        for chunk in batch["caption_keys"].chunks:
            counts.update(pc.list_value_length(chunk).to_numpy())
            captions.update(chunk.flatten().to_numpy())
    return hashlib.blake2b(keys.digest() + counts.digest() + captions.digest(), digest_size=8).hexdigest()


def occurring_tokens(rows: datasets.Dataset, vocabulary: int) -> Tensor | None:
    """Return which tokens the captions have, bool `[vocabulary]`; None as soon as these are more than half."""
    occurs = torch.zeros(vocabulary, dtype=torch.bool)
    for batch in arrow_batches(rows, ["input_ids"], _BATCH // 10):
        for chunk in batch["input_ids"].chunks:
            # rows of captions of ids are flattened twice
            occurs[torch.from_numpy(chunk.flatten().flatten().unique().to_numpy().astype(np.int64))] = True
        if 2 * occurs.sum() > vocabulary:
            return None
    return occurs


def tokenize_splits(
    pairs: datasets.DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    readers: Iterable[ColumnReader] = (),
) -> datasets.DatasetDict:
    """Tokenise the captions of every split, see `tokenize_captions`, and add the columns of readers; log what is not read."""
    found = {name: tokenize_captions(rows, tokenizer, max_seq_length) for name, rows in pairs.items()}
    name = "train" if "train" in found else next(iter(found))
    if rank() == 0:  # all ranks would say the same
        for said in unread_captions(found[name], tokenizer, max_seq_length, f"The captions of {name}"):
            logger.warning("%s", said)
    for reader in readers:
        for name, rows in found.items():
            found[name] = reader.prepare(rows, name, tokenizer, max_seq_length)
    return datasets.DatasetDict(found)


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hexadecimal digits that identify a tokenizer's content, wherever from."""
    if tokenizer.is_fast:
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()  # a call leaves its settings in the tokenizer, and they would change the cache's name
        backend.no_padding()
        content = [backend.to_str()]
    else:
        content = [type(tokenizer).__name__, sorted(tokenizer.get_vocab().items())]
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def tokenize_rows(
    rows: Columns, wanted: np.ndarray | None, tokenizer: PreTrainedTokenizerBase, max_seq_length: int
) -> Columns:
    """Return the columns that `tokenize_captions` adds; of rows that are not wanted, no captions."""
    all_captions = rows["captions"]
    if wanted is not None:
        all_captions = [row if is_wanted else [] for row, is_wanted in zip(all_captions, wanted, strict=True)]
    tokens = iter(encode_captions(tokenizer, [text for row in all_captions for text in row], max_seq_length))
    return {
        "input_ids": [list(itertools.islice(tokens, len(row))) for row in all_captions],
        "image_key": list(map(image_key, rows["id"])),
        "caption_keys": [list(map(caption_key, row)) for row in all_captions],
    }
