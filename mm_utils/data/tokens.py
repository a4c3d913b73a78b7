"""Captions become token ids once, and rows get the keys that say which images and captions are the same."""

import hashlib
import itertools
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import datasets
import numpy as np
import pyarrow.compute as pc
import torch
from datasets.fingerprint import Hasher
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mm_utils.data.derived import Columns, add_columns, table_of
from mm_utils.data.languages import own_codes
from mm_utils.data.neighbours import arrange
from mm_utils.data.order import BatchSizes, CaptionLengths, GlobalOrder, choose_captions

_CHARACTERS_PER_TOKEN = 32  # text beyond this many characters per allowed token is cut before it is tokenised
_TEXT = ("id", "captions", "languages")  # all that is read of a row
_BATCH = 1_000_000  # rows whose keys are looked at together; 50 MB with five captions each


def tokenize_captions(
    rows: datasets.Dataset, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.Dataset:
    """Add what follows from ids and captions, once, in the datasets cache.

    `input_ids`: token ids, one list per caption. `image_key` and `caption_keys`: int64.

    Special tokens written inside a caption (`[SEP]`, `<|endoftext|>`) are text, not tokens. A multilingual tokenizer is
    told each caption's language, see `encode_captions`. Keys are hashes; equal keys mean the same image or, up to case
    and spacing, the same caption.

    Only ids, captions and languages are read and only the new columns written: they lie beside the others, which stay
    where they are, memory-mapped. Rows that were picked out of a table keep pointing into it.

    Raises:
        ValueError: if a row has another number of languages than captions.
    """
    text = table_of(rows).select_columns([name for name in _TEXT if name in rows.column_names])
    codes = own_codes(tokenizer, _languages(text))
    derive = partial(_tokenize, tokenizer=tokenizer, max_seq_length=max_seq_length, codes=codes)
    name = Hasher.hash((rows._fingerprint, tokenizer_content(tokenizer), max_seq_length, sorted(codes.items())))
    return add_columns(rows, text.column_names, derive, name, title="Tokenising captions", num_proc=num_proc)


def encode_captions(
    tokenizer: PreTrainedTokenizerBase,
    captions: Sequence[str],
    languages: Sequence[str] | None,
    max_seq_length: int,
) -> list[list[int]]:
    """Token ids of each caption, at most `max_seq_length`, by the rules of `tokenize_captions`.

    `languages` has one code per caption, "" where unknown. Each goes to the tokenizer as its own code for that language
    (`mm_utils.data.languages` says which): as `src_lang` where it has one (mBART, NLLB, M2M100 ...), otherwise as the
    language's token in front of the text, behind the token that every caption begins with. Languages without a code of
    its own are tokenised as the tokenizer does by default.

    Special tokens written in a caption are text; what the vocabulary has only as such a token is left out. At most 32
    characters per token are read of a caption, so that none takes long.
    """
    if languages is None:
        languages = [""] * len(captions)
    return _encode(tokenizer, captions, languages, max_seq_length, own_codes(tokenizer, languages))


def pad_captions(captions: Sequence[Sequence[int]], pad_token_id: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask of t captions, int64 `[t, L]`, padded to the longest; L is 1 if there is none."""
    length_t = np.fromiter(map(len, captions), np.int64, len(captions))
    mask_tL = np.arange(length_t.max(initial=1)) < length_t[:, None]
    ids_tL = np.full(mask_tL.shape, pad_token_id, np.int64)
    ids_tL[mask_tL] = np.fromiter(itertools.chain.from_iterable(captions), np.int64, int(length_t.sum()))
    return torch.from_numpy(ids_tL), torch.from_numpy(mask_tL.astype(np.int64))


def image_key(image_id: str) -> int:
    """Of 63 bits, the same for the same id."""
    return _key(image_id)


def caption_key(caption: str) -> int:
    """Of 63 bits, the same for captions that differ in case and spacing alone."""
    return _key(" ".join(caption.lower().split()))


def fingerprint(rows: datasets.Dataset) -> str:
    """16 hexadecimal digits that depend on which images and captions, in which order, tokenised `rows` hold.

    How the rows are stored (chunks, slices, an order laid over a table) changes nothing.
    """
    keys, counts, captions = (hashlib.blake2b(digest_size=8) for _ in range(3))
    table = rows.data.table.select(["image_key", "caption_keys"])
    if rows._indices is not None:  # taken from one chunk: row by row, as `datasets` does it, was 20 us a row
        table = table.combine_chunks()
    for start in range(0, len(rows), _BATCH):
        batch = table.slice(start, _BATCH)
        if rows._indices is not None:
            batch = table.take(rows._indices.column(0).slice(start, _BATCH))
        for chunk in batch["image_key"].chunks:
            keys.update(chunk.to_numpy())
        for chunk in batch["caption_keys"].chunks:
            counts.update(pc.list_value_length(chunk).to_numpy())
            captions.update(chunk.flatten().to_numpy())
    return hashlib.blake2b(keys.digest() + counts.digest() + captions.digest(), digest_size=8).hexdigest()


def tokenize_splits(
    pairs: datasets.DatasetDict, tokenizer: PreTrainedTokenizerBase, max_seq_length: int, num_proc: int | None = None
) -> datasets.DatasetDict:
    """`tokenize_captions` of every split."""
    return datasets.DatasetDict(
        {name: tokenize_captions(rows, tokenizer, max_seq_length, num_proc) for name, rows in pairs.items()}
    )


def global_order(
    rows: datasets.Dataset, sizes: BatchSizes, seed: int, length_bucket_window: int = 1, look_alikes: int = 1
) -> GlobalOrder:
    """The order of the tokenised `rows`; buckets read all captions' lengths from the table, not the tokens.

    With `look_alikes`, blocks of so many rows of like captions are in a batch (`mm_utils.data.neighbours`).
    """
    lengths = _caption_lengths(rows, seed) if length_bucket_window > 1 else None
    arrangement = None
    if look_alikes > 1:
        tokens = rows.select_columns(["input_ids"]).with_format("arrow")[:]["input_ids"]
        arrangement = arrange(tokens, look_alikes)
    return GlobalOrder(len(rows), sizes, seed, lengths, length_bucket_window, arrangement, look_alikes)


def tokenizer_content(tokenizer: PreTrainedTokenizerBase) -> tuple[Any, ...]:
    """All that decides what the tokenizer makes of a text."""
    if not tokenizer.is_fast:
        vocabulary = sorted(tokenizer.get_vocab().items())
        return type(tokenizer).__name__, sorted(tokenizer.init_kwargs.items(), key=str), vocabulary
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()  # a call leaves its settings in the tokenizer, and they would change the name
    backend.no_padding()
    return tokenizer.name_or_path, backend.to_str()


def _languages(rows: datasets.Dataset) -> set[str]:
    """All that occur."""
    if "languages" not in rows.column_names:
        return set()
    found: set[str] = set()
    for batch in rows.select_columns(["languages"]).with_format("arrow").iter(_BATCH):
        found.update(pc.unique(pc.list_flatten(batch["languages"])).to_pylist())
    return found - {None}


def _tokenize(
    rows: Columns,
    wanted: np.ndarray | None,
    tokenizer: PreTrainedTokenizerBase,
    max_seq_length: int,
    codes: Mapping[str, str],
) -> Columns:
    """The new columns; those of rows that are not wanted are empty, as nobody reads them."""
    all_captions = rows["captions"] if wanted is None else _only(rows["captions"], wanted)
    all_languages = _languages_of(rows, all_captions)
    captions, languages = ([item for row in column for item in row] for column in (all_captions, all_languages))
    tokens = iter(_encode(tokenizer, captions, languages, max_seq_length, codes))
    return {
        "input_ids": [[next(tokens) for _ in row] for row in all_captions],
        "image_key": [image_key(image_id) for image_id in rows["id"]],
        "caption_keys": [[caption_key(caption) for caption in row] for row in all_captions],
    }


def _only(captions: list[list[str]], wanted: np.ndarray) -> list[list[str]]:
    return [row if is_wanted else [] for row, is_wanted in zip(captions, wanted, strict=True)]


def _languages_of(rows: Columns, all_captions: list[list[str]]) -> list[list[str]]:
    """One code per caption, "" where unknown."""
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


def _encode(
    tokenizer: PreTrainedTokenizerBase,
    captions: Sequence[str],
    languages: Sequence[str],
    max_seq_length: int,
    codes: Mapping[str, str],
) -> list[list[int]]:
    by_code: dict[str | None, list[int]] = {}
    for place, (_, language) in enumerate(zip(captions, languages, strict=True)):
        by_code.setdefault(codes.get(language), []).append(place)
    found: list[list[int]] = [[]] * len(captions)
    for code, places in by_code.items():
        texts = [captions[place][: _CHARACTERS_PER_TOKEN * max_seq_length] for place in places]
        for place, ids in zip(places, _encode_alike(tokenizer, texts, max_seq_length, code), strict=True):
            found[place] = ids
    return found


def _encode_alike(
    tokenizer: PreTrainedTokenizerBase, texts: list[str], max_seq_length: int, code: str | None
) -> list[list[int]]:
    """Texts of one language."""
    if code is None:
        return _call(tokenizer, texts, max_seq_length)
    if hasattr(tokenizer, "src_lang"):
        names = {token: name for name, token in getattr(tokenizer, "lang_code_to_token", {}).items()}  # M2M100
        default, tokenizer.src_lang = tokenizer.src_lang, names.get(code, code)
        try:
            return _call(tokenizer, texts, max_seq_length)
        finally:
            tokenizer.src_lang = default
    token = int(tokenizer.convert_tokens_to_ids(code))  # type: ignore[arg-type]
    begin = {tokenizer.bos_token_id, tokenizer.cls_token_id}
    # A token that begins a caption was put there by the tokenizer: one that is written in it is text.
    firsts = ((ids, int(ids[:1] != [] and ids[0] in begin)) for ids in _call(tokenizer, texts, max_seq_length - 1))
    return [[*ids[:first], token, *ids[first:]] for ids, first in firsts]


def _call(tokenizer: PreTrainedTokenizerBase, texts: list[str], max_seq_length: int) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        truncation=True,
        max_length=max_seq_length,
        split_special_tokens=True,
        return_special_tokens_mask=True,
    )
    # A Unigram vocabulary (T5, XLM-R, mBART, SigLIP) holds special tokens as pieces, which it also finds in split text.
    special = _special_ids(tokenizer)
    pairs = zip(encoded["input_ids"], encoded["special_tokens_mask"], strict=True)
    return [
        [token for token, is_added in zip(ids, added, strict=True) if is_added or token not in special]
        for ids, added in pairs
    ]


def _special_ids(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    """Of tokens that no text may become; the one for unknown letters is among them if it means something else too."""
    others = [token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"]
    return set(tokenizer.all_special_ids) - ({tokenizer.unk_token_id} if tokenizer.unk_token not in others else set())


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
