"""Captions become token ids, equal captions have equal keys, and a fingerprint identifies all of them."""

from collections.abc import Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, List, Value, disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    CLIPTokenizer,
    GPT2Tokenizer,
    MBartTokenizer,
    NllbTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from mm_utils.data.batches.tokens import encode_captions, fingerprint, tokenize_captions
from tests.kit import awkward
from tests.kit.numbered_rows import FEATURES, new_tokenizer, png, rows_of

TEXTS = List(Value("string"))
disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")


def one_row(*captions: str, image_id: str = "a") -> Dataset:
    row = {"id": image_id, "image": {"bytes": png(0), "path": None}, "captions": list(captions)}
    return Dataset.from_list([row], features=FEATURES)


def test_captions_are_cut(tokenizer: PreTrainedTokenizerFast) -> None:
    tokens = tokenize_captions(one_row("one " * 100, "two"), tokenizer, 10)[0]["input_ids"]
    assert list(map(len, tokens)) == [10, 3]
    assert tokens[0][-1] == tokenizer.sep_token_id


TINY = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3, "▁": 4, "a": 5}
PIECES = [(piece, -1.0) for piece in TINY]
LETTERS = {letter: number for number, letter in enumerate("a|<>[]/senodftx")}
FAMILIES = {
    "trained here": new_tokenizer,
    "BERT": lambda: BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}),
    "GPT-2": lambda: GPT2Tokenizer(vocab={**LETTERS, "<|endoftext|>": 99}, merges=[]),
    "CLIP": lambda: CLIPTokenizer(vocab={**LETTERS, "<|startoftext|>": 98, "<|endoftext|>": 99}, merges=[]),
    "T5": lambda: T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES[4:]], extra_ids=2),
    "mBART": lambda: MBartTokenizer(),
    "XLM-R": lambda: XLMRobertaTokenizer(vocab=[*PIECES, ("<mask>", 0.0)]),
    "NLLB": lambda: NllbTokenizer(vocab=TINY),
    "ByT5, in Python": lambda: ByT5Tokenizer(),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_are_text_for_every_family(family: str) -> None:
    tokenizer: PreTrainedTokenizerBase = FAMILIES[family]()
    named = {name: token for name, token in tokenizer.special_tokens_map.items() if name != "unk_token"}
    written = sorted({*named.values(), *tokenizer.all_special_tokens} - {tokenizer.unk_token} | set(named.values()))
    special = set(map(tokenizer.convert_tokens_to_ids, written))
    frame = [token for token in tokenizer("")["input_ids"] if token in special]
    for ids in tokenize_captions(one_row(*written, f"a {written[0]} a"), tokenizer, 64)[0]["input_ids"]:
        assert [token for token in ids if token in special] == frame


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("most", [5, 64])
def test_many_captions_at_once_are_tokenised_as_one_by_one(family: str, most: int) -> None:
    tokenizer: PreTrainedTokenizerBase = FAMILIES[family]()
    texts = [*awkward.TEXTS, *tokenizer.all_special_tokens, "a a " * 200, ""]
    many = encode_captions(tokenizer, texts, most)
    assert many == [ids for text in texts for ids in encode_captions(tokenizer, [text], most)]
    tokenizer("a a a", truncation=True, max_length=2)  # what a call leaves in the tokenizer changes nothing
    assert encode_captions(tokenizer, texts, most) == many


def test_equal_images_and_captions_have_equal_keys(tokenizer: PreTrainedTokenizerFast) -> None:
    found = tokenize_captions(one_row("A  red\tcar ", "a red car", "a red cat", "ÄÖ", "äö"), tokenizer, 16)[0]
    keys = found["caption_keys"]
    assert keys[0] == keys[1] != keys[2]
    assert keys[3] == keys[4]
    other = tokenize_captions(one_row("a red car", image_id="b"), tokenizer, 16)[0]
    assert other["caption_keys"] == keys[:1]
    assert other["image_key"] != found["image_key"]
    assert all(0 <= key < 2**63 for key in [*keys, found["image_key"]])


def test_fingerprint_follows_images_and_captions(tokenizer: PreTrainedTokenizerFast) -> None:
    def print_of(rows: Dataset, length: int = 16) -> str:
        return fingerprint(tokenize_captions(rows, tokenizer, length))

    six = rows_of(6)
    # The same image ids, whatever their bytes, and the same captions, however long they are cut.
    same = [rows_of(6, broken=[1]), rows_of(8).select(range(6)), six.add_column("split", ["x"] * 6)]
    assert {print_of(rows) for rows in (six, *same)} == {print_of(six, length=5)}
    captions = six.map(lambda row: {"captions": [*row["captions"], "more"]})
    others = [six.select([1, 0, 2, 3, 4, 5]), rows_of(5), captions, six.map(lambda row: {"id": row["id"] + "x"})]
    assert len({print_of(rows) for rows in (six, *others)}) == 5


# -- the fingerprint ----------------------------------------------------------------------------------------------------
KEYS = st.lists(st.tuples(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**63 - 1), max_size=3)), max_size=8)


def keyed(rows: Sequence[tuple[int, list[int]]]) -> Dataset:
    columns = {"image_key": pa.array([key for key, _ in rows], pa.int64())}
    columns["caption_keys"] = pa.array([keys for _, keys in rows], pa.list_(pa.int64()))
    return Dataset(pa.table(columns))


@given(KEYS, KEYS, st.randoms())
@settings(max_examples=25)
def test_fingerprint_depends_on_content_only(rows: list, other: list, random: Any) -> None:
    base = fingerprint(keyed(rows))
    assert (base == fingerprint(keyed(other))) == (rows == other)
    assert base != fingerprint(keyed([*rows, (1, [2]), (3, [4])])) != fingerprint(keyed([*rows, (1, [2, 4]), (3, [])]))
    cut = random.randint(0, len(rows))
    assert base == fingerprint(datasets.concatenate_datasets([keyed(rows[:cut]), keyed(rows[cut:])]))
    padded = keyed([*other, *rows, *other])
    assert base == fingerprint(padded.select(range(len(other), len(other) + len(rows))))
    order = list(range(len(rows)))
    random.shuffle(order)
    assert base == fingerprint(keyed([rows[place] for place in order]).select(np.argsort(order)))
