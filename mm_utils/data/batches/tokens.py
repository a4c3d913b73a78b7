"""Tokenise captions once, and give equal images and equal captions equal keys.

`mm_utils.extras.languages` finds a multilingual tokenizer's own code for a caption's language.
"""

import hashlib
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.batches.column_cache import Columns, add_columns, arrow_batches, fingerprint_of
from mm_utils.data.batches.column_reader import ColumnReader
from mm_utils.data.batches.order import BatchSizes, GlobalOrder
from mm_utils.distributed import available_cores
from mm_utils.doors import entry
from mm_utils.model.reading import CHARACTERS_PER_TOKEN, token_ids

logger = logging.getLogger(__name__)

_MANY = 100_000  # rows from which on all cores tokenise; fewer take less time than starting processes
_BATCH = 1_000_000  # rows whose keys are read at a time; 50 MB with five captions each


def tokenize_captions(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.Dataset:
    """Add columns that are computed from ids and captions, once, in the datasets cache.

    `input_ids`: token ids, one list per caption. `image_key` and `caption_keys`: int64 hashes; equal keys mean the same
    image or, except for case and spacing, the same caption.

    Captions are tokenised by the rules of `encode_captions`. Only ids and texts are read and only the new columns are
    written, see `add_columns`.

    Raises:
        ValueError: if a row has languages, and not as many as captions.
    """
    codes = own_codes(tokenizer, languages_of(rows))
    columns = [name for name in ("id", "captions", "languages") if name in rows.column_names]
    compute = partial(_tokenize, tokenizer=tokenizer, max_seq_length=max_seq_length, codes=codes)
    if num_proc is None and rows.data.num_rows >= _MANY:
        num_proc = available_cores()  # the other ranks wait for the one that does this
    name = Hasher.hash((fingerprint_of(rows), tokenizer_content(tokenizer), max_seq_length, sorted(codes.items())))
    return add_columns(rows, columns, compute, name, title="Tokenising captions", num_proc=num_proc)


def encode_captions(
    tokenizer: PreTrainedTokenizerBase,
    captions: Sequence[str],
    languages: Sequence[str] | None,
    max_seq_length: int,
    codes: Mapping[str, str] | None = None,
) -> list[list[int]]:
    """Return the token ids of each caption, at most `max_seq_length`.

    Special tokens that are written in a caption (`[SEP]`, `<|endoftext|>`) are text; text that the vocabulary has only as
    such a token is left out. At most 32 characters per token are read of a caption, so that none takes long.

    Args:
        tokenizer: any tokenizer of `transformers`.
        captions: texts.
        languages: a language code per caption, "" where unknown; None if all are unknown.
        max_seq_length: longest result, special tokens included.
        codes: the tokenizer's own code of each language, by default `own_codes`. A tokenizer with `src_lang` (mBART, NLLB,
            M2M100 ...) gets it there; others get it as a token, after the token that begins every caption. Captions in
            other languages are tokenised by the tokenizer's default.
    """
    languages = [""] * len(captions) if languages is None else languages
    codes = own_codes(tokenizer, languages) if codes is None else codes
    by_code: dict[str | None, list[int]] = {}
    for place, (_, language) in enumerate(zip(captions, languages, strict=True)):
        by_code.setdefault(codes.get(language), []).append(place)
    found: list[list[int]] = [[]] * len(captions)
    for code, places in by_code.items():
        texts = [captions[place][: CHARACTERS_PER_TOKEN * max_seq_length] for place in places]
        if code is None:
            encoded = token_ids(tokenizer, texts, max_seq_length)
        else:
            encoded = entry("LANGUAGES", "encode", "captions have languages")(tokenizer, texts, max_seq_length, code)
        for place, ids in zip(places, encoded, strict=True):
            found[place] = ids
    return found


def pad_captions(captions: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Pad t captions to the longest; return ids and mask, int64 `[t, L]`, L being at least 1."""
    length_t = np.fromiter(map(len, captions), np.int64, len(captions))
    mask_tL = np.arange(length_t.max(initial=1)) < length_t[:, None]
    ids_tL = np.full(mask_tL.shape, pad_token_id, np.int64)
    ids_tL[mask_tL] = np.fromiter(itertools.chain.from_iterable(captions), np.int64, int(length_t.sum()))
    return torch.from_numpy(ids_tL), torch.from_numpy(mask_tL.astype(np.int64))


def collate_all_captions(examples: Sequence[Mapping[str, Any]], pad_token_id: int) -> dict[str, Tensor]:
    """Pad captions to the longest, and images with fewer captions by empty ones."""
    most = max((len(example["all_input_ids"]) for example in examples), default=1)
    captions = [ids for example in examples for ids in [*example["all_input_ids"], *[[]] * most][:most]]
    names = ("all_input_ids", "all_attention_mask")
    padded = pad_captions(captions, pad_token_id)
    return {name: value.view(-1, most, value.shape[1]) for name, value in zip(names, padded, strict=True)}


def image_key(image_id: str) -> int:
    """Return a hash of 63 bits, the same for the same id."""
    return _key(image_id)


def caption_key(caption: str) -> int:
    """Return a hash of 63 bits, the same for captions that differ only in case and spacing."""
    return _key(" ".join(caption.lower().split()))


def fingerprint(rows: datasets.Dataset) -> str:
    """Return 16 hexadecimal digits that identify tokenised images and captions in their order.

    The way the rows are stored (chunks, slices, picked rows of a table) changes nothing.
    """
    keys, counts, captions = (hashlib.blake2b(digest_size=8) for _ in range(3))
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
            occurs[torch.from_numpy(chunk.flatten().flatten().unique().to_numpy().astype(np.int64))] = True
        if 2 * occurs.sum() > vocabulary:
            return None
    return occurs


def tokenize_splits(
    pairs: datasets.DatasetDict,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    num_proc: int | None = None,
    readers: Iterable[ColumnReader] = (),
) -> datasets.DatasetDict:
    """Tokenise the captions of every split, see `tokenize_captions`, and add the columns of readers."""
    found = {name: tokenize_captions(rows, tokenizer, max_seq_length, num_proc) for name, rows in pairs.items()}
    for reader in readers:
        for name, rows in found.items():
            found[name] = reader.prepare(rows, name, tokenizer, max_seq_length, num_proc)
    return datasets.DatasetDict(found)


def global_order(
    rows: datasets.Dataset, sizes: BatchSizes, seed: int, similar_captions_per_batch: int = 1
) -> GlobalOrder:
    """Return the order of tokenised rows, with that many similar ones together if above 1."""
    if similar_captions_per_batch == 1:
        return GlobalOrder(len(rows), sizes, seed)
    tokens = rows.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
    asked = f"--similar_captions_per_batch is {similar_captions_per_batch}"
    arrangement = entry("ARRANGEMENTS", "similar_captions", asked)(tokens, similar_captions_per_batch)
    return GlobalOrder(len(rows), sizes, seed, arrangement, similar_captions_per_batch)


def languages_of(rows: datasets.Dataset) -> set[str]:
    """Return the language codes of the captions; "" stands for an unknown one."""
    found: set[str | None] = set()
    if "languages" in rows.column_names:
        for batch in arrow_batches(rows, ["languages"], _BATCH):
            found.update(pc.unique(pc.list_flatten(batch["languages"])).to_pylist())
    return {language for language in found if language is not None}


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """Return everything that decides the tokens of a text."""
    if not tokenizer.is_fast:
        vocabulary = sorted(tokenizer.get_vocab().items())
        return type(tokenizer).__name__, sorted(tokenizer.init_kwargs.items(), key=str), vocabulary
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a call leaves its settings in the tokenizer, and they would change the cache's name
    backend.no_padding()
    return tokenizer.name_or_path, backend.to_str()


def tokenizer_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return 16 hexadecimal digits that identify a tokenizer's content, wherever from."""
    name, *content = tokenizer_content(tokenizer)
    if not tokenizer.is_fast:
        content = [name, content[-1]]
    return hashlib.blake2b(repr(content).encode(), digest_size=8).hexdigest()


def _tokenize(
    rows: Columns,
    wanted: np.ndarray | None,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    codes: Mapping[str, str],
) -> Columns:
    all_captions = rows["captions"]
    if wanted is not None:
        all_captions = [row if is_wanted else [] for row, is_wanted in zip(all_captions, wanted, strict=True)]
    all_languages = _languages_of(rows, all_captions)
    texts, languages = ([item for row in column for item in row] for column in (all_captions, all_languages))
    tokens = iter(encode_captions(tokenizer, texts, languages, max_seq_length, codes))
    return {
        "input_ids": [[next(tokens) for _ in row] for row in all_captions],
        "image_key": [image_key(image_id) for image_id in rows["id"]],
        "caption_keys": [[caption_key(caption) for caption in row] for row in all_captions],
    }


def _languages_of(rows: Columns, all_captions: list[list[str]]) -> list[list[str]]:
    """Return one code per caption, "" where unknown."""
    if "languages" not in rows:
        return [[""] * len(captions) for captions in all_captions]
    found = []
    for image_id, languages, captions in zip(rows["id"], rows["languages"], all_captions, strict=True):
        if languages and captions and len(languages) != len(captions):
            raise ValueError(
                f"image {image_id} has {len(captions)} captions and {len(languages)} languages; each caption has one "
                "language. Give as many, with empty text where it is unknown."
            )
        found.append([code or "" for code in languages or []][: len(captions)] or [""] * len(captions))
    return found


def _key(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def own_codes(tokenizer: PreTrainedTokenizerBase, languages: Iterable[str]) -> dict[str, str]:
    """Return the tokenizer's token for each language that has one; "" is ignored."""
    known = sorted(set(languages) - {""})
    return entry("LANGUAGES", "codes", "captions have languages")(tokenizer, known) if known else {}
