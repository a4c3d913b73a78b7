"""Tokens and keys of captions are made once and lie beside the rows; the fingerprint of rows."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, DatasetDict, disable_progress_bars
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BertTokenizer,
    ByT5Tokenizer,
    CLIPTokenizer,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    T5Tokenizer,
    XLMRobertaTokenizer,
)

from mm_utils.data.batches.tokens import (
    caption_key,
    encode_captions,
    fingerprint,
    image_key,
    tokenize_captions,
    tokenize_splits,
)
from tests.kit.fault_images import TEXTS as AWKWARD
from tests.kit.numbered_rows import FEATURES, new_tokenizer, png, rows_of

disable_progress_bars()
pytestmark = pytest.mark.usefixtures("own_cache")


def cached(folder: Path) -> dict[str, int]:
    return {str(path): os.stat(path).st_mtime_ns for path in folder.glob("tandem_tokens/*/*.arrow")}


def test_tokens_are_made_once(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    splits = DatasetDict({"train": rows_of(8), "validation": rows_of(3)})
    before = tokenize_splits(splits, new_tokenizer(), 16)
    written = cached(own_cache)
    assert len(written) == 2
    with monkeypatch.context() as patch:
        patch.setattr("mm_utils.data.batches.tokens.caption_key", lambda _: pytest.fail("tokenised again"))
        fresh, used = new_tokenizer(), new_tokenizer()
        used(["one two"], truncation=True, max_length=5, padding=True)  # a tokenizer keeps its last settings
        for tokenizer in (fresh, used, fresh):
            again = tokenize_splits(splits, tokenizer, 16)
            assert again["train"].to_dict() == before["train"].to_dict()
    assert cached(own_cache) == written


def test_tokens_are_made_anew_for_other_settings(own_cache: Path) -> None:
    rows = rows_of(4)
    tokenize_captions(rows, new_tokenizer(), 16)
    for number, (changed, tokenizer, length) in enumerate(
        [
            (rows, new_tokenizer(), 15),
            (rows, new_tokenizer(["something else"]), 16),
            (rows.select([0, 1]), new_tokenizer(), 16),
        ]
    ):
        tokens = tokenize_captions(changed, tokenizer, length)
        assert len(cached(own_cache)) == number + 2
        assert len(tokens) == len(changed)


def on_disk(rows: Dataset, folder: Path) -> Dataset:
    rows.save_to_disk(folder)
    return datasets.load_from_disk(str(folder))


def test_only_the_new_columns_are_written(tmp_path: Path, own_cache: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    big = [{**row, "image": {"bytes": os.urandom(100_000), "path": None}} for row in rows_of(12)]
    rows = on_disk(Dataset.from_list(big, features=FEATURES), tmp_path / "pairs")
    tokens = tokenize_captions(rows, tokenizer, 16)
    assert tokens.to_dict() == {**rows.to_dict(), **{name: tokens[:][name] for name in NEW}}
    assert tokens.column_names == [*rows.column_names, *NEW]
    written = sum(path.stat().st_size for path in own_cache.glob("tandem_tokens/*/*"))
    assert written < 20_000
    [stored] = own_cache.glob("tandem_tokens/*/")
    assert {Path(file["filename"]).parent for file in tokens.cache_files} == {tmp_path / "pairs", stored}
    assert tokens.features == {**FEATURES, **{name: tokens.features[name] for name in NEW}}


NEW = ["input_ids", "image_key", "caption_keys"]
PICKED = {
    "shuffled": lambda rows: rows.shuffle(seed=1),
    "picked": lambda rows: rows.select([7, 2, 9, 2]),
    "sliced, shuffled, sliced": lambda rows: rows.select(range(2, 10)).shuffle(seed=2).select(range(1, 6)),
    "filtered": lambda rows: rows.filter(lambda row: len(row["captions"]) > 1),
    "joined": lambda rows: datasets.concatenate_datasets([rows.select([4, 1]), rows.select(range(3))]),
}


@pytest.mark.parametrize(("how", "many"), [*((how, 13) for how in PICKED), ("sliced, shuffled, sliced", 1)])
def test_picked_rows_get_their_own_tokens(
    how: str, many: int, tmp_path: Path, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From `many` rows on, by several processes."""
    monkeypatch.setattr("mm_utils.data.batches.tokens._MANY", many)
    rows = PICKED[how](on_disk(rows_of(12), tmp_path / "pairs"))
    tokens = tokenize_captions(rows, tokenizer, 16)
    assert tokens.select_columns(rows.column_names).to_list() == rows.to_list()
    for row in tokens:
        assert row["input_ids"] == encode_captions(tokenizer, row["captions"], 16)
        assert row["image_key"] == image_key(row["id"])
        assert row["caption_keys"] == list(map(caption_key, row["captions"]))


def one_row(*captions: str, image_id: str = "a") -> Dataset:
    row = {"id": image_id, "image": {"bytes": png(0), "path": None}, "captions": list(captions)}
    return Dataset.from_list([row], features=FEATURES)


PIECES = [(piece, -1.0) for piece in ("<s>", "<pad>", "</s>", "<unk>", "▁", "a")]
LETTERS = {letter: number for number, letter in enumerate("a|<>[]/senodftx")}
FAMILIES = {
    "trained here": new_tokenizer,
    "BERT": lambda: BertTokenizer(vocab={"[PAD]": 0, "[UNK]": 1, "[CLS]": 2, "[SEP]": 3, "[MASK]": 4, "a": 5}),
    "CLIP": lambda: CLIPTokenizer(vocab={**LETTERS, "<|startoftext|>": 98, "<|endoftext|>": 99}, merges=[]),
    "T5": lambda: T5Tokenizer(vocab=[("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), *PIECES[4:]], extra_ids=2),
    "XLM-R": lambda: XLMRobertaTokenizer(vocab=[*PIECES, ("<mask>", 0.0)]),
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
    texts = [*AWKWARD, *tokenizer.all_special_tokens, "a a " * 200, ""]
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


KEYS = st.lists(st.tuples(st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**63 - 1), max_size=3)), max_size=8)


def keyed(rows: Sequence[tuple[int, list[int]]]) -> Dataset:
    columns = {"image_key": pa.array([key for key, _ in rows], pa.int64())}
    columns["caption_keys"] = pa.array([keys for _, keys in rows], pa.list_(pa.int64()))
    return Dataset(pa.table(columns))


@given(KEYS, KEYS, st.randoms())
@settings(max_examples=10)
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
